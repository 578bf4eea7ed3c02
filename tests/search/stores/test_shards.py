"""Several processes that write the shards of one collection into one destination at the same time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from offsphere.data.documents import Document
from offsphere.errors import StoreError
from offsphere.search.export import export
from offsphere.search.index import Index
from offsphere.search.manifest import Manifest
from offsphere.search.sources import IndexedDocuments
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
    shards = [f"{number}/{SHARDS}" for number in range(1, SHARDS + 1)]
    writers = [
        subprocess.Popen(
            [sys.executable, WRITER, index, shard, meeting, *targets],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for shard in shards
    ]
    said = [writer.communicate(timeout=300) for writer in writers]
    for writer, (_, errors) in zip(writers, said, strict=True):
        assert writer.returncode == 0, errors
    return [json.loads(output) for output, _ in said]


@pytest.mark.parametrize("kind", ["pgvector", "lancedb"])
def test_three_writers_fill_one_table(kind, index, target, opened, documents, raw, tmp_path):
    at = target(kind)  # not there yet: all three want to make it
    rows = [row for (row,) in in_parallel(index, tmp_path / "first", at)]
    assert sum(row["written"] for row in rows) == COUNT
    assert {row["kept"] for row in rows} == {0}
    assert all(COUNT / SHARDS / 2 < row["written"] < COUNT / SHARDS * 2 for row in rows)
    store = opened(at)
    ids = [one.id for one in documents]
    assert store.count() == COUNT
    assert store.digests(ids) == {one.id: digest_of(one) for one in documents}
    np.testing.assert_array_equal(store.vectors(ids), QNORM.prepare_document(raw).astype(np.float32))
    assert store.stamp() == Index.open(index).stamp
    (again,) = export(IndexedDocuments(Index.open(index)), [at])
    assert (again.written, again.kept, again.extra) == (0, COUNT, 0)


def test_a_collection_that_cannot_be_made_is_still_an_error(index, target, opened, xquad):
    at = target("pgvector", "theirs")
    store = opened(at)
    store.create(DIMENSION, xquad.stamp("dot"))
    # Another one made it in the meantime, of another model: what is there is checked as if it had always been there.
    source = IndexedDocuments(Index.open(index))
    with pytest.raises(StoreError, match="exists already, but holds other vectors"):
        export(source, [at])
