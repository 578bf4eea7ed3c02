"""The documents of an index as they are in one version of its table, and the way to answer from them."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offsphere.errors import IndexFolderError
from offsphere.search.manifest import Manifest
from offsphere.search.table import DocumentTable
from offsphere.search.vectors import Vectors
from offsphere.similarity import Similarity

if TYPE_CHECKING:
    from offsphere.search.approximation import Approximation


class Snapshot:
    """One version of the documents.

    Args:
        folder: Of the index.
        manifest: Of the index.
        table: Of the index.
        memory: Bytes that embeddings may take; half of what is available if None.

    Attributes:
        vectors: The documents.
    """

    def __init__(self, folder: Path, manifest: Manifest, table: DocumentTable, memory: int | None):
        self._folder = folder
        self._manifest = manifest
        self._table = table
        self.vectors = Vectors(table, memory)

    def is_of(self, manifest: Manifest, table: DocumentTable) -> bool:
        """Whether it still shows this index as it is."""
        return self.vectors.version == table.version and self._manifest.approximate == manifest.approximate

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
        only = None
        if where is not None:
            only = vectors.positions(self._table.matching(where))
            only = only[vectors.norms[only] > 0]
        found, scores = vectors.best(queries, similarity, k, only)
        if (vectors.norms[found[found >= 0]] == 0).any():
            found, scores = vectors.best(queries, similarity, k, np.flatnonzero(vectors.norms > 0))
        return found, scores

    def _why_exact(self, similarity: Similarity, where: str | None) -> str | None:
        """Why the approximate index is not asked; empty where nobody asked for one, None where it is asked."""
        kept = self._manifest.approximate
        if kept is None:
            return ""
        if kept["folder"] is None:
            return str(kept["reason"])
        if kept["version"] != self.vectors.version:
            return "documents have changed since the approximate index was made; make it again with index --approximate"
        if where is not None:
            return "filters are answered exactly"
        if similarity.gammas[1] != self._manifest.similarity.gammas[1]:
            return f"the approximate index is for {self._manifest.similarity}"
        if self._approximation is None:
            return "the approximate index is lost or damaged; make it again with index --approximate"
        return None

    @cached_property
    def _approximation(self) -> Approximation | None:
        from offsphere.search.approximation import Approximation

        kept = self._manifest.approximate
        try:
            return Approximation.load(self._folder / kept["folder"]) if kept and kept["folder"] else None
        except IndexFolderError:
            return None

    @cached_property
    def _positions(self) -> np.ndarray:
        return self._approximation.positions(self.vectors.ids) if self._approximation else np.empty(0, np.int64)
