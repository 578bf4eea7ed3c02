"""A LanceDB table, in a folder or on object storage; searched exactly unless somebody makes an index."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offsphere.errors import StoreError
from offsphere.search.stores import arrow
from offsphere.search.stores.engines import in_order, reported
from offsphere.search.stores.store import Found, Record, Stamp

if TYPE_CHECKING:
    import lancedb

IDS_AT_ONCE = 1000


class LanceStore:
    """A table with the stamp in its schema; each write is one version of it.

    LanceDB has the metric in the query, and gives the distance 1 - q . d for ``dot``, which is undone here. It warns
    and searches exactly where an index was made for another metric.

    Args:
        location: A folder, or a URL such as ``s3://bucket/folder``.
        name: Of the table: letters without accents, digits, ``_``, ``-`` and ``.``.
    """

    kind = "lancedb"

    def __init__(self, location: str, name: str):
        import lancedb

        self._name = name
        self._target = f"lancedb:{location}#{name}"
        self._folder = None if "://" in location else Path(location)
        with reported(self._target):
            self._database = lancedb.connect(location)
        self._opened: lancedb.table.Table | None = None
        self._written = False

    def exists(self) -> bool:
        """Whether the table is there."""
        try:
            self._table()
        except StoreError as error:
            if isinstance(error.__cause__, ValueError) and "was not found" in str(error.__cause__):
                return False
            raise
        return True

    def create(self, dimension: int, stamp: Stamp) -> None:
        """Make the table without rows.

        In a folder, one process of several that do so at the same moment makes it, and the others are refused. In
        object storage LanceDB may let a second one through, which empties the table that the first one made.

        Raises:
            StoreError: If it is there already, or LanceDB refuses its name.
        """
        schema = arrow.schema(dimension, stamp)
        with reported(self._target):
            if self._folder is None:
                self._opened = self._database.create_table(self._name, schema=schema)
                return
            with tempfile.TemporaryDirectory(dir=self._folder, prefix=".unfinished-") as unfinished:
                import lancedb

                lancedb.connect(unfinished).create_table(self._name, schema=schema)
                table = f"{self._name}.lance"
                Path(unfinished, table).rename(self._folder / table)  # refused where there is one with files in it

    def metric(self) -> str:
        """Of the index on the vectors; where there is none, ``ip`` in a table of ours and ``none`` in another one."""
        table = self._table()
        with reported(self._target):
            for index in table.list_indices():
                statistics = table.index_stats(index.name) if "vector" in index.columns else None
                if statistics is not None and statistics.distance_type:
                    return "ip" if statistics.distance_type == "dot" else str(statistics.distance_type)
            return str(self._notes().get("metric", "none"))

    def dimension(self) -> int:
        """Of the column of vectors."""
        return arrow.dimension(self._table().schema)

    def stamp(self) -> Stamp | None:
        """Which model wrote the table."""
        return arrow.noted_stamp(self._notes())

    def sign(self, stamp: Stamp) -> None:
        """Note the stamp on the column of vectors: the notes of a table that is there cannot be changed."""
        noted = {"path": "vector", "metadata": {arrow.KEY.decode(): json.dumps(arrow.signed(stamp))}}
        with reported(self._target):
            self._table().update_field_metadata(noted)

    def digests(self, ids: Sequence[str]) -> dict[str, str]:
        """The digests of those documents that are stored."""
        return {row["id"]: row["digest"] for rows in self._where(ids, "digest") for row in rows.to_pylist()}

    def write(self, records: Sequence[Record]) -> None:
        """Insert or replace, in one version.

        Raises:
            StoreError: If a record cannot be stored anywhere.
        """
        if not records:
            return
        rows = arrow.table(records, self.dimension())
        with reported(self._target):
            self._table().merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(rows)
        self._written = True

    def delete(self, ids: Iterable[str]) -> None:
        """Remove those that are there."""
        table = self._table()
        with reported(self._target):
            for condition in _conditions(list(ids)):
                table.delete(condition)
                self._written = True

    def count(self) -> int:
        """Documents stored."""
        table = self._table()
        with reported(self._target):
            return int(table.count_rows())

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        """(len(ids), n) float32 as stored now.

        Raises:
            StoreError: If an id is not there.
        """
        stored: dict[str, np.ndarray] = {}
        for rows in self._where(ids, "vector"):
            stored.update(zip(rows["id"].to_pylist(), arrow.matrix(rows["vector"]), strict=True))
        return in_order(ids, stored, self._target)

    def search(self, queries: np.ndarray, k: int) -> list[list[Found]]:
        """The k best documents of each prepared query (Q, n), best first."""
        table = self._table()
        answers = []
        with reported(self._target):
            for query in queries.astype(np.float32, copy=False):
                search = table.search(query, vector_column_name="vector").distance_type("dot").limit(k)
                rows = search.select(["id", "_distance"]).to_arrow()
                scores = 1.0 - rows["_distance"].to_numpy().astype(np.float64)
                answers.append(list(map(Found, rows["id"].to_pylist(), scores.tolist())))
        return answers

    def close(self) -> None:
        """Merge the many small files of many writes; where another writer is at it, that one does it for both."""
        if self._written and self._opened is not None:
            with reported(self._target):
                try:
                    self._opened.optimize()
                except RuntimeError as error:
                    if "commit conflict" not in str(error):
                        raise
        self._opened, self._written = None, False

    def _table(self) -> Any:
        if self._opened is None:
            with reported(self._target):
                self._opened = self._database.open_table(self._name)
        return self._opened

    def _notes(self) -> dict[str, Any]:
        schema = self._table().schema
        return arrow.notes(schema.field("vector")) or arrow.notes(schema)

    def _where(self, ids: Sequence[str], column: str) -> Iterator[Any]:
        """Tables with the ids and one column of those documents that are stored."""
        table = self._table()
        for condition in _conditions(ids):
            with reported(self._target):
                yield table.search().where(condition).select(["id", column]).limit(None).to_arrow()


def _conditions(ids: Sequence[str]) -> Iterator[str]:
    """SQL for sets of ids, of a size that LanceDB reads well."""
    for start in range(0, len(ids), IDS_AT_ONCE):
        quoted = ", ".join("'" + document.replace("'", "''") + "'" for document in ids[start : start + IDS_AT_ONCE])
        yield f"id IN ({quoted})"
