"""Several processes that write the shards of one collection into one destination at the same time."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from offsphere.data.documents import Document
from offsphere.errors import StoreError
from offsphere.search.export import export
from offsphere.search.index import Index
from offsphere.search.manifest import Manifest
from offsphere.search.sources import IndexedDocuments
from offsphere.search.stores.lancedb import LanceStore
from offsphere.search.table import DocumentTable, Rows, digest_of
from offsphere.similarity import Similarity

WRITER = Path(__file__).with_name("writer_of_a_shard.py")
COUNT = 900
DIMENSION = 16
SHARDS = 3
QNORM = Similarity.parse("qnorm")


@pytest.fixture
def documents() -> list[Document]:
    return [Document(f"doc/{row} é", text=f"text {row}", metadata={"row": row}) for row in range(COUNT)]


@pytest.fixture
def raw() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(COUNT, DIMENSION)).astype(np.float32)


@pytest.fixture
def index(tmp_path, documents, raw) -> Path:
    """An index of documents whose embeddings are given."""
    folder = tmp_path / "index"
    folder.mkdir()
    Manifest("model", "fingerprint", QNORM, {"query": "", "document": ""}, None, DIMENSION).write(folder)
    DocumentTable.create(folder, DIMENSION).append(Rows(documents, raw))
    return folder


def in_parallel(index: Path, meeting: Path, *targets: str) -> list[list[dict]]:
    """What each of the writers says, once all have ended well."""
    meeting.mkdir()
    done = subprocess.run(
        [sys.executable, WRITER, index, str(SHARDS), meeting, *targets], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_three_writers_fill_one_table(index, target, opened, documents, raw, tmp_path):
    targets = [target("pgvector"), target("lancedb")]  # not there yet: all three want to make them
    said = in_parallel(index, tmp_path / "first", *targets)
    for at, rows in zip(targets, zip(*said, strict=True), strict=True):
        assert sum(row["written"] for row in rows) == COUNT
        assert {row["kept"] for row in rows} == {0}
        assert all(COUNT / SHARDS / 2 < row["written"] < COUNT / SHARDS * 2 for row in rows)
        store = opened(at)
        ids = [one.id for one in documents]
        assert store.count() == COUNT
        assert store.digests(ids) == {one.id: digest_of(one) for one in documents}
        np.testing.assert_array_equal(store.vectors(ids), QNORM.prepare_document(raw).astype(np.float32))
        assert store.stamp() == Index.open(index).stamp
    for again in export(IndexedDocuments(Index.open(index)), targets):
        assert (again.written, again.kept, again.extra) == (0, COUNT, 0)


@pytest.mark.parametrize(("fingerprint", "message"), [("fingerprint", None), ("another", "but holds other vectors")])
def test_a_collection_that_another_process_makes_at_the_same_moment(
    fingerprint, message, index, target, opened, monkeypatch
):
    at = target("lancedb")
    source = IndexedDocuments(Index.open(index))
    real = LanceStore.exists

    def just_made(self) -> bool:
        monkeypatch.setattr(LanceStore, "exists", real)
        opened(at).create(DIMENSION, replace(source.stamp, fingerprint=fingerprint))
        return False

    monkeypatch.setattr(LanceStore, "exists", just_made)
    if message:  # it is checked as if it had always been there
        with pytest.raises(StoreError, match=message):
            export(source, [at])
    else:
        assert export(source, [at])[0].stored == COUNT


def test_a_collection_that_nobody_can_make_is_still_an_error(index, target):
    with pytest.raises(StoreError, match="may contain only alphanumeric characters"):
        export(IndexedDocuments(Index.open(index)), [target("lancedb", "two words")])
