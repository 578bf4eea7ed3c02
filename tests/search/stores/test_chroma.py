from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import chromadb
import numpy as np
import pytest
from chromadb.config import Settings

from offsphere.errors import StoreError
from offsphere.search.stores import Record, Stamp
from offsphere.search.stores.chroma import HNSW, ChromaStore
from offsphere.similarity import Similarity, norms

STAMP = Stamp(Similarity.parse("dot"), "0123456789abcdef0123456789abcdef", "passage: ")


def vectors(count: int, seed: int = 0, dimension: int = 8) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.normal(size=(count, dimension)) * np.exp(random.normal(size=(count, 1)))).astype(np.float32)


def records(rows: np.ndarray, **fields: Any) -> list[Record]:
    return [Record(f"d{i}", row, float(norms(row)), **fields) for i, row in enumerate(rows)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChromaStore]:
    """An empty collection of 8 dimensions."""
    store = ChromaStore(str(tmp_path / "chroma"), "documents")
    store.create(8, STAMP)
    yield store
    store.close()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Any]:
    """Of the same folder."""
    client = chromadb.PersistentClient(tmp_path / "chroma", settings=Settings(anonymized_telemetry=False))
    yield client
    client.close()


@pytest.mark.parametrize(
    ("made", "metric"),
    [
        ({}, "l2"),  # what one gets without asking
        ({"configuration": {"hnsw": {"space": "cosine"}}}, "cosine"),
        ({"configuration": {"hnsw": {"space": "ip"}}}, "ip"),
        ({"metadata": {"hnsw:space": "cosine"}}, "cosine"),
        ({"metadata": {"hnsw:space": "ip"}}, "ip"),
    ],
)
def test_collections_made_by_hand_say_what_they_are(tmp_path: Path, client: Any, made: dict, metric: str) -> None:
    rows = vectors(3, dimension=5)
    client.create_collection("by_hand", **made).add(ids=["0", "1", "2"], embeddings=rows)
    store = ChromaStore(str(tmp_path / "chroma"), "by_hand")
    assert (store.metric(), store.dimension(), store.stamp(), store.count()) == (metric, 5, None, 3)
    assert store.digests(["0", "1"]) == {}
    assert np.allclose(store.vectors(["2", "0"]), rows[[2, 0]], rtol=1e-6)  # cosine divides by the length and back
    [answer] = store.search(rows[:1], 3)
    scores = {
        "ip": rows @ rows[0],
        "cosine": Similarity.parse("cosine").scores(rows[:1], rows)[0],
        "l2": -((rows - rows[0]) ** 2).sum(1),
    }[metric]
    assert [found.id for found in answer] == [str(i) for i in np.argsort(-scores)]
    assert np.allclose([found.score for found in answer], np.sort(scores)[::-1], rtol=1e-4, atol=1e-5)
    store.close()


def test_an_empty_collection_made_by_hand_has_no_dimension_yet(tmp_path: Path, client: Any) -> None:
    client.create_collection("by_hand", embedding_function=None)
    store = ChromaStore(str(tmp_path / "chroma"), "by_hand")
    with pytest.raises(StoreError, match="is empty, and Chroma has fixed no dimension"):
        store.dimension()
    store.close()


def test_the_space_and_the_graph_are_asked_for_and_read_back(store: ChromaStore, client: Any) -> None:
    made = client.get_collection("documents", embedding_function=None).configuration_json["hnsw"]
    assert {name: made[name] for name in HNSW} == HNSW
    assert (store.metric(), store.dimension(), store.stamp(), store.count()) == ("ip", 8, STAMP, 0)
    assert store.search(vectors(2), 3) == [[], []]
    with pytest.raises(StoreError, match="exists already"):
        store.create(8, STAMP)


@pytest.mark.parametrize(
    "name", ["", "ab", "a b", "é-é-é", 'a"b"c', "_abc", "abc-", "a..b", "10.0.0.1", "x" * 513, "a/b"]
)
def test_names_that_chroma_refuses_are_refused_first(tmp_path: Path, client: Any, name: str) -> None:
    with pytest.raises(StoreError, match="cannot name a Chroma collection"):
        ChromaStore(str(tmp_path / "chroma"), name)
    with pytest.raises(Exception, match="Expected a name"):
        client.create_collection(name, embedding_function=None)


@pytest.mark.parametrize("name", ["abc", "A.b-c_9", "x" * 512, "10.0.0.1.2"])
def test_names_that_chroma_takes_are_taken(tmp_path: Path, name: str) -> None:
    store = ChromaStore(str(tmp_path / "chroma"), name)
    store.create(8, STAMP)
    assert store.exists()
    store.close()


