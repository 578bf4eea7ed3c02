"""An index: a folder with the raw embeddings and texts of documents, which ranks as its model was trained to.

The embeddings are raw, so that one index answers under every similarity and any gamma_d; its own similarity is the one
that the model declares.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offsphere.data.documents import Document
from offsphere.data.shard import WHOLE, Shard
from offsphere.diagnosis.subject import open_bare
from offsphere.encoders import encode, model_fingerprint
from offsphere.errors import IndexFolderError, UsageError
from offsphere.progress import Progress, Silent
from offsphere.search.begin import Asked, begin
from offsphere.search.indexing import Added, add_documents
from offsphere.search.manifest import Manifest, read_manifest, refuse_another_model, writing
from offsphere.search.searcher import Searcher
from offsphere.search.snapshot import Snapshot
from offsphere.search.stores.store import Record, Stamp
from offsphere.search.table import DocumentTable
from offsphere.search.vectors import matrix
from offsphere.similarity import Similarity

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


class Index(Searcher):
    """Documents in a folder: ``manifest.json`` says how they were embedded, a LanceDB table holds them.

    Made by ``Index.create`` or ``Index.open``. It searches the documents as they were when it was opened, or when it
    last changed them itself; what another process adds is seen after opening it again.

    Attributes:
        folder: Where it is.
        manifest: How it was made.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        model: SentenceTransformer | None = None,
        *,
        source: str | None = None,
        device: str | None = None,
        memory: int | None = None,
    ):
        self.folder = folder
        self.manifest = manifest
        self._source = source or manifest.model
        self._model = model
        self._device = device
        self._memory = memory
        self._table = DocumentTable.open(folder)
        self._snapshot: Snapshot | None = None

    @classmethod
    def create(
        cls,
        folder: str | Path,
        model: str | Path,
        *,
        similarity: Asked = None,
        prompts: Mapping[str, str] | None = None,
        max_length: int | None = None,
        device: str | None = None,
    ) -> Index:
        """The index in this folder: a new one, or the one that is there if it was made in the same way.

        Args:
            folder: Made if need be.
            model: See ``encoders.open_encoder``.
            similarity: What to rank under, if the model does not say it or something else is meant.
            prompts: By side, in place of the model's own.
            max_length: Tokens kept of each text.
            device: Where to encode.

        Raises:
            UsageError: If neither the model nor the caller says which similarity it is.
            IndexFolderError: If the folder holds something else, or an index made in another way.
            EncoderError: If the model cannot be opened.
        """
        folder = Path(folder).expanduser()
        manifest, encoder = begin(folder, str(model), similarity, prompts or {}, max_length, device)
        return cls(folder, manifest, encoder.model, source=str(model), device=device)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        model: str | Path | None = None,
        *,
        device: str | None = None,
        memory: int | None = None,
    ) -> Index:
        """The index in this folder, to search or to change.

        Args:
            folder: What ``create`` made.
            model: Where its model is now, if it has moved; opened and compared at once. Otherwise the model is opened
                when a text is to be encoded.
            device: Where to encode.
            memory: Bytes that embeddings may take; half of what is available if None. Beyond it, search reads them
                block by block, with the same result.

        Raises:
            IndexFolderError: If there is no index, a part of it is missing, or the model is another one.
        """
        folder = Path(folder).expanduser()
        manifest = read_manifest(folder)
        index = cls(folder, manifest, source=None if model is None else str(model), device=device, memory=memory)
        if model is not None:
            _ = index.encoder
        return index

    @property
    def encoder(self) -> SentenceTransformer:
        """The model, without Normalize modules, with the prompts and the length limit of the index.

        Raises:
            IndexFolderError: If its weights are not those that the index was made with.
        """
        if self._model is None:
            manifest = self.manifest
            model = open_bare(self._source, manifest.max_length, manifest.prompts, self._device).model
            refuse_another_model(self.folder, manifest, self._source, model_fingerprint(model))
            self._model = model
        return self._model

    @property
    def similarity(self) -> Similarity:
        """What search ranks under unless it is asked for something else."""
        return self.manifest.similarity

    @property
    def model(self) -> str:
        """What its encoder was opened with when it was made."""
        return self.manifest.model

    @property
    def prompts(self) -> dict[str, str]:
        """What stands before each ``query`` and each ``document``."""
        return self.manifest.prompts

    @property
    def stamp(self) -> Stamp:
        """What a destination of these vectors should remember about them."""
        return Stamp(self.similarity, self.manifest.fingerprint, self.manifest.prompts["document"])

    @property
    def ids(self) -> list[str]:
        """Every id, descending: the order in which ties are broken, and of ``embeddings`` and ``norms``."""
        return self.snapshot().vectors.ids

    @property
    def embeddings(self) -> np.ndarray:
        """(N, n) raw float32, read into memory; rows in the order of ``ids``."""
        return self.snapshot().vectors.embeddings

    @property
    def norms(self) -> np.ndarray:
        """(N,) float32: lengths of ``embeddings``, 0 for documents without text."""
        return self.snapshot().vectors.norms

    def count(self) -> int:
        """Documents stored."""
        return 0 if self._table is None else self._table.count()

    def add(
        self,
        *sources: str | Path | Iterable[Document],
        batch_size: int = 64,
        delete_missing: bool = False,
        shard: Shard = WHOLE,
        progress: Progress | None = None,
    ) -> Added:
        """Index documents: new ones are encoded, changed ones encoded again, all others left alone.

        Every source is read and checked before anything is encoded. Batches are committed as they are encoded, so that
        the same call goes on where a stopped one ended.

        Args:
            sources: Collections, files (see ``data.documents.read_documents``), or documents.
            batch_size: Texts in one forward pass.
            delete_missing: Whether to delete documents that none of the sources, or not this shard of them, has.
            shard: Which of the documents to index. Fields to filter by are those of all documents, so that the indexes
                of all shards have the same ones.
            progress: Told what happens.

        Raises:
            UsageError: If there is no source.
            DataError: If a source is malformed, or two have the same id.
            EncoderError: If an embedding is NaN or infinite.
            IndexFolderError: If another process writes, or the folder cannot be written.
        """
        if not sources:
            raise UsageError("nothing to index; name a collection, a file, or documents")
        encoder = self.encoder
        with writing(self.folder):
            return add_documents(
                self._begin_writing(),
                encoder,
                sources,
                self.manifest.fields,
                self._settle_fields,
                batch_size=batch_size,
                delete_missing=delete_missing,
                shard=shard,
                progress=progress or Silent(),
            )

    def delete(self, ids: Iterable[str]) -> int:
        """Remove documents; how many of these ids were there.

        Raises:
            IndexFolderError: If another process writes, or the folder cannot be written.
        """
        with writing(self.folder):
            table = self._begin_writing()
            there = sorted(table.digests().keys() & set(ids))
            table.delete(there)
            return len(there)

    def approximate(
        self,
        recall: float = 0.95,
        queries: Sequence[str] | None = None,
        *,
        k: int = 10,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> str:
        """Make, or bring up to date, what ``search`` answers from approximately; says what was chosen, and why.

        Where only new documents have come, the graph that is there takes them in. Otherwise the candidates are built
        and measured anew (see ``approximate.choose``); if none keeps the promise, search stays exact.

        Args:
            recall: The promised share of the k best documents.
            queries: Real ones to measure with; noisy documents if None.
            k: Length of the answers that the promise is about.
            seed: Of all draws.
            progress: Told what is measured.

        Raises:
            ConfigError: If the recall or k is out of range.
            UsageError: If FAISS is not installed.
        """
        from offsphere.search.approximation import drawn, remove_others, renew

        asked = None if queries is None else encode(self.encoder, drawn(queries, seed), "query")
        with writing(self.folder):
            digests = self._begin_writing().digests()
            vectors, promise = self._filled().vectors, {"recall": recall, "k": k}
            kept = renew(self.folder, self.manifest, vectors, digests, asked, promise, seed, progress or Silent())
            self.manifest = replace(self.manifest, approximate=kept)
            self.manifest.write(self.folder)
            remove_others(self.folder, kept)
        return str(kept["reason"])

    def documents(self, ids: Sequence[str]) -> list[Document]:
        """The documents with these ids, in that order, as their source had them; ids not there are left out."""
        found = {} if self._table is None else self._table.documents(ids)
        return [found[one] for one in ids if one in found]

    def records(self, batch_size: int = 1024, similarity: Similarity | None = None) -> Iterator[list[Record]]:
        """Every document as a destination stores it, in batches, in the order of the table.

        Args:
            batch_size: Documents read into memory at a time.
            similarity: What to prepare the vectors for; the index's own if None.
        """
        prepare = (similarity or self.similarity).prepare_document
        said = ("id", "norm", "title", "text", "metadata")
        for batch in self._table.scan((*said, "vector"), batch_size) if self._table else ():
            prepared = prepare(matrix(batch, self.manifest.dimension))
            rows = batch.select(said).to_pylist()
            yield [
                Record(row["id"], vector, row["norm"], row["title"], row["text"], json.loads(row["metadata"]))
                for row, vector in zip(rows, prepared, strict=True)
            ]

    def _opened(self) -> DocumentTable:
        if self._table is None:
            raise IndexFolderError(
                f"{self.folder} has no table yet: the command that began it was stopped before its first batch. Type "
                "it again, and it goes on"
            )
        return self._table

    def snapshot(self) -> Snapshot:
        """The documents as they are now.

        Raises:
            IndexFolderError: If the index was only begun.
        """
        table = self._opened()
        if self._snapshot is None or not self._snapshot.is_of(self.manifest, table):
            self._snapshot = None  # the one before makes room first
            self._snapshot = Snapshot(self.folder, self.manifest, table, self._memory)
        return self._snapshot

    def _filled(self) -> Snapshot:
        snapshot = self.snapshot()
        if not len(snapshot.vectors):
            raise IndexFolderError(
                f"{self.folder} holds no documents; add some with: offsphere index {self.manifest.model} COLLECTION "
                f"--out {self.folder}"
            )
        return snapshot

    def _begin_writing(self) -> DocumentTable:
        """The table in its newest version, mended where a stopped process left it half made."""
        newest = read_manifest(self.folder)
        if not newest.made_like(self.manifest):
            raise IndexFolderError(f"{self.folder} was made anew in the meantime; type the same command again")
        self.manifest = newest
        self._table = DocumentTable.of(self.folder, newest.dimension)
        self._table.match_fields(newest.fields)
        return self._table

    def _settle_fields(self, fields: dict[str, str | None]) -> None:
        """Remember the kinds of metadata fields, then make the columns; the next write mends it if that is stopped."""
        self.manifest = replace(self.manifest, fields=fields)
        self.manifest.write(self.folder)
        self._opened().match_fields(fields)
