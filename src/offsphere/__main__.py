"""``python -m offsphere`` is the command line."""

from offsphere.cli import main

main()
