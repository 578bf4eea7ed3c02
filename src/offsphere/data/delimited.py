"""Rows of CSV and TSV files, plain or gzipped. Nothing guesses types: the text "NA" stays the text "NA"."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from offsphere.data.lines import read_lines
from offsphere.errors import DataError

LONGEST_FIELD = 2**31 - 1  # the csv module's own limit, 131072 characters, is shorter than some documents


def read_csv(path: Path, delimiter: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Each row as (1-based line number of its end, {column: text}); the first row names the columns.

    Raises:
        DataError: If a row has another number of fields than the header, or its quotes do not close.
    """
    csv.field_size_limit(LONGEST_FIELD)
    rows = csv.reader((line + "\n" for _, line in read_lines(path)), delimiter=delimiter, strict=True)
    try:
        header = next(rows, [])
        for row in rows:
            if not row:
                continue
            if len(row) != len(header):
                raise DataError(
                    f"found {len(row)} fields, expected the {len(header)} of the header ({', '.join(header)}); a field "
                    f"that holds the delimiter must stand in double quotes",
                    path,
                    rows.line_num,
                )
            yield rows.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise DataError(
            f"malformed row ({error}); a field that holds a quote must stand in double quotes, with its quotes doubled",
            path,
            rows.line_num,
        ) from error
