"""What moved between two rankings of the same documents, and why."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Comparison:
    """Two rankings of D documents for one query.

    Equal scores are won by the document that comes first.

    Attributes:
        trained: (D,) float32 scores that count some of the length.
        cosine: (D,) float32 scores that order by the angle alone.
        lengths: (D,) float64 lengths of the documents.
    """

    trained: np.ndarray
    cosine: np.ndarray
    lengths: np.ndarray

    def why(self, place: int) -> tuple[int, int, str]:
        """Its rank under each of the two, from 1, and in words what lifted or lowered it.

        Where all documents that it passed are shorter, its own length lifted it, and so on; the words say only what
        holds for every one of them.

        Args:
            place: Of the document, from 0 to D - 1.
        """
        above, above_by_angle = (_above(scores, place) for scores in (self.trained, self.cosine))
        rank, rank_by_angle = (1 + int(mask.sum()) for mask in (above, above_by_angle))
        moved = rank_by_angle - rank
        if moved == 0:
            return rank, rank_by_angle, "same place in both"
        passed = above_by_angle & ~above if moved > 0 else above & ~above_by_angle
        others, own = self.lengths[passed], self.lengths[place]
        number = len(others)
        those = f"the {number} it passed" if moved > 0 else f"the {number} that passed it"
        if (others < own).all():
            reason = f"longer than {_most(self.lengths < own) or those}"
        elif (others > own).all():
            reason = f"shorter than {_most(self.lengths > own) or those}"
        else:
            reason = f"its score nearly equals that of {those}"
        return rank, rank_by_angle, f"{'up' if moved > 0 else 'down'} {abs(moved):,}: {reason}"


def best(scores: np.ndarray, k: int) -> np.ndarray:
    """The places of the k highest of (D,) scores, best first; equal scores in their own order."""
    k = min(k, len(scores))
    if k == 0:
        return np.empty(0, np.int64)
    last = np.partition(scores, -k)[-k]
    certain = np.flatnonzero(scores > last)
    tied = np.flatnonzero(scores == last)[: k - len(certain)]
    places = np.sort(np.concatenate([certain, tied]))
    return places[np.argsort(-scores[places], kind="stable")]


def _above(scores: np.ndarray, place: int) -> np.ndarray:
    """(D,) whether each document ranks above this one."""
    mask = scores > scores[place]
    mask[:place] |= scores[:place] == scores[place]
    return mask


def _most(documents: np.ndarray) -> str | None:
    """``93% of documents``, rounded down; None where it is not most of them."""
    share = 100 * int(documents.sum()) // len(documents)
    return f"{share}% of documents" if share >= 50 else None
