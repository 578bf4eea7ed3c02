from __future__ import annotations

import faiss
import numpy as np
import pytest
from pyarrow import parquet

from offsphere.errors import StoreError
from offsphere.search.stores import Record


@pytest.fixture
def file(tmp_path):
    return tmp_path / "documents.faiss"


@pytest.fixture
def store(created):
    return created("faiss", similarity="qnorm")


def record(name: str, value: float = 1.0, **more) -> Record:
    return Record(name, np.array([value, 2, 3], dtype=np.float32), 2.5, **more)


def test_row_i_of_the_index_is_row_i_of_the_table(file, store):
    store.write([record(name, place) for place, name in enumerate("abcdef")])
    store.delete(["b", "e"])
    store.write([record("c", 9, text="new"), record("g", 6)])
    store.close()
    index = faiss.read_index(str(file))
    assert type(index) is faiss.IndexFlatIP
    table = parquet.read_table(f"{file}.parquet")
    assert table.column_names == ["id", "norm", "title", "text", "metadata", "digest"]
    stored = dict(zip(table["id"].to_pylist(), index.reconstruct_n(0, index.ntotal)[:, 0], strict=True))
    assert stored == {"a": 0, "c": 9, "d": 3, "f": 5, "g": 6}


def test_a_search_before_closing_finds_what_was_written(file, store):
    store.write([record("a", 1), record("b", 5)])
    (answer,) = store.search(np.array([[1, 0, 0]], dtype=np.float32), 5)
    assert [(hit.id, hit.score) for hit in answer] == [("b", 5), ("a", 1)]
    assert faiss.read_index(str(file)).ntotal == 2  # it is the file that was searched
    store.write([record("a", 7)])
    assert store.search(np.array([[1, 0, 0]], dtype=np.float32), 1)[0][0].id == "a"


def test_nothing_lies_beside_a_closed_pair(file, store):
    store.write([record("a")])
    store.close()
    assert sorted(file.parent.iterdir()) == [file, file.with_name("documents.faiss.parquet")]


@pytest.mark.parametrize("kind", [faiss.IndexFlatL2, faiss.IndexFlatIP])
def test_an_index_made_by_hand(kind, file, target, opened):
    index = kind(3)
    index.add(np.ones((2, 3), dtype=np.float32))
    faiss.write_index(index, str(file))
    store = opened(target("faiss"))
    assert (store.exists(), store.dimension()) == (True, 3)
    assert store.metric() == {faiss.IndexFlatL2: "l2", faiss.IndexFlatIP: "ip"}[kind]
    with pytest.raises(StoreError, match=r"ranks by l2|documents\.faiss\.parquet"):
        store.search(np.ones((1, 3), dtype=np.float32), 1)


def test_an_index_that_was_exchanged(file, store, target, opened):
    store.write([record("a"), record("b")])
    store.close()
    index = faiss.IndexFlatIP(3)
    index.add(np.ones((2, 3), dtype=np.float32))
    faiss.write_index(index, str(file))
    again = opened(target("faiss"))
    for ask in (lambda: again.search(np.ones((1, 3), dtype=np.float32), 1), lambda: again.vectors(["a"])):
        with pytest.raises(StoreError, match=r"has changed since documents\.faiss\.parquet was written"):
            ask()


def test_a_damaged_index(file, store, target, opened):
    store.close()
    file.write_bytes(b"not an index")
    with pytest.raises(StoreError, match=r"documents\.faiss"):
        opened(target("faiss")).metric()
