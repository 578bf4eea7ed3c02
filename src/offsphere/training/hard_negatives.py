"""Which of the best-ranked documents become the negatives of a pair, and why the others do not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from offsphere.data.fingerprint import text_id
from offsphere.errors import ConfigError

MARGIN, RELATIVE_MARGIN, MAX_SCORE = "margin", "relative margin", "maximal score"


@dataclass(frozen=True)
class Rule:
    """What a negative must be. Ranks count from 1, over the documents that are not known to be relevant.

    A document is skipped where it scores above any of the limits that are given, pos being the score of the pair's own
    positive. All of them move down from pos for scores of either sign:

    ===============  =================================================================================
    margin           pos - margin * (standard deviation of the scores of the query's ranks 1 to last)
    relative_margin  pos - relative_margin * abs(pos)
    max_score        max_score
    ===============  =================================================================================

    Attributes:
        negatives: How many for each pair.
        first: The best rank that negatives are taken from; those before it are often relevant and not judged.
        last: The last one.
        sample: ``top`` takes the best of those that are left, ``random`` draws among all of them.
        seed: Of the draws. Each pair draws by itself, from the seed and its own texts.
        margin: In standard deviations, so that it means the same for every model and similarity.
        relative_margin: A share of the positive's score.
        max_score: In the similarity's own units.
        keep_short: Keep a pair with fewer negatives than asked for, as long as it has one.

    Raises:
        ConfigError: If a number is impossible, or the ranks are fewer than the negatives.
    """

    negatives: int = 1
    first: int = 10
    last: int = 100
    sample: Literal["top", "random"] = "top"
    seed: int = 0
    margin: float | None = None
    relative_margin: float | None = None
    max_score: float | None = None
    keep_short: bool = False

    def __post_init__(self) -> None:
        if self.negatives < 1 or self.seed < 0:
            raise ConfigError(f"expected --negatives from 1 and --seed from 0, found {self.negatives} and {self.seed}")
        if not 1 <= self.first <= self.last:
            raise ConfigError(f"expected ranks such as 10-100, the first from 1 on, found {self.first}-{self.last}")
        if self.last - self.first + 1 < self.negatives:
            raise ConfigError(
                f"the ranks {self.first}-{self.last} are fewer than --negatives {self.negatives}; widen --range"
            )
        if self.sample not in ("top", "random"):
            raise ConfigError(f"--sample must be top or random, found {self.sample!r}")
        for name in ("margin", "relative_margin", "max_score"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and (value >= 0 or name == "max_score")):
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be a finite number"
                    f"{'' if name == 'max_score' else ' of at least 0'}, found {value}"
                )

    def eligible(self, scores: np.ndarray, positives: np.ndarray) -> tuple[np.ndarray, Counter[str]]:
        """Which candidates may be negatives, and how many of the ranks asked for may not, by the first limit they pass.

        Args:
            scores: (R, last) of the candidates of each pair, best first, -inf where there is none.
            positives: (R,) the score of each pair's positive.

        Returns:
            (R, last) boolean, and counts.
        """
        exact, own = scores.astype(np.float64), positives.astype(np.float64)[:, None]
        there = scores > -np.inf
        left = there & (np.arange(1, scores.shape[1] + 1) >= self.first)
        skipped: Counter[str] = Counter()
        limits: list[tuple[str, np.ndarray | float]] = []
        if self.margin is not None:
            limits.append((MARGIN, own - self.margin * _spread(exact, there)))
        if self.relative_margin is not None:
            limits.append((RELATIVE_MARGIN, own - self.relative_margin * np.abs(own)))
        if self.max_score is not None:
            limits.append((MAX_SCORE, self.max_score))
        for reason, limit in limits:
            above = left & (exact > limit)
            skipped[reason] = int(above.sum())
            left &= ~above
        return left, skipped

    def choose(self, eligible: np.ndarray, texts: Sequence[str]) -> np.ndarray:
        """The places of a pair's negatives, best first; fewer than asked for where no more are eligible.

        Args:
            eligible: (last,) boolean.
            texts: Of the pair, which the draw depends on.
        """
        places = np.flatnonzero(eligible)
        if self.sample == "top" or len(places) <= self.negatives:
            return places[: self.negatives]
        random = np.random.default_rng([self.seed, *(int(text_id(text), 16) for text in texts)])
        return np.sort(random.choice(places, self.negatives, replace=False))


def _spread(scores: np.ndarray, there: np.ndarray) -> np.ndarray:
    """(R, 1) standard deviation of the scores that are there; 0 where there is none."""
    count = np.maximum(there.sum(axis=1, keepdims=True), 1)
    known = np.where(there, scores, 0.0)
    deviations = np.where(there, known - known.sum(axis=1, keepdims=True) / count, 0.0)
    return np.sqrt((deviations**2).sum(axis=1, keepdims=True) / count)
