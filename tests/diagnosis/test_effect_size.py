from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offsphere.diagnosis import cohens_d, effect_size
from offsphere.diagnosis.effect_size import (
    _d_of_moments,
    _moments,
    candidate_effect,
    collection_effect,
    hedges_correction,
    text_length_correlation,
    without_text_length,
)

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


def judgements(n_queries: int, n_documents: int, seed: int) -> np.ndarray:
    """Pairs of a query and a relevant document; some documents are relevant to several queries."""
    random = np.random.default_rng(seed)
    return np.array([(query, random.integers(n_documents)) for query in range(n_queries) for _ in range(2)])


def irrelevant_to_all(judged: np.ndarray, n_documents: int) -> np.ndarray:
    return np.setdiff1d(np.arange(n_documents), judged[:, 1])


def test_hedges_correction_by_its_gamma_functions_and_its_usual_approximation():
    assert hedges_correction(2) == pytest.approx(math.gamma(1) / (math.sqrt(1) * math.gamma(0.5)))
    for freedom in (10, 50, 1000):
        assert hedges_correction(freedom) == pytest.approx(1 - 3 / (4 * freedom - 1), abs=0.05 / freedom**2)
    assert hedges_correction(1e6) == pytest.approx(1, abs=1e-6)


def test_hedges_correction_takes_the_bias_off():
    """The mean of d over many samples of 3 + 3 normal values with a true effect of 1."""
    values = np.random.default_rng(0).normal(size=(20_000, 2, 3)) + np.array([1.0, 0.0])[:, None]
    mean = np.mean([cohens_d(first, second) for first, second in values])
    assert mean > 1.15
    assert mean * hedges_correction(4) == pytest.approx(1, abs=0.03)


def test_the_effect_over_a_collection_is_cohens_d_whatever_shares_documents():
    lengths = np.random.default_rng(0).uniform(3, 7, 60)
    judged = judgements(30, 40, seed=1)
    assert len(np.unique(judged[:, 1])) < len(judged)  # some are shared, or the weights would not be tested
    irrelevant = irrelevant_to_all(judged, 60)
    found = collection_effect(lengths, judged, irrelevant)
    relevant = np.unique(judged[:, 1])
    assert found.value == cohens_d(lengths[relevant], lengths[irrelevant])
    assert found.hedges_g == pytest.approx(found.value * hedges_correction(58))
    assert (found.n_queries, found.n_relevant, found.n_irrelevant) == (30, len(relevant), len(irrelevant))
    assert found.low < found.value < found.high


def test_moments_give_cohens_d():
    first, second = np.random.default_rng(0).normal(5, 1, (2, 30))
    sums = [_moments(group).sum(0) for group in (first, second)]
    assert _d_of_moments(*sums) == pytest.approx(cohens_d(first, second), rel=1e-9)


def test_the_interval_over_a_collection_is_as_wide_as_samples_differ():
    def sample(seed: int):
        random = np.random.default_rng(seed)
        lengths = np.concatenate([random.normal(5.5, 1, 40), random.normal(5, 1, 80)])
        judged = np.stack([np.arange(40), np.arange(40)], axis=1)
        return collection_effect(lengths, judged, np.arange(40, 120), seed=seed)

    found = [sample(seed) for seed in range(60)]
    claimed = np.mean([(one.high - one.low) / (2 * 1.96) for one in found])
    assert 0.8 < claimed / np.std([one.value for one in found], ddof=1) < 1.25
    assert np.mean([one.low < 0.5 < one.high for one in found]) >= 0.85


def test_many_irrelevant_documents_are_resampled_in_groups(monkeypatch):
    random = np.random.default_rng(0)
    lengths = np.concatenate([random.normal(5.5, 1, 40), random.normal(5, 1, 400)])
    judged = np.stack([np.arange(40), np.arange(40)], axis=1)
    plain = collection_effect(lengths, judged, np.arange(40, 440))
    monkeypatch.setattr(effect_size, "UNITS", 100)
    grouped = collection_effect(lengths, judged, np.arange(40, 440))
    assert grouped.value == plain.value
    assert (grouped.low, grouped.high) != (plain.low, plain.high)  # the other path was taken
    assert grouped.high - grouped.low == pytest.approx(plain.high - plain.low, rel=0.1)


def slow_candidate_effect(lengths, candidates, relevant):
    differences, squares, freedom = [], 0.0, 0
    for row, flags in zip(candidates, relevant, strict=True):
        groups = [[lengths[d] for d, f in zip(row, flags, strict=True) if d >= 0 and f == wanted] for wanted in (1, 0)]
        if all(groups):
            means = [sum(group) / len(group) for group in groups]
            differences.append(means[0] - means[1])
            squares += sum((x - mean) ** 2 for group, mean in zip(groups, means, strict=True) for x in group)
            freedom += len(groups[0]) + len(groups[1]) - 2
    return sum(differences) / len(differences) / math.sqrt(squares / freedom)


def candidates_of(seed: int, n_queries: int = 30) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    candidates = np.stack([random.permutation(50)[:8] for _ in range(n_queries)])
    candidates[random.random(candidates.shape) < 0.1] = -1
    return random.uniform(1, 9, 50), candidates, random.random(candidates.shape) < 0.3


