"""Is a difference more than noise? Paired tests, Holm's correction, and intervals over queries and seeds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

EXACT_UP_TO = 13  # 2^13 sign patterns are fewer than the resamples that would stand in for them
ELEMENTS_AT_ONCE = 2**22


def paired_randomisation(a: np.ndarray, b: np.ndarray, *, resamples: int = 10_000, seed: int = 0) -> np.ndarray:
    """Two-sided p-value that swapping a and b within queries moves their mean difference as far as observed.

    Exact up to 13 queries; beyond, the signs of the differences are drawn ``resamples`` times and both counts get
    one added, so that p is never 0 (Phipson and Smyth 2010). For a mean of dataset means, give what
    ``macro_weighted`` makes of both: only the ratio of weights matters.

    Args:
        a: (..., n) values, one per query.
        b: (..., n) values of the same queries; broadcasts against a.
        resamples: Number of drawn sign patterns.
        seed: Of the drawing; the same seed draws the same patterns for every leading index.

    Returns:
        (...) p-values in (0, 1].
    """
    differences = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    n = differences.shape[-1]
    if n <= EXACT_UP_TO:
        swapped = np.arange(2**n)[:, None] >> np.arange(n) & 1
        return _as_extreme(differences, swapped) / 2**n
    rng = np.random.default_rng(seed)
    block = max(1, ELEMENTS_AT_ONCE // n)
    sizes = [min(block, resamples - start) for start in range(0, resamples, block)]
    extreme = np.sum([_as_extreme(differences, _coins(rng, size, n)) for size in sizes], axis=0)
    return (extreme + 1) / (resamples + 1)


def macro_weighted(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """(..., all queries) with the same total weight for each dataset, as a mean of dataset means gives them.

    Args:
        arrays: Per dataset (..., queries).
    """
    return np.concatenate([array / array.shape[-1] for array in arrays], axis=-1)


def paired_t(variant: Sequence[np.ndarray], baseline: Sequence[np.ndarray]) -> np.ndarray:
    """Two-sided p-value of a paired t-test whose random factors are the queries and, where several, the seeds.

    With one dataset and one seed it is the textbook test over queries. With more seeds the variance of the mean is
    the sum of the part seen between queries and the part seen between seeds, with Satterthwaite's degrees of
    freedom: Clark's min F' (1973), slightly conservative because the residual is counted in both. Two or three
    seeds that agree by chance would make any difference look sure, so no variant's part between seeds is taken as
    smaller than the mean of that part over all variants given, which are trainings of the same kind.

    Args:
        variant: Per dataset (..., seeds, queries); the seeds of one row are the same trainings in every dataset.
        baseline: Per dataset (..., seeds, queries), the same seeds and queries; broadcasts against the variant.

    Returns:
        (...) p-values; 1 where nothing differs, or where a dataset has one query and so no variance to judge by.
    """
    from scipy import stats

    differences = _differences(variant, baseline)
    mean = _macro(differences)
    shape, n_seeds = mean.shape, differences[0].shape[-2]
    if any(d.shape[-1] < 2 for d in differences):
        return np.ones(shape)
    parts = [d.mean(-2).var(-1, ddof=1) / d.shape[-1] / len(differences) ** 2 for d in differences]
    freedom = [d.shape[-1] - 1 for d in differences]
    if n_seeds > 1:
        between = np.mean([d.mean(-1) for d in differences], axis=0).var(-1, ddof=1) / n_seeds
        parts.append(np.maximum(between, between.mean()))
        # V estimates that correlate 1/4, as squares of differences from a shared baseline do, count as 4V / (V + 3).
        freedom.append((n_seeds - 1) * 4 * between.size / (between.size + 3))
    variance = np.sum(parts, axis=0)
    known = variance > 0
    safe = np.where(known, variance, 1.0)
    spread = np.sum([part**2 / f for part, f in zip(parts, freedom, strict=True)], axis=0)
    freedom_all = np.where(known, safe**2 / np.where(known, spread, 1.0), 1.0)
    p = 2 * stats.t.sf(np.abs(mean) / np.sqrt(safe), freedom_all)
    return np.where(known, p, np.where(mean == 0, 1.0, 0.0))


def bootstrap_difference(
    variant: Sequence[np.ndarray],
    baseline: Sequence[np.ndarray],
    *,
    resamples: int = 2_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Percentile interval of the mean over datasets of (variant - baseline), over queries and seeds.

    Every resample draws the queries of each dataset with replacement, and one set of seeds for all datasets, since
    they share the trained models. Of S seeds S - 1 are drawn, which makes the variance of their mean unbiased
    (Hesterberg 2015, on narrowness bias); drawing S would make it a third too small at S = 3.

    Args:
        variant: Per dataset (..., seeds, queries).
        baseline: Per dataset (..., seeds, queries), the same seeds and queries; broadcasts against the variant.
        resamples: Number of resamples.
        confidence: Coverage of the interval.
        seed: Of the drawing.

    Returns:
        (low, high), each (...). With one seed they cover the choice of queries only.
    """
    rng = np.random.default_rng(seed)
    differences = _differences(variant, baseline)
    n_seeds = differences[0].shape[-2]
    drawn_seeds = _counts(rng, resamples, n_seeds, max(1, n_seeds - 1))
    totals = sum(
        np.einsum("...sb,bs->...b", d @ _counts(rng, resamples, d.shape[-1], d.shape[-1]).T, drawn_seeds)
        for d in differences
    )
    outside = (1 - confidence) / 2
    low, high = np.quantile(totals / len(differences), [outside, 1 - outside], axis=-1)
    return low, high


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted for testing all of them (Holm 1979), in the same order."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def _differences(variant: Sequence[np.ndarray], baseline: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(v, dtype=np.float64) - b for v, b in zip(variant, baseline, strict=True)]


def _macro(differences: Sequence[np.ndarray]) -> np.ndarray:
    return np.mean([d.mean((-2, -1)) for d in differences], axis=0)


def _as_extreme(differences: np.ndarray, swapped: np.ndarray) -> np.ndarray:
    """How many sign patterns give a mean difference as far from 0 as the observed one."""
    observed = differences.sum(-1, keepdims=True)
    randomised = observed - 2 * differences @ swapped.T.astype(np.float64)
    rounding = 1e-12 * np.abs(differences).sum(-1, keepdims=True)  # equal sums must count as equal
    return (np.abs(randomised) >= np.abs(observed) - rounding).sum(-1)


def _coins(rng: np.random.Generator, size: int, n: int) -> np.ndarray:
    """(size, n) fair zeros and ones, eight to a random byte."""
    width = -(-n // 8)
    return np.unpackbits(np.frombuffer(rng.bytes(size * width), np.uint8).reshape(size, width), axis=1, count=n)


def _counts(rng: np.random.Generator, resamples: int, n: int, drawn: int) -> np.ndarray:
    """(resamples, n) weights: how often each of n comes up in ``drawn`` draws with replacement, over ``drawn``."""
    cells = rng.integers(0, n, (resamples, drawn)) + n * np.arange(resamples)[:, None]
    return np.bincount(cells.ravel(), minlength=resamples * n).reshape(resamples, n) / drawn
