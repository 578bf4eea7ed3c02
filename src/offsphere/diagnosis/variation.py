"""How much lengths vary: 0 for an encoder that normalises."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

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


def variation_ratios(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """CV of lengths after training with dnorm over CV after training with dot, mean over seeds, per dataset.

    In the paper the queries of RetroMAE, which prefers dnorm, have 4 to 9; those of Contriever, which prefers
    qnorm, 0.5 to 2.

    Args:
        records: What a run's ``norms.json`` holds: ``similarity``, ``dataset``, ``query_cv`` and ``document_cv``.

    Returns:
        ``{dataset: {"query": ratio, "document": ratio}}``, with what both trainings have.
    """
    found: dict[tuple[str, str, str], list[float]] = {}
    for record in records:
        for side in ("query", "document"):
            if record[f"{side}_cv"] is not None:
                found.setdefault((record["dataset"], side, record["similarity"]), []).append(record[f"{side}_cv"])
    ratios: dict[str, dict[str, float]] = {}
    for (dataset, side, similarity), values in found.items():
        baseline = found.get((dataset, side, "dot"))
        if similarity == "dnorm" and baseline and fmean(baseline) > 0:
            ratios.setdefault(dataset, {})[side] = fmean(values) / fmean(baseline)
    return ratios
