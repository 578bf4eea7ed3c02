"""Exact search over the raw embeddings of an index: from memory while they fit, block by block from disk beyond."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from offsphere.search.exact import ExactSearch, Pairs
from offsphere.similarity import Similarity

if TYPE_CHECKING:
    import pyarrow

    from offsphere.search.table import DocumentTable

MEMORY_SHARE = 0.5
"""Of the memory that is available when an index is opened: its embeddings may take so much."""
BLOCK = 65_536
"""Rows read and searched at a time beyond that."""


class Vectors:
    """The documents of one version of a table, in the order in which ties are broken: by id, descending.

    Scores are those of ``evaluation.ranking.rank``: prepared and summed in float64 from the raw embeddings, rounded to
    float32 once, whether the embeddings fit or not.

    Args:
        table: Of the index.
        memory: Bytes that embeddings may take; half of what is available now if None.

    Attributes:
        version: Of the table.
        ids: Every id, descending. A position in it is what search answers with.
        row_ids: (N,) uint64, of the table.
        norms: (N,) float32, lengths of the raw embeddings; 0 for documents without text.
        fits: Whether the embeddings are searched in memory.
    """

    def __init__(self, table: DocumentTable, memory: int | None = None):
        self._table = table
        self.version = table.version
        ids: list[str] = []
        row_ids, lengths = [np.empty(0, np.uint64)], [np.empty(0, np.float32)]
        for batch in table.scan(("id", "norm")):
            ids += batch["id"].to_pylist()
            row_ids.append(batch["_rowid"].to_numpy())
            lengths.append(batch["norm"].to_numpy())
        order = sorted(range(len(ids)), key=ids.__getitem__, reverse=True)
        self.ids = [ids[place] for place in order]
        self.row_ids = np.concatenate(row_ids)[order]
        self.norms = np.concatenate(lengths)[order]
        self._by_row_id = np.argsort(self.row_ids)
        needed = len(ids) * table.dimension * np.dtype(np.float32).itemsize
        self.fits = needed <= (spare_memory() if memory is None else memory)
        self._embeddings: np.ndarray | None = None
        self._searcher: tuple[float, ExactSearch] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def embeddings(self) -> np.ndarray:
        """(N, n) raw float32 in the order of ``ids``, read into memory once, whether they fit or not."""
        if self._embeddings is None:
            raw = np.empty((len(self), self._table.dimension), np.float32)
            for positions, block in self._blocks():
                raw[positions] = block
            self._embeddings = raw
        return self._embeddings

    def raw(self, positions: np.ndarray) -> np.ndarray:
        """(len(positions), n) raw float32 embeddings of the documents at these positions."""
        if self.fits:
            return self.embeddings[positions]
        rows = self._table.take(self.row_ids[positions].tolist(), ("vector",))
        return np.array([row["vector"] for row in rows], np.float32).reshape(len(positions), self._table.dimension)

    def positions(self, row_ids: np.ndarray) -> np.ndarray:
        """Where documents stand, in ascending order, from their row ids."""
        return np.sort(self._find(row_ids))

    def best(
        self,
        queries: np.ndarray,
        similarity: Similarity,
        k: int,
        only: np.ndarray | None = None,
        excluded: Pairs | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k best documents of each query: score descending, then id descending.

        Args:
            queries: (Q, n) raw embeddings.
            similarity: What to rank under.
            k: Length of the answers.
            only: Ascending positions of the documents that may be answers; all of them if None.
            excluded: Rows and positions, sorted by row, of pairs of a query and a document that it must not get.

        Returns:
            Positions (Q, k) int64, -1 where there are fewer documents, and scores (Q, k) float32, -inf there.
        """
        prepared = similarity.prepare_query(queries.astype(np.float64))
        positions = np.full((len(queries), k), -1, np.int64)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        for block, searcher in self._searchers(similarity.gammas[1], only):
            rows, found = searcher.search(prepared, k, _within(excluded, block))
            rows = np.where(rows >= 0, block[rows], -1)
            positions, scores = first(np.hstack([positions, rows]), np.hstack([scores, found]), k)
        return positions, scores

    def rescored(
        self, queries: np.ndarray, similarity: Similarity, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Each query's candidates, best first, scored and ordered as ``best`` does.

        Args:
            queries: (Q, n) raw embeddings.
            similarity: What to rank under.
            positions: (Q, C), -1 where there is no candidate.

        Returns:
            The same positions in their order, and scores (Q, C) float32, -inf where there is no candidate.
        """
        scores = np.full(positions.shape, -np.inf, np.float32)
        for row, query in enumerate(queries.astype(np.float64)):
            found = positions[row] >= 0
            documents = self.raw(positions[row, found]).astype(np.float64)
            scores[row, found] = similarity.scores(query[None], documents)[0] + 0.0  # which turns -0 into 0
        return first(positions, scores, positions.shape[1])

    def _searchers(self, gamma_d: float, only: np.ndarray | None) -> Iterator[tuple[np.ndarray, ExactSearch]]:
        """Ascending positions, and a search over the documents there."""
        if not len(self):
            return
        if self.fits and only is None:
            if self._searcher is None or self._searcher[0] != gamma_d:
                self._searcher = gamma_d, ExactSearch(self.embeddings, gamma_d=gamma_d)
            yield np.arange(len(self)), self._searcher[1]
        elif self.fits and only is not None:
            for start in range(0, len(only), BLOCK):
                block = only[start : start + BLOCK]
                yield block, ExactSearch(self.embeddings[block], gamma_d=gamma_d)
        else:
            wanted = np.ones(len(self), bool) if only is None else np.isin(np.arange(len(self)), only)
            for positions, raw in self._blocks():
                order = np.argsort(positions)
                order = order[wanted[positions[order]]]
                if len(order):
                    yield positions[order], ExactSearch(raw[order], gamma_d=gamma_d)

    def _blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All positions, in the order of the table, and the raw embeddings there."""
        for batch in self._table.scan(("vector",), BLOCK):
            yield self._find(batch["_rowid"].to_numpy()), matrix(batch, self._table.dimension)

    def _find(self, row_ids: np.ndarray) -> np.ndarray:
        return self._by_row_id[np.searchsorted(self.row_ids, row_ids, sorter=self._by_row_id)]


def matrix(batch: pyarrow.RecordBatch, dimension: int) -> np.ndarray:
    """(B, n) float32: the column ``vector`` of B rows."""
    return batch["vector"].flatten().to_numpy(zero_copy_only=False).reshape(-1, dimension)


def _within(excluded: Pairs | None, block: np.ndarray) -> Pairs | None:
    """The excluded pairs of a block, as rows of it."""
    if excluded is None:
        return None
    rows, positions = excluded
    places = np.searchsorted(block, positions)
    inside = np.isin(positions, block)
    return rows[inside], places[inside]


def first(positions: np.ndarray, scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The first k columns in the order score descending, position ascending; -1 comes last."""
    order = np.lexsort((positions, -scores), axis=-1)[:, :k]
    return np.take_along_axis(positions, order, axis=1), np.take_along_axis(scores, order, axis=1)


def spare_memory() -> int:
    """Bytes that embeddings may take now."""
    import psutil

    return int(MEMORY_SHARE * psutil.virtual_memory().available)
