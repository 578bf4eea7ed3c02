from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offsphere.diagnosis import cohens_d

groups = st.lists(st.integers(0, 50).map(float), min_size=2, max_size=20)


def slow_cohens_d(first, second):
    means = [sum(group) / len(group) for group in (first, second)]
    squares = [sum((x - mean) ** 2 for x in group) for group, mean in zip((first, second), means, strict=True)]
    return (means[0] - means[1]) / math.sqrt(sum(squares) / (len(first) + len(second) - 2))


@given(groups, groups)
def test_equals_the_definition_and_changes_sign_with_the_groups(first, second):
    found = cohens_d(np.array(first), np.array(second))
    if len({*first}) == len({*second}) == 1:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(slow_cohens_d(first, second))
        assert found == pytest.approx(-cohens_d(np.array(second), np.array(first)))


def test_longer_relevant_documents_are_positive():
    assert cohens_d(np.array([4.0, 6.0]), np.array([1.0, 3.0])) == pytest.approx(3 / math.sqrt(2))


@pytest.mark.parametrize(("first", "second"), [([], [1, 2]), ([1, 2], [3]), ([2, 2], [2, 2]), ([1, 1], [2, 2])])
def test_undefined_is_nan(first, second):
    assert math.isnan(cohens_d(np.array(first), np.array(second)))


def test_single_precision_input_is_summed_in_double():
    rng = np.random.default_rng(0)
    first, second = (1000 + rng.normal(shift, 0.01, 50_000) for shift in (0.002, 0.0))
    single = cohens_d(first.astype(np.float32), second.astype(np.float32))
    assert single == pytest.approx(cohens_d(first, second), abs=0.02)
