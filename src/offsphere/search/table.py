"""The LanceDB table of an index: one row a document, each batch of rows one commit.

Columns: id, vector (raw embedding), norm, title, text, metadata (JSON), digest, and one for each metadata field that
can be filtered by. LanceDB writes a version beside the one before and names it last, so a process that is killed leaves
the table as it was after the last commit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offsphere.data.documents import Document
from offsphere.errors import ConfigError, IndexFolderError
from offsphere.search.manifest import TABLE
from offsphere.search.stores.store import digest
from offsphere.similarity import norms

if TYPE_CHECKING:
    import pyarrow

COLUMNS = ("id", "vector", "norm", "title", "text", "metadata", "digest")
KINDS = ("text", "number", "flag")
"""Kinds of metadata fields that can be filtered by; numbers are compared in float64."""
MOST_FIELDS = 200
MOST_IDS = 1000
"""Ids named in one condition."""
EXACT_WHOLE = 2**53
"""Whole numbers beyond it are not exact in float64."""

_NAME = re.compile(r"[^\W_][\w -]{0,99}")


@dataclass(frozen=True)
class Rows:
    """Documents with their raw embeddings, ready to be stored.

    Attributes:
        documents: B of them.
        embeddings: (B, n) raw float32.
    """

    documents: Sequence[Document]
    embeddings: np.ndarray


class DocumentTable:
    """The table of an index, as it was when it was opened or last written through this object.

    Args:
        table: What LanceDB opened.
    """

    def __init__(self, table: Any):
        self._table = table

    @classmethod
    def create(cls, folder: Path, dimension: int) -> DocumentTable:
        """An empty table; what a stopped creation left is taken over."""
        import pyarrow as pa

        types = {"vector": pa.list_(pa.float32(), dimension), "norm": pa.float32(), "text": pa.large_string()}
        schema = pa.schema([pa.field(name, types.get(name, pa.string()), nullable=False) for name in COLUMNS])
        with _explained("create the table"):
            return cls(_connect(folder).create_table(TABLE, schema=schema))

    @classmethod
    def open(cls, folder: Path) -> DocumentTable | None:
        """The table in its newest version; None where there is none yet."""
        connection = _connect(folder)
        if not (folder / f"{TABLE}.lance" / "_versions").is_dir():
            return None
        with _explained("open the table"):
            return cls(connection.open_table(TABLE))

    @classmethod
    def of(cls, folder: Path, dimension: int) -> DocumentTable:
        """The table in its newest version, made if there is none yet.

        Raises:
            IndexFolderError: If its vectors have another dimension.
        """
        table = cls.open(folder) or cls.create(folder, dimension)
        if table.dimension != dimension:
            raise IndexFolderError(
                f"the vectors in {folder} have {table.dimension} dimensions, but its manifest says {dimension}; "
                "restore the folder from a copy, or index again into another one"
            )
        return table

    @property
    def version(self) -> int:
        """Counts commits; the same version holds the same rows under the same row ids."""
        return int(self._table.version)

    @property
    def dimension(self) -> int:
        """Of the vectors."""
        return int(self._table.schema.field("vector").type.list_size)

    def count(self) -> int:
        """Documents stored."""
        return int(self._table.count_rows())

    def fields(self) -> list[str]:
        """Metadata fields that have a column."""
        return [name for name in self._table.schema.names if name not in COLUMNS]

    def match_fields(self, fields: Mapping[str, str | None]) -> None:
        """Add and drop columns until there is one for each field that has a kind.

        Args:
            fields: Field to kind; None for a field that has no column.
        """
        import pyarrow as pa

        types = {"text": pa.string(), "number": pa.float64(), "flag": pa.bool_()}
        there = set(self.fields())
        wanted = {name: kind for name, kind in fields.items() if kind is not None}
        added = [pa.field(name, types[kind]) for name, kind in wanted.items() if name not in there]
        with _explained("change its columns"):
            if added:
                self._table.add_columns(pa.schema(added))
            if dropped := sorted(there - wanted.keys()):
                self._table.drop_columns(dropped)

    def append(self, rows: Rows) -> None:
        """Commit documents whose ids are not there."""
        with _explained("write"):
            self._table.add(self._arrow(rows))

    def replace(self, rows: Rows) -> None:
        """Commit documents in place of those with the same ids."""
        with _explained("write"):
            self._table.merge_insert("id").when_matched_update_all().execute(self._arrow(rows))

    def delete(self, ids: Sequence[str]) -> None:
        """Remove those that are there."""
        with _explained("delete"):
            for start in range(0, len(ids), MOST_IDS):
                self._table.delete(_is_one_of(ids[start : start + MOST_IDS]))

    def compact(self) -> None:
        """Join the many small files of many commits; processes that read an earlier version are not disturbed."""
        with _explained("compact the table"):
            self._table.optimize()

    def digests(self) -> dict[str, str]:
        """The digest of every document, by id."""
        return {
            identifier: stored
            for batch in self.scan(("id", "digest"))
            for identifier, stored in zip(batch["id"].to_pylist(), batch["digest"].to_pylist(), strict=True)
        }

    def scan(self, columns: Sequence[str], rows_at_once: int = 65_536) -> Iterator[pyarrow.RecordBatch]:
        """Every row, with its ``_rowid``.

        Args:
            columns: Which of them.
            rows_at_once: At most so many rows in one batch.
        """
        with _explained("read"):
            yield from self._table.search().select([*columns]).with_row_id(True).to_batches(rows_at_once)

    def matching(self, where: str) -> np.ndarray:
        """The row ids (uint64) of the documents for which an SQL condition is true.

        Raises:
            ConfigError: If it is no condition on the columns of the table.
        """
        try:
            # In parentheses nothing can stand behind the condition, where LanceDB would not read it.
            found = self._table.search().where(f"({where}\n)").select(["id"]).with_row_id(True).to_arrow()
        except (ValueError, RuntimeError) as error:
            reason = re.sub(r"\s*Valid fields are.*|, /\S+\.rs:\S+$", "", _first_line(error))
            fields = ", ".join(("id", "title", "text", "norm", *self.fields()))
            raise ConfigError(
                f"cannot filter by {where!r}: {reason}\nExpected SQL such as \"lang = 'en'\" over the fields {fields}; "
                "a name with spaces or hyphens stands in backquotes. Fields that are lists, objects or of mixed kinds "
                "cannot be filtered by."
            ) from error
        return found["_rowid"].to_numpy()

    def take(self, row_ids: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
        """The rows of these row ids, in that order."""
        if not len(row_ids):
            return []
        with _explained("read"):
            found = self._table.take_row_ids([int(one) for one in row_ids]).select([*columns]).with_row_id().to_arrow()
        rows = {row.pop("_rowid"): row for row in found.to_pylist()}
        return [rows[int(one)] for one in row_ids]

    def documents(self, ids: Sequence[str]) -> dict[str, Document]:
        """Those of these documents that are there, by id."""
        found: dict[str, Document] = {}
        with _explained("read"):
            for start in range(0, len(ids), MOST_IDS):
                condition = _is_one_of(ids[start : start + MOST_IDS])
                some = self._table.search().where(condition).select(["id", "title", "text", "metadata"]).to_arrow()
                for row in some.to_pylist():
                    metadata = json.loads(row["metadata"])
                    found[row["id"]] = Document(row["id"], row["title"], row["text"], metadata)
        return found

    def _arrow(self, rows: Rows) -> pyarrow.Table:
        import pyarrow as pa

        documents, schema = rows.documents, self._table.schema
        embeddings = np.ascontiguousarray(rows.embeddings, dtype=np.float32)
        columns: dict[str, Any] = {
            "id": [one.id for one in documents],
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(embeddings.ravel()), self.dimension),
            "norm": norms(embeddings),
            "title": [one.title for one in documents],
            "text": [one.text for one in documents],
            "metadata": [json.dumps(one.metadata, ensure_ascii=False) for one in documents],
            "digest": [digest_of(one) for one in documents],
        }
        for name in self.fields():
            columns[name] = [one.metadata.get(name) for one in documents]
        return pa.table([pa.array(columns[one.name], one.type) for one in schema], schema=schema)


def digest_of(document: Document) -> str:
    """The digest of what a document says: one that has not changed is not encoded again."""
    return digest(document.title, document.text, document.metadata)


def merge_fields(fields: dict[str, str | None], metadata: Mapping[str, Any]) -> None:
    """Take the fields of one more document into ``fields``.

    A field keeps its kind while every value is a text, a number or a flag; one with a list, an object, a whole number
    beyond 2^53, values of two kinds, or a name that SQL would stumble over, is None: stored, but not to filter by.
    """
    for name, value in metadata.items():
        if value is None:
            continue
        kind = _kind(value) if _NAME.fullmatch(name) and name not in COLUMNS else None
        if name not in fields:
            full = sum(one is not None for one in fields.values()) >= MOST_FIELDS
            fields[name] = None if full else kind
        elif fields[name] != kind:
            fields[name] = None


def _kind(value: Any) -> str | None:
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, int):
        return "number" if abs(value) <= EXACT_WHOLE else None
    return "number" if isinstance(value, float) else "text" if isinstance(value, str) else None


def _connect(folder: Path) -> Any:
    try:
        import lancedb
    except ImportError as error:
        raise IndexFolderError("an index needs LanceDB; type: pip install 'offsphere[lancedb]'") from error
    return lancedb.connect(str(folder))


def _is_one_of(ids: Sequence[str]) -> str:
    quoted = ("'" + one.replace("'", "''") + "'" for one in ids)
    return f"id IN ({', '.join(quoted)})"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns what LanceDB raises into an error that says what to do."""
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        reason = _first_line(error)
        hint = "free some disk space or check the folder's permissions, then type the same command again"
        if "onflict" in reason:
            hint = "another program wrote to the table at the same time; type the same command again"
        raise IndexFolderError(
            f"the index could not {what}: {reason}\nWhat was committed before is safe; {hint}"
        ) from error
