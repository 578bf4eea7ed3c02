from __future__ import annotations

import pyarrow
import pytest
from pyarrow import parquet

from offsphere.data.parquet import read_parquet
from offsphere.errors import DataError


def write_table(path, columns):
    parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


def test_rows_across_row_groups(tmp_path):
    path = write_table(tmp_path / "a.parquet", {"query": ["NA", None, "c"], "positive_id": [1, 2, 3]})
    assert list(read_parquet(path)) == [
        (1, {"query": "NA", "positive_id": 1}),
        (2, {"query": None, "positive_id": 2}),
        (3, {"query": "c", "positive_id": 3}),
    ]


@pytest.mark.parametrize("keep", [0, 3, 200])
def test_a_damaged_file_is_an_error(tmp_path, keep):
    path = write_table(tmp_path / "a.parquet", {"query": ["a"] * 100})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as Parquet"):
        list(read_parquet(path))
