"""Rows of JSON Lines files, plain or gzipped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offsphere.data.lines import read_lines
from offsphere.errors import DataError


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each JSON object of a file as (1-based line number, object); blank lines are skipped.

    Raises:
        DataError: If a line is not one JSON object, or the file cannot be decoded.
    """
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"malformed JSON ({error.msg} at column {error.colno}); expected one object a line", path, number
            ) from error
        if not isinstance(row, dict):
            raise DataError(f"found {type(row).__name__}, expected one JSON object a line", path, number)
        yield number, row
