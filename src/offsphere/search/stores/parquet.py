"""A neutral Parquet file: id, vector, norm, title, text, metadata, digest; readable by everything, searched exactly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offsphere.errors import StoreError
from offsphere.search.stores import arrow
from offsphere.search.stores.changes import Changes, replaced
from offsphere.search.stores.engines import in_order, reported
from offsphere.search.stores.store import Found, Record, Stamp

if TYPE_CHECKING:
    import pyarrow

ROWS_AT_ONCE = 1024
ROW_GROUP_BYTES = 2**26


class ParquetStore:
    """One file, with the stamp in its key-value metadata.

    Writes wait in ``FILE.changes``, each on disk at once. ``close`` folds them into a new file in one pass, also those
    of a process that was ended half way.

    Args:
        path: Of the file.
    """

    kind = "parquet"
    columns: tuple[str, ...] = arrow.COLUMNS

    def __init__(self, path: str):
        self.path = Path(path)
        self._target = f"{self.kind}:{path}"
        self._changes = Changes(self.path)
        self._digests: dict[str, str] | None = None
        self._loaded: tuple[list[str], np.ndarray] | None = None

    def exists(self) -> bool:
        """Whether the file is there."""
        with reported(self._target):
            return self.path.is_file()

    def create(self, dimension: int, stamp: Stamp) -> None:
        """Write the file without rows.

        Raises:
            StoreError: If it is there already.
        """
        from pyarrow import parquet

        with reported(self._target):
            self._begin()
            if self.exists():
                raise StoreError(f"{self.path} is there already; choose another name, or delete it first")
            self._changes.clear()  # of a file that somebody has deleted since
            with replaced(self.path) as temporary:
                parquet.write_table(arrow.schema(dimension, stamp).empty_table(), temporary)

    def metric(self) -> str:
        """``ip``, as the file itself notes."""
        return str(arrow.notes(self._schema()).get("metric", "none"))

    def dimension(self) -> int:
        """Of the column of vectors."""
        return arrow.dimension(self._schema())

    def stamp(self) -> Stamp | None:
        """Which model wrote the file."""
        return arrow.noted_stamp(arrow.notes(self._schema()))

    def sign(self, stamp: Stamp) -> None:
        """Note the stamp in the file, with all that has changed folded in."""
        with reported(self._target):
            self._begin()
            self._settle()
            schema = self._schema()
            self._write_rows(arrow.with_notes(schema, {**arrow.notes(schema), **arrow.signed(stamp)}))
            self._forget()

    def digests(self, ids: Sequence[str]) -> dict[str, str]:
        """The digests of those documents that are stored."""
        stored = self._stored()
        return {document: stored[document] for document in ids if document in stored}

    def write(self, records: Sequence[Record]) -> None:
        """Insert or replace.

        Raises:
            StoreError: If a record cannot be stored anywhere, or another process is changing the file.
        """
        if not records:
            return
        rows = arrow.table(records, self.dimension())
        with reported(self._target):
            self._begin()
            self._changes.append(rows)
        self._loaded = None
        if self._digests is not None:
            self._digests.update((record.id, record.digest) for record in records)

    def delete(self, ids: Iterable[str]) -> None:
        """Remove those that are there."""
        import pyarrow as pa

        with reported(self._target):
            self._schema()  # an error where there is no file
            self._begin()
            present = [document for document in dict.fromkeys(ids) if document in self._stored()]
            if present:
                self._changes.append(pa.table({"id": present}))
            self._forget()

    def count(self) -> int:
        """Documents stored."""
        return len(self._stored())

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        """(len(ids), n) float32 as stored now.

        Raises:
            StoreError: If an id is not there.
        """
        stored, vectors = self._load()
        return in_order(ids, dict(zip(stored, vectors, strict=True)), self._target)

    def search(self, queries: np.ndarray, k: int) -> list[list[Found]]:
        """The k best documents of each prepared query (Q, n), best first, by exact search in memory."""
        from offsphere.search.exact import ExactSearch

        ids, vectors = self._load()
        return arrow.answers(ids, *ExactSearch(vectors).search(queries, k))

    def close(self) -> None:
        """Fold what was written into the file, in one step."""
        try:
            self._settle()
        finally:
            self._changes.end()
            self._forget()

    def _begin(self) -> None:
        if not self._changes.held:
            self._changes.begin()
            self._forget()  # another process may have written since

    def _settle(self) -> None:
        """Fold the changes in, unless another process is making some right now: it will fold them all."""
        with reported(self._target):
            if self._changes.parts() and (self._changes.held or self._changes.try_begin()):
                self._fold()
                self._changes.clear()

    def _forget(self) -> None:
        self._digests = self._loaded = None

    def _fold(self) -> None:
        self._write_rows(self._schema())

    def _write_rows(self, schema: pyarrow.Schema) -> None:
        """Replace the file by one that holds every row."""
        from pyarrow import parquet

        with replaced(self.path) as temporary, parquet.ParquetWriter(temporary, schema) as writer:
            for rows in _groups(rows.cast(schema) for rows in self._rows(schema.names)):
                writer.write_table(rows, row_group_size=len(rows))

    def _schema(self) -> pyarrow.Schema:
        with self._file() as file:
            return file.schema_arrow

    @contextmanager
    def _file(self) -> Iterator[pyarrow.parquet.ParquetFile]:
        import pyarrow
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(self.path) as file:
                missing = [name for name in self.columns if name not in file.schema_arrow.names]
                if missing:
                    raise StoreError(f"{self.path} has no column {missing[0]!r}; expected {', '.join(self.columns)}")
                yield file
        except FileNotFoundError:
            raise StoreError(f"there is no file {self.path}") from None
        except pyarrow.ArrowException as error:
            raise StoreError(f"{self.path} cannot be read as Parquet: {error}") from error

    def _rows(self, columns: Sequence[str]) -> Iterator[pyarrow.Table]:
        """Every row that holds: those of the file that have not changed, then the changes."""
        import pyarrow as pa

        latest = self._changes.latest()
        with self._file() as file:
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=list(columns)):
                kept = [document not in latest for document in batch["id"].to_pylist()]
                yield pa.Table.from_batches([batch]).filter(kept)
        for rows in self._changes.rows(latest):
            yield rows.select(columns)

    def _stored(self) -> dict[str, str]:
        """The digest of every document."""
        if self._digests is None:
            self._digests = {}
            for rows in self._rows(["id", "digest"]):
                self._digests.update(zip(rows["id"].to_pylist(), rows["digest"].to_pylist(), strict=True))
        return self._digests

    def _load(self) -> tuple[list[str], np.ndarray]:
        """The ids and vectors (N, n) of all rows."""
        if self._loaded is None:
            ids: list[str] = []
            blocks = [np.empty((0, self.dimension()), dtype=np.float32)]
            for rows in self._rows(["id", "vector"]):
                ids.extend(rows["id"].to_pylist())
                blocks.append(arrow.matrix(rows["vector"]))
            self._loaded = ids, np.concatenate(blocks)
        return self._loaded


def _groups(tables: Iterable[pyarrow.Table]) -> Iterator[pyarrow.Table]:
    """The same rows in tables of a size that reads fast."""
    import pyarrow as pa

    waiting: list[pyarrow.Table] = []
    size = 0
    for table in tables:
        if len(table):
            waiting.append(table)
            size += table.nbytes
        if size >= ROW_GROUP_BYTES:
            yield pa.concat_tables(waiting)
            waiting, size = [], 0
    if waiting:
        yield pa.concat_tables(waiting)
