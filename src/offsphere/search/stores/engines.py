"""What the stores that ask a database engine share: the size of a request, its errors, and answers in order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from offsphere.errors import OffsphereError, StoreError
from offsphere.search.stores.store import Record

MOST_RECORDS = 1000
"""Documents in one request."""

MOST_BYTES = 16 * 2**20
"""Bytes in one request: half of what the strictest of the servers takes unless it is told otherwise."""

BYTES_A_NUMBER = 12
"""What one component of a vector takes as JSON text, about."""


@contextmanager
def reported(target: str) -> Iterator[None]:
    """A context in which whatever an engine raises becomes a StoreError that names the target."""
    try:
        yield
    except OffsphereError:
        raise
    except Exception as error:  # the engines share no class of errors; one of them raises plain Exception
        raise StoreError(f"{target}: {error}") from error


def batches(records: Sequence[Record], most: int = MOST_RECORDS) -> Iterator[list[Record]]:
    """The records in order, in lists that one request can carry; a record larger than a request goes alone."""
    batch: list[Record] = []
    size = 0
    for record in records:
        texts = (record.id, record.title, record.text, as_json(record))
        needed = BYTES_A_NUMBER * len(record.vector) + sum(len(text.encode()) for text in texts)
        if batch and (len(batch) == most or size + needed > MOST_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += needed
    if batch:
        yield batch


def as_json(record: Record) -> str:
    """The metadata of a record as JSON text."""
    return json.dumps(record.metadata, ensure_ascii=False)


def in_order(ids: Sequence[str], found: Mapping[str, Sequence[float] | np.ndarray], target: str) -> np.ndarray:
    """(len(ids), n) float32, the vector of each id.

    Raises:
        StoreError: If an id has none; names the first few.
    """
    missing = [document for document in ids if document not in found]
    if missing:
        few = ", ".join(map(repr, missing[:3]))
        raise StoreError(f"{target} holds no document {few}{', ...' if len(missing) > 3 else ''}")
    if not ids:
        return np.empty((0, 0), np.float32)
    return np.asarray([found[document] for document in ids], np.float32)
