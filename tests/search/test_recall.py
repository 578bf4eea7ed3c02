from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy import stats

from offsphere.search.exact import ExactSearch
from offsphere.search.recall import Choice, Measured, Trial, fewest_queries, lower_bound
from offsphere.similarity import norms


@pytest.mark.parametrize("queries", [10, 60, 500])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_lower_bound_is_that_of_wilson(queries, share):
    hits = round(share * queries)
    expected = stats.binomtest(hits, queries).proportion_ci(0.9, method="wilson").low
    assert lower_bound(hits / queries, queries) == pytest.approx(expected, abs=1e-5)


def test_the_lower_bound_holds_for_recalls():
    """True mean 0.95: most queries answered in full, a few not at all; 5 % of bounds may lie above."""
    random = np.random.default_rng(0)
    drawn = random.choice([1.0, 0.9, 0.5, 0.0], p=[0.85, 0.1, 0.02, 0.03], size=(4000, 250))
    above = np.mean([lower_bound(float(mean), 250) > 0.95 for mean in drawn.mean(axis=1)])
    assert 0.0 < above <= 0.05


@pytest.mark.parametrize("recall", [0.8, 0.95, 0.99])
def test_the_fewest_queries_that_can_prove_a_recall(recall):
    fewest = fewest_queries(recall)
    assert lower_bound(1.0, int(fewest)) >= recall
    assert fewest == 10 or lower_bound(1.0, int(fewest) - 1) < recall


def test_no_number_of_queries_proves_certainty():
    assert math.isinf(fewest_queries(1.0)) and fewest_queries(0.1) == 10


@pytest.fixture
def trial():
    random = np.random.default_rng(1)
    documents = (random.normal(size=(300, 6)) * np.exp(random.normal(0, 0.5, (300, 1)))).astype(np.float32)
    return documents, Trial(documents, random.normal(size=(41, 6)).astype(np.float32), 5)


def without(documents: np.ndarray, lost: np.ndarray):
    """Exact search that cannot see some rows."""
    seen = np.setdiff1d(np.arange(len(documents)), lost)
    search = ExactSearch(np.ascontiguousarray(documents[seen])).search

    def find(queries: np.ndarray, k: int):
        rows, scores = search(queries, k)
        return seen[rows], scores

    return find


def test_recall_is_the_share_of_right_answers(trial):
    documents, trial = trial
    lost = np.arange(0, 300, 3)
    measured = trial.measure("some", 16, without(documents, lost))
    shares = []
    for query in trial.queries.astype(np.float64):
        right = np.argsort(-(documents.astype(np.float64) @ query))[:5]
        shares.append(np.mean([row % 3 > 0 for row in right]))
    assert measured.recall == pytest.approx(np.mean(shares[:21])) and measured.recall < 0.9
    assert measured.held_out == pytest.approx(np.mean(shares[21:]))
    assert measured.bound == lower_bound(measured.recall, 21)
    assert measured.held_out_bound == lower_bound(measured.held_out, 20)
    assert measured.queries_per_second > 0 and measured.documents == 300
    assert np.mean(measured.deciles) == pytest.approx(np.mean(shares), abs=0.02)


def test_exact_search_misses_nothing(trial):
    documents, trial = trial
    measured = trial.measure("exact", None, ExactSearch(documents).search)
    assert measured.recall == measured.held_out == 1.0 and measured.deciles == (1.0,) * 10


def test_deciles_tell_the_long_answers_from_the_short_ones(trial):
    documents, trial = trial
    long = np.flatnonzero(norms(documents) > trial.decile_norms[8])
    deciles = trial.measure("some", 16, without(documents, long)).deciles
    assert deciles[:9] == (1.0,) * 9 and deciles[9] < 0.3  # answers as long as the boundary are in both
    assert list(trial.decile_norms) == sorted(trial.decile_norms)


def test_a_document_that_ties_with_the_last_answer_is_as_right():
    documents = np.tile(np.eye(2, dtype=np.float32), (6, 1))
    queries = np.random.default_rng(2).uniform(1, 2, (12, 2)).astype(np.float32)
    trial = Trial(documents, queries, 3)
    shown = trial.measure("some", 16, without(documents, np.array([0, 1, 2, 3])))
    assert shown.recall == shown.held_out == 1.0 and shown.deciles == (1.0,) * 10
    hidden = trial.measure("some", 16, without(documents, np.arange(0, 12, 2)))
    assert hidden.recall < 1.0


def test_rows_and_choices_survive_json():
    row = Measured("direction", 64, 100, 0.96, 0.97, 0.951, 0.952, (0.5,) * 10, 123.0)
    for kept in (None, row):
        choice = Choice(0.95, 10, 200, "queries", (row, row), (1.0, 2.0), kept, kept, "since")
        assert Choice.from_dict(json.loads(json.dumps(choice.to_dict()))) == choice
