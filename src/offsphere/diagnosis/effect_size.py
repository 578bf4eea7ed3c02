"""Cohen's d between the lengths of relevant and of irrelevant documents: does length carry a signal?

Three views of the same question: over the whole collection, among the candidates of each query (what a ranking
decides between; the whole collection mixes in topics), and after the length of the text is taken out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

FEWEST_QUERIES = 20
"""With fewer, an interval over queries means nothing, so no number is given."""
UNITS = 2_000  # more independent units than this are resampled in groups, which changes the interval by nothing visible
Statistic = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Effect:
    """Relevant minus irrelevant length in standard deviations; every number is None where there is not enough data.

    Attributes:
        value: Cohen's d. Around 0.2 is small, 0.5 medium, 0.8 large.
        hedges_g: The same without the bias of small samples.
        low: Lower end of the 95 % interval by bootstrap.
        high: Its upper end.
        n_queries: Queries that say something.
        n_relevant: Relevant lengths that went in.
        n_irrelevant: Irrelevant lengths that went in.
        note: What is missing, where numbers are None.
    """

    value: float | None
    hedges_g: float | None
    low: float | None
    high: float | None
    n_queries: int
    n_relevant: int
    n_irrelevant: int
    note: str | None = None


def cohens_d(relevant: np.ndarray, irrelevant: np.ndarray) -> float:
    """(mean(relevant) - mean(irrelevant)) / pooled standard deviation; positive where relevant ones are longer.

    The pooled variance weighs the two sample variances by their degrees of freedom (Cohen 1988, section 2.5).
    Around 0.2 is small, 0.5 medium, 0.8 large.

    Args:
        relevant: (R,) lengths.
        irrelevant: (I,) lengths.

    Returns:
        The effect size; NaN where a group has fewer than two members or the pooled variance is 0.
    """
    first, second = np.asarray(relevant, dtype=np.float64), np.asarray(irrelevant, dtype=np.float64)
    if min(len(first), len(second)) < 2:
        return math.nan
    freedom = np.array([len(first) - 1, len(second) - 1])
    pooled = freedom @ [first.var(ddof=1), second.var(ddof=1)] / freedom.sum()
    return float((first.mean() - second.mean()) / math.sqrt(pooled)) if pooled > 0 else math.nan


def hedges_correction(freedom: float) -> float:
    """The factor that takes the small-sample bias off Cohen's d (Hedges 1981, equation 6e, exact).

    Args:
        freedom: Degrees of freedom of the pooled variance, n1 + n2 - 2; at least 2.
    """
    return math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom - 1) / 2)) / math.sqrt(freedom / 2)


def collection_effect(
    lengths: np.ndarray,
    judged: np.ndarray,
    irrelevant: np.ndarray,
    *,
    resamples: int = 1_000,
    seed: int = 0,
) -> Effect:
    """Cohen's d over a collection, with an interval by bootstrap over queries and over irrelevant documents.

    A document that is relevant to several drawn queries counts with the mean of how often they were drawn, so that
    the sample itself, every query once, gives ``cohens_d``.

    Args:
        lengths: (D,) lengths of the documents' embeddings.
        judged: (J, 2) integers, a query and the position of a document relevant to it.
        irrelevant: (I,) positions of documents that are relevant to no query.
        resamples: Number of bootstrap resamples.
        seed: Of the resampling.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    judged = np.asarray(judged, dtype=np.int64).reshape(-1, 2)
    relevant, inverse, times = np.unique(judged[:, 1], return_inverse=True, return_counts=True)
    queries, of_query = np.unique(judged[:, 0], return_inverse=True)
    value = cohens_d(lengths[relevant], lengths[irrelevant])
    counts = len(queries), len(relevant), len(irrelevant)
    if note := _missing(*counts, value):
        return Effect(None, None, None, None, *counts, note)
    # Lengths far from 0 would lose their digits in the sums of squares.
    centred = lengths - lengths[relevant].mean()
    shares = _moments(centred[judged[:, 1]]) / times[inverse][:, None]
    first = np.stack([np.bincount(of_query, share, len(queries)) for share in shares.T], axis=1)
    second = _grouped(_moments(centred[irrelevant]), np.random.default_rng(seed))
    drawn = _resampled(first, resamples, seed), _resampled(second, resamples, seed + 1)
    low, high = _interval(_d_of_moments(*drawn))
    return Effect(value, value * hedges_correction(sum(counts[1:]) - 2), low, high, *counts)


