from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offsphere.diagnosis import coefficient_of_variation


@given(st.lists(st.floats(0.1, 100), min_size=2, max_size=30), st.floats(0.01, 100))
def test_does_not_depend_on_the_scale(lengths, scale):
    values = np.array(lengths)
    expected = math.sqrt(sum((x - values.mean()) ** 2 for x in lengths) / (len(lengths) - 1)) / values.mean()
    assert coefficient_of_variation(values) == pytest.approx(expected, abs=1e-12)
    assert coefficient_of_variation(values * scale) == pytest.approx(expected, abs=1e-9)


def test_by_hand():
    assert coefficient_of_variation(np.array([1.0, 3.0])) == pytest.approx(math.sqrt(2) / 2)
    assert coefficient_of_variation(np.ones(5)) == 0


@pytest.mark.parametrize("lengths", [[], [1.0], [0.0, 0.0]])
def test_undefined_is_nan(lengths):
    assert math.isnan(coefficient_of_variation(np.array(lengths)))
