from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pymilvus import DataType, MilvusClient

from offsphere.errors import StoreError
from offsphere.search.stores import Record, Stamp
from offsphere.search.stores.milvus import MilvusStore
from offsphere.similarity import Similarity, norms

STAMP = Stamp(Similarity.parse("dot"), "0123456789abcdef0123456789abcdef", "passage: ")
UGLY = [
    'double"quote', "single'quote", "back\\slash", "\\", "\\'", '\\"', '"', "'", "new\nline", "return\r", "tab\t",
    "\x01control", "slash/and/slash", "100%", "{braces}", "é", "😀", "line\u2028separator", "x' or 1 == 1 or '",
    'x"] or id != "', "$meta", "a,b", " spaces ",
]  # fmt: skip


def vectors(count: int, seed: int = 0, dimension: int = 8) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.normal(size=(count, dimension)) * np.exp(random.normal(size=(count, 1)))).astype(np.float32)


def records(rows: np.ndarray, **fields: Any) -> list[Record]:
    return [Record(f"d{i}", row, float(norms(row)), **fields) for i, row in enumerate(rows)]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """Of a milvus-lite database; its engine is stopped at the end."""
    from milvus_lite.server_manager import server_manager_instance

    yield tmp_path / "milvus.db"
    server_manager_instance.release_server(str(tmp_path / "milvus.db"))


@pytest.fixture
def store(file: Path) -> Iterator[MilvusStore]:
    """An empty collection of 8 dimensions."""
    store = MilvusStore(str(file), "documents")
    store.create(8, STAMP)
    yield store
    store.close()


@pytest.mark.parametrize(("metric", "ours"), [("IP", "ip"), ("COSINE", "cosine"), ("L2", "l2")])
def test_collections_made_by_hand_say_what_they_are(file: Path, metric: str, ours: str) -> None:
    client = MilvusClient(uri=str(file))
    client.create_collection("by_hand", dimension=5, metric_type=metric)  # numbers its documents
    rows = vectors(3, dimension=5)
    client.insert("by_hand", [{"id": i, "vector": row.tolist()} for i, row in enumerate(rows)])
    store = MilvusStore(str(file), "by_hand")
    assert (store.metric(), store.dimension(), store.stamp(), store.count()) == (ours, 5, None, 3)
    assert {found.id for found in store.search(rows[:1], 9)[0]} == {"0", "1", "2"}
    assert np.array_equal(store.vectors(["2", "0"]), rows[[2, 0]])
    with pytest.raises(StoreError, match="holds no document 'nobody'"):
        store.vectors(["0", "nobody"])
    store.close()
    client.close()


def test_fields_of_other_names_are_found(file: Path) -> None:
    client = MilvusClient(uri=str(file))
    schema = client.create_schema()
    schema.add_field("key", DataType.VARCHAR, is_primary=True, max_length=10)
    schema.add_field("embedding", DataType.FLOAT_VECTOR, dim=8)
    index = client.prepare_index_params()
    index.add_index("embedding", index_type="FLAT", metric_type="L2")
    client.create_collection("by_hand", schema=schema, index_params=index)
    rows = vectors(2)
    client.insert("by_hand", [{"key": f"d{i}", "embedding": row.tolist()} for i, row in enumerate(rows)])
    store = MilvusStore(str(file), "by_hand")
    assert (store.metric(), store.dimension()) == ("l2", 8)
    assert store.search(rows[1:], 1)[0][0].id == "d1"
    assert np.array_equal(store.vectors(["d1"]), rows[1:])
    store.close()
    client.close()


@pytest.mark.parametrize("name", ["", "a b", "a-b", "é", "1st", 'a"b', "a.b", "x" * 256, "a;drop"])
def test_names_that_milvus_refuses_are_refused_first(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="cannot name a Milvus collection"):
        MilvusStore(str(tmp_path / "milvus.db"), name)


def test_the_longest_name_is_taken(file: Path) -> None:
    store = MilvusStore(str(file), "_" + "x" * 254)
    store.create(8, STAMP)
    assert store.exists()
    store.close()


def test_a_location_that_is_no_database_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"must end in \.db"):
        MilvusStore(str(tmp_path / "milvus.sqlite"), "documents")


def test_asking_makes_no_file(file: Path) -> None:
    store = MilvusStore(str(file), "documents")
    assert not store.exists()
    assert not file.exists()
    store.close()