def test_asking_makes_no_folder(tmp_path: Path) -> None:
    store = ChromaStore(str(tmp_path / "chroma"), "documents")
    assert not store.exists()
    assert not list(tmp_path.iterdir())
    store.close()


def test_distance_is_turned_into_the_inner_product(store: ChromaStore) -> None:
    rows, queries = vectors(1500), vectors(7, seed=1)
    store.write(records(rows))
    exact = queries @ rows.T
    assert exact.min() < -1 < 1 < exact.max()  # neither a distance nor a cosine
    for answer, scores in zip(store.search(queries, 10), exact, strict=True):
        assert [found.id for found in answer] == [f"d{i}" for i in np.argsort(-scores)[:10]]
        assert np.allclose([found.score for found in answer], np.sort(scores)[::-1][:10], rtol=1e-4)


def test_the_graph_reaches_documents_that_the_default_graph_misses(store: ChromaStore, client: Any) -> None:
    random = np.random.default_rng(0)
    rows = vectors(2000, dimension=8) * np.exp(0.5 * random.normal(size=(2000, 1)))
    rows = rows.astype(np.float32)
    default = client.create_collection("default", embedding_function=None, configuration={"hnsw": {"space": "ip"}})
    default.add(ids=[record.id for record in records(rows)], embeddings=rows)
    store.write(records(rows))
    by_default = len(default.query(query_embeddings=rows[:1], n_results=2000, include=[])["ids"][0])
    [reached] = store.search(rows[:1], 2000)
    assert len(reached) > by_default
    assert len(reached) > 1900


def test_what_is_written_can_be_read_by_chroma(store: ChromaStore, client: Any) -> None:
    metadata = {"year": 1969, "tags": ["é", None], "deep": {"a": 1}}
    record = Record("a/b 😀'\"", vectors(1)[0], 2.5, "", "x" * 2**20, metadata)
    empty = Record("empty", vectors(1)[0], 2.5)
    store.write([record, empty])
    found = client.get_collection("documents").get(ids=[record.id], include=["documents", "metadatas"])
    assert found["documents"] == [record.text]
    [stored] = found["metadatas"]
    assert json.loads(stored.pop("metadata")) == metadata
    assert stored == {"norm": 2.5, "title": "", "digest": record.digest}
    assert client.get_collection("documents").get(ids=["empty"])["documents"] == [""]


def test_batches_are_as_large_as_chroma_allows(store: ChromaStore, monkeypatch: pytest.MonkeyPatch) -> None:
    client = store._open()
    monkeypatch.setattr(client, "get_max_batch_size", lambda: 7)
    sizes: list[int] = []
    upsert = chromadb.Collection.upsert
    monkeypatch.setattr(
        chromadb.Collection, "upsert", lambda self, ids, **rest: (sizes.append(len(ids)), upsert(self, ids, **rest))
    )
    store.write(records(vectors(20)))
    assert (sizes, store.count()) == ([7, 7, 6], 20)


def test_the_empty_list_asks_nothing(store: ChromaStore) -> None:
    store.write([])
    store.delete([])
    assert (store.digests([]), len(store.vectors([])), store.search(np.empty((0, 8), np.float32), 3)) == ({}, 0, [])


def test_a_closed_store_says_so(store: ChromaStore) -> None:
    other = ChromaStore(store._location, "documents")
    assert other.count() == 0
    other.close()
    with pytest.raises(StoreError, match="closed"):
        other.count()
    assert store.count() == 0  # another store on the same folder goes on


@pytest.fixture
def server(tmp_path: Path, serving: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    """The URL of Chroma's server."""
    with serving("chroma", "run", "--path", tmp_path, ANONYMIZED_TELEMETRY="False") as url:
        yield url


def test_a_server_is_used_as_a_folder_is(server: str) -> None:
    store = ChromaStore(server, "documents")
    assert not store.exists()
    store.create(8, STAMP)
    rows = vectors(2100)
    documents = records(rows, text="x" * 10_000, metadata={"year": 1969})  # 21 MB, more than one request
    store.write(documents)
    store.close()
    store = ChromaStore(server, "documents")
    assert (store.metric(), store.dimension(), store.stamp(), store.count()) == ("ip", 8, STAMP, 2100)
    assert store.digests(["d0", "nobody"]) == {"d0": documents[0].digest}
    assert np.array_equal(store.vectors(["d9", "d3"]), rows[[9, 3]])
    assert store.search(rows[:1], 1)[0][0].score == pytest.approx((rows @ rows[0]).max(), rel=1e-5)
    store.close()


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(StoreError, match=r"chroma:http://127\.0\.0\.1:9#documents: Could not connect"):
        ChromaStore("http://127.0.0.1:9", "documents").count()
