"""Cohen's d between two groups of lengths, such as those of relevant and of irrelevant documents."""

from __future__ import annotations

import math

import numpy as np


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
