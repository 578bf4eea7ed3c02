"""What a run measured, on disk: ``results.csv`` with one measurement a row, and one value per query in Parquet."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from offsphere.errors import DataError, RunError

if TYPE_CHECKING:
    import pyarrow

PRETRAINED = "pretrained"
"""The ``similarity`` of the encoder before any training: a reference without a seed, with the gammas it declares."""


@dataclass(frozen=True)
class Result:
    """One row of ``results.csv``: the mean of one measure over the queries of one dataset.

    Attributes:
        model: The encoder that was trained, as the user named it.
        training_data: The training sources, as the user named them.
        similarity: The similarity trained with, or ``pretrained``.
        gamma_q: The exponent after training; None where there is none.
        gamma_d: The same for the document.
        scored_as: The similarity that ranked.
        seed: The seed of the training; None where there was none.
        dataset: The name of the collection.
        split: The split of its judgements.
        measure: The measure as ir-measures prints it, such as ``nDCG@10``; on scored sentence pairs ``Spearman`` or
            ``Pearson``, and with ``(b,a)`` behind it where the second sentence was the query.
        value: The mean, a fraction from 0 to 1; a correlation from -1 to 1.
        n_queries: How many queries the mean covers, or sentence pairs the correlation.
    """

    model: str
    training_data: str
    similarity: str
    gamma_q: float | None
    gamma_d: float | None
    scored_as: str
    seed: int | None
    dataset: str
    split: str
    measure: str
    value: float
    n_queries: int


class QueryValue(NamedTuple):
    """One measure on one query, for a model scored with the similarity it was trained with."""

    model: str
    similarity: str
    seed: int | None
    dataset: str
    measure: str
    query_id: str
    value: float


COLUMNS = tuple(field.name for field in fields(Result))


def write_results(path: Path, rows: Iterable[Result]) -> None:
    """Write ``results.csv``; floats are written so that they read back exactly, None as an empty cell."""
    temporary = _temporary(path)
    with temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(astuple(row) for row in rows)
    temporary.replace(path)


def read_results(path: Path | str) -> list[Result]:
    """The rows of a ``results.csv``, in the order of the file.

    Raises:
        RunError: If there is no such file.
        DataError: If the header is another one, or a row has the wrong number of cells or a cell that is no number.
    """
    path = _require(path)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        if tuple(header) != COLUMNS:
            raise DataError(f"expected the header {','.join(COLUMNS)}, found {','.join(header)!r}", path, 1)
        return [_parse(cells, path, reader.line_num) for cells in reader]


def write_query_values(path: Path, rows: Sequence[QueryValue]) -> None:
    """Write one value per query as Parquet, with the columns of QueryValue."""
    import pyarrow
    import pyarrow.parquet

    columns = zip(*rows, strict=True) if rows else [()] * len(QueryValue._fields)
    table = pyarrow.table([list(column) for column in columns], schema=_schema())
    temporary = _temporary(path)
    pyarrow.parquet.write_table(table, temporary)
    temporary.replace(path)


def read_query_values(path: Path | str) -> list[QueryValue]:
    """The rows of a table that ``write_query_values`` wrote, in the same order.

    Raises:
        RunError: If there is no such file.
        DataError: If it is not Parquet, or has other columns.
    """
    import pyarrow
    import pyarrow.parquet

    path = _require(path)
    try:
        table = pyarrow.parquet.read_table(path).select(QueryValue._fields).cast(_schema())
    except (pyarrow.ArrowException, KeyError) as error:
        raise DataError(f"expected Parquet with the columns {', '.join(QueryValue._fields)}; {error}", path) from error
    return [QueryValue(*row) for row in zip(*(column.to_pylist() for column in table.columns), strict=True)]


def _parse(cells: list[str], path: Path, line: int) -> Result:
    if len(cells) != len(COLUMNS):
        raise DataError(f"expected {len(COLUMNS)} cells, found {len(cells)}", path, line)
    row = dict(zip(COLUMNS, cells, strict=True))
    try:
        return Result(
            model=row["model"],
            training_data=row["training_data"],
            similarity=row["similarity"],
            gamma_q=float(row["gamma_q"]) if row["gamma_q"] else None,
            gamma_d=float(row["gamma_d"]) if row["gamma_d"] else None,
            scored_as=row["scored_as"],
            seed=int(row["seed"]) if row["seed"] else None,
            dataset=row["dataset"],
            split=row["split"],
            measure=row["measure"],
            value=float(row["value"]),
            n_queries=int(row["n_queries"]),
        )
    except ValueError as error:
        raise DataError(f"expected a number; {error}", path, line) from error


def _schema() -> pyarrow.Schema:
    import pyarrow

    types = {"seed": pyarrow.int64(), "value": pyarrow.float64()}
    return pyarrow.schema([(name, types.get(name, pyarrow.string())) for name in QueryValue._fields])


def _require(path: Path | str) -> Path:
    path = Path(path)
    if not path.is_file():
        raise RunError(f"{path} is missing; `offsphere compare --out {path.parent}` writes it")
    return path


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")
