"""The command line: one command a verb, each a thin call into the library."""

from __future__ import annotations

import sys

from offsphere.cli import (  # noqa: F401  (each adds its commands)
    compare,
    diagnose,
    evaluate,
    export,
    index,
    mine,
    onnx,
    runs,
    serve,
)
from offsphere.cli.app import app, err
from offsphere.cli.lists import spread_lists
from offsphere.errors import OffsphereError


def main() -> None:
    """Run the program; exit 2 for a wrong request, 1 for a failure, 130 for Ctrl-C."""
    try:
        app(spread_lists(sys.argv[1:]), standalone_mode=True)
    except OffsphereError as error:
        err.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except SystemExit as end:
        if end.code == 130:  # typer's own answer to Ctrl-C
            err.print("stopped; the same command goes on from here", highlight=False)
        raise
