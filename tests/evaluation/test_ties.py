from __future__ import annotations

from collections import Counter
from itertools import permutations
from statistics import fmean

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from offsphere.errors import ConfigError
from offsphere.evaluation import per_query
from offsphere.evaluation.ties import average_ties

NAMES = [
    "nDCG@3",
    "nDCG",
    "P@2",
    "R@2",
    "RR",
    "RR@2",
    "AP",
    "AP@3",
    "Success@2",
    "P(rel=2)@3",
    "AP(rel=2)",
    "RR(rel=2)",
]
DOCUMENTS = [f"d{i}" for i in range(5)]
scores = st.dictionaries(st.sampled_from(DOCUMENTS), st.sampled_from([0.0, 1.0, 2.0]), min_size=1)
grades = st.dictionaries(st.sampled_from([*DOCUMENTS, "never found"]), st.integers(0, 3), min_size=1)


def averages(run, qrels, measure):
    return average_ties(run, qrels, measure, per_query(run, qrels, [measure])[measure])


def over_all_names(scores, grades, measure):
    """The mean of trec_eval's value over every way to name the documents, which is what orders those that tie."""
    found = []
    for order in permutations(scores):
        names = {document: f"{place}" for place, document in enumerate(order)}
        run = {"q": {names[document]: score for document, score in scores.items()}}
        qrels = {"q": {names.get(document, document): grade for document, grade in grades.items()}}
        found += per_query(run, qrels, [measure])[measure].values()
    return fmean(found)


@given(scores, grades, st.sampled_from(NAMES))
@settings(max_examples=40)
def test_is_the_mean_over_all_names(scores, grades, measure):
    assume(any(grades.values()))
    averaged = averages({"q": scores}, {"q": grades}, measure)
    assert averaged.values == {"q": pytest.approx(over_all_names(scores, grades, measure), abs=1e-12)}


def test_renaming_a_document_changes_the_measure_and_not_the_average():
    """T-G1."""
    before = {"q": {"a": 1.0, "b": 1.0, "c": 0.5}}
    after = {"q": {"z": 1.0, "b": 1.0, "c": 0.5}}
    values = [
        per_query(run, {"q": {best: 1}}, ["nDCG@10"])["nDCG@10"]["q"] for run, best in ((before, "a"), (after, "z"))
    ]
    assert values == [pytest.approx(0.6309, abs=1e-4), 1.0]
    averaged = [averages(run, {"q": {best: 1}}, "nDCG@10").values["q"] for run, best in ((before, "a"), (after, "z"))]
    assert averaged == [pytest.approx(fmean(values))] * 2


@pytest.mark.parametrize("measure", NAMES)
def test_without_ties_it_is_the_measure(measure):
    run = {"q": {"a": 3.0, "b": 2.0, "c": 1.0}, "p": {"a": 1.0}}
    qrels = {"q": {"b": 2, "c": 1, "d": 3}, "p": {"b": 1}, "unanswered": {"a": 1}}
    averaged = averages(run, qrels, measure)
    assert averaged.values == per_query(run, qrels, [measure])[measure]
    assert averaged.queries == frozenset()


def test_only_ties_that_the_measure_sees_count():
    run = {"q": {"a": 3.0, "b": 2.0, "c": 2.0, "d": 1.0}}
    for measure, tied in (("P@1", set()), ("P@2", {"q"}), ("P@4", {"q"}), ("AP", {"q"})):
        assert averages(run, {"q": {"b": 1}}, measure).queries == tied


def test_scores_tie_as_in_float32():
    assert averages({"q": {"a": 1.0, "b": 1.0 + 1e-9}}, {"q": {"a": 1}}, "RR").values == {"q": 0.75}
    assert averages({"q": {"a": 1.0, "b": 1.0 + 1e-6}}, {"q": {"a": 1}}, "RR").values == {"q": 0.5}


@given(scores, st.sampled_from(DOCUMENTS))
@settings(max_examples=40)
def test_with_one_relevant_document_ap_is_rr(scores, relevant):
    """T-G2: in trec_eval's order and on average, because both see one ranking."""
    run, qrels = {"q": scores}, {"q": {relevant: 1}}
    values = per_query(run, qrels, ["AP", "RR"])
    assert values["AP"] == values["RR"]
    average = averages(run, qrels, "AP").values
    assert average == {"q": pytest.approx(averages(run, qrels, "RR").values["q"], abs=1e-12)}


def test_long_ties():
    """The average over 400 tied documents of which 2 are relevant: 401 / 3 is the mean place of the first."""
    run = {"q": dict.fromkeys(map(str, range(400)), 1.0)}
    qrels = {"q": {"17": 1, "230": 1}}
    assert averages(run, qrels, "P@10").values["q"] == pytest.approx(2 / 400)
    assert averages(run, qrels, "Success@10").values["q"] == pytest.approx(1 - 390 * 389 / (400 * 399))
    assert 3 / 401 < averages(run, qrels, "RR").values["q"] < 1


def test_a_measure_without_a_form_still_tells_of_ties():
    averaged = averages({"q": {"a": 1.0, "b": 1.0}}, {"q": {"a": 1}}, "Bpref")
    assert averaged.values is None and averaged.queries == {"q"}
    run, qrels = {"q": {"a": 1.0}}, {"q": {"a": 1}}
    assert average_ties(run, qrels, "nDCG(dcg='exp-log2')@10", {"q": 1.0}).values is None


def test_unknown_measure():
    with pytest.raises(ConfigError, match="did you mean nDCG@10"):
        average_ties({}, {}, "nDGC@10", {})


def test_the_sample_of_measures_is_no_accident():
    assert Counter(name.partition("@")[0].partition("(")[0] for name in NAMES).keys() == {
        "nDCG", "P", "R", "RR", "AP", "Success",
    }  # fmt: skip