def candidate_effect(
    lengths: np.ndarray,
    candidates: np.ndarray,
    relevant: np.ndarray,
    *,
    resamples: int = 1_000,
    seed: int = 0,
) -> Effect:
    """The mean over queries of (relevant - irrelevant length), in deviations within the groups of a query.

    Only queries with a relevant and an irrelevant candidate take part. What differs between queries, such as topic,
    cancels out.

    Args:
        lengths: (D,) lengths of the documents' embeddings.
        candidates: (Q, k) positions of the best documents of each query, -1 where there is none.
        relevant: (Q, k) boolean, whether the candidate is relevant.
        resamples: Number of bootstrap resamples over queries.
        seed: Of the resampling.
    """
    values = np.asarray(lengths, dtype=np.float64)[candidates]
    groups = relevant & (candidates >= 0), ~relevant & (candidates >= 0)
    numbers = np.stack([group.sum(1) for group in groups], axis=1)
    told = (numbers > 0).all(1)
    counts = int(told.sum()), int(numbers[told, 0].sum()), int(numbers[told, 1].sum())
    means = [np.where(group, values, 0).sum(1) / np.maximum(1, group.sum(1)) for group in groups]
    squares = sum(
        np.where(group, (values - mean[:, None]) ** 2, 0).sum(1) for group, mean in zip(groups, means, strict=True)
    )
    sums = np.stack([np.ones(len(values)), means[0] - means[1], squares, numbers.sum(1) - 2], axis=1)[told]
    value = float(_d_of_queries(sums.sum(0))) if len(sums) else math.nan
    if note := _missing(*counts, value):
        return Effect(None, None, None, None, *counts, note)
    low, high = _interval(_d_of_queries(_resampled(sums, resamples, seed)))
    return Effect(value, value * hedges_correction(sums[:, 3].sum()), low, high, *counts)


def without_text_length(lengths: np.ndarray, text_lengths: np.ndarray, relevant: np.ndarray) -> np.ndarray:
    """The lengths of embeddings as they would be if every text were equally long.

    The slope on log(text length) is the common one within the relevant and within the irrelevant group (analysis of
    covariance), so it takes nothing of the difference between the groups themselves.

    Args:
        lengths: (D,) lengths of embeddings.
        text_lengths: (D,) positive lengths of the texts, such as token counts.
        relevant: (D,) boolean.

    Returns:
        (D,) float64.
    """
    lengths, logs = np.asarray(lengths, dtype=np.float64), np.log(np.asarray(text_lengths, dtype=np.float64))
    products = squares = 0.0
    for group in (relevant, ~relevant):
        if group.any():
            spread = logs[group] - logs[group].mean()
            products += spread @ lengths[group]
            squares += spread @ spread
    slope = products / squares if squares > 0 else 0.0
    return lengths - slope * (logs - logs.mean())


def text_length_correlation(lengths: np.ndarray, text_lengths: np.ndarray) -> float:
    """Pearson correlation of embedding length with log(text length); NaN where either does not vary.

    Args:
        lengths: (D,) lengths of embeddings.
        text_lengths: (D,) positive lengths of the texts.
    """
    first, second = np.asarray(lengths, dtype=np.float64), np.log(np.asarray(text_lengths, dtype=np.float64))
    if len(first) < 2 or not first.std() or not second.std():
        return math.nan
    return float(np.corrcoef(first, second)[0, 1])


def _missing(n_queries: int, n_relevant: int, n_irrelevant: int, value: float) -> str | None:
    if min(n_relevant, n_irrelevant) < 2:
        kind = "relevant" if n_relevant < 2 else "irrelevant"
        number = min(n_relevant, n_irrelevant)
        return f"not enough data: {number} {kind} document{'' if number == 1 else 's'}, at least 2 needed"
    if n_queries < FEWEST_QUERIES:
        return f"not enough data: {n_queries} queries, at least {FEWEST_QUERIES} needed"
    return "not defined: all lengths of a group are equal" if math.isnan(value) else None


def _moments(values: np.ndarray) -> np.ndarray:
    return np.stack([np.ones_like(values), values, values**2], axis=1)


def _grouped(contributions: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """At most UNITS rows with the same sum, of as many members as possible alike."""
    if len(contributions) <= UNITS:
        return contributions
    group = random.permutation(len(contributions)) % UNITS
    return np.stack([np.bincount(group, column, UNITS) for column in contributions.T], axis=1)


def _resampled(contributions: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """(resamples, columns) sums over units drawn with replacement from (units, columns)."""
    random, units = np.random.default_rng(seed), len(contributions)
    uniform = np.full(units, 1 / units)
    step = max(1, 2**22 // units)
    sizes = [min(step, resamples - start) for start in range(0, resamples, step)]
    return np.concatenate([random.multinomial(units, uniform, size) @ contributions for size in sizes])


def _d_of_moments(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Cohen's d from (..., 3) sums of weights, values and squares."""
    (n1, s1, q1), (n2, s2, q2) = np.moveaxis(first, -1, 0), np.moveaxis(second, -1, 0)
    pooled = (q1 - s1**2 / n1 + q2 - s2**2 / n2) / (n1 + n2 - 2)
    known = pooled > 0
    return np.where(known, (s1 / n1 - s2 / n2) / np.sqrt(np.where(known, pooled, 1.0)), math.nan)


def _d_of_queries(sums: np.ndarray) -> np.ndarray:
    """Mean difference over pooled deviation, from (..., 4) sums of queries, differences, squares and freedom."""
    queries, differences, squares, freedom = np.moveaxis(sums, -1, 0)
    known = (freedom > 0) & (squares > 0)
    deviation = np.sqrt(np.where(known, squares, 1.0) / np.where(known, freedom, 1.0))
    return np.where(known, differences / queries / deviation, math.nan)


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.nanquantile(values, [0.025, 0.975])
    return float(low), float(high)
