from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from offsphere.evaluation import bootstrap_difference, holm, paired_randomisation, paired_t


def permutation_p(a, b, resamples=np.inf):
    return stats.permutation_test(
        (a, b),
        lambda x, y, axis: (x - y).mean(axis),
        permutation_type="samples",
        n_resamples=resamples,
        vectorized=True,
        rng=0,
    ).pvalue


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_randomisation_is_exact_on_few_queries(n):
    rng = np.random.default_rng(n)
    a, b = rng.random(n) + 0.2, rng.random(n)
    swaps = np.array(np.meshgrid(*[[1, -1]] * n)).reshape(n, -1)
    as_far = np.abs((a - b) @ swaps) >= np.abs((a - b).sum()) - 1e-12
    assert paired_randomisation(a, b) == as_far.mean()
    if n > 1:  # SciPy wants two
        assert paired_randomisation(a, b) == pytest.approx(permutation_p(a, b))


@pytest.mark.parametrize("shift", [0.0, 0.03, 0.08])
def test_randomisation_agrees_with_scipy_on_many_queries(shift):
    rng = np.random.default_rng(0)
    a, b = rng.random(200) + shift, rng.random(200)
    expected = permutation_p(a, b, 20_000)
    assert paired_randomisation(a, b, resamples=20_000) == pytest.approx(expected, abs=0.012)


def test_randomisation_counts_equal_sums_as_equal():
    """Reciprocal ranks tie all the time; sums such as 0.1 + 0.2 and 0.3 must count as the same distance."""
    values = np.array([0.1, 0.2, 0.3, 1 / 3, 0.5, 1.0] * 4)
    a, b = np.roll(values, 1), values
    differences = np.rint((a - b) * 30).astype(int)  # exact in thirtieths
    rng = np.random.default_rng(0)
    coins = np.unpackbits(np.frombuffer(rng.bytes(3 * 10_000), np.uint8).reshape(-1, 3), axis=1)
    as_far = np.abs(differences @ (1 - 2 * coins.T.astype(int))) >= abs(differences.sum())
    assert paired_randomisation(a, b) == (as_far.sum() + 1) / 10_001


