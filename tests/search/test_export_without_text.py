"""Documents without text, which no destination is given."""

from __future__ import annotations

from contextlib import closing

import pytest

from offsphere.data.shard import Shard
from offsphere.search.export import export
from offsphere.search.sources import IndexedDocuments
from offsphere.search.stores import open_store

EMBEDDED = ["chroma", "faiss", "lancedb", "milvus", "parquet", "qdrant"]
IDS = [f"doc/{number} é" for number in range(3)]


@pytest.mark.parametrize("kind", EMBEDDED)
def test_documents_without_text_are_left_out(kind, source, target, corpus):
    """T-I2: a zero vector scores 0, and so would be the best answer where all others are negative."""
    data = corpus(["", "sea", "ice"])
    (result,) = export(source(data=data), [target(kind)])
    assert (result.written, result.kept, result.empty, result.stored, result.extra) == (2, 0, 1, 2, 0)
    with closing(open_store(target(kind))) as store:
        opposite = -store.vectors(IDS[1:3]).sum(axis=0, keepdims=True)
        (answer,) = store.search(opposite, 3)
    assert {found.id for found in answer} == set(IDS[1:3])
    assert max(found.score for found in answer) < 0, "canary"
    (again,) = export(source(data=data), [target(kind)])
    assert (again.written, again.kept, again.empty, again.stored) == (0, 2, 1, 2)


@pytest.mark.parametrize("kind", EMBEDDED)
def test_a_document_that_lost_its_text_is_gone(kind, source, target, corpus):
    (before,) = export(source(data=corpus(["fire", "sea", "ice"])), [target(kind)])
    assert (before.empty, before.stored) == (0, 3)
    (result,) = export(source(data=corpus(["", "sea", "ice"])), [target(kind)])
    assert (result.written, result.kept, result.empty, result.stored, result.extra) == (0, 2, 1, 2, 0)
    with closing(open_store(target(kind))) as store:
        assert set(store.digests(IDS[:3])) == set(IDS[1:3])


def test_nothing_but_documents_without_text(source, target, corpus):
    (result,) = export(source(data=corpus([""])), [target("lancedb")])
    assert (result.written, result.empty, result.stored, result.read_back) == (0, 1, 0, 0)


def test_shards_leave_out_their_own_documents_without_text(prompted_model, corpus, target, tmp_path):
    from offsphere.search.index import Index

    data = corpus(["", "sea", "ice cold", "", "hot"])  # every third has no title either
    Index.create(tmp_path / "index", prompted_model, device="cpu").add(data)
    index = Index.open(tmp_path / "index")
    parts = [
        export(IndexedDocuments(index, shard=Shard(number, 2)), [target("lancedb")], at_once=2)[0] for number in (1, 2)
    ]
    assert (sum(part.written for part in parts), sum(part.empty for part in parts), parts[1].stored) == (3, 2, 3)
    (whole,) = export(IndexedDocuments(index), [target("lancedb")], at_once=2)
    assert (whole.written, whole.kept, whole.empty, whole.stored, whole.extra) == (0, 3, 2, 3, 0)
