from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offsphere.diagnosis import coefficient_of_variation
from offsphere.diagnosis.variation import variation_ratios


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


def record(similarity: str, query_cv: float | None, document_cv: float | None = 0.5, dataset: str = "a") -> dict:
    return {"similarity": similarity, "dataset": dataset, "query_cv": query_cv, "document_cv": document_cv}


def test_ratios_are_means_over_seeds_of_dnorm_over_those_of_dot():
    records = [
        record("dnorm", 0.6),
        record("dnorm", 1.0),
        record("dot", 0.1),
        record("dot", 0.3),
        record("cosine", 9.0),
    ]
    found = variation_ratios([*records, record("dnorm", 0.2, dataset="b"), record("dot", 0.4, dataset="b")])
    assert found["a"] == {"query": pytest.approx(4.0), "document": pytest.approx(1.0)}
    assert found["b"]["query"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [record("dnorm", 0.5)],
        [record("dot", 0.5)],
        [record("dnorm", None, None), record("dot", 0.5)],
        [record("dnorm", 0.5), record("dot", 0.0, 0.0)],
        [record("dnorm", 0.5), record("dot", 0.5, dataset="b")],
    ],
)
def test_without_both_trainings_there_is_no_ratio(records):
    assert variation_ratios(records) == {}
