from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import lancedb
import numpy as np
import pytest

from offsphere.errors import StoreError
from offsphere.search.stores import Record


@pytest.fixture
def vectors() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)


@pytest.fixture
def store(created, vectors):
    store = created("lancedb", dimension=8, similarity="qnorm")
    store.write([Record(str(row), vector, 1.0) for row, vector in enumerate(vectors)])
    return store


@pytest.fixture
def table(store, tmp_path):
    return lancedb.connect(tmp_path / "lancedb").open_table("documents")


def test_the_distance_of_lancedb_is_one_minus_the_product(store, table, vectors):
    query = vectors[0]
    (found,) = table.search(query).distance_type("dot").limit(1).select(["id", "_distance"]).to_list()
    (hit,) = store.search(query[None], 1)[0]
    best = float((vectors @ query).max())
    assert found["_distance"] == pytest.approx(1 - best, abs=1e-5)
    assert (hit.id, hit.score) == (found["id"], pytest.approx(best, abs=1e-5))


@pytest.mark.parametrize(("index", "metric"), [("cosine", "cosine"), ("l2", "l2"), ("dot", "ip")])
def test_an_index_says_its_metric(index, metric, store, table, target, opened):
    from lancedb.index import IvfFlat

    table.create_index("vector", config=IvfFlat(distance_type=index, num_partitions=1))
    assert opened(target("lancedb")).metric() == metric


def test_an_index_on_another_column_says_nothing(store, table, target, opened):
    from lancedb.index import BTree

    table.create_index("id", config=BTree())
    assert opened(target("lancedb")).metric() == "ip"


def test_a_table_made_by_hand(target, opened, tmp_path, vectors):
    rows = [{"id": str(row), "vector": vector} for row, vector in enumerate(vectors)]
    lancedb.connect(tmp_path / "lancedb").create_table("documents", rows)
    store = opened(target("lancedb"))
    assert (store.metric(), store.dimension(), store.stamp(), store.count()) == ("none", 8, None, 300)
    assert store.search(vectors[:1], 1)[0][0].id == str((vectors @ vectors[0]).argmax())
    with pytest.raises(StoreError, match="digest"):
        store.digests(["1"])


def test_what_is_stored(store, table):
    kept = Record("it's", np.arange(8, dtype=np.float32), 2.5, "T", "Text", {"tags": ["ä", None]})
    store.write([kept])
    table.checkout_latest()
    (row,) = table.search().where("id = 'it''s'").to_list()
    assert row["vector"] == list(range(8))
    assert json.loads(row["metadata"]) == kept.metadata
    assert {key: row[key] for key in ("norm", "title", "text", "digest")} == {
        "norm": 2.5,
        "title": "T",
        "text": "Text",
        "digest": kept.digest,
    }


def test_a_write_is_one_version(store, table, vectors):
    before = len(table.list_versions())
    store.write([Record(str(row), vector, 1.0) for row, vector in enumerate(vectors[::-1])])
    table.checkout_latest()
    assert len(table.list_versions()) == before + 1


def test_closing_merges_the_files_of_many_writes(created, vectors, tmp_path):
    store = created("lancedb", dimension=8)
    for row, vector in enumerate(vectors[:20]):
        store.write([Record(str(row), vector, 1.0)])
    table = lancedb.connect(tmp_path / "lancedb").open_table("documents")
    assert table.stats()["fragment_stats"]["num_fragments"] == 20
    store.close()
    table.checkout_latest()
    assert table.stats()["fragment_stats"]["num_fragments"] == 1


def test_of_many_that_make_a_table_at_the_same_moment_one_makes_it(target, opened, xquad, tmp_path):
    # LanceDB itself lets two through in four of ten such moments; the second one empties the table of the first.
    makers, moments = 8, 20

    def made(store, start: threading.Barrier) -> bool:
        start.wait()
        try:
            store.create(3, xquad.stamp("dot"))
        except StoreError:
            return False
        store.write([Record("0", np.ones(3, np.float32), 1.0)])
        return True

    with ThreadPoolExecutor(makers) as pool:
        for moment in range(moments):
            stores = [opened(target("lancedb", f"table{moment}")) for _ in range(makers)]
            start = threading.Barrier(makers)
            assert sum(pool.map(made, stores, [start] * makers)) == 1
            assert {store.count() for store in stores} == {1}
    assert sorted(path.name for path in (tmp_path / "lancedb").iterdir()) == sorted(
        f"table{moment}.lance" for moment in range(moments)
    )


@pytest.mark.parametrize("name", ["two words", "it's", "a/b", "Ångström"])
def test_a_name_that_lancedb_refuses(name, target, opened, xquad):
    store = opened(target("lancedb", name))
    for ask in (store.exists, lambda: store.create(3, xquad.stamp("dot"))):
        with pytest.raises(StoreError, match="may contain only alphanumeric characters"):
            ask()


def test_the_same_ids_asked_by_the_thousand(store, vectors):
    ids = [str(row % 300) for row in range(2500)]
    np.testing.assert_array_equal(store.vectors(ids), vectors[[int(name) for name in ids]])
    assert len(store.digests([*ids, *map(str, range(300, 3000))])) == 300
    store.delete(map(str, range(5000)))
    assert store.count() == 0
