from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from offsphere.evaluation.correlation import Correlation, Point, correlate, points_of


def points(effects, gains, model="m", similarity="dot"):
    return [
        Point(model, similarity, f"set{i}", effect, 0.5 * (1 + gain), 0.5)
        for i, (effect, gain) in enumerate(zip(effects, gains, strict=True))
    ]


@pytest.mark.parametrize("n", [4, 12, 40])
def test_equals_scipy(n):
    random = np.random.default_rng(n)
    effects = random.normal(size=n)
    gains = 0.3 * effects + random.normal(size=n)
    (found,) = correlate(points(effects, gains))
    expected = stats.pearsonr(effects, gains)
    interval = expected.confidence_interval(0.95)
    assert (found.n, found.r) == (n, pytest.approx(expected.statistic))
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))


def test_what_cannot_be_told_is_none():
    nothing = (None, None, None)
    assert correlate(points([0.1, 0.2], [1, 2])) == [Correlation("m", "dot", 2, *nothing)]
    assert correlate(points([0.1, 0.1, 0.1], [1, 2, 3])) == [Correlation("m", "dot", 3, *nothing)]
    (three,) = correlate(points([0.1, 0.2, 0.4], [0.2, 0.3, 0.1]))
    assert three.r is not None and three.low is None


def test_models_and_similarities_are_apart():
    one, other = points([0, 1, 2], [0, 1, 2]), points([0, 1, 2], [2, 1, 0], "n")
    assert [(found.model, round(found.r)) for found in correlate([*one, *other])] == [("m", 1), ("n", -1)]


def test_a_point_is_the_relative_gain_on_cosine():
    means = {
        "a": {"cosine": 0.4, "dot": 0.5, "dnorm": 0.4},
        "no effect": {"cosine": 0.4, "dot": 0.5},
        "nothing found": {"cosine": 0.0, "dot": 0.1},
        "no cosine": {"dot": 0.1},
    }
    effects = {"a": 0.3, "no effect": None, "nothing found": 0.1, "no cosine": 0.1}
    found = points_of("m", means, effects)
    assert [(point.dataset, point.similarity, point.cohens_d) for point in found] == [
        ("a", "dot", 0.3), ("a", "dnorm", 0.3),
    ]  # fmt: skip
    assert [point.gain for point in found] == [pytest.approx(0.25), 0]
