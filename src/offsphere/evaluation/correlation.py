"""Does the length of documents tell where a similarity gains on cosine? The paper's figure, over any data sets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

COSINE = "cosine"
FEWEST = 3
"""Data sets from which on a correlation is given; its interval needs one more."""


@dataclass(frozen=True)
class Point:
    """One similarity of one model on one data set.

    Attributes:
        model: The encoder.
        similarity: What ranked.
        dataset: The collection.
        cohens_d: Length of relevant minus irrelevant documents, in standard deviations.
        value: The mean of the measure, a fraction.
        cosine: The same under cosine.
    """

    model: str
    similarity: str
    dataset: str
    cohens_d: float
    value: float
    cosine: float

    @property
    def gain(self) -> float:
        """What it gains on cosine, as a share of cosine's value."""
        return self.value / self.cosine - 1


@dataclass(frozen=True)
class Correlation:
    """Pearson's correlation of Cohen's d with the relative gain over cosine, over data sets.

    Attributes:
        model: The encoder.
        similarity: What was set against cosine.
        n: How many data sets.
        r: From -1 to 1; None with fewer than three data sets, or where one side does not vary.
        low: Lower end of its 95 % interval (Fisher's z); None with fewer than four data sets.
        high: Its upper end.
    """

    model: str
    similarity: str
    n: int
    r: float | None
    low: float | None
    high: float | None


def points_of(model: str, means: Mapping[str, Mapping[str, float]], effects: Mapping[str, float | None]) -> list[Point]:
    """A point for each similarity but cosine and each data set where Cohen's d is defined and cosine finds anything.

    Args:
        model: The encoder.
        means: Data set to similarity to the mean of a measure.
        effects: Data set to Cohen's d.
    """
    return [
        Point(model, similarity, dataset, effect, value, of_dataset[COSINE])
        for dataset, of_dataset in means.items()
        for similarity, value in of_dataset.items()
        if similarity != COSINE and of_dataset.get(COSINE) and (effect := effects[dataset]) is not None
    ]


def correlate(points: Iterable[Point]) -> list[Correlation]:
    """The correlation of each model and similarity over its data sets, in the order of the points."""
    groups: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        groups.setdefault((point.model, point.similarity), []).append(point)
    return [Correlation(*names, len(group), *_pearson(group)) for names, group in groups.items()]


def _pearson(points: list[Point]) -> tuple[float | None, float | None, float | None]:
    """The correlation and its interval by Fisher's transformation, whose standard error is 1 / sqrt(n - 3)."""
    effects, gains = np.array([(point.cohens_d, point.gain) for point in points]).T
    if len(points) < FEWEST or not np.ptp(effects) or not np.ptp(gains):
        return None, None, None
    r = float(np.clip(np.corrcoef(effects, gains)[0, 1], -1, 1))
    if len(points) == FEWEST or abs(r) == 1:
        return r, None, None
    reach = 1.959964 / math.sqrt(len(points) - 3)
    return r, math.tanh(math.atanh(r) - reach), math.tanh(math.atanh(r) + reach)
