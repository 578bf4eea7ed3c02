"""Documents to index or export: the corpus of a collection, or the rows of a file. No queries or judgements needed."""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from offsphere.data.jsonl import read_jsonl
from offsphere.data.records import read_id, read_text
from offsphere.data.rows import FILES, Row, file_rows
from offsphere.data.settings import SIDES, read_settings
from offsphere.errors import DataError

CORPUS = "corpus.jsonl"
QUERIES = "queries.jsonl"
LAYOUT = "a collection is a folder with corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv (each may end in .gz)"
IDS = ("_id", "id")


@dataclass(frozen=True)
class Document:
    """One document as its source has it.

    Attributes:
        id: Any string that is not empty.
        title: May be empty.
        text: May be empty.
        metadata: Every other field of the source, as plain JSON values.
    """

    id: str
    title: str = ""
    text: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def passage(self) -> str:
        """What is embedded, without a prompt: ``title text``."""
        return f"{self.title} {self.text}".strip()


def read_documents(source: str | Path) -> Iterator[Document]:
    """Each document of a collection folder, or of a .jsonl, .csv, .tsv (each also with .gz) or .parquet file.

    A file has the columns _id (or id), text and, where there are titles, title. What else a row has is metadata; an
    object in the field ``metadata``, as some corpora have it, adds its own fields.

    Args:
        source: A folder with a corpus.jsonl or corpus.jsonl.gz, or a file.

    Raises:
        DataError: If there is no such source, or, while reading, if a row is malformed or an id comes twice: names
            the file and the line.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        path = required_file(path, CORPUS)
        return parse_documents(read_jsonl(path), path, "_id")
    if not path.exists():
        raise DataError(f"no such file or folder; {LAYOUT}, or a file that ends in {', '.join(FILES)}", path)
    rows = file_rows(path)
    first = next(rows, None)
    if first is None:
        raise DataError("the file is empty; expected rows with the columns _id and text", path)
    id_field = next((name for name in IDS if name in first[1]), IDS[0])
    return parse_documents(chain([first], rows), path, id_field)


def read_prompts(source: str | Path) -> dict[str, str]:
    """The prompts that a collection folder declares, by side; none for a file.

    Raises:
        DataError: If the collection.yaml is malformed.
    """
    path = Path(source).expanduser()
    return read_settings(path).prompts if path.is_dir() else {}


def shared_prompts(sources: Sequence[str | Path], sides: Sequence[str] = SIDES) -> dict[str, str]:
    """The prompts that these collections declare, by side; those that declare none go along with the others.

    Raises:
        DataError: If two declare different ones, with what to type.
    """
    prompts: dict[str, str] = {}
    for source in sources:
        declared = read_prompts(source)
        for side in sorted(declared.keys() & set(sides)):
            if prompts.setdefault(side, declared[side]) != declared[side]:
                raise DataError(
                    f"it declares the {side} prompt {declared[side]!r}, another one {prompts[side]!r}, and what is "
                    f"searched together needs the same; keep them apart, or give one with --{side}-prompt",
                    source,
                )
    return prompts


def read_queries(source: str | Path) -> list[str]:
    """The texts of all queries of a collection folder; none where it has no queries, and for a file.

    Raises:
        DataError: If its queries.jsonl is malformed.
    """
    path = Path(source).expanduser()
    file = find_file(path, QUERIES) if path.is_dir() else None
    return [] if file is None else [query.text for query in parse_queries(file)]


def parse_queries(path: Path) -> Iterator[Document]:
    """The queries of a file, checked as documents are.

    Raises:
        DataError: If it is malformed, or an id comes twice.
    """
    return parse_documents(read_jsonl(path), path, "_id", titled=False)


def parse_documents(rows: Iterable[Row], path: Path, id_field: str, *, titled: bool = True) -> Iterator[Document]:
    """The documents of numbered rows: ids are unique strings, null is the empty text.

    Args:
        rows: (1-based line number, fields).
        path: Where they come from, for messages.
        id_field: The field that has the id.
        titled: Whether a field ``title`` is the title; otherwise it is metadata.

    Raises:
        DataError: If a field is missing or of the wrong kind, an id comes twice, or there is no row.
    """
    seen: set[str] = set()
    for line, row in rows:
        identifier = read_id(row, id_field, path, line)
        if identifier in seen:
            raise DataError(f"the {id_field} {identifier!r} occurs twice; every id must be unique", path, line)
        if identifier != _text(identifier):
            raise DataError(f"the {id_field} {identifier!r} holds an unpaired surrogate; write it in UTF-8", path, line)
        seen.add(identifier)
        text = read_text(row, "text", path, line)
        title = read_text(row, "title", path, line) if titled and "title" in row else ""
        own = {id_field, "text", "title"} if titled else {id_field, "text"}
        metadata = _metadata({name: value for name, value in row.items() if name not in own}, path, line)
        yield Document(identifier, title, text, metadata)
    if not seen:
        raise DataError("the file is empty; expected one JSON object a line", path)


def find_file(folder: Path, name: str) -> Path | None:
    """The file of that name in a collection, plain or gzipped."""
    candidates = (folder / name, folder / f"{name}.gz")
    return next((file for file in candidates if file.is_file()), None)


def required_file(folder: Path, name: str) -> Path:
    """The file of that name in a collection.

    Raises:
        DataError: If there is no such folder or file, with what a collection looks like.
    """
    if not folder.is_dir():
        raise DataError(f"not a folder; {LAYOUT}", folder)
    file = find_file(folder, name)
    if file is None:
        raise DataError(f"{name} is missing; {LAYOUT}", folder)
    return file


def _metadata(fields: dict[str, Any], path: Path, line: int) -> dict[str, Any]:
    """The fields as JSON values, those of an object called ``metadata`` among them."""
    nested = fields.get("metadata")
    if isinstance(nested, Mapping):
        del fields["metadata"]
        twice = sorted(fields.keys() & nested.keys())
        if twice:
            raise DataError(f"the field {twice[0]!r} stands both beside and inside metadata; keep one", path, line)
        fields |= nested
    return {_text(name): _plain(value, name, path, line) for name, value in fields.items()}


def _plain(value: Any, name: str, path: Path, line: int) -> Any:
    """A JSON value that says the same. Parquet has dates and decimals, and writes a missing number as NaN."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float) and not math.isinf(value):
        return None if math.isnan(value) else value
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, Mapping):
        return {_text(str(key)): _plain(one, name, path, line) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, name, path, line) for one in value]
    raise DataError(
        f"the field {name!r} holds {type(value).__name__} {value!r:.60}, which JSON cannot store; leave it out",
        path,
        line,
    )


def _text(value: str) -> str:
    """Without unpaired surrogates, which no file in UTF-8 can hold."""
    return value.encode("utf-8", "replace").decode("utf-8")
