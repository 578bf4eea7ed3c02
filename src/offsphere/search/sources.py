"""Documents on their way to a destination, with their raw embeddings: encoded now, or from an index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from offsphere.data.documents import Document, read_documents, shared_prompts
from offsphere.data.shard import WHOLE, Shard
from offsphere.diagnosis.subject import Encoder
from offsphere.encoders import encode, model_fingerprint
from offsphere.errors import ConfigError, DataError, EncoderError
from offsphere.evaluation.evaluate import OWN, asked_similarity
from offsphere.search.stores.store import Stamp
from offsphere.similarity import Similarity

if TYPE_CHECKING:
    from offsphere.search.index import Index

RAW = Similarity.parse("dot")


class Batch(Protocol):
    """Some documents with a way to their raw embeddings."""

    @property
    def documents(self) -> Sequence[Document]:
        """In the order of the source."""

    def embed(self, rows: Sequence[int]) -> np.ndarray:
        """(len(rows), n) float32 raw embeddings of these documents."""


class Source(Protocol):
    """Documents to export: what prepared them, how many there are, and all of them in batches."""

    stamp: Stamp
    dimension: int

    def __len__(self) -> int:
        """Documents."""

    def batches(self, size: int) -> Iterator[Batch]:
        """Every document once, in the same order each time."""


class EncodedDocuments:
    """Documents of collections and files, encoded by a model when they are needed.

    Everything is read once beforehand, the whole of it for one shard as well, so that a malformed line is found before
    anything is written.

    Args:
        encoder: Without Normalize modules.
        data: Collection folders or files, see ``read_documents``.
        similarity: What to prepare for; the encoder's own when None.
        prompt: What stands before each document; the collections' or else the model's when None.
        batch_size: Texts in one forward pass.
        shard: Which of the documents; all of them by default.

    Raises:
        DataError: If something is malformed, an id comes in two sources, or these declare different prompts.
        UsageError: If the similarity is not known.
    """

    def __init__(
        self,
        encoder: Encoder,
        data: Sequence[str],
        similarity: str | None = None,
        prompt: str | None = None,
        batch_size: int = 64,
        shard: Shard = WHOLE,
    ):
        self._model = encoder.model
        self._data = data
        self._batch_size = batch_size
        self._shard = shard
        self.stamp = Stamp(
            asked_similarity(similarity or OWN, encoder.declared, encoder.source),
            model_fingerprint(encoder.model),
            _document_prompt(encoder, data) if prompt is None else prompt,
        )
        self._count = _count_distinct(data, shard)
        self.dimension = self.embed([Document("probe", text="probe")]).shape[1]

    def __len__(self) -> int:
        return self._count

    def batches(self, size: int) -> Iterator[Batch]:
        """Every document once, in the order of the sources."""
        read = chain.from_iterable(map(read_documents, self._data))
        documents = (document for document in read if self._shard.holds(document.id))
        while batch := list(islice(documents, size)):
            yield _Encoded(batch, self)

    def embed(self, documents: Sequence[Document]) -> np.ndarray:
        """(len(documents), n) float32 raw embeddings.

        Raises:
            EncoderError: If one is NaN or infinite.
        """
        texts = [document.passage for document in documents]
        embeddings = encode(self._model, texts, "document", prompt=self.stamp.prompt, batch_size=self._batch_size)
        broken = np.flatnonzero(~np.isfinite(embeddings).all(axis=1))
        if len(broken):
            raise EncoderError(f"the embedding of document {documents[broken[0]].id!r} is NaN or infinite")
        return embeddings


class IndexedDocuments:
    """Documents of an index with the raw embeddings that it keeps; nothing is encoded.

    Args:
        index: To be exported.
        similarity: What to prepare for; the index's own when None.
        shard: Which of the documents; all of them by default.
    """

    def __init__(self, index: Index, similarity: str | None = None, shard: Shard = WHOLE):
        self._index = index
        self._shard = shard
        own = index.stamp
        asked = asked_similarity(similarity or OWN, own.similarity, str(index.folder))
        self.stamp = replace(own, similarity=asked)
        self.dimension = index.manifest.dimension

    def __len__(self) -> int:
        return sum(map(self._shard.holds, self._index.ids)) if self._shard.count > 1 else self._index.count()

    def batches(self, size: int) -> Iterator[Batch]:
        """Every document once, in the order of the index's table."""
        for batch in self._index.records(size, RAW):
            records = [record for record in batch if self._shard.holds(record.id)]
            if not records:
                continue
            documents = [Document(record.id, record.title, record.text, record.metadata) for record in records]
            yield _Indexed(documents, np.stack([record.vector for record in records]))


@dataclass(frozen=True)
class _Encoded:
    documents: Sequence[Document]
    source: EncodedDocuments

    def embed(self, rows: Sequence[int]) -> np.ndarray:
        return self.source.embed([self.documents[row] for row in rows])


@dataclass(frozen=True)
class _Indexed:
    documents: Sequence[Document]
    raw: np.ndarray

    def embed(self, rows: Sequence[int]) -> np.ndarray:
        return self.raw[list(rows)]


def _document_prompt(encoder: Encoder, data: Sequence[str]) -> str:
    """What stands before each document: the prompt of the collections, or else the model's."""
    return shared_prompts(data, ["document"]).get("document", encoder.model.prompts.get("document") or "")


def _count_distinct(data: Sequence[str], shard: Shard) -> int:
    """Documents of the shard; every id is in one of the sources only."""
    if not data:
        raise ConfigError("give the documents to export: --data COLLECTION, or --index INDEX")
    count = 0
    owner: dict[str, str] = {}
    for source in data:
        for document in read_documents(source):
            count += shard.holds(document.id)
            if len(data) > 1 and (first := owner.setdefault(document.id, source)) is not source:
                raise DataError(
                    f"document {document.id!r} is in {first} as well; every id must be unique in a destination: export "
                    "to one for each, or rename",
                    Path(source),
                )
    return count
