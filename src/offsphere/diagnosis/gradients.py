"""The gradient of InfoNCE with respect to raw embeddings in closed form: no graph, no backward pass.

With lengths |q|, |d| and products q . d, the logits are scale * (q . d) |q|^-gamma_q |d|^-gamma_d. Let p be their
softmax and r = scale * (p - I) |q|^-gamma_q |d|^-gamma_d, a weight for every pair. The gradients of the summed loss are

    at q_i:  sum_j r_ij d_j - gamma_q / |q_i|^2 (sum_j r_ij (q_i . d_j)) q_i
    at d_j:  sum_i r_ij q_i - gamma_d / |d_j|^2 (sum_i r_ij (q_i . d_j)) d_j

The second terms take out the part along the embedding itself: all of it where gamma is 1. A similarity changes the
weights alone, so products and lengths are computed once for all of them.
"""

from __future__ import annotations

import numpy as np

from offsphere.similarity import Similarity, norms


def info_nce_gradients(
    queries: np.ndarray,
    documents: np.ndarray,
    similarity: Similarity,
    scale: float,
    masked: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of the summed InfoNCE loss of a batch at its raw queries and at its raw documents.

    Args:
        queries: (..., B, n) raw embeddings, one batch or several.
        documents: (..., M, n) raw embeddings, M >= B; row i < B is the positive of query i.
        similarity: Its gammas are taken as fixed.
        scale: Inverse temperature alpha.
        masked: (..., B, M) boolean, true where a document is no negative; never hides a query's own positive.

    Returns:
        Arrays in the shapes of queries and documents, in float32 or float64. ``losses.info_nce`` is the mean of the
        same losses, so its gradients are these over B.
    """
    return Batch(queries, documents).gradients(similarity, scale, masked)


class Batch:
    """Embeddings with what the gradients under any similarity are made from (see ``info_nce_gradients``).

    Args:
        queries: (..., B, n) raw embeddings.
        documents: (..., M, n) raw embeddings.
    """

    def __init__(self, queries: np.ndarray, documents: np.ndarray):
        self.queries, self.documents = queries, documents
        self.products = queries @ np.swapaxes(documents, -1, -2)
        self.query_lengths, self.document_lengths = _positive(norms(queries)), _positive(norms(documents))

    def gradients(
        self, similarity: Similarity, scale: float, masked: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The gradients at the queries and at the documents, under one similarity."""
        gamma_q, gamma_d = similarity.gammas
        removed = self.query_lengths[..., :, None] ** -gamma_q * self.document_lengths[..., None, :] ** -gamma_d
        weights = _residuals(scale * self.products * removed, masked) * (scale * removed)
        along = weights * self.products
        return (
            weights @ self.documents - _scaled(gamma_q * along.sum(-1) / self.query_lengths**2, self.queries),
            np.swapaxes(weights, -1, -2) @ self.queries
            - _scaled(gamma_d * along.sum(-2) / self.document_lengths**2, self.documents),
        )


def _positive(lengths: np.ndarray) -> np.ndarray:
    """A zero vector is left as it is by every similarity, as if its length were 1."""
    return np.where(lengths > 0, lengths, np.ones_like(lengths))


def _scaled(factors: np.ndarray, rows: np.ndarray) -> np.ndarray | float:
    return factors[..., None] * rows if factors.any() else 0.0


def _residuals(logits: np.ndarray, masked: np.ndarray | None) -> np.ndarray:
    """Softmax minus the identity, row by row."""
    own = np.arange(logits.shape[-2])
    if masked is not None:
        positives = logits[..., own, own]
        logits = np.where(masked, -np.inf, logits)
        logits[..., own, own] = positives
    residuals = np.exp(logits - logits.max(-1, keepdims=True))
    residuals /= residuals.sum(-1, keepdims=True)
    residuals[..., own, own] -= 1.0
    return residuals
