"""What every destination of embeddings can do, so that export and verify need to know none of them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from offsphere.errors import StoreError
from offsphere.similarity import Similarity


@dataclass(frozen=True)
class Stamp:
    """Which model and similarity a collection holds the vectors of.

    Attributes:
        similarity: The one that documents were prepared for.
        fingerprint: Of the encoder, see ``encoders.model_fingerprint``.
        prompt: What was put before each document.
    """

    similarity: Similarity
    fingerprint: str
    prompt: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a destination's own metadata."""
        return {
            "similarity": self.similarity.to_dict(),
            "fingerprint": self.fingerprint,
            "prompt": self.prompt,
        }

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Stamp:
        """The stamp that ``to_dict`` described."""
        return cls(Similarity.from_dict(stored["similarity"]), stored["fingerprint"], stored.get("prompt", ""))


@dataclass(frozen=True)
class Record:
    """A document as a destination keeps it.

    Attributes:
        id: Any string.
        vector: (n,) float32, prepared: d / |d|^gamma_d, so that the metric is the inner product.
        norm: Length of the raw embedding.
        title: May be empty.
        text: May be empty.
        metadata: Plain JSON values.
    """

    id: str
    vector: np.ndarray
    norm: float
    title: str = ""
    text: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """A hash of title, text and metadata: a document that has not changed is not written again."""
        return digest(self.title, self.text, self.metadata)


def digest(title: str, text: str, metadata: dict[str, Any]) -> str:
    """A hash (32 hex digits) of what a record says, whatever its vector."""
    content = json.dumps([title, text, metadata], ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@dataclass(frozen=True)
class Found:
    """One document of an answer.

    Attributes:
        id: As it was written.
        score: The inner product with the prepared query; whatever the destination makes of it is undone.
    """

    id: str
    score: float


def checked(records: Sequence[Record], dimension: int) -> np.ndarray:
    """(len(records), dimension) float32: the vectors of records that any destination can hold.

    Raises:
        StoreError: If an id is empty or comes twice, a vector has another shape, a number is NaN or infinite, a text
            is no valid Unicode, or metadata are no JSON.
    """
    seen: set[str] = set()
    vectors = np.empty((len(records), dimension), dtype=np.float32)
    for row, record in enumerate(records):
        if not record.id or record.id in seen:
            raise StoreError(f"every document needs an id of its own, found {record.id!r} empty or twice")
        seen.add(record.id)
        if record.vector.shape != (dimension,):
            raise StoreError(
                f"document {record.id!r} has a vector of shape {record.vector.shape}, but the collection holds "
                f"{dimension} dimensions; encode with the model that wrote it, or choose another collection"
            )
        vectors[row] = record.vector
        if not (np.isfinite(vectors[row]).all() and math.isfinite(record.norm)):
            raise StoreError(f"the embedding of document {record.id!r} is NaN or infinite in float32")
        try:
            metadata = json.dumps(record.metadata, ensure_ascii=False, allow_nan=False)
            for text in (record.id, record.title, record.text, metadata):
                text.encode()
        except UnicodeEncodeError:
            raise StoreError(f"document {record.id!r} holds half a surrogate pair, which no UTF-8 can store") from None
        except (TypeError, ValueError) as error:
            raise StoreError(f"the metadata of document {record.id!r} are no JSON: {error}") from error
    return vectors


class Store(Protocol):
    """A collection at a destination; it need not exist yet.

    ``metric`` and ``dimension`` say what the live destination itself says, not what we asked for.
    """

    kind: str

    def exists(self) -> bool:
        """Whether the collection is there."""

    def create(self, dimension: int, stamp: Stamp) -> None:
        """Make an empty collection for the inner product.

        Raises:
            StoreError: If it is there already.
        """

    def metric(self) -> str:
        """The metric of the live collection in this project's words: ``ip``, ``cosine``, ``l2``, or the store's own."""

    def dimension(self) -> int:
        """Of the live collection's vectors."""

    def stamp(self) -> Stamp | None:
        """Which model wrote the live collection; None where nobody said so."""

    def sign(self, stamp: Stamp) -> None:
        """Note on a collection that somebody else made which model its vectors are of, beside whatever it says."""

    def digests(self, ids: Sequence[str]) -> dict[str, str]:
        """The digests of those documents that are stored."""

    def write(self, records: Sequence[Record]) -> None:
        """Insert or replace, durable once this returns; writing the same records twice changes nothing.

        Raises:
            StoreError: If the destination cannot hold a record, naming its id and the limit.
        """

    def delete(self, ids: Iterable[str]) -> None:
        """Remove those that are there."""

    def count(self) -> int:
        """Documents stored."""

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        """(len(ids), n) float32 as stored now.

        Raises:
            StoreError: If an id is not there.
        """

    def search(self, queries: np.ndarray, k: int) -> list[list[Found]]:
        """The k best documents of each prepared query (Q, n), best first."""

    def close(self) -> None:
        """Release files and connections; further use is an error."""
