"""The fields of one record, checked at the border: ids become strings, null becomes the empty text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offsphere.errors import DataError


def read_id(record: Mapping[str, Any], field: str, path: Path | str, line: int) -> str:
    """The id in a field as a string; whole numbers are accepted.

    Raises:
        DataError: If the field is missing, empty, or neither a string nor a whole number.
    """
    value = _value(record, field, path, line)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{field} must be a string or a whole number, found {value!r}", path, line)
    return str(value)


def read_text(record: Mapping[str, Any], field: str, path: Path | str, line: int) -> str:
    """The text in a field without white space around it; null is the empty text.

    An unpaired surrogate, which no tokenizer accepts, becomes a question mark.

    Raises:
        DataError: If the field is missing, or neither a string nor null.
    """
    value = _value(record, field, path, line)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{field} must be a string or null, found {_short(value)}", path, line)
    return value.encode("utf-8", "replace").decode("utf-8").strip()


def _value(record: Mapping[str, Any], field: str, path: Path | str, line: int) -> Any:
    try:
        return record[field]
    except KeyError:
        raise DataError(f"{field} is missing; found the fields {', '.join(record) or '(none)'}", path, line) from None


def _short(value: object) -> str:
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"
