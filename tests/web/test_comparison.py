from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from offsphere.web.comparison import Comparison, best

SCORES = npst.arrays(np.float32, st.integers(1, 30), elements=st.sampled_from([-1.0, -0.5, 0.0, 0.25, 0.5, 2.0]))


def slow_order(scores: np.ndarray) -> list[int]:
    return sorted(range(len(scores)), key=lambda place: (-scores[place], place))


@given(SCORES, st.integers(1, 40))
def test_best_is_the_head_of_a_stable_sort(scores: np.ndarray, k: int) -> None:
    assert best(scores, k).tolist() == slow_order(scores)[:k]


def test_best_of_nothing_is_nothing() -> None:
    assert best(np.empty(0, np.float32), 5).tolist() == []


@given(st.data())
def test_ranks_are_those_of_a_stable_sort(data: st.DataObject) -> None:
    trained = data.draw(SCORES)
    cosine = data.draw(npst.arrays(np.float32, len(trained), elements=st.sampled_from([-1.0, 0.0, 0.5])))
    comparison = Comparison(trained, cosine, np.ones(len(trained)))
    for place in range(len(trained)):
        rank, by_angle, _ = comparison.why(place)
        assert slow_order(trained)[rank - 1] == place
        assert slow_order(cosine)[by_angle - 1] == place


@given(st.data())
def test_what_it_says_about_length_holds_for_every_document_passed(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 12))
    lengths = data.draw(npst.arrays(np.float64, count, elements=st.floats(0.5, 4)))
    cosine = data.draw(npst.arrays(np.float32, count, elements=st.floats(-1, 1, width=32)))
    gamma = data.draw(st.sampled_from([-0.5, 0.0, 0.5, 1.5]))
    trained = (cosine * lengths ** (1 - gamma)).astype(np.float32)
    comparison = Comparison(trained, cosine, lengths)
    for place in range(count):
        rank, by_angle, words = comparison.why(place)
        if rank == by_angle:
            assert words == "same place in both"
            continue
        now, before = slow_order(trained), slow_order(cosine)
        passed = set(now[rank:]) & set(before[: by_angle - 1])
        if rank > by_angle:
            passed = set(now[: rank - 1]) & set(before[by_angle:])
        assert words.startswith(f"{'up' if rank < by_angle else 'down'} {abs(rank - by_angle)}: ")
        if "longer than" in words:
            assert all(lengths[other] < lengths[place] for other in passed)
        elif "shorter than" in words:
            assert all(lengths[other] > lengths[place] for other in passed)
        else:
            assert "nearly equals" in words


@pytest.mark.parametrize(
    ("lengths", "cosine", "place", "expected"),
    [
        ([9.0, 1.0, 3.0, 2.0, 4.0], [0.6, 0.9, 0.8, 0.7, 0.1], 0, (1, 4, "up 3: longer than 80% of documents")),
        ([9.0, 1.0, 3.0, 2.0, 4.0], [0.6, 0.9, 0.8, 0.7, 0.1], 1, (4, 1, "down 3: shorter than 80% of documents")),
        ([9.0, 1.0, 3.0, 2.0, 4.0], [0.6, 0.9, 0.8, 0.7, 0.1], 2, (2, 2, "same place in both")),
        ([1.0, 2.0, 9.0, 8.0, 7.0], [0.9, 0.8, 0.0, 0.0, 0.0], 1, (1, 2, "up 1: longer than the 1 it passed")),
        ([7.0, 9.0, 1.0, 1.0, 1.0], [0.9, 0.8, 0.0, 0.0, 0.0], 0, (2, 1, "down 1: shorter than the 1 that passed it")),
    ],
)
def test_words(lengths: list[float], cosine: list[float], place: int, expected: tuple[int, int, str]) -> None:
    angular = np.array(cosine, np.float32)
    trained = (angular * np.array(lengths)).astype(np.float32)
    assert Comparison(trained, angular, np.array(lengths)).why(place) == expected


def test_an_even_score_is_not_put_down_to_length() -> None:
    comparison = Comparison(np.array([1, 1], np.float32), np.array([1, 1.1], np.float32), np.array([2.0, 2.0]))
    assert comparison.why(0) == (1, 2, "up 1: its score nearly equals that of the 1 it passed")
