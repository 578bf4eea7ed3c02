"""A FAISS file with an exact inner-product index, and its ids and texts in ``FILE.faiss.parquet``, row by row."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offsphere.errors import StoreError
from offsphere.search.stores import arrow
from offsphere.search.stores.changes import move, replaced, sync
from offsphere.search.stores.engines import in_order, reported
from offsphere.search.stores.parquet import ParquetStore
from offsphere.search.stores.store import Found, Stamp

if TYPE_CHECKING:
    import faiss
    import pyarrow


class FaissStore(ParquetStore):
    """``IndexFlatIP`` in one file; row i of it belongs to row i of the Parquet file beside it.

    The two are replaced as a pair: the new index waits in ``FILE.faiss.next`` until the Parquet file that names its
    checksum is in place, and whoever finds it waiting finishes the step.

    Args:
        path: Of the index.
    """

    kind = "faiss"
    columns = tuple(name for name in arrow.COLUMNS if name != "vector")

    def __init__(self, path: str):
        import faiss

        self._faiss = faiss
        super().__init__(f"{path}.parquet")
        self._target = f"faiss:{path}"
        self.index_path = Path(path)
        self._next = Path(f"{path}.next")
        self._index: faiss.Index | None = None
        self._ids: list[str] | None = None

    def exists(self) -> bool:
        """Whether the index is there."""
        with reported(self._target):
            self._finish()
            return self.index_path.is_file()

    def create(self, dimension: int, stamp: Stamp) -> None:
        """Write both files without rows.

        Raises:
            StoreError: If the index is there already.
        """
        from pyarrow import parquet

        with reported(self._target):
            self._begin()
            if self.exists():
                raise StoreError(f"{self.index_path} is there already; choose another name, or delete it first")
            self._changes.clear()  # of a file that somebody has deleted since
            schema = self._prepare(self._faiss.IndexFlatIP(dimension), arrow.schema(dimension, stamp))
            with replaced(self.path) as temporary:
                parquet.write_table(schema.empty_table(), temporary)
            self._finish()

    def metric(self) -> str:
        """The metric of the index."""
        metric = self._read().metric_type
        names = {self._faiss.METRIC_INNER_PRODUCT: "ip", self._faiss.METRIC_L2: "l2"}
        return names.get(metric, f"FAISS metric {metric}")

    def dimension(self) -> int:
        """Of the vectors in the index."""
        return int(self._read().d)

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        """(len(ids), n) float32 as stored now.

        Raises:
            StoreError: If an id is not there.
        """
        self._settle()
        row = {document: place for place, document in enumerate(self._row_ids())}
        there = [document for document in ids if document in row]
        stored = self._read().reconstruct_batch(np.array([row[document] for document in there], dtype=np.int64))
        return in_order(ids, dict(zip(there, stored, strict=True)), self._target)

    def search(self, queries: np.ndarray, k: int) -> list[list[Found]]:
        """The k best documents of each prepared query (Q, n), best first, by the index.

        Raises:
            StoreError: If the index ranks by another metric.
        """
        self._settle()
        if self.metric() != "ip":
            raise StoreError(f"{self.index_path} ranks by {self.metric()}, not by inner product; export it anew")
        scores, rows = self._read().search(np.ascontiguousarray(queries, dtype=np.float32), k)
        return arrow.answers(self._row_ids(), rows, scores)

    def _fold(self) -> None:
        index, ids, latest = self._read(), self._row_ids(), self._changes.latest()
        self._forget()  # the index is about to change in memory first
        changed = [row for row, document in enumerate(ids) if document in latest]
        # The rows behind move up, in order.
        index.remove_ids(self._faiss.IDSelectorBatch(np.array(changed, dtype=np.int64)))
        for rows in self._changes.rows(latest):
            index.add(arrow.matrix(rows["vector"]))
        self._write_rows(self._prepare(index, self._schema()))
        self._finish()

    def _prepare(self, index: faiss.Index, schema: pyarrow.Schema) -> pyarrow.Schema:
        """Leave an index waiting; the schema that the Parquet file must have to let it in."""
        import pyarrow as pa

        self._faiss.write_index(index, str(self._next))
        sync(self._next)
        noted = {**arrow.notes(schema), "index_sha256": _sha256(self._next)}
        return arrow.with_notes(pa.schema([schema.field(name) for name in self.columns]), noted)

    def _finish(self) -> None:
        """Put a waiting index in place if the Parquet file is there that belongs to it."""
        if self._next.is_file() and self.path.is_file() and _sha256(self._next) == self._expected():
            move(self._next, self.index_path)

    def _expected(self) -> str | None:
        return arrow.notes(self._schema()).get("index_sha256")

    def _forget(self) -> None:
        super()._forget()
        self._index = self._ids = None

    def _read(self) -> faiss.Index:
        """The index in memory."""
        if self._index is None:
            with reported(self._target):
                self._finish()
                if not self.index_path.is_file():
                    raise StoreError(f"there is no file {self.index_path}")
                self._index = self._faiss.read_index(str(self.index_path))
        return self._index

    def _row_ids(self) -> list[str]:
        """The id of each row of the index."""
        if self._ids is None:
            self._finish()
            if _sha256(self.index_path) != self._expected():
                raise StoreError(
                    f"{self.index_path} has changed since {self.path.name} was written, so that its rows have no ids; "
                    "restore the two together, or delete them and export anew"
                )
            with self._file() as file:
                self._ids = file.read(["id"])["id"].to_pylist()
        return self._ids


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
