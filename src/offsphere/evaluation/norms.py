"""What the lengths of one collection's embeddings look like: the material of the report's histograms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from offsphere.diagnosis.effect_size import cohens_d
from offsphere.diagnosis.variation import coefficient_of_variation
from offsphere.evaluation.ranking import EmbeddedCollection
from offsphere.similarity import norms

BINS = 40


def norm_record(embedded: EmbeddedCollection) -> dict[str, Any]:
    """Lengths of queries and documents in numbers, ready for JSON; None where a number is not defined.

    A document is relevant when any query has a positive judgement for it. Queries and documents without text are left
    out: what an encoder makes of nothing says nothing about relevance.

    Args:
        embedded: Raw embeddings of one collection.

    Returns:
        dataset; edges (41 bin borders), relevant and irrelevant (40 counts each); relevant_mean, irrelevant_mean,
        cohens_d (relevant minus irrelevant); query_mean, query_cv, document_mean, document_cv.
    """
    collection = embedded.collection
    positive = {document for grades in collection.qrels.values() for document, grade in grades.items() if grade > 0}
    full = _with_text(collection.documents)
    relevant = np.array([document in positive for document in collection.documents], dtype=bool)
    queries, documents = (norms(side).astype(np.float64) for side in (embedded.queries, embedded.documents))
    queries = queries[_with_text(collection.queries)]
    groups = {"relevant": documents[full & relevant], "irrelevant": documents[full & ~relevant]}
    edges = np.histogram_bin_edges(documents[full], BINS)
    return {
        "dataset": collection.name,
        "edges": edges.tolist(),
        **{name: np.histogram(lengths, edges)[0].tolist() for name, lengths in groups.items()},
        **{f"{name}_mean": _mean(lengths) for name, lengths in groups.items()},
        "cohens_d": _defined(cohens_d(groups["relevant"], groups["irrelevant"])),
        "query_mean": _mean(queries),
        "query_cv": _defined(coefficient_of_variation(queries)),
        "document_mean": _mean(documents[full]),
        "document_cv": _defined(coefficient_of_variation(documents[full])),
    }


def _with_text(texts: Mapping[str, str]) -> np.ndarray:
    return np.array([bool(text.strip()) for text in texts.values()], dtype=bool)


def _mean(lengths: np.ndarray) -> float | None:
    return float(lengths.mean()) if len(lengths) else None


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value
