from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from offsphere.errors import StoreError
from offsphere.search.stores import Record
from offsphere.search.stores.arrow import COLUMNS


@pytest.fixture
def file(tmp_path):
    return tmp_path / "documents.parquet"


def record(name: str, value: float = 1.0, **more) -> Record:
    return Record(name, np.array([value, 2, 3], dtype=np.float32), 2.5, **more)


def test_the_file_needs_no_offsphere(file, created, xquad):
    store = created("parquet", similarity="qnorm")
    kept = record("ä/1", title="T", text="Text", metadata={"tags": ["ä", None]})
    store.write([kept])
    store.close()
    table = parquet.read_table(file)
    assert tuple(table.column_names) == COLUMNS
    (row,) = table.to_pylist()
    assert row == {
        "id": "ä/1",
        "vector": [1, 2, 3],
        "norm": 2.5,
        "title": "T",
        "text": "Text",
        "metadata": row["metadata"],
        "digest": kept.digest,
    }
    assert json.loads(row["metadata"]) == kept.metadata
    assert table.schema.field("vector").type == pa.list_(pa.float32(), 3)
    noted = json.loads(parquet.read_metadata(file).metadata[b"offsphere"])
    assert noted == {"metric": "ip", "stamp": xquad.stamp("qnorm").to_dict()}


def test_nothing_lies_beside_a_closed_file(file, created):
    store = created("parquet")
    store.write([record("a")])
    store.delete(["a"])
    store.close()
    assert list(file.parent.iterdir()) == [file]


def test_reading_writes_nothing(file, created, target, opened):
    store = created("parquet")
    store.write([record("a")])
    store.close()
    before = file.stat()
    again = opened(target("parquet"))
    again.search(np.ones((1, 3), dtype=np.float32), 1)
    again.vectors(["a"])
    again.close()
    after = file.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_many_small_writes_become_large_row_groups(file, created):
    store = created("parquet")
    for number in range(30):
        store.write([record(f"{number}/{row}") for row in range(10)])
    store.close()
    assert parquet.read_metadata(file).num_row_groups == 1
    assert parquet.read_metadata(file).num_rows == 300


def test_the_last_of_several_versions_stays(created, target, opened):
    store = created("parquet")
    store.write([record("a", 1), record("b", 1), record("c", 1)])
    store.write([record("a", 2), record("b", 2)])
    store.delete(["b"])
    store.write([record("a", 3), record("b", 4)])
    store.delete(["c"])
    for _ in range(2):
        assert store.count() == 2
        np.testing.assert_array_equal(store.vectors(["a", "b"])[:, 0], [3, 4])
        store.close()
        store = opened(target("parquet"))


def test_changes_of_a_file_that_was_deleted_do_not_come_back(file, created, target, opened):
    store = created("parquet")
    store.write([record("a")])
    file.unlink()  # in the middle of an export, by hand
    del store
    again = opened(target("parquet"))
    assert not again.exists()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (pa.table({"id": ["a"]}), "has no column 'vector'; expected id, vector, norm"),
        (
            pa.table({name: [[1.0]] if name == "vector" else ["a"] for name in COLUMNS}),
            "the column vector is of type list<",
        ),
    ],
)
def test_a_file_of_another_layout(table, said, file, target, opened):
    parquet.write_table(table, file)
    with pytest.raises(StoreError, match=said):
        opened(target("parquet")).dimension()


def test_a_file_without_a_stamp(file, created, target, opened):
    store = created("parquet")
    store.write([record("a")])
    store.close()
    parquet.write_table(parquet.read_table(file).replace_schema_metadata(None), file)
    again = opened(target("parquet"))
    assert (again.metric(), again.stamp(), again.dimension(), again.count()) == ("none", None, 3, 1)


def test_a_damaged_file(file, target, opened):
    file.write_bytes(b"PAR1 but not for long")
    with pytest.raises(StoreError, match="cannot be read as Parquet"):
        opened(target("parquet")).count()


def test_a_folder_that_cannot_be_written(target, opened, xquad, tmp_path):
    (tmp_path / "a file").write_text("x")
    store = opened(f"parquet:{tmp_path / 'a file' / 'documents.parquet'}")
    with pytest.raises(StoreError, match="a file"):
        store.create(3, xquad.stamp("dot"))
