"""How far the answers of a destination agree with the exact ranking by the model, ties aside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offsphere.search.causes import Cause
from offsphere.search.stores.store import Found
from offsphere.similarity import Similarity, norms

TIE = 1e-5
"""Scores closer than this share of |q| |d| are ties: float32 arithmetic cannot tell them apart."""

SAME_SCORE = 1e-4
"""Scores closer than this share of |q| |d| are the same: half precision moves them less, int8 more."""

COSINE, DOT = Similarity.parse("cosine"), Similarity.parse("dot")


@dataclass(frozen=True)
class Answer:
    """What the destination gave for one query, and what the model makes of it.

    Attributes:
        live: (m,) scores as given, best first.
        exact: (m,) inner products of the prepared query and the prepared documents; NaN for unknown ids.
        size: |q| |d| of the prepared vectors, the scale of rounding errors: the largest of the answer.
        least: The k-th best exact score of the whole collection.
        expected: How many documents the answer should have: k, or fewer in a small collection.
    """

    live: np.ndarray
    exact: np.ndarray
    size: float
    least: float
    expected: int

    @property
    def overlap(self) -> float:
        """The share of the expected places that hold one of the k best documents, ties counted as right."""
        right = self.exact >= self.least - TIE * self.size
        return min(int(right.sum()), self.expected) / self.expected

    @property
    def tau(self) -> float:
        """Kendall's tau of the live order and the exact scores; NaN where there are fewer than 2 documents."""
        return rank_agreement(self.exact[~np.isnan(self.exact)], TIE * self.size)

    @property
    def same_scores(self) -> np.ndarray:
        """(known documents,) whether each score is the inner product."""
        known = ~np.isnan(self.exact)
        return np.abs(self.live[known] - self.exact[known]) <= SAME_SCORE * self.size


def answer(
    found: Sequence[Found], query: np.ndarray, rows: dict[str, int], documents: np.ndarray, least: float, expected: int
) -> Answer:
    """One live answer beside the exact scores of its documents, in float64.

    Args:
        found: What the destination gave.
        query: (n,) prepared.
        rows: Document id to row.
        documents: (D, n) prepared.
        least: The k-th best exact score.
        expected: How many documents there should be.
    """
    distinct = list({one.id: one for one in found}.values())
    places = np.array([rows.get(one.id, -1) for one in distinct], dtype=np.int64)
    known = documents[places].astype(np.float64)
    exact = np.where(places >= 0, known @ query.astype(np.float64), np.nan)
    lengths = norms(known[places >= 0])
    size = float(norms(query)) * float(lengths.max(initial=0.0))
    return Answer(np.array([one.score for one in distinct]), exact, size, least, expected)


def rank_agreement(scores: np.ndarray, tie: float) -> float:
    """Kendall's tau of positions 0, 1, ... and scores that should fall: 1 in order, -1 backwards.

    Scores within ``tie`` of the next one are equal, and pairs of equal scores do not count: their order means nothing.

    Args:
        scores: In the order to be judged.
        tie: Distance of scores that cannot be told apart.
    """
    from scipy.stats import kendalltau

    if len(scores) < 2:
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    groups = np.concatenate([[0], np.cumsum(-np.diff(scores[order]) > tie)])
    if groups[-1] == 0:
        return 1.0
    place = np.empty(len(scores), dtype=np.int64)
    place[order] = groups
    pairs = len(scores) * (len(scores) - 1) / 2
    counted = pairs - sum(size * (size - 1) / 2 for size in np.bincount(groups))
    # tau-b divides by sqrt(pairs * counted), because positions have no ties.
    return float(kendalltau(np.arange(len(scores)), place).statistic * np.sqrt(pairs / counted))


def order_causes(queries: np.ndarray, stored: Sequence[np.ndarray], metric: str) -> list[Cause]:
    """By which measure a destination ranks the vectors that it stores, where it is not the inner product.

    Args:
        queries: (Q, n) prepared.
        stored: Per query, (m, n) the stored vectors of its answer, best first.
        metric: What the destination says that it ranks by; ``none`` where that is left to the query.
    """
    taus: dict[str, list[float]] = {"ip": [], "cosine": [], "l2": []}
    for query, vectors in zip(queries.astype(np.float64), stored, strict=True):
        vectors = vectors.astype(np.float64)
        scores = {
            "ip": DOT.scores(query[None], vectors)[0],
            "cosine": COSINE.scores(query[None], vectors)[0],
            "l2": -norms(vectors - query),
        }
        for name, values in scores.items():
            taus[name].append(rank_agreement(values, TIE * float(np.abs(values).max(initial=0.0))))
    means = {name: _mean(values) for name, values in taus.items()}
    best = max(means, key=lambda name: means[name])
    causes = []
    if metric not in ("ip", "none"):
        causes.append(Cause("metric", f"the collection compares by {metric}, expected ip; {_wrong_metric(metric)}"))
    elif means["ip"] <= -0.9:
        causes.append(
            Cause(
                "reversed",
                f"worst first: Kendall's tau of the live order is {means['ip']:.2f}; a distance is read as a "
                "similarity, so sort the other way round",
            )
        )
    elif means["ip"] < 0.99 <= means[best]:
        causes.append(
            Cause(
                "metric",
                f"the collection says ip and ranks by {best}: Kendall's tau {means[best]:.3f} to that, "
                f"{means['ip']:.3f} to ip; {_wrong_metric(best)}",
            )
        )
    return causes


def score_causes(answers: Sequence[Answer]) -> list[Cause]:
    """The transform that live scores went through, where they are not the inner product."""
    same = np.concatenate([one.same_scores for one in answers]) if answers else np.empty(0, dtype=bool)
    if not len(same) or same.mean() >= 0.99:
        return []
    forms = {
        "the negative inner product": lambda exact: -exact,
        "1 minus the inner product": lambda exact: 1 - exact,
        "the inner product minus 1": lambda exact: exact - 1,
        "half of 1 plus the inner product": lambda exact: (1 + exact) / 2,
    }
    for form, transform in forms.items():
        fits = [
            np.abs(one.live - transform(one.exact))[~np.isnan(one.exact)] <= SAME_SCORE * max(one.size, 1.0)
            for one in answers
        ]
        if np.concatenate(fits).mean() >= 0.99:
            return [Cause("scores", f"a score is {form}: undo it before scores are compared or cut at a threshold")]
    return []


def _wrong_metric(metric: str) -> str:
    """What a metric does to length."""
    return {
        "cosine": "cosine removes every length, so it ranks as cosine. Create the collection for the inner product",
        "l2": "L2 prefers documents whose length is near the query's. Create the collection for the inner product",
    }.get(metric, "create the collection for the inner product")


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else 0.0
