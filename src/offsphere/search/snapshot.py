"""The documents of an index as they are in one version of its table, and the way to answer from them."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offsphere.errors import IndexFolderError
from offsphere.evaluation.ranking import excluded_pairs
from offsphere.search.hits import Hit, read_hits
from offsphere.search.manifest import Manifest
from offsphere.search.table import DocumentTable
from offsphere.search.vectors import Vectors
from offsphere.similarity import Similarity

if TYPE_CHECKING:
    from offsphere.data import Collection
    from offsphere.search.approximation import Approximation


class Snapshot:
    """One version of the documents.

    Args:
        folder: Of the index.
        manifest: Of the index.
        table: Of the index.
        memory: Bytes that embeddings may take; half of what is available if None.

    Attributes:
        folder: Of the index.
        manifest: Of the index, as it was then.
        vectors: The documents.
    """

    def __init__(self, folder: Path, manifest: Manifest, table: DocumentTable, memory: int | None):
        self.folder = folder
        self.manifest = manifest
        self._table = table
        self.vectors = Vectors(table, memory)

    @property
    def ids(self) -> list[str]:
        """Every id, descending; a position is one in this list."""
        return self.vectors.ids

    def is_of(self, manifest: Manifest, table: DocumentTable) -> bool:
        """Whether it still shows this index as it is."""
        return self.vectors.version == table.version and self.manifest.approximate == manifest.approximate

    def explain(self, similarity: Similarity, where: str | None) -> str:
        """How a search would be answered, in words."""
        why = self._why_exact(similarity, where)
        if why is None and self._approximation is not None:
            return f"approximate search over {len(self.vectors)} documents: {self._approximation.graph.choice.reason}"
        blocks = "" if self.vectors.fits else ", read block by block, as they do not fit into memory"
        return f"exact search over {len(self.vectors)} documents{blocks}" + (f" ({why})" if why else "")

    def best(
        self, queries: np.ndarray, similarity: Similarity, k: int, where: str | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k best documents with text of each query; see ``Vectors.best``."""
        vectors = self.vectors
        if self._why_exact(similarity, where) is None and self._approximation is not None:
            return self._approximation.best(vectors, self._positions, queries, similarity, k)
        return self.exact(queries, similarity, k, where)

    def exact(
        self, queries: np.ndarray, similarity: Similarity, k: int, where: str | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """As ``best``, and never approximately."""
        vectors, only = self.vectors, None
        if where is not None:
            only = vectors.positions(self._table.matching(where))
            only = only[vectors.norms[only] > 0]
        found, scores = vectors.best(queries, similarity, k, only)
        if (vectors.norms[found[found >= 0]] == 0).any():
            found, scores = vectors.best(queries, similarity, k, np.flatnonzero(vectors.norms > 0))
        return found, scores

    def ranked(
        self, queries: np.ndarray, similarity: Similarity, k: int, collection: Collection
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k best documents, with those without text, and without those that the collection excludes."""
        return self.vectors.best(queries, similarity, k, excluded=excluded_pairs(collection, self.ids))

    def hits(self, queries: np.ndarray, positions: np.ndarray, scores: np.ndarray) -> list[list[Hit]]:
        """The documents at these positions (Q, k), -1 for none, for each query; see ``read_hits``."""
        return read_hits(self._table, self.vectors, queries, positions, scores)

    def _why_exact(self, similarity: Similarity, where: str | None) -> str | None:
        """Why the approximate index is not asked; empty where nobody asked for one, None where it is asked."""
        kept = self.manifest.approximate
        if kept is None:
            return ""
        if kept["folder"] is None:
            return str(kept["reason"])
        if kept["version"] != self.vectors.version:
            return "documents have changed since the approximate index was made; make it again with index --approximate"
        if where is not None:
            return "filters are answered exactly"
        if similarity.gammas[1] != self.manifest.similarity.gammas[1]:
            return f"the approximate index is for {self.manifest.similarity}"
        if self._approximation is None:
            return "the approximate index is lost or damaged; make it again with index --approximate"
        return None

    @cached_property
    def _approximation(self) -> Approximation | None:
        from offsphere.search.approximation import Approximation

        kept = self.manifest.approximate
        try:
            return Approximation.load(self.folder / kept["folder"]) if kept and kept["folder"] else None
        except IndexFolderError:
            return None

    @cached_property
    def _positions(self) -> np.ndarray:
        return self._approximation.positions(self.vectors.ids) if self._approximation else np.empty(0, np.int64)
