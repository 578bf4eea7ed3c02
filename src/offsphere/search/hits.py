"""The documents of an answer, as people and programs read them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from offsphere.search.table import DocumentTable
from offsphere.search.vectors import Vectors
from offsphere.similarity import Similarity

COSINE = Similarity.parse("cosine")
COLUMNS = ("id", "vector", "norm", "title", "text", "metadata")


@dataclass(frozen=True)
class Hit:
    """One document of an answer.

    Attributes:
        id: As the source had it.
        score: Under the similarity that was asked for: the plain s(q, d), rescaled by nothing.
        title: May be empty.
        text: Whole.
        metadata: What else the source had.
        norm: Length of the document's raw embedding.
        cosine: Of the angle between query and document; summed in float64 and rounded to float32, as the score is.
    """

    id: str
    score: float
    title: str
    text: str
    metadata: dict[str, Any] = field(default_factory=dict)
    norm: float = 0.0
    cosine: float = 0.0


def read_hits(
    table: DocumentTable, vectors: Vectors, queries: np.ndarray, positions: np.ndarray, scores: np.ndarray
) -> list[list[Hit]]:
    """The hits of each query, best first.

    Args:
        table: Of the index.
        vectors: Its documents.
        queries: (Q, n) raw embeddings.
        positions: (Q, k) in ``vectors``, -1 behind the last document.
        scores: (Q, k) float32.
    """
    return [
        _hits(table, vectors, query[None], found[found >= 0], values[found >= 0])
        for query, found, values in zip(queries.astype(np.float64), positions, scores, strict=True)
    ]


def _hits(
    table: DocumentTable, vectors: Vectors, query: np.ndarray, positions: np.ndarray, scores: np.ndarray
) -> list[Hit]:
    rows = table.take(vectors.row_ids[positions].tolist(), COLUMNS)
    if not rows:
        return []
    cosines = COSINE.scores(query, np.array([row["vector"] for row in rows], np.float64))[0].astype(np.float32)
    return [
        Hit(row["id"], score, row["title"], row["text"], json.loads(row["metadata"]), row["norm"], cosine)
        for row, score, cosine in zip(rows, scores.tolist(), cosines.tolist(), strict=True)
    ]
