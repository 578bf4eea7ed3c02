"""The best few of many scanned scores, kept from block to block."""

from __future__ import annotations

import numpy as np

LOWEST = np.finfo(np.float32).min  # every score passes this floor; -inf, which marks an excluded document, does not
CROWD = 8
"""Times as many as are kept: a block that leaves more is sorted out query by query."""


class Candidates:
    """The documents of highest scanned score for every query, in no order.

    Most of a block is below the worst that is already kept and costs one comparison. Where that says little, in the
    first blocks, the scores are cut into groups of documents: the groups' maxima are few, and the lowest of the best of
    them is a floor that enough documents reach. No document that was left out scores above the lowest that is kept.

    Args:
        queries: Number of queries.
        size: Documents kept for each.

    Attributes:
        size: As given.
        scores: (Q, size) float32, -inf where there is no document.
        rows: (Q, size) int64, -1 where there is no document.
    """

    def __init__(self, queries: int, size: int):
        self.size = size
        self.scores = np.full((queries, size), -np.inf, np.float32)
        self.rows = np.full((queries, size), -1)
        self._floors = np.full(queries, LOWEST)

    def add(self, scores: np.ndarray, first: int, start: int) -> None:
        """Keep the best of a block of scores beside those kept so far.

        Args:
            scores: (documents, queries) float32, C-ordered; -inf for excluded pairs.
            first: Number of its first query.
            start: Row of its first document. Blocks come in the order of the rows.
        """
        queries = slice(first, first + scores.shape[1])
        columns, rows = _reaching(scores, self._floors[queries], self.size, start)
        counts = np.bincount(columns, minlength=scores.shape[1])
        width = int(counts.max())
        if not width:
            return
        table = np.full((scores.shape[1], self.size + width), -np.inf, np.float32)
        table_rows = np.full(table.shape, -1)
        table[:, : self.size], table_rows[:, : self.size] = self.scores[queries], self.rows[queries]
        places = self.size + np.arange(len(columns)) - np.repeat(np.cumsum(counts) - counts, counts)
        table[columns, places] = scores[rows, columns]
        table_rows[columns, places] = start + rows
        best = np.argpartition(table, width, axis=1)[:, width:]
        self.scores[queries] = np.take_along_axis(table, best, axis=1)
        self.rows[queries] = np.take_along_axis(table_rows, best, axis=1)
        worst = self.scores[queries].min(axis=1)
        self._floors[queries] = np.where(worst > -np.inf, np.nextafter(worst, np.float32(np.inf)), LOWEST)


def _reaching(scores: np.ndarray, floors: np.ndarray, size: int, seen: int) -> tuple[np.ndarray, np.ndarray]:
    """(columns, rows) of the scores at or above the floors, by column, or enough of them to hold the ``size`` best."""
    height, width = scores.shape
    if height > CROWD * size:
        # Once more documents have been seen than this block holds, few of its own are left above the floors.
        attempts = (False, True) if seen > height else (True,)
        for grouped in attempts:
            if grouped:
                floors = np.maximum(floors, _group_floors(scores, size))
            reached = scores >= floors
            if np.count_nonzero(reached) > CROWD * size * width:
                continue
            rows, columns = np.divmod(np.flatnonzero(reached), width)
            if np.bincount(columns, minlength=1).max() > CROWD * size:
                continue
            by_column = np.argsort(columns.astype(np.uint16) if width <= 2**16 else columns, kind="stable")
            return columns[by_column], rows[by_column]
    return _best_of_each(scores, floors, size)


def _group_floors(scores: np.ndarray, size: int) -> np.ndarray:
    """(queries,) a score that at least ``size`` documents reach: the lowest of the ``size`` best group maxima."""
    groups = CROWD // 2 * size
    height = len(scores) // groups
    # A group takes every groups-th row, so that neighbours, which are often alike, do not share one.
    maxima = scores[: height * groups].reshape(height, groups, -1).max(axis=0)
    return np.partition(np.ascontiguousarray(maxima.T), groups - size, axis=1)[:, groups - size]


def _best_of_each(scores: np.ndarray, floors: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(columns, rows) of the ``size`` best of each column that are at or above its floor."""
    height, width = scores.shape
    step = max(1, 2**20 // height)
    columns, rows = [], []
    for first in range(0, width, step):
        some = np.ascontiguousarray(scores[:, first : first + step].T)
        best = np.broadcast_to(np.arange(height), some.shape)
        if height > size:
            best = np.argpartition(some, height - size, axis=1)[:, height - size :]
        column, place = np.nonzero(np.take_along_axis(some, best, axis=1) >= floors[first : first + step, None])
        columns.append(first + column)
        rows.append(best[column, place])
    return np.concatenate(columns), np.concatenate(rows)
