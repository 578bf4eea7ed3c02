"""Lines of plain and gzipped text files: UTF-8 whatever the locale, with the line number for error messages."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from offsphere.errors import DataError


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Each line of a file as (1-based number, text without its line end).

    A byte order mark and CRLF are accepted. Only a line feed ends a line: U+2028 and its like are part of the text.

    Raises:
        DataError: If the file is not UTF-8, or its gzip stream is cut off or damaged.
    """
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8 ({error.reason} at byte {error.start}); convert it, for example with iconv -f LATIN1 -t UTF-8",
            path,
            number,
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"the gzip stream cannot be read on after line {number} ({error}); fetch or compress the file again", path
        ) from error


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")
