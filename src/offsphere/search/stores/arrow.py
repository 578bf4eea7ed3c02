"""Records as Arrow tables, as the stores that are files or folders of columns keep them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from offsphere.errors import StoreError
from offsphere.search.stores.engines import as_json
from offsphere.search.stores.store import Found, Record, Stamp, checked

if TYPE_CHECKING:
    import pyarrow

COLUMNS = ("id", "vector", "norm", "title", "text", "metadata", "digest")
KEY = b"offsphere"


def schema(dimension: int, stamp: Stamp | None = None) -> pyarrow.Schema:
    """The type of each column, ``metadata`` being JSON; metric and stamp are noted in the metadata of the schema."""
    import pyarrow as pa

    types = {"vector": pa.list_(pa.float32(), dimension), "norm": pa.float32(), "text": pa.large_string()}
    fields = [pa.field(name, types.get(name, pa.string()), nullable=False) for name in COLUMNS]
    return with_notes(pa.schema(fields), signed(stamp) if stamp else {})


def signed(stamp: Stamp) -> dict[str, Any]:
    """The notes of a table of vectors for the inner product, and of that model."""
    return {"metric": "ip", "stamp": stamp.to_dict()}


def with_notes(schema: pyarrow.Schema, noted: dict[str, Any]) -> pyarrow.Schema:
    """The same columns with these notes."""
    return schema.with_metadata({KEY: json.dumps(noted)})


def notes(of: pyarrow.Schema | pyarrow.Field) -> dict[str, Any]:
    """What was noted; empty where somebody else made the table."""
    noted: dict[str, Any] = json.loads((of.metadata or {}).get(KEY, b"{}"))
    return noted


def noted_stamp(noted: dict[str, Any]) -> Stamp | None:
    """The stamp among the notes."""
    stored = noted.get("stamp")
    return None if stored is None else Stamp.from_dict(stored)


def dimension(schema: pyarrow.Schema) -> int:
    """Of the column ``vector``.

    Raises:
        StoreError: If it is none of vectors of one length.
    """
    kind = schema.field("vector").type
    if not hasattr(kind, "list_size"):
        raise StoreError(f"the column vector is of type {kind}; expected fixed_size_list<float>")
    size: int = kind.list_size
    return size


def table(records: Sequence[Record], dimension: int) -> pyarrow.Table:
    """The records, one a row.

    Raises:
        StoreError: If a record is not as ``checked`` demands.
    """
    import pyarrow as pa

    vectors = checked(records, dimension)
    columns = {
        "id": [record.id for record in records],
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), dimension),
        "norm": np.array([record.norm for record in records], dtype=np.float32),
        "title": [record.title for record in records],
        "text": [record.text for record in records],
        "metadata": [as_json(record) for record in records],
        "digest": [record.digest for record in records],
    }
    return pa.table(columns, schema=schema(dimension))


def matrix(column: pyarrow.ChunkedArray) -> np.ndarray:
    """(N, n) float32 of a column of N vectors."""
    flat: np.ndarray = column.combine_chunks().flatten().to_numpy()
    return flat.astype(np.float32, copy=False).reshape(len(column), column.type.list_size)


def answers(ids: Sequence[str], rows: np.ndarray, scores: np.ndarray) -> list[list[Found]]:
    """Rows and scores (Q, k), as libraries give them, as documents; row -1 is none."""
    return [
        [Found(ids[row], score) for row, score in zip(*answer, strict=True) if row >= 0]
        for answer in zip(rows.tolist(), scores.tolist(), strict=True)
    ]
