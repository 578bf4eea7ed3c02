"""What a measure would be on average over every order of the documents that tie, beside trec_eval's one order."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from offsphere.evaluation.measures import Qrels, Run, parse_measures


@dataclass(frozen=True)
class Ties:
    """How far a run's value hangs on the order of documents with equal scores.

    Attributes:
        queries: The queries with a tie among the documents that the measure sees.
        values: The measure of every judged query, averaged over all orders of tied documents; None where the measure
            has no closed form here.
    """

    queries: frozenset[str]
    values: dict[str, float] | None


@dataclass(frozen=True)
class _Ranked:
    """One query's ranking by place, from 0; every document of a tie has the ``start`` and ``size`` of its group.

    Attributes:
        grades: (n,) of the documents, in any order within a tie.
        start: (n,) place where the group begins.
        size: (n,) how many documents the group has.
        group: (n,) its number.
        judged: Grades of all judged documents, also of those that were not found.
        cutoff: Places that the measure sees.
        rel: The grade from which a document is relevant.
    """

    grades: np.ndarray
    start: np.ndarray
    size: np.ndarray
    group: np.ndarray
    judged: np.ndarray
    cutoff: int
    rel: int

    def in_group(self, weights: np.ndarray) -> np.ndarray:
        """(n,) the sum of (n,) weights over the group of each place."""
        return np.bincount(self.group, weights)[self.group]


def average_ties(run: Run, qrels: Qrels, measure: str, values: Mapping[str, float]) -> Ties:
    """A measure averaged over all orders of tied documents, each order as likely as the others.

    trec_eval breaks ties by the documents' ids, so that renaming a document can change a value; this average does not
    depend on names. Exact, by the closed forms of McSherry and Najork (2008) for nDCG, P, R, RR and AP, and by the
    hypergeometric distribution for Success; scores tie where they are equal in float32, as in trec_eval. Documents
    below the end of the run that would tie with its last one cannot be known.

    Args:
        run: Query id to document id to score.
        qrels: Query id to document id to grade.
        measure: A name that ir-measures knows.
        values: The measure in trec_eval's order, one value a judged query, which stands where nothing ties.

    Raises:
        ConfigError: If the measure is unknown.
    """
    (parsed,) = parse_measures([measure])
    known = FORMS.get(parsed.NAME) if parsed.params.keys() <= {"cutoff", "rel"} else None
    averaged, tied = dict(values), set()
    for query, grades in qrels.items():
        scores = run.get(query, {})
        cutoff = parsed.params.get("cutoff", len(scores) + len(grades))  # without one, everything
        ranked = _ranked(scores, grades, cutoff, parsed.params.get("rel", 1))
        if (ranked.size[:cutoff] > 1).any():
            tied.add(query)
            if known:
                averaged[query] = known(ranked)
    return Ties(frozenset(tied), averaged if known else None)


def _ranked(scores: Mapping[str, float], grades: Mapping[str, int], cutoff: int, rel: int) -> _Ranked:
    rounded = -np.frombuffer(array("f", scores.values()), np.float32)
    order = np.argsort(rounded, kind="stable")
    found = np.array([grades.get(document, 0) for document in scores], dtype=np.int64)[order]
    _, start, group, size = np.unique(rounded[order], return_index=True, return_inverse=True, return_counts=True)
    judged = np.array([*grades.values()], dtype=np.int64)
    return _Ranked(found, start[group], size[group], group, judged, cutoff, rel)


def _ndcg(ranked: _Ranked) -> float:
    mean_gains = ranked.in_group(np.maximum(ranked.grades, 0)) / ranked.size
    ideal = _discounted(np.sort(np.maximum(ranked.judged, 0))[::-1][: ranked.cutoff])
    return _discounted(mean_gains[: ranked.cutoff]) / ideal if ideal else 0.0


def _discounted(gains: np.ndarray) -> float:
    return float(gains @ (1 / np.log2(np.arange(2, len(gains) + 2))))


def _expected_hits(ranked: _Ranked) -> float:
    share = ranked.in_group(ranked.grades >= ranked.rel) / ranked.size
    return float(share[: ranked.cutoff].sum())


def _precision(ranked: _Ranked) -> float:
    return _expected_hits(ranked) / ranked.cutoff


def _recall(ranked: _Ranked) -> float:
    relevant = int((ranked.judged >= ranked.rel).sum())
    return _expected_hits(ranked) / relevant if relevant else 0.0


def _average_precision(ranked: _Ranked) -> float:
    """Given that a place holds a relevant document, each earlier place of its tie does with (r - 1) / (g - 1)."""
    relevant = int((ranked.judged >= ranked.rel).sum())
    if not relevant:
        return 0.0
    hits = (ranked.grades >= ranked.rel).astype(np.float64)
    place = np.arange(len(hits))
    own = ranked.in_group(hits)
    before = np.concatenate([[0.0], np.cumsum(hits)])[ranked.start]
    tied_before = (place - ranked.start) * (own - 1) / np.maximum(ranked.size - 1, 1)
    expected = own / ranked.size * (before + 1 + tied_before) / (place + 1)
    return float(expected[: ranked.cutoff].sum() / relevant)


def _reciprocal_rank(ranked: _Ranked) -> float:
    own = ranked.in_group(ranked.grades >= ranked.rel)
    if not own.any():
        return 0.0
    first = int(np.argmax(own > 0))
    start, size, relevant = int(ranked.start[first]), int(ranked.size[first]), int(own[first])
    return sum(
        math.comb(size - place, relevant - 1) / math.comb(size, relevant) / (start + place)
        for place in range(1, min(size - relevant + 1, ranked.cutoff - start) + 1)
    )


def _success(ranked: _Ranked) -> float:
    own = ranked.in_group(ranked.grades >= ranked.rel)
    missed = 1.0
    for first in np.flatnonzero(ranked.start == np.arange(len(own))):
        size, relevant = int(ranked.size[first]), int(own[first])
        seen = min(size, ranked.cutoff - int(first))
        if seen > 0:
            missed *= math.comb(size - relevant, seen) / math.comb(size, seen)
    return 1 - missed


FORMS: dict[str, Callable[[_Ranked], float]] = {
    "nDCG": _ndcg,
    "P": _precision,
    "R": _recall,
    "AP": _average_precision,
    "RR": _reciprocal_rank,
    "Success": _success,
}
