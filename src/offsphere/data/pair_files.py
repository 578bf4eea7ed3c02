"""Files of training pairs, written a block at a time and put in place once they are whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from offsphere.errors import ConfigError

FORMS = (".jsonl", ".parquet")

Write = Callable[[Iterable[Sequence[str]]], None]


def check_form(path: Path) -> None:
    """Refuse a name that does not say how to write the file.

    Raises:
        ConfigError: If it ends in neither of the known ways.
    """
    if not path.name.endswith(FORMS) or path.name in FORMS:
        raise ConfigError(f"expected a file name that ends in {' or '.join(FORMS)}, found {path}")


def temporary_name(path: Path) -> Path:
    """Where a file is written before it takes its name."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextmanager
def pair_file(path: Path, columns: Sequence[str]) -> Iterator[Write]:
    """A function that writes rows of texts; the file has its name once the block ends without an error.

    Whatever ends it otherwise, Ctrl-C included, leaves a file that was there before as it was.

    Args:
        path: A .jsonl or .parquet file, as ``load_pairs`` reads them.
        columns: Of every row, in order.

    Raises:
        ConfigError: If the name ends in something else.
    """
    check_form(path)
    temporary = temporary_name(path)
    try:
        with (_parquet if path.suffix == ".parquet" else _jsonl)(temporary, columns) as write:
            yield write
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _jsonl(path: Path, columns: Sequence[str]) -> Iterator[Write]:
    with path.open("w", encoding="utf-8", newline="\n") as file:

        def write(rows: Iterable[Sequence[str]]) -> None:
            for row in rows:
                file.write(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) + "\n")

        yield write


@contextmanager
def _parquet(path: Path, columns: Sequence[str]) -> Iterator[Write]:
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.schema([(column, pyarrow.string()) for column in columns])
    with parquet.ParquetWriter(path, schema) as file:

        def write(rows: Iterable[Sequence[str]]) -> None:
            named = [dict(zip(columns, row, strict=True)) for row in rows]
            if named:
                file.write_table(pyarrow.Table.from_pylist(named, schema))

        yield write
