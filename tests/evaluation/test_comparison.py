from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

from offsphere.errors import RunError
from offsphere.evaluation import PRETRAINED, QueryValue, compare_similarities, paired_randomisation

NAMES = ("cosine", "dot", "qnorm", "dnorm", "learnable")
QUERIES = {"home": 40, "away": 60, "far": 90}


def table(rng, seeds=(0,), gains=None, seed_spread=0.0, queries=QUERIES, names=NAMES) -> list[QueryValue]:
    """Values whose queries differ in hardness, with the same noise for every similarity and a gain where given."""
    gains = gains or {}
    shifts = {(name, seed): rng.normal(0, seed_spread) for name in names for seed in seeds}
    rows = []
    for dataset, n in queries.items():
        hardness = rng.normal(0.5, 0.2, n)
        for name in names:
            values = hardness + rng.normal(0, 0.1, n) + gains.get((name, dataset), 0)
            for seed in seeds:
                noisy = values + rng.normal(0, 0.03, n) + shifts[name, seed]
                rows += [
                    QueryValue("m", name, seed, dataset, "nDCG@10", f"q{i:02d}", v)
                    for i, v in enumerate(noisy.tolist())
                ]
    return rows


def find(comparison, similarity, scope):
    (difference,) = [d for d in comparison.differences if (d.similarity, d.scope) == (similarity, scope)]
    return difference


def values_of(rows, similarity, dataset):
    return np.array([row.value for row in rows if (row.similarity, row.dataset) == (similarity, dataset)])


def test_a_planted_effect_out_of_domain_is_found_and_told():
    rows = table(np.random.default_rng(0), gains={("dnorm", "away"): 0.1, ("dnorm", "far"): 0.08})
    comparison = compare_similarities("m", rows, ["home", "trained on but not evaluated"])
    verdict = comparison.verdict
    assert (verdict.similarity, verdict.beats_cosine, verdict.scope) == ("dnorm", True, "out of domain")
    assert verdict.low < 0.09 < verdict.high and verdict.low > 0 and verdict.p_holm < 0.01
    assert (comparison.in_domain, comparison.out_of_domain) == (("home",), ("away", "far"))
    number = r"-?\d+\.\d"
    assert re.fullmatch(
        rf"dnorm; \+{number} nDCG@10 out of domain \[{number}, {number}\], p (= 0\.\d+|< 0\.001); in domain cosine is "
        rf"within noise \([+-]{number} \[{number}, {number}\]\); 150 queries, one seed: the interval covers the choice "
        "of queries only",
        verdict.sentence,
    )
    assert f"{100 * verdict.difference:+.1f} nDCG@10" in verdict.sentence


def test_numbers_equal_their_definitions():
    rows = table(np.random.default_rng(1))
    comparison = compare_similarities("m", rows, ["home"])
    away, cosine_away = values_of(rows, "dot", "away"), values_of(rows, "cosine", "away")
    far, cosine_far = values_of(rows, "dot", "far"), values_of(rows, "cosine", "far")
    macro = find(comparison, "dot", "out of domain")
    assert macro.value == pytest.approx((away.mean() + far.mean()) / 2)
    assert macro.baseline == pytest.approx((cosine_away.mean() + cosine_far.mean()) / 2)
    assert macro.difference == pytest.approx(macro.value - macro.baseline)
    assert (macro.n_queries, macro.n_seeds) == (150, 1)
    weights = np.repeat([1 / 60, 1 / 90], [60, 90])
    expected = paired_randomisation(np.r_[away, far] * weights, np.r_[cosine_away, cosine_far] * weights)
    assert macro.p == expected
    assert find(comparison, "dot", "away").p == paired_randomisation(away, cosine_away)
    assert {d.scope for d in comparison.differences} == {"in domain", "out of domain", "all", *QUERIES}
    assert comparison.means["cosine"]["far"] == (pytest.approx(cosine_far.mean()), None)


