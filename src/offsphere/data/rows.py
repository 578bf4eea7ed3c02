"""The rows of a file, whatever its format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offsphere.data.delimited import read_csv
from offsphere.data.jsonl import read_jsonl
from offsphere.data.parquet import read_parquet
from offsphere.errors import DataError

FILES = (".jsonl", ".csv", ".tsv", ".parquet")

Row = tuple[int, Mapping[str, Any]]


def file_rows(path: Path) -> Iterator[Row]:
    """The numbered rows of a .jsonl, .csv, .tsv or .parquet file.

    Raises:
        DataError: If there is no such file, its name ends in something else, or it is malformed.
    """
    if not path.is_file():
        raise DataError("no such file", path)
    form = path.name.removesuffix(".gz")
    if form.endswith(".jsonl"):
        return read_jsonl(path)
    if form.endswith((".csv", ".tsv")):
        return read_csv(path, "," if form.endswith(".csv") else "\t")
    if path.name.endswith(".parquet"):
        return read_parquet(path)
    raise DataError(f"expected a file that ends in {', '.join(FILES)} (the text ones also with .gz)", path)
