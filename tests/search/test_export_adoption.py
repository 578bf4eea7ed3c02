"""Exports into collections that somebody made without us: refused, or adopted where that is asked for."""

from __future__ import annotations

import numpy as np
import pytest

from offsphere.errors import StoreError
from offsphere.progress import Silent
from offsphere.search.export import export

IDS = [f"doc/{number} é" for number in range(3)]


def make_chroma(target: str, metric: str, vectors: np.ndarray, ids: list[str]) -> None:
    """A collection as somebody would make it by hand."""
    import chromadb
    from chromadb.config import Settings

    folder, _, name = target.removeprefix("chroma:").partition("#")
    client = chromadb.PersistentClient(folder, settings=Settings(anonymized_telemetry=False))
    collection = client.create_collection(
        name or "documents", embedding_function=None, configuration={"hnsw": {"space": metric}}
    )
    collection.add(ids=ids, embeddings=vectors.astype(np.float32))
    client.close()


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_another_metric_is_refused(metric, source, target, corpus):
    make_chroma(target("chroma"), metric, np.ones((1, 16)), ["x"])
    with pytest.raises(StoreError, match=f"compares by {metric}; expected the inner product"):
        export(source(data=corpus(["sea"])), [target("chroma")], adopt=True)


class Heard(Silent):
    """Progress that remembers what it was told."""

    def __init__(self):
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def test_a_collection_of_somebody_else_is_refused_unless_adopted(source, target, corpus, contents):
    data = corpus(["sea", "ice cold"])
    make_chroma(target("chroma"), "ip", np.ones((2, 16)), [IDS[0], "theirs"])
    with pytest.raises(StoreError, match=r"no stamp of offsphere.*its 2 vectors.*--adopt"):
        export(source(data=data), [target("chroma")])
    adopted, heard = source(data=data), Heard()
    (result,) = export(adopted, [target("chroma")], adopt=True, progress=heard)
    assert (result.written, result.stored, result.extra) == (2, 3, 1)
    documents = next(adopted.batches(2)).documents
    np.testing.assert_allclose(contents(target("chroma"), IDS[:2]), adopted.embed(documents), rtol=1e-5)
    # Nobody knows what the third vector is of, so that the collection stays somebody else's.
    assert any("gets no stamp, as 1 of its documents" in line for line in heard.lines)
    with pytest.raises(StoreError, match="no stamp of offsphere"):
        export(source(data=data), [target("chroma")])


def make_lancedb(target: str, metric: str, vectors: np.ndarray, ids: list[str]) -> None:
    """A table with the columns of ours, and of no metric, as somebody would make it by hand."""
    import lancedb
    import pyarrow as pa

    kinds = {name: pa.string() for name in ("id", "title", "text", "metadata", "digest")}
    kinds |= {"vector": pa.list_(pa.float32(), vectors.shape[1]), "norm": pa.float32()}
    blank = {"title": "", "text": "", "metadata": "{}", "digest": "", "norm": 0.0}
    rows = [{"id": one, "vector": vector, **blank} for one, vector in zip(ids, vectors, strict=True)]
    lancedb.connect(target.removeprefix("lancedb:")).create_table("documents", rows, pa.schema(list(kinds.items())))


@pytest.mark.parametrize(("kind", "make"), [("chroma", make_chroma), ("lancedb", make_lancedb)])
def test_an_adopted_collection_is_recognised_once_it_holds_nothing_else(kind, make, source, target, corpus):
    data = corpus(["sea", "ice cold"])
    make(target(kind), "ip", np.ones((1, 16)), [IDS[0]])
    with pytest.raises(StoreError, match=r"no stamp of offsphere"):
        export(source(data=data), [target(kind)])
    (result,) = export(source(data=data), [target(kind)], adopt=True)
    assert (result.written, result.extra) == (2, 0)
    (result,) = export(source(data=data), [target(kind)])
    assert (result.written, result.kept) == (0, 2)
    with pytest.raises(StoreError, match="prepared for"):
        export(source("cosine", data=data), [target(kind)], adopt=True)


@pytest.mark.parametrize(("kind", "make"), [("chroma", make_chroma), ("lancedb", make_lancedb)])
def test_an_adopted_collection_keeps_nothing_of_a_document_without_text(kind, make, source, target, corpus):
    data = corpus(["", "sea", "ice cold", "", "hot"])  # every third has no title either
    make(target(kind), "ip", np.ones((2, 16)), IDS[:2])
    (result,) = export(source(data=data), [target(kind)], adopt=True)
    assert (result.written, result.empty, result.stored, result.extra) == (3, 2, 3, 0)
    (again,) = export(source(data=data), [target(kind)])  # signed, as all of it is ours
    assert (again.written, again.kept, again.empty) == (0, 3, 2)