@given(st.integers(0, 10**6))
def test_the_effect_among_candidates_equals_its_definition(seed):
    arguments = candidates_of(seed)
    found = candidate_effect(*arguments, resamples=20)
    assert found.value == pytest.approx(slow_candidate_effect(*arguments))
    assert found.hedges_g == pytest.approx(found.value, rel=0.02)


def test_the_effect_among_candidates_does_not_see_differences_between_queries():
    """Half of the queries have long candidates and mostly relevant ones; within a query nothing differs in the mean."""
    random = np.random.default_rng(0)
    lengths = np.concatenate([random.normal(10, 1, 200), random.normal(2, 1, 200)])
    candidates = np.arange(400).reshape(40, 10)
    relevant = np.zeros((40, 10), dtype=bool)
    relevant[:20, :8] = relevant[20:, :2] = True
    shuffled = np.take_along_axis(relevant, random.permuted(np.tile(np.arange(10), (40, 1)), axis=1), axis=1)
    assert cohens_d(lengths[candidates[shuffled]], lengths[candidates[~shuffled]]) > 1
    found = candidate_effect(lengths, candidates, shuffled)
    assert found.low < 0 < found.high
    assert abs(found.value) < 0.2
    planted = candidate_effect(lengths + 0.5 * np.isin(np.arange(400), candidates[shuffled]), candidates, shuffled)
    assert planted.value == pytest.approx(found.value + 0.5, abs=0.1)


@pytest.mark.parametrize(
    ("judged", "irrelevant", "note"),
    [
        (np.empty((0, 2), int), np.arange(30), "0 relevant documents"),
        (np.stack([np.arange(30), np.arange(30)], 1), np.empty(0, int), "0 irrelevant documents"),
        (np.stack([np.arange(30), np.zeros(30, int)], 1), np.arange(1, 30), "1 relevant document,"),
        (np.stack([np.arange(19), np.arange(19)], 1), np.arange(19, 30), "19 queries, at least 20 needed"),
    ],
)
def test_without_enough_data_there_is_a_note_and_no_number(judged, irrelevant, note):
    found = collection_effect(np.random.default_rng(0).uniform(1, 2, 30), judged, irrelevant)
    assert (found.value, found.hedges_g, found.low, found.high) == (None,) * 4
    assert note in found.note
    assert "not enough data" in found.note


def test_equal_lengths_give_a_note_and_no_number():
    judged = np.stack([np.arange(25), np.arange(25)], 1)
    assert (
        collection_effect(np.ones(60), judged, np.arange(25, 60)).note
        == "not defined: all lengths of a group are equal"
    )
    lengths, candidates, relevant = candidates_of(0)
    assert candidate_effect(np.ones_like(lengths), candidates, relevant).value is None


@pytest.mark.parametrize(
    ("keep", "note"),
    [
        (lambda relevant: relevant & False, "0 relevant documents"),
        (lambda relevant: relevant | True, "0 irrelevant documents"),
        (lambda relevant: relevant & (np.arange(30) < 12)[:, None], "queries, at least 20 needed"),
    ],
)
def test_candidates_without_both_kinds_give_a_note_and_no_number(keep, note):
    lengths, candidates, relevant = candidates_of(3)
    found = candidate_effect(lengths, candidates, keep(relevant))
    assert found.value is None
    assert note in found.note or "0 relevant" in found.note


def test_no_query_at_all_gives_a_note():
    nothing = np.empty((0, 5), dtype=np.int64)
    assert candidate_effect(np.ones(3), nothing, nothing.astype(bool)).value is None


def test_the_slope_on_text_length_comes_from_within_the_groups():
    """Longer texts make longer embeddings, and relevant ones are longer by 1 beyond that and longer as texts."""
    random = np.random.default_rng(0)
    relevant = np.arange(400) < 200
    texts = np.exp(random.normal(3, 0.5, 400) + relevant)
    lengths = 2.0 * np.log(texts) + relevant + random.normal(0, 0.1, 400)
    adjusted = without_text_length(lengths, texts, relevant)
    assert adjusted[relevant].mean() - adjusted[~relevant].mean() == pytest.approx(1, abs=0.05)
    assert adjusted.mean() == pytest.approx(lengths.mean())
    for group in (relevant, ~relevant):
        assert abs(text_length_correlation(adjusted[group], texts[group])) < 0.1
    raw = lengths[relevant].mean() - lengths[~relevant].mean()
    assert raw == pytest.approx(3, abs=0.2)  # what the text's length would have claimed


def test_texts_of_one_length_explain_nothing():
    lengths = np.array([1.0, 2.0, 4.0])
    np.testing.assert_array_equal(without_text_length(lengths, np.full(3, 7), np.array([True, False, True])), lengths)
    assert math.isnan(text_length_correlation(lengths, np.full(3, 7)))
    assert math.isnan(text_length_correlation(lengths[:1], np.array([7])))
    assert text_length_correlation(np.log([1.0, 3.0, 20.0]), np.array([1, 3, 20])) == pytest.approx(1)