def test_correction_covers_the_similarities_of_a_scope_and_all_datasets_together():
    comparison = compare_similarities("m", table(np.random.default_rng(2)), ["home"])
    smallest = min((d for d in comparison.differences if d.scope == "all"), key=lambda d: d.p)
    assert smallest.p_holm == pytest.approx(min(1, 4 * smallest.p))
    of_datasets = min((d for d in comparison.differences if d.scope in QUERIES), key=lambda d: d.p)
    assert of_datasets.p_holm == pytest.approx(min(1, 12 * of_datasets.p))


def test_means_and_deviations_over_seeds():
    rows = table(np.random.default_rng(3), seeds=(0, 42, 1337), seed_spread=0.05)
    comparison = compare_similarities("m", rows, ["home"])
    of_seeds = [
        np.mean(
            [np.mean([r.value for r in rows if (r.similarity, r.dataset, r.seed) == ("dot", d, s)]) for d in QUERIES]
        )
        for s in (0, 42, 1337)
    ]
    mean, deviation = comparison.means["dot"]["all"]
    assert mean == pytest.approx(np.mean(of_seeds)) and deviation == pytest.approx(np.std(of_seeds, ddof=1))
    assert comparison.verdict.sentence.endswith("; 150 queries, 3 seeds")


@pytest.mark.parametrize(
    ("seeds", "seed_spread"), [((0,), 0.0), ((0, 1, 2), 0.0), ((0, 1, 2), 0.03), ((0, 1), 0.03)], ids=str
)
def test_false_verdicts_under_the_null_are_rare(seeds, seed_spread):
    rng = np.random.default_rng(0)
    queries = {"home": 20, "away": 30, "far": 40}
    wrong = sum(
        compare_similarities(
            "m", table(rng, seeds, seed_spread=seed_spread, queries=queries), ["home"]
        ).verdict.beats_cosine
        for _ in range(150)
    )
    assert wrong / 150 <= 0.07


def test_one_lucky_seed_does_not_win():
    """Queries alone would call this sure: the same gain on every query, but in one of two trainings only."""
    rows = table(np.random.default_rng(4), seeds=(0, 1))
    lucky = [r._replace(value=r.value + 0.2) if (r.similarity, r.seed) == ("dot", 1) else r for r in rows]
    assert not compare_similarities("m", lucky, ["home"]).verdict.beats_cosine
    both = [r._replace(value=r.value + 0.2) if r.similarity == "dot" else r for r in rows]
    assert compare_similarities("m", both, ["home"]).verdict.similarity == "dot"


def test_honest_when_nothing_beats_cosine():
    rows = table(np.random.default_rng(5), gains={(n, d): -0.2 for n in NAMES[1:] for d in QUERIES})
    verdict = compare_similarities("m", rows, ["home"]).verdict
    assert (verdict.similarity, verdict.beats_cosine) == ("cosine", False)
    assert re.match(
        r"cosine; nothing beats it beyond noise: the closest is \w+, -\d+\.\d nDCG@10 out of domain \[-",
        verdict.sentence,
    )


@pytest.mark.parametrize(
    ("gain", "words"), [(0.1, "in domain it also beats cosine (+"), (-0.1, "in domain it loses to cosine (-")]
)
def test_the_sentence_tells_what_happens_in_domain(gain, words):
    gains = {("dnorm", "away"): 0.1, ("dnorm", "far"): 0.1, ("dnorm", "home"): gain}
    assert words in compare_similarities("m", table(np.random.default_rng(6), gains=gains), ["home"]).verdict.sentence


def test_without_out_of_domain_the_decision_is_in_domain():
    rows = table(np.random.default_rng(7), gains={("qnorm", "home"): 0.1}, queries={"home": 80})
    comparison = compare_similarities("m", rows, ["home"])
    assert (comparison.verdict.similarity, comparison.verdict.scope) == ("qnorm", "in domain")
    assert comparison.verdict.sentence.count("in domain") == 1
    assert {d.scope for d in comparison.differences} == {"in domain", "home"}