def test_ids_with_quotes_and_backslashes_are_their_own(store: MilvusStore) -> None:
    rows = vectors(len(UGLY))
    store.write([Record(name, row, 1.0) for name, row in zip(UGLY, rows, strict=True)])
    assert store.count() == len(UGLY)
    assert np.array_equal(store.vectors(UGLY), rows)
    for name in UGLY:
        assert store.digests([name]).keys() == {name}
    for left, name in enumerate(reversed(UGLY)):
        store.delete([name])
        assert store.count() == len(UGLY) - left - 1


def test_texts_up_to_the_limit_are_stored_and_longer_ones_named(store: MilvusStore) -> None:
    rows = vectors(1)
    longest = "é" * 32_767 + "x"
    assert len(longest.encode()) == 65_535
    store.write(records(rows, title=longest, text=longest))
    assert store.count() == 1
    for field in ("title", "text"):
        with pytest.raises(StoreError, match=f"the {field} of 'd0' has 65536 bytes, and Milvus holds 65535 at most"):
            store.write(records(rows, **{field: longest + "x"}))
    with pytest.raises(StoreError, match="the metadata of 'd0' has 1000013 bytes"):
        store.write(
            records(
                rows,
                metadata={
                    "field": "x" * 1_000_000,
                },
            )
        )
    with pytest.raises(StoreError, match="the id of 'xxx"):
        store.write([Record("x" * 65_536, rows[0], 1.0)])
    assert store.count() == 1


def test_what_is_written_can_be_read_by_milvus(store: MilvusStore, file: Path) -> None:
    row = vectors(1)[0]
    metadata = {"year": 1969, "tags": ["é", None], "quote": "\"'"}
    store.write([Record("a/b 😀", row, 2.5, "", "", metadata)])
    client = MilvusClient(uri=str(file))
    [found] = client.query("documents", filter='metadata["year"] == 1969', output_fields=["*"])
    assert found["metadata"] == metadata
    assert (found["id"], found["norm"], found["title"], found["text"]) == ("a/b 😀", 2.5, "", "")
    client.close()


def test_scores_are_inner_products_and_answers_exact(store: MilvusStore) -> None:
    rows, queries = vectors(1500), vectors(7, seed=1)
    store.write(records(rows))
    exact = queries @ rows.T
    for answer, scores in zip(store.search(queries, 10), exact, strict=True):
        assert [found.id for found in answer] == [f"d{i}" for i in np.argsort(-scores)[:10]]
        assert np.allclose([found.score for found in answer], np.sort(scores)[::-1][:10], rtol=1e-4)
    with pytest.raises(StoreError, match=r"8 dimensions, found queries of shape \(7, 5\)"):
        store.search(queries[:, :5], 10)


def test_errors_are_raised_and_not_printed_as_well(store: MilvusStore, capfd: pytest.CaptureFixture[str]) -> None:
    missing = MilvusStore(store._location, "nowhere")
    with pytest.raises(StoreError, match=r"milvus:.*#nowhere: .*nowhere"):
        missing.count()
    missing.close()
    assert capfd.readouterr() == ("", "")


def test_stores_on_one_file_do_not_stop_each_other(store: MilvusStore) -> None:
    store.write(records(vectors(3)))
    other = MilvusStore(store._location, "other")
    other.create(8, STAMP)
    other.close()
    assert store.count() == 3
    with pytest.raises(StoreError, match="closed"):
        other.count()


def test_a_file_of_another_process_is_named(file: Path) -> None:
    script = f"""
from pymilvus import MilvusClient
client = MilvusClient(uri={str(file)!r})
print("open", flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "open\n"
        with pytest.raises(StoreError, match="if another process has it open, close that"):
            MilvusStore(str(file), "documents").create(8, STAMP)
        process.communicate("\n")
    store = MilvusStore(str(file), "documents")
    store.create(8, STAMP)
    store.close()


@pytest.fixture
def server(tmp_path: Path, serving: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    """The URL of milvus-lite's server."""
    with serving("milvus-lite", "server", "--data-dir", tmp_path / "data", PYTHONUNBUFFERED="1") as url:
        yield url


def test_a_server_is_used_as_a_file_is(server: str) -> None:
    store = MilvusStore(server, "documents")
    assert not store.exists()
    store.create(8, STAMP)
    with pytest.raises(StoreError, match="exists already"):
        store.create(8, STAMP)
    rows = vectors(30)
    store.write(records(rows, text="A text"))
    store.close()
    store = MilvusStore(server, "documents")
    assert (store.metric(), store.dimension(), store.stamp(), store.count()) == ("ip", 8, STAMP, 30)
    assert store.search(rows[:1], 1)[0][0].score == pytest.approx((rows @ rows[0]).max(), rel=1e-5)
    store.close()
