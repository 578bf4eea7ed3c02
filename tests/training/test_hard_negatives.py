from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offsphere.errors import ConfigError
from offsphere.training.hard_negatives import MARGIN, MAX_SCORE, RELATIVE_MARGIN, Rule

numbers = st.floats(-50, 50, width=32)


@given(
    st.lists(st.lists(numbers, min_size=6, max_size=6), min_size=1, max_size=4),
    st.lists(st.integers(0, 6), min_size=4, max_size=4),
    st.lists(numbers, min_size=4, max_size=4),
    st.none() | st.floats(0, 3),
    st.none() | st.floats(0, 3),
    st.none() | numbers,
    st.integers(1, 6),
)
def test_eligible_is_what_the_definitions_say(rows, lengths, own, margin, relative, highest, first):
    rule = Rule(first=first, last=6, margin=margin, relative_margin=relative, max_score=highest)
    scores = np.full((len(rows), 6), -np.inf, np.float32)
    for row, length, values in zip(scores, lengths, rows, strict=False):
        row[:length] = sorted(values[:length], reverse=True)
    positives = np.array(own[: len(rows)], np.float32)
    found, skipped = rule.eligible(scores, positives)
    counts = {MARGIN: 0, RELATIVE_MARGIN: 0, MAX_SCORE: 0}
    for row, positive, mask in zip(scores.tolist(), positives.tolist(), found, strict=True):
        there = [score for score in row if score > -math.inf]
        mean = math.fsum(there) / len(there) if there else 0.0
        spread = math.sqrt(math.fsum((s - mean) ** 2 for s in there) / len(there)) if there else 0.0
        for rank, score in enumerate(row, 1):
            near = False
            reason = None
            if margin is not None:
                near |= math.isclose(score, positive - margin * spread, abs_tol=1e-9)
                reason = MARGIN if score > positive - margin * spread else None
            if reason is None and relative is not None and score > positive - relative * abs(positive):
                reason = RELATIVE_MARGIN
            if reason is None and highest is not None and score > highest:
                reason = MAX_SCORE
            if near:  # the order of the additions may decide
                reason = None if mask[rank - 1] else reason or MARGIN
            asked = rank >= first and score > -math.inf
            assert mask[rank - 1] == (asked and reason is None)
            counts[reason] = counts.get(reason, 0) + (asked and reason is not None)
    if margin is None:
        assert {name: skipped[name] for name in (RELATIVE_MARGIN, MAX_SCORE)} == {
            name: counts[name] for name in (RELATIVE_MARGIN, MAX_SCORE)
        }
    assert sum(skipped.values()) == counts[MARGIN] + counts[RELATIVE_MARGIN] + counts[MAX_SCORE]


def test_a_relative_margin_moves_down_from_a_negative_score():
    """-4 is above the positive's -5 and so more similar; -5 * (1 - 0.1) = -4.5 would let the rank between through."""
    scores = np.array([[-4.0, -4.6, -5.2, -5.6]], np.float32)
    mask, skipped = Rule(first=1, last=4, relative_margin=0.1).eligible(scores, np.array([-5.0], np.float32))
    assert mask.tolist() == [[False, False, False, True]]
    assert skipped == {RELATIVE_MARGIN: 3}
    wrong = scores <= -5.0 * (1 - 0.1)
    assert wrong.tolist() == [[False, True, True, True]]


@given(st.floats(0.01, 100), st.floats(-100, 100))
def test_a_margin_in_spreads_means_the_same_on_every_scale(factor, shift):
    scores = np.array([[9.0, 7.5, 4.0, 3.5, 1.0]])
    own = np.array([8.0])
    rule = Rule(first=1, last=5, margin=1.0)
    mask, _ = rule.eligible(scores * factor + shift, own * factor + shift)
    assert mask.tolist() == rule.eligible(scores, own)[0].tolist() == [[False, False, True, True, True]]


def test_top_takes_the_best_and_random_draws_evenly_among_all():
    eligible = np.array([False, True, True, False, True, True])
    top = Rule(negatives=2, first=1, last=6)
    assert top.choose(eligible, ("q", "p")).tolist() == [1, 2]
    counts = np.zeros(6)
    for number in range(2000):
        rule = Rule(negatives=2, first=1, last=6, sample="random", seed=3)
        chosen = rule.choose(eligible, (f"q{number}", "p"))
        assert sorted(set(chosen.tolist())) == chosen.tolist() and eligible[chosen].all() and len(chosen) == 2
        counts[chosen] += 1
    assert counts[~eligible].sum() == 0
    assert np.abs(counts[eligible] - 1000).max() < 5 * math.sqrt(2000 * 0.25)


def test_a_draw_depends_on_the_seed_and_the_pair_alone():
    eligible = np.ones(50, dtype=bool)

    def draw(seed, query="q", positive="p"):
        rule = Rule(negatives=5, first=1, last=50, sample="random", seed=seed)
        return tuple(rule.choose(eligible, (query, positive)).tolist())

    assert draw(0) == draw(0)
    assert len({draw(0), draw(1), draw(0, query="other"), draw(0, positive="other")}) == 4


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"negatives": 0}, "--negatives from 1"),
        ({"seed": -1}, "--seed from 0"),
        ({"first": 0}, "found 0-100"),
        ({"first": 20, "last": 10}, "found 20-10"),
        ({"first": 5, "last": 8, "negatives": 5}, "fewer than --negatives 5"),
        ({"sample": "best"}, "top or random"),
        ({"margin": -0.1}, "--margin must be a finite number of at least 0"),
        ({"relative_margin": math.nan}, "--relative-margin"),
        ({"max_score": math.inf}, "--max-score must be a finite number, found inf"),
    ],
)
def test_impossible_numbers_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        Rule(**settings)
