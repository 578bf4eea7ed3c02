"""Is the task symmetric? Where query and document can change places, a one-sided similarity contradicts the task."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from offsphere.errors import ConfigError
from offsphere.similarity import FIXED, Similarity

SYMMETRIC = {
    "sts": True,
    "paraphrase": True,
    "duplicates": True,
    "clustering": True,
    "image-text": True,
    "retrieval": False,
    "qa": False,
    "rag": False,
    "code-search": False,
    "recommendation": False,
}
"""Task to whether its inputs are interchangeable (after the symmetric tasks of the paper)."""
EXPECTED_LOSS = (37.5, 43.5)
"""Spearman points that one-sided similarities lost against cosine on STS-B (paper, table 5), least and most."""
SHARED_TEXTS = 0.5
POINTS = 100


@dataclass(frozen=True)
class Probe:
    """Real pairs scored in both directions under one similarity.

    Attributes:
        asymmetry: Mean |s(a, b) - s(b, a)| over mean |s|: 0 for a symmetric similarity.
        correlation: Pearson correlation of the two directions; None where one does not vary.
        forward: s(a, b) of at most a hundred pairs, for the figure.
        backward: s(b, a) of the same pairs.
    """

    asymmetry: float | None
    correlation: float | None
    forward: list[float]
    backward: list[float]


def is_symmetric(task: str) -> bool:
    """Whether the inputs of a task are interchangeable.

    Raises:
        ConfigError: If there is no such task.
    """
    if task not in SYMMETRIC:
        raise ConfigError(f"unknown task {task!r}; expected one of {', '.join(SYMMETRIC)}")
    return SYMMETRIC[task]


def detect_task(queries: list[str], documents: list[str]) -> tuple[str, str]:
    """The task that two sides of texts look like, and why: ``duplicates`` where they share texts, else ``retrieval``.

    Args:
        queries: Texts of one side.
        documents: Texts of the other.
    """
    known = set(documents)
    share = sum(text in known for text in queries) / max(1, len(queries))
    if share >= SHARED_TEXTS:
        return "duplicates", f"{share:.0%} of the queries are documents as well"
    return "retrieval", f"{share:.0%} of the queries are documents as well, so the two sides have different roles"


def symmetry_warning(task: str, similarity: Similarity) -> str | None:
    """What a one-sided similarity would cost on a symmetric task; None where there is nothing to warn of.

    Args:
        task: One of SYMMETRIC.
        similarity: What is to be trained.

    Raises:
        ConfigError: If there is no such task.
    """
    gamma_q, gamma_d = similarity.gammas
    if not is_symmetric(task) or similarity.learned or gamma_q == gamma_d:
        return None
    least, most = EXPECTED_LOSS
    return (
        f"{task} is symmetric and {similarity.name} is not: s(a, b) differs from s(b, a). One-sided similarities lost "
        f"{least:g} to {most:g} Spearman points there (paper, table 5); use cosine"
    )


def probe(
    queries: np.ndarray, documents: np.ndarray, swapped_queries: np.ndarray, swapped_documents: np.ndarray
) -> dict[str, Probe]:
    """Every fixed similarity's scores of the same pairs in both directions.

    Args:
        queries: (N, n) raw embeddings of the pairs' first texts, encoded as queries.
        documents: (N, n) of their second texts, encoded as documents.
        swapped_queries: (N, n) of the second texts, encoded as queries.
        swapped_documents: (N, n) of the first texts, encoded as documents.
    """
    return {
        name: _both_ways(
            Similarity.parse(name).pairwise(queries, documents).astype(np.float64),
            Similarity.parse(name).pairwise(swapped_queries, swapped_documents).astype(np.float64),
        )
        for name in FIXED
    }


def _both_ways(forward: np.ndarray, backward: np.ndarray) -> Probe:
    size = (np.abs(forward).mean() + np.abs(backward).mean()) / 2 if len(forward) else 0.0
    varies = len(forward) > 1 and forward.std() > 0 and backward.std() > 0
    return Probe(
        asymmetry=float(np.abs(forward - backward).mean() / size) if size > 0 else None,
        correlation=float(np.corrcoef(forward, backward)[0, 1]) if varies else None,
        forward=forward[:POINTS].tolist(),
        backward=backward[:POINTS].tolist(),
    )