def test_equal_values_and_one_query_do_not_crash():
    rows = table(np.random.default_rng(8), queries={"home": 1, "away": 1, "far": 30}, seeds=(0, 1))
    same = [row._replace(value=0.5) for row in rows]
    for case in (rows, same):
        comparison = compare_similarities("m", case, ["home"])
        json.dumps(comparison.to_dict(), allow_nan=False)
        assert not comparison.verdict.beats_cosine
    assert find(comparison, "dot", "all").p == 1
    assert "+0.0 nDCG@10 out of domain [0.0, 0.0], p = 1.00" in comparison.verdict.sentence


def test_cosine_alone():
    comparison = compare_similarities("m", table(np.random.default_rng(9), names=("cosine",)), ["home"])
    assert comparison.differences == () and "no other similarity was trained" in comparison.verdict.sentence
    json.dumps(comparison.to_dict(), allow_nan=False)


def test_same_input_same_output_whatever_the_order_of_rows():
    rows = table(np.random.default_rng(10), seeds=(0, 1))
    first = compare_similarities("m", rows, ["home"])
    assert first == compare_similarities("m", rows, ["home"])
    for name in NAMES[1:]:  # rows of one similarity after those of the others, its queries from last to first
        moved = [r for r in rows if r.similarity != name] + [r for r in rows if r.similarity == name][::-1]
        other = compare_similarities("m", moved, ["home"])
        assert other.verdict.similarity == first.verdict.similarity
        for difference in first.differences:
            again = dataclasses.astuple(find(other, difference.similarity, difference.scope))
            assert again[2:] == pytest.approx(dataclasses.astuple(difference)[2:])
    assert json.loads(json.dumps(first.to_dict()))["verdict"] == dataclasses.asdict(first.verdict)


def test_other_models_other_measures_and_the_pretrained_encoder_take_no_part():
    rows = table(np.random.default_rng(11))
    others = [
        change
        for row in rows
        for change in (
            row._replace(model="other", value=9.0),
            row._replace(measure="R@100", value=9.0),
            row._replace(similarity=PRETRAINED, seed=None, value=9.0),
        )
    ]
    assert compare_similarities("m", rows + others, ["home"]) == compare_similarities("m", rows, ["home"])


def without(rows, **fields):
    return [row for row in rows if any(getattr(row, name) != value for name, value in fields.items())]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({"similarity": "cosine"}, r"no nDCG@10 values of m for cosine.*found only dot, qnorm"),
        ({"similarity": "dot", "dataset": "far", "query_id": "q07", "seed": 0}, r"far: dot .* 89 .* on 90.*'q07'"),
        ({"similarity": "cosine", "dataset": "away", "query_id": "q07"}, r"away: dot .* 60 .* cosine on 59.*'q07'"),
        ({"similarity": "dot", "dataset": "far"}, r"cosine was evaluated on home, away, far, dot on home, away"),
        ({"similarity": "dot", "seed": 1}, r"home: dot has the seeds 0, cosine has 0, 1"),
        ({"similarity": "cosine", "dataset": "far", "seed": 1}, r"far: cosine has the seeds 0, cosine has 0, 1"),
        ({"model": "m"}, r"found none"),
    ],
)  # fmt: skip
def test_what_does_not_match_is_refused(missing, message):
    with pytest.raises(RunError, match=message):
        compare_similarities("m", without(table(np.random.default_rng(12), seeds=(0, 1)), **missing), ["home"])


def test_a_dataset_with_the_name_of_a_scope_is_refused():
    with pytest.raises(RunError, match="a dataset is named 'all'"):
        compare_similarities("m", table(np.random.default_rng(13), queries={"all": 5, "far": 5}), ["far"])
