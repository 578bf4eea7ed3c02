"""How much lengths vary: 0 for an encoder that normalises."""

from __future__ import annotations

import math

import numpy as np


def coefficient_of_variation(lengths: np.ndarray) -> float:
    """Sample standard deviation over mean; a pure number, so that encoders of any scale compare.

    Args:
        lengths: (N,) lengths.

    Returns:
        The coefficient; NaN where there are fewer than two lengths or all are 0.
    """
    values = np.asarray(lengths, dtype=np.float64)
    if len(values) < 2 or not values.any():
        return math.nan
    return float(values.std(ddof=1) / values.mean())
