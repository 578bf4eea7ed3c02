"""Runs ``work`` on the target in its argument once per step, each time in a process that is killed before that step.

A step is whatever changes the names in a folder. The targets are the argument with the number of the step for ``{}``.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import count
from pathlib import Path

# Imported once, before the processes part.
import faiss  # noqa: F401
import filelock  # noqa: F401
import numpy as np
import pyarrow.parquet  # noqa: F401

from offsphere.search.stores import Record, Stamp, open_store
from offsphere.similarity import Similarity

STAMP = Stamp(Similarity.parse("dot"), "fingerprint")


def record(name: str, version: int) -> Record:
    return Record(name, np.array([version, 2, 3], dtype=np.float32), 1.0, text=f"version {version}")


HISTORY = [
    {},
    {"a": 1, "b": 1, "c": 1},
    {"a": 1, "b": 2, "c": 1, "d": 2},
    {"b": 2, "c": 1, "d": 2},
    {"b": 2, "c": 3, "d": 2},
]
"""The versions stored after each call below."""


def work(at: str) -> None:
    """Write, change, delete; close in between so that there is a file to replace."""
    store = open_store(at)
    store.create(3, STAMP)
    store.write([record("a", 1), record("b", 1), record("c", 1)])
    store.close()
    store = open_store(at)
    store.write([record("b", 2), record("d", 2)])
    store.delete(["a"])
    store.write([record("c", 3)])
    store.close()


def killed(at: str, step: int) -> bool:
    """Whether the work was killed before that step, and not finished before."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
        return os.WIFSIGNALED(status)
    os.fsync = lambda descriptor: None  # a signal takes nothing from what the kernel was given, and disks are slow
    steps = count()
    for name in ("replace", "unlink", "mkdir"):
        setattr(Path, name, counted(getattr(Path, name), steps, step))
    work(at)
    os._exit(0)


def counted(call, steps, last: int):
    def counting(*arguments, **options):
        if next(steps) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)

    return counting


if __name__ == "__main__":
    step = next(step for step in count() if not killed(sys.argv[1].format(step), step))
    print(step)  # noqa: T201
