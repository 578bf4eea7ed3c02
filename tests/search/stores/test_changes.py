"""Stores that are files survive whatever ends the process that changes them."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from offsphere.errors import StoreError
from offsphere.search.stores import Record

SCRIPT = Path(__file__).with_name("killed_at_a_step.py")


@pytest.mark.parametrize("kind", ["faiss", "parquet"])
def test_a_kill_before_any_step_leaves_a_state_of_the_history(kind, tmp_path, opened, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # as in the script
    script = runpy.run_path(str(SCRIPT))
    form = f"{kind}:{tmp_path}/{{}}/documents.{kind}"
    done = subprocess.run([sys.executable, str(SCRIPT), form], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = int(done.stdout)
    assert steps > 15
    met = set()
    for step in range(steps + 1):
        store = opened(form.format(step))
        if not store.exists():
            assert step < 5
            continue
        met.add(script["HISTORY"].index(versions(store)))
        assert store.stamp() == script["STAMP"]
        store.write([script["record"](name, version) for name, version in script["HISTORY"][-1].items()])
        store.delete(["a"])
        store.close()
        again = opened(form.format(step))
        assert versions(again) == script["HISTORY"][-1]
        again.close()
        left = {file.name for file in (tmp_path / str(step)).iterdir()}
        assert left == {f"documents.{kind}"} | ({"documents.faiss.parquet"} if kind == "faiss" else set())
    assert met == set(range(len(script["HISTORY"])))


def versions(store) -> dict[str, int]:
    """What is stored, having asked in every way."""
    ids = sorted(store.digests(list("abcd")))
    assert store.count() == len(ids)
    numbers = store.vectors(ids)[:, 0].astype(int).tolist() if ids else []
    (answer,) = store.search(np.ones((1, 3), dtype=np.float32), 10)
    assert sorted((hit.id, hit.score) for hit in answer) == [(n, v + 5) for n, v in zip(ids, numbers, strict=True)]
    return dict(zip(ids, numbers, strict=True))


@pytest.mark.parametrize("kind", ["faiss", "parquet"])
def test_two_processes_never_change_one_file(kind, target, opened, xquad):
    record = Record("a", np.ones(3, dtype=np.float32), 1.0)
    first, second = opened(target(kind)), opened(target(kind))
    first.create(3, xquad.stamp("dot"))
    for ask in (lambda: second.write([record]), lambda: second.delete(["a"])):
        with pytest.raises(StoreError, match="another process is changing"):
            ask()
    first.write([record])
    assert second.count() == 1  # reading is free
    second.close()
    first.close()
    third = opened(target(kind))
    third.write([Record("b", np.ones(3, dtype=np.float32), 1.0)])
    assert third.count() == 2