@given(st.integers(1, 30), st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_randomisation_never_gives_zero_and_treats_both_sides_alike(n, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 3, (2, n)) / 2
    p = paired_randomisation(a, b, resamples=200)
    assert 0 < p <= 1
    assert p == paired_randomisation(b, a, resamples=200) == paired_randomisation(a * 7, b * 7, resamples=200)
    assert paired_randomisation(a, a, resamples=200) == 1


def test_a_batch_equals_one_by_one_for_any_block():
    rng = np.random.default_rng(0)
    a, b = rng.random((3, 60)), rng.random(60)
    together = paired_randomisation(a, b)
    assert together.tolist() == [paired_randomisation(row, b) for row in a]
    assert together.tolist() != paired_randomisation(a, b, seed=1).tolist()


def test_a_single_seed_is_the_textbook_t_test():
    rng = np.random.default_rng(0)
    a, b = rng.random((4, 1, 50)) + 0.05, rng.random((1, 50))
    expected = [stats.ttest_rel(row[0], b[0]).pvalue for row in a]
    np.testing.assert_allclose(paired_t([a], [b]), expected)


def test_t_over_queries_and_seeds_by_hand():
    """T-F4, seeds as a factor: two datasets and three seeds, following the definitions step by step."""
    rng = np.random.default_rng(1)
    variant, baseline = [rng.random((3, 20)) + 0.1, rng.random((3, 30))], [rng.random((3, 20)), rng.random((3, 30))]
    differences = [v - b for v, b in zip(variant, baseline, strict=True)]
    queries = [np.var([d[:, q].mean() for q in range(d.shape[1])], ddof=1) / d.shape[1] / 4 for d in differences]
    macro = [np.mean([d[s].mean() for d in differences]) for s in range(3)]
    seeds = np.var(macro, ddof=1) / 3
    variance = sum(queries) + seeds
    freedom = variance**2 / (queries[0] ** 2 / 19 + queries[1] ** 2 / 29 + seeds**2 / 2)
    expected = 2 * stats.t.sf(abs(np.mean(macro)) / np.sqrt(variance), freedom)
    assert paired_t(variant, baseline) == pytest.approx(expected)


def test_seeds_that_agree_by_chance_borrow_the_spread_of_the_other_variants():
    rng = np.random.default_rng(2)
    baseline = rng.random((2, 200))
    steady = baseline + 0.02 + rng.normal(0, 0.001, (2, 200))
    wild = baseline + np.array([[0.2], [-0.2]])
    alone, with_wild = paired_t([steady[None]], [baseline])[0], paired_t([np.stack([steady, wild])], [baseline])[0]
    assert alone < 0.01 < 0.3 < with_wild


def test_t_without_variance():
    same = np.full((1, 5), 0.5)
    assert paired_t([same], [same]) == 1
    assert paired_t([same + 0.1], [same]) == 0
    assert paired_t([same[:, :1] + 0.1], [same[:, :1]]) == 1  # one query


def test_interval_agrees_with_scipy_on_one_seed():
    rng = np.random.default_rng(0)
    variant, baseline = rng.random((1, 300)) + 0.05, rng.random((1, 300))
    low, high = bootstrap_difference([variant], [baseline], resamples=20_000)
    expected = stats.bootstrap(
        ((variant - baseline)[0],), np.mean, n_resamples=20_000, method="percentile", rng=0
    ).confidence_interval
    np.testing.assert_allclose([low, high], expected, atol=0.002)


def test_interval_by_an_explicit_loop():
    """The same draws, one resample at a time: queries per dataset, one set of S - 1 seeds for all datasets."""
    rng = np.random.default_rng(0)
    variant = [rng.random((3, 11)), rng.random((3, 17))]
    baseline = [rng.random((3, 11)), rng.random((3, 17))]
    again = np.random.default_rng(5)
    seeds = again.integers(0, 3, (400, 2))
    queries = [again.integers(0, n, (400, n)) for n in (11, 17)]
    means = [
        np.mean(
            [
                np.mean([[(v - b)[s, q] for q in drawn[i]] for s in seeds[i]])
                for v, b, drawn in zip(variant, baseline, queries, strict=True)
            ]
        )
        for i in range(400)
    ]
    found = bootstrap_difference(variant, baseline, resamples=400, seed=5)
    np.testing.assert_allclose(found, np.quantile(means, [0.025, 0.975]))


def test_interval_widens_with_the_spread_of_seeds():
    rng = np.random.default_rng(0)
    queries = rng.normal(0, 0.1, 400)
    steady, wild = np.stack([queries] * 3), queries + np.array([[-0.1], [0.0], [0.1]])
    widths = [np.subtract(*bootstrap_difference([v], [np.zeros((3, 400))])[::-1]) for v in (steady, wild)]
    assert widths[1] > 5 * widths[0]


def test_variance_over_seeds_is_unbiased():
    values = np.array([[-1.0], [0.0], [1.0]]) * np.ones((3, 4))
    low, high = bootstrap_difference([values], [np.zeros((3, 4))], resamples=50_000, confidence=0.6)
    assert (low, high) == (-0.5, 0.5)  # two of three drawn: -1 1/9, -.5 2/9, 0 3/9, .5 2/9, 1 1/9


def test_interval_covers_the_truth():
    rng = np.random.default_rng(0)
    covered = 0
    for i in range(300):
        truth = [rng.normal(0.1, 0.3, (2, 40)), rng.normal(0.0, 0.3, (2, 60))]
        low, high = bootstrap_difference(truth, [np.zeros_like(t) for t in truth], resamples=500, seed=i)
        covered += low <= 0.05 <= high
    assert 0.91 <= covered / 300 <= 0.995


def test_interval_of_a_batch_equals_one_by_one():
    rng = np.random.default_rng(0)
    variants, baseline = rng.random((4, 2, 30)), rng.random((2, 30))
    together = np.array(bootstrap_difference([variants], [baseline]))
    alone = np.array([bootstrap_difference([variant], [baseline]) for variant in variants]).T
    np.testing.assert_allclose(together, alone)


def test_six_datasets_three_seeds_four_variants_are_quick():
    rng = np.random.default_rng(0)
    variants, baseline = [rng.random((4, 3, 1355)) for _ in range(6)], [rng.random((3, 1355)) for _ in range(6)]
    start = time.process_time()
    bootstrap_difference(variants, baseline)
    assert time.process_time() - start < 3  # 0.3 s when nothing else runs


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []
    assert holm([0.02]) == [0.02]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_keeps_the_order_and_lies_between_no_correction_and_bonferroni(p_values):
    adjusted = holm(p_values)
    for p, corrected in zip(p_values, adjusted, strict=True):
        assert p <= corrected <= min(1.0, len(p_values) * p) or corrected == max(
            a for a, q in zip(adjusted, p_values, strict=True) if q <= p
        )
    order = np.argsort(p_values, kind="stable")
    assert (np.diff(np.array(adjusted)[order]) >= 0).all()
