"""The approximate index that stands beside the table of an index, and which documents its rows are."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offsphere.errors import IndexFolderError
from offsphere.progress import Progress
from offsphere.search.approximate import EXACT, ApproximateIndex, choose
from offsphere.search.manifest import Manifest
from offsphere.search.vectors import Vectors
from offsphere.similarity import Similarity

PREFIX = "approximate-"
DOCUMENTS = "documents.json"
MOST_QUERIES = 1000
"""Queries that approximate search is measured with."""


@dataclass
class Approximation:
    """An approximate index with the ids of its documents. Documents without text are left out: they answer nothing.

    Attributes:
        graph: Finds candidates among the prepared embeddings.
        digests: The digest of each of its documents by id, in the order of its rows.
    """

    graph: ApproximateIndex
    digests: dict[str, str]

    @classmethod
    def make(
        cls,
        vectors: Vectors,
        digests: dict[str, str],
        queries: np.ndarray | None,
        similarity: Similarity,
        *,
        recall: float,
        k: int,
        seed: int,
        progress: Progress,
    ) -> Approximation:
        """One chosen by measurement on these documents; see ``approximate.choose``.

        Args:
            vectors: Of the index.
            digests: Of all its documents, by id.
            queries: (Q, n) raw embeddings of real queries; None where there are none.
            similarity: What the index ranks under.
            recall: The promise.
            k: Length of the answers that the promise is about.
            seed: Of all draws.
            progress: Told what is measured.
        """
        filled = np.flatnonzero(vectors.norms > 0)
        graph = choose(vectors.embeddings[filled], queries, similarity, recall, k, seed=seed, progress=progress)
        ids = [vectors.ids[position] for position in filled]
        return cls(graph, {one: digests[one] for one in ids})

    def grow(self, vectors: Vectors, digests: dict[str, str], similarity: Similarity, progress: Progress) -> bool:
        """Take in the documents that have come; whether nothing else has changed, so that this is enough."""
        if any(digests.get(one) != digest for one, digest in self.digests.items()):
            return False
        filled = np.flatnonzero(vectors.norms > 0)
        fresh = np.array([one for one in filled if vectors.ids[one] not in self.digests], np.int64)
        self.graph.add(similarity.prepare_document(vectors.raw(fresh)), progress)
        self.digests |= {vectors.ids[one]: digests[vectors.ids[one]] for one in fresh}
        return True

    @property
    def is_exact(self) -> bool:
        """Whether no candidate kept the promise, so that the index itself does better."""
        return self.graph.method == EXACT

    def save(self, folder: Path) -> str:
        """Write it into a new folder inside the index; the name of that folder."""
        name = f"{PREFIX}{uuid.uuid4().hex[:12]}"
        self.graph.save(folder / name)
        with (folder / name / DOCUMENTS).open("w", encoding="utf-8") as file:
            json.dump(self.digests, file, ensure_ascii=False)
        return name

    @classmethod
    def load(cls, folder: Path) -> Approximation:
        """What ``save`` wrote into this folder.

        Raises:
            IndexFolderError: If a part is missing or damaged.
        """
        graph = ApproximateIndex.load(folder)
        try:
            digests = json.loads((folder / DOCUMENTS).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise IndexFolderError(f"{folder / DOCUMENTS} cannot be read: {error}") from error
        if len(digests) != len(graph):
            raise IndexFolderError(f"{folder} holds {len(graph)} vectors and {len(digests)} ids")
        return cls(graph, digests)

    def positions(self, ids: list[str]) -> np.ndarray:
        """(documents,) where each row stands in ``ids``."""
        places = {one: place for place, one in enumerate(ids)}
        return np.array([places[one] for one in self.digests], np.int64)

    def best(
        self, vectors: Vectors, positions: np.ndarray, queries: np.ndarray, similarity: Similarity, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k best among the candidates of each query, scored as exact search scores them.

        Args:
            vectors: Of the index.
            positions: Of each row in ``vectors``.
            queries: (Q, n) raw embeddings.
            similarity: The one that the graph was made for.
            k: Length of the answers.
        """
        rows, _ = self.graph.search(similarity.prepare_query(queries), min(k, len(self.graph)))
        return vectors.rescored(queries, similarity, np.where(rows >= 0, positions[rows], -1))


def drawn(queries: Sequence[str], seed: int) -> list[str]:
    """At most ``MOST_QUERIES`` different queries, drawn at random."""
    distinct = sorted({query for query in queries if query.strip()})
    return [distinct[place] for place in np.random.default_rng(seed).permutation(len(distinct))[:MOST_QUERIES]]


def renew(
    folder: Path,
    manifest: Manifest,
    vectors: Vectors,
    digests: dict[str, str],
    queries: np.ndarray | None,
    promise: dict[str, Any],
    seed: int,
    progress: Progress,
) -> dict[str, Any]:
    """What the manifest is to say of an approximate index that fits the documents as they are now.

    Args:
        folder: Of the index.
        manifest: Of the index.
        vectors: Its documents.
        digests: Their digests by id.
        queries: (Q, n) raw embeddings of real queries; None where there are none.
        promise: recall and k.
        seed: Of all draws.
        progress: Told what is measured.
    """
    before = manifest.approximate or {}
    grown = None
    if before.get("folder") and {name: before[name] for name in promise} == promise:
        try:
            grown = Approximation.load(folder / before["folder"])
        except IndexFolderError as error:
            progress.say(f"note: {error}")
        if grown is not None and before["version"] == vectors.version:
            return before
    if grown is None or not grown.grow(vectors, digests, manifest.similarity, progress):
        grown = Approximation.make(
            vectors, digests, queries, manifest.similarity, **promise, seed=seed, progress=progress
        )
    name = None if grown.is_exact else grown.save(folder)
    return {**promise, "version": vectors.version, "folder": name, "reason": grown.graph.choice.reason}


def remove_others(folder: Path, kept: dict[str, Any] | None) -> None:
    """Delete the approximate indexes inside an index that its manifest does not name."""
    for other in folder.glob(f"{PREFIX}*"):
        if kept is None or other.name != kept["folder"]:
            shutil.rmtree(other, ignore_errors=True)
