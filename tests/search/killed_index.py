"""Changes copies of an index in processes that are killed: before one step each, or at any moment of a compaction.

Arguments: ``approximate`` or ``compact``, an index, and a folder for the copies, which are numbered. Prints how many
processes were killed, and how many ended before that.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

# Imported once, before the processes part: what is large. LanceDB itself is not, as it has threads at once.
import faiss  # noqa: F401
import lance_namespace  # noqa: F401
import numpy as np
import pyarrow.dataset  # noqa: F401

from offsphere.search.graphs import Graph
from offsphere.search.index import Index

MOMENTS = 6


def approximate(folder: Path, step: int) -> None:
    """Bring the approximate index up to date; a step is whatever changes the names of files, or writes a large one."""
    index = Index.open(folder)
    steps = count()
    where = [(Path, "replace"), (Path, "mkdir"), (shutil, "rmtree"), (np, "save"), (Graph, "write")]
    for owner, name in where:
        setattr(owner, name, counted(getattr(owner, name), steps, step))
    index.approximate()


def counted(call: Callable, steps: count, last: int) -> Callable:
    def counting(*arguments, **options):
        if next(steps) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)

    return counting


def ended(work: Callable[[], None], wait: Callable[[int], None] = lambda process: None) -> bool:
    """Whether the work ended by itself, in a process of its own, which ``wait`` may kill."""
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    wait(child)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return not os.WIFSIGNALED(status)


def compact(folder: Path, ready: int) -> None:
    table = Index.open(folder)._opened()
    os.write(ready, b"!")
    table.compact()


def compacted(folder: Path, seconds: float) -> tuple[bool, float]:
    """Whether the compaction ended within so many seconds, and how long it was let go on."""
    ready, tell = os.pipe()
    taken = 0.0

    def kill(process: int) -> None:
        nonlocal taken
        os.read(ready, 1)
        began = time.monotonic()
        while (taken := time.monotonic() - began) < seconds:
            if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return
            time.sleep(min(0.001, seconds))
        os.kill(process, signal.SIGKILL)

    return ended(lambda: compact(folder, tell), kill), taken


def main(what: str, index: Path, copies: Path) -> None:
    def copy(number: int) -> Path:
        return Path(shutil.copytree(index, copies / str(number)))

    if what == "approximate":
        killed = next(step for step in count() if ended(lambda: approximate(copy(step), step)))  # noqa: B023
        print(json.dumps([killed, 1]))  # noqa: T201
        return
    done, whole = compacted(copy(MOMENTS), 60.0)
    assert done
    endings = [compacted(copy(moment), whole * moment / MOMENTS)[0] for moment in range(MOMENTS)]
    print(json.dumps([endings.count(False), endings.count(True) + 1]))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
