from __future__ import annotations

import math

import numpy as np
import pytest

from offsphere.errors import ConfigError, EncoderError
from offsphere.search.prefix import prefix_lengths, truncate


def test_lengths_of_prefixes():
    documents = np.array([[3, 4, 0, 0], [6, 8, 0, 10], [0, 0, 0, 0], [0, 1, 0, 1]], np.float32)
    two, four = prefix_lengths(documents, [2, 4])
    assert (two.dimension, four.dimension) == (2, 4)
    assert two.mean == pytest.approx((5 + 10 + 1) / 3)
    assert two.variation == pytest.approx(np.std([5, 10, 1], ddof=1) / two.mean)
    assert two.share == pytest.approx((1 + math.sqrt(0.5) + math.sqrt(0.5)) / 3)
    assert (four.share, four.correlation) == (1.0, pytest.approx(1.0))


def test_zero_vectors_are_in_no_number():
    """T-I2: an empty text has no length that a prefix could keep; a prefix of a text that is all 0 has lost its own."""
    documents = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    empty = np.zeros((7, 6), np.float32)
    assert prefix_lengths(np.concatenate([empty, documents]), [2, 6]) == prefix_lengths(documents, [2, 6])
    (lost,) = prefix_lengths(np.eye(2, dtype=np.float32), [1])
    assert (lost.mean, lost.share) == (0.5, 0.5), "canary"
    (nothing,) = prefix_lengths(empty, [2])
    assert all(map(math.isnan, (nothing.mean, nothing.variation, nothing.share, nothing.correlation)))


def test_a_prefix_that_says_nothing_of_the_length_correlates_with_nothing():
    rng = np.random.default_rng(0)
    documents = rng.normal(size=(2000, 8))
    documents[:, 4:] *= 100 * rng.lognormal(size=(2000, 1))
    assert abs(prefix_lengths(documents, [4])[0].correlation) < 0.1
    assert math.isnan(prefix_lengths(np.ones((3, 2)), [1])[0].correlation)


def test_prefixes_that_are_none_are_named():
    with pytest.raises(EncoderError, match=r"shape \(2, 3\); expected at least 4 dimensions"):
        truncate(np.ones((2, 3)), 4)
    with pytest.raises(ConfigError, match="at least 1 dimension"):
        truncate(np.ones((2, 3)), 0)
