"""nDCG@10 of every query for every gamma_d, exactly, from one product of queries and documents.

For one query the score of a document under gamma is s |d|^-gamma, with s its dot product: in logarithms a straight
line over gamma. A document that ten others beat at both ends of an interval is therefore beaten all along it, and is
in no top ten there. What is left to sort is a few documents a query.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from offsphere.evaluation.ranking import EmbeddedCollection, excluded_pairs
from offsphere.similarity import Similarity, norms

if TYPE_CHECKING:
    from torch import Tensor

SCORES_AT_ONCE = 2**24  # 128 MB of float64, and a few times that for what is made of them
INTERVALS = 4
MARGIN = 1e-6  # of a score: more than float32 rounds away, so that a tie by rounding is never left out


def gamma_curve(
    embedded: EmbeddedCollection,
    gammas: np.ndarray,
    *,
    k: int = 10,
    on_queries: Callable[[int], None] = lambda queries: None,
) -> np.ndarray:
    """nDCG@k of each query under each gamma_d; gamma_q changes no ranking of a query.

    Rankings are those of ``evaluation.rank``: scores rounded to float32, ties and exclusions as there. Gains are the
    positive grades, discounts log2(rank + 1), as in trec_eval.

    Args:
        embedded: Raw embeddings of a collection.
        gammas: (G,) ascending exponents of the document's length.
        k: Depth of the measure.
        on_queries: Told how many queries are done.

    Returns:
        (Q, G) float64, rows in the order of the collection's queries.
    """
    import torch

    collection = embedded.collection
    ids = list(collection.documents)
    order = np.array(sorted(range(len(ids)), key=ids.__getitem__, reverse=True), dtype=np.int64)  # of tied documents
    position = {ids[place]: rank for rank, place in enumerate(order)}
    raw = embedded.documents[order].astype(np.float64)
    lengths = norms(raw)
    log_lengths = np.log(np.where(lengths > 0, lengths, 1.0))  # a zero vector scores 0 whatever its length is
    queries = torch.from_numpy(Similarity(1.0, 0.0).prepare_query(embedded.queries.astype(np.float64)))
    documents = torch.from_numpy(raw)
    excluded_rows, excluded_places = excluded_pairs(collection, [ids[place] for place in order])
    grades = [{position[d]: g for d, g in collection.qrels[query].items() if g > 0} for query in collection.queries]
    curve = np.empty((len(queries), len(gammas)))
    step = max(1, SCORES_AT_ONCE // max(1, len(ids)))
    for first in range(0, len(queries), step):
        scores = queries[first : first + step] @ documents.T
        inside = slice(*np.searchsorted(excluded_rows, [first, first + len(scores)]))
        scores[excluded_rows[inside] - first, excluded_places[inside]] = -torch.inf
        candidates = _candidates(scores, torch.from_numpy(log_lengths), gammas, k)
        rows, places = (side.numpy() for side in candidates.nonzero(as_tuple=True))
        table = _Table(rows, places, scores[candidates].numpy(), log_lengths[places], grades[first : first + step], k)
        curve[first : first + step] = np.stack([table.ndcg(gamma) for gamma in gammas], axis=1)
        on_queries(first + len(scores))
    return curve


def _candidates(scores: Tensor, log_lengths: Tensor, gammas: np.ndarray, k: int) -> Tensor:
    """(Q, D) boolean: every document that is among the best k of its query for some gamma of the range, and few others.

    Between two ends, the k documents that are best half-way keep a lowest score at each end; who is below both is
    below these k all along.
    """
    import torch

    k = min(k, scores.shape[1])
    ends = np.linspace(gammas[0], gammas[-1], INTERVALS + 1)
    lowest = torch.full((len(ends), len(scores)), torch.inf, dtype=scores.dtype)
    for number, middle in enumerate((ends[:-1] + ends[1:]) / 2):
        best = (scores * (-middle * log_lengths).exp()).topk(k, dim=1).indices
        own = scores.gather(1, best)
        for end in (number, number + 1):
            at_end = (own * (-ends[end] * log_lengths[best]).exp()).amin(1)
            lowest[end] = torch.minimum(lowest[end], at_end - MARGIN * at_end.abs())
    kept = torch.zeros(scores.shape, dtype=torch.bool)
    for end, threshold in zip(ends, lowest, strict=True):
        kept |= scores * (-end * log_lengths).exp() >= threshold[:, None]
    return kept & (scores > -torch.inf)


class _Table:
    """The candidates of some queries, one row a query, padded to the longest."""

    def __init__(
        self,
        rows: np.ndarray,
        places: np.ndarray,
        scores: np.ndarray,
        log_lengths: np.ndarray,
        grades: list[dict[int, int]],
        k: int,
    ):
        counts = np.bincount(rows, minlength=len(grades))
        columns = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        shape = len(grades), int(counts.max(initial=1))
        self.scores, self.log_lengths, self.gains = np.full(shape, -np.inf), np.zeros(shape), np.zeros(shape)
        self.scores[rows, columns] = scores
        self.log_lengths[rows, columns] = log_lengths
        self.gains[rows, columns] = [grades[row].get(place, 0) for row, place in zip(rows, places, strict=True)]
        self.discounts = 1 / np.log2(np.arange(2, k + 2))
        self.ideal = np.array([self._dcg(np.array(sorted(one.values(), reverse=True)[:k])) for one in grades])

    def ndcg(self, gamma: float) -> np.ndarray:
        """(Q,) nDCG@k under this gamma."""
        scores = (self.scores * np.exp(-gamma * self.log_lengths)).astype(np.float32)
        # Candidates stand in the order that breaks ties, and a stable sort keeps it.
        best = np.argsort(-scores, axis=1, kind="stable")[:, : len(self.discounts)]
        return self._dcg(np.take_along_axis(self.gains, best, axis=1)) / self.ideal

    def _dcg(self, gains: np.ndarray) -> np.ndarray:
        return gains @ self.discounts[: gains.shape[-1]]
