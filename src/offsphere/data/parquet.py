"""Rows of Parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offsphere.errors import DataError


def read_parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row as (1-based row number, {column: value}).

    Raises:
        DataError: If the file is not Parquet, or is damaged.
    """
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"cannot be read as Parquet after row {number} ({error})", path) from error
