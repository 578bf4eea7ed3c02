"""What a search misses: its recall against the exact answers, by length of the answer, its speed, and what to keep."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from offsphere.search.exact import ExactSearch
from offsphere.similarity import norms

Search = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]
DECILES = 10
CONFIDENCE_Z = 1.6449
"""One-sided 95 % of a normal distribution."""


@dataclass(frozen=True)
class Measured:
    """One way to search, measured: a row of the table of candidates.

    Attributes:
        method: ``exact``, or a kind of graph.
        ef_search: Candidates that the walk keeps; None for exact search.
        documents: How many were searched.
        recall: Share of the k best documents that are found, by the queries that choose.
        held_out: The same by the queries that judge, which take no part in a choice.
        bound: Lower end of the one-sided 95 % interval of ``recall``.
        held_out_bound: The same of ``held_out``.
        deciles: Recall, by all queries, of the tenth of the right answers with the smallest prepared norms, then of
            the next. Under gamma_d = 1 all prepared norms are 1, and the tenths are arbitrary.
        queries_per_second: For one query at a time, from its prepared embedding to its scores; the median.
    """

    method: str
    ef_search: int | None
    documents: int
    recall: float
    held_out: float
    bound: float
    held_out_bound: float
    deciles: tuple[float, ...]
    queries_per_second: float

    def line(self, k: int) -> str:
        """The row in words."""
        setting = "" if self.ef_search is None else f" graph with efSearch {self.ef_search}"
        return (
            f"{self.method}{setting}: recall@{k} {self.held_out:.3f} (at least {self.held_out_bound:.3f}) and "
            f"{self.queries_per_second:.0f} queries/s over {self.documents} documents"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Measured:
        """The row that ``to_dict`` described."""
        return cls(**stored | {"deciles": tuple(stored["deciles"])})


@dataclass(frozen=True)
class Choice:
    """What was measured, what was kept, and why.

    Attributes:
        promise: The asked recall.
        k: Length of the answers that it is about.
        queries: How many measured it; half of them chose, half judged.
        source: ``queries``, or ``perturbed documents`` where no real query was given.
        candidates: The table, measured on a sample of the documents.
        decile_norms: The greatest prepared norm in each tenth of the right answers in the sample.
        exact: Exact search over all documents; None where there are too few queries or documents to measure.
        kept: What answers now, measured on all documents; None as above.
        reason: The choice in words.
    """

    promise: float
    k: int
    queries: int
    source: str
    candidates: tuple[Measured, ...]
    decile_norms: tuple[float, ...]
    exact: Measured | None
    kept: Measured | None
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Choice:
        """The choice that ``to_dict`` described."""
        rows = {name: stored[name] and Measured.from_dict(stored[name]) for name in ("exact", "kept")}
        table = tuple(map(Measured.from_dict, stored["candidates"]))
        return cls(**stored | rows | {"candidates": table, "decile_norms": tuple(stored["decile_norms"])})


class Trial:
    """Queries with their exact answers, in two halves: the first chooses, the second judges what was chosen.

    Args:
        documents: (D, n) float32, prepared.
        queries: (Q, n) float32, prepared, in random order, at least 10.
        k: Length of an answer, at most D.

    Attributes:
        decile_norms: The greatest prepared norm in each tenth of the right answers.
    """

    def __init__(self, documents: np.ndarray, queries: np.ndarray, k: int):
        self.queries = queries
        self.k = k
        self.documents = len(documents)
        self._answers, scores = ExactSearch(documents).search(queries, k)
        self._last = scores[:, -1:]
        lengths = norms(documents[self._answers.ravel()])
        self._tenths = np.array_split(np.argsort(lengths, kind="stable"), DECILES)
        self.decile_norms = tuple(float(lengths[tenth].max()) for tenth in self._tenths)

    def measure(self, method: str, ef_search: int | None, search: Search) -> Measured:
        """Put every query alone to ``search``, which gives rows and exact scores.

        A document that ties with the last of the right answers is as right as that one.
        """
        recalls, found, seconds = [], [], []
        for query, answer, last in zip(self.queries, self._answers, self._last, strict=True):
            began = time.perf_counter()
            rows, scores = search(query[None], self.k)
            seconds.append(time.perf_counter() - began)
            recalls.append(np.count_nonzero(scores[0] >= last) / self.k)
            found.append(np.isin(answer, rows[0]) | (recalls[-1] == 1.0))
        choosing, judging = np.array_split(np.array(recalls), 2)
        hits = np.concatenate(found)
        return Measured(
            method,
            ef_search,
            self.documents,
            float(choosing.mean()),
            float(judging.mean()),
            lower_bound(float(choosing.mean()), len(choosing)),
            lower_bound(float(judging.mean()), len(judging)),
            tuple(float(hits[tenth].mean()) for tenth in self._tenths),
            1.0 / statistics.median(seconds),
        )


def lower_bound(recall: float, queries: int) -> float:
    """The lower end of the one-sided 95 % interval of a mean recall: the score interval of Wilson (1927).

    The recall of one query lies between 0 and 1, so that its variance is at most that of a success with the same mean:
    for recalls the interval is on the safe side, and unlike one from their own variance it does not vanish at 1.
    """
    z2 = CONFIDENCE_Z**2 / queries
    root = math.sqrt(z2 * (recall * (1.0 - recall) + z2 / 4.0))
    return max(0.0, (recall + z2 / 2.0 - root) / (1.0 + z2))


def fewest_queries(recall: float) -> float:
    """How many queries, all answered in full, put the lower bound at ``recall``, 10 at least; infinite for 1."""
    return math.inf if recall >= 1.0 else max(DECILES, math.ceil(CONFIDENCE_Z**2 * recall / (1.0 - recall)))
