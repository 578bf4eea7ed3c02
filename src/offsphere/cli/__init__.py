"""The command line: one command a verb, each a thin call into the library."""

from __future__ import annotations

import os
import sys
import time

from offsphere.cli import (  # noqa: F401  (each adds its commands)
    compare,
    diagnose,
    encode,
    evaluate,
    export,
    index,
    mine,
    onnx,
    runs,
    serve,
    train,
)
from offsphere.cli.app import app, err
from offsphere.cli.lists import spread_lists
from offsphere.errors import OffsphereError, TrainingError

FIRST = os.environ.get("RANK", "0") == "0"
"""Whether this is the only process, or the first of those that torchrun started."""

PATIENCE = 10.0
"""Seconds that another process waits with an error that the first one should find as well."""

RESUMABLE = ("compare", "train", "index", "export")
"""Commands that, started again, do not repeat what is done."""


def main() -> None:
    """Run the program; exit 2 for a wrong request, 1 for a failure, 130 for Ctrl-C."""
    try:
        app(spread_lists(sys.argv[1:]), standalone_mode=True)
    except OffsphereError as error:
        if not FIRST and not isinstance(error, TrainingError):
            # Of several processes each finds the same wrong request. The first one says it, and its end ends this one;
            # ending sooner would end the first before it has said anything.
            time.sleep(PATIENCE)
        err.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except SystemExit as end:
        if end.code == 130 and FIRST:  # typer's own answer to Ctrl-C
            kept = sys.argv[1:2] == ["evaluate"] and any(one.startswith("--out") for one in sys.argv)
            goes_on = kept or (sys.argv[1:2] and sys.argv[1] in RESUMABLE)
            err.print("stopped; the same command goes on from here" if goes_on else "stopped", highlight=False)
        raise
