"""Semantic textual similarity: how scores of sentence pairs correlate with what people said, in both orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from offsphere.data.scored_pairs import ScoredPairs
from offsphere.encoders import Side, encode
from offsphere.errors import DataError, EncoderError
from offsphere.evaluation.results import Result
from offsphere.similarity import Similarity

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from offsphere.evaluation.evaluate import Subject

SWAPPED = "(b,a)"
"""Behind the name of a measure where the second sentence was the query and the first one the document."""


@dataclass(frozen=True)
class EmbeddedPairs:
    """Scored pairs with the raw embeddings of both sentences on both sides, each (N, n) float32.

    Attributes:
        pairs: The texts and their scores.
        first_as_query: First sentences with the query's prompt.
        second_as_document: Second sentences with the document's prompt.
        second_as_query: Second sentences with the query's prompt.
        first_as_document: First sentences with the document's prompt.
    """

    pairs: ScoredPairs
    first_as_query: np.ndarray
    second_as_document: np.ndarray
    second_as_query: np.ndarray
    first_as_document: np.ndarray


def embed_pairs(model: SentenceTransformer, pairs: ScoredPairs) -> EmbeddedPairs:
    """The pairs with raw embeddings; each distinct sentence is encoded once as a query and once as a document.

    Args:
        model: An encoder without Normalize modules, where length matters.
        pairs: What to encode.
    """
    place = {text: i for i, text in enumerate(dict.fromkeys([*pairs.first, *pairs.second]))}

    def embeddings(side: Side) -> tuple[np.ndarray, np.ndarray]:
        encoded = encode(model, [*place], side)
        return encoded[[place[text] for text in pairs.first]], encoded[[place[text] for text in pairs.second]]

    first_as_query, second_as_query = embeddings("query")
    first_as_document, second_as_document = embeddings("document")
    return EmbeddedPairs(pairs, first_as_query, second_as_document, second_as_query, first_as_document)


def evaluate_pairs(embedded: EmbeddedPairs, subject: Subject, scored_as: Mapping[str, Similarity]) -> list[Result]:
    """Rows for ``results.csv``: Spearman and Pearson under each similarity, for s(a, b) and for s(b, a).

    Where the model has one prompt for both sides, a symmetric similarity gives the same number twice; qnorm and dnorm
    do not, because each removes the length of one side only. Scores are computed in float64.

    Args:
        embedded: Raw embeddings of the pairs.
        subject: Whose they are.
        scored_as: What to score under, by the name in ``results.csv``.

    Raises:
        DataError: If the pairs have no scores, or scores that do not vary.
        EncoderError: If the model's scores are not finite, or do not vary.
    """
    pairs = embedded.pairs
    if pairs.scores is None:
        raise DataError("no column score, with which the model's scores are to correlate", pairs.path)
    orders = {
        "": (embedded.first_as_query, embedded.second_as_document),
        SWAPPED: (embedded.second_as_query, embedded.first_as_document),
    }
    rows = []
    for name, similarity in scored_as.items():
        for order, (queries, documents) in orders.items():
            scores = similarity.pairwise(queries.astype(np.float64), documents.astype(np.float64))
            try:
                found = correlations(scores, pairs.scores)
            except EncoderError as error:
                raise EncoderError(f"{subject.model} on {pairs.name}, scored as {name}: {error}") from error
            except DataError as error:
                raise DataError(str(error), pairs.path) from error
            rows += [
                subject.result(name, pairs.name, pairs.split, f"{measure}{order}", value, len(pairs))
                for measure, value in found.items()
            ]
    return rows


def correlations(scores: np.ndarray, human: Sequence[float]) -> dict[str, float]:
    """Spearman's rank correlation (ties get their mean rank) and Pearson's, each from -1 to 1.

    Args:
        scores: (N,) of a model.
        human: N scores of people.

    Raises:
        DataError: If the human scores do not vary.
        EncoderError: If the model's scores are not finite, or do not vary.
    """
    from scipy import stats

    if len(human) < 2 or min(human) == max(human):
        raise DataError("a correlation needs two pairs or more with different scores")
    if not np.isfinite(scores).all():
        raise EncoderError("some scores are NaN or infinite; encode in float32, and look for a diverged training")
    if np.ptp(scores) == 0:
        raise EncoderError("every pair gets the same score, so there is no correlation; the model may have collapsed")
    return {
        "Spearman": float(stats.spearmanr(scores, human).statistic),
        "Pearson": float(stats.pearsonr(scores, human).statistic),
    }
