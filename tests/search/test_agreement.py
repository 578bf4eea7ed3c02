"""Agreement of rankings: exact where nothing differs, and the measure that a destination ranks by is recognised."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offsphere.search.agreement import answer, order_causes, rank_agreement, score_causes
from offsphere.search.stores.store import Found
from offsphere.similarity import Similarity, norms

K = 10


@pytest.fixture(scope="module")
def world():
    random = np.random.default_rng(0)
    documents = (random.normal(size=(200, 16)) * random.lognormal(0, 0.6, (200, 1))).astype(np.float32)
    queries = random.normal(size=(20, 16)).astype(np.float32)
    return queries, documents


def answers_by(world, measure, transform=lambda score: score):
    """Answers of a destination that ranks by a measure and reports a transform of the inner product."""
    queries, documents = world
    rows = {str(row): row for row in range(len(documents))}
    found, stored = [], []
    for query in queries:
        best = np.argsort(-measure(query, documents), kind="stable")[:K]
        scores = documents[best].astype(np.float64) @ query.astype(np.float64)
        live = [Found(str(row), transform(score)) for row, score in zip(best, scores, strict=True)]
        least = np.sort(documents.astype(np.float64) @ query.astype(np.float64))[-K]
        found.append(answer(live, query, rows, documents, float(least), K))
        stored.append(documents[best])
    return found, stored


def inner(query, documents):
    return documents @ query


def cosine(query, documents):
    return Similarity.parse("cosine").scores(query[None], documents)[0]


def l2(query, documents):
    return -norms(documents - query)


def test_the_exact_ranking_agrees_in_everything(world):
    found, stored = answers_by(world, inner)
    assert [one.overlap for one in found] == [1.0] * 20
    assert [one.tau for one in found] == pytest.approx([1.0] * 20)
    assert all(one.same_scores.all() for one in found)
    assert order_causes(world[0], stored, "ip") == [] and score_causes(found) == []


@pytest.mark.parametrize(("measure", "name"), [(cosine, "cosine"), (l2, "l2")])
def test_a_measure_that_the_destination_does_not_name_is_recognised(world, measure, name):
    found, stored = answers_by(world, measure)
    assert np.mean([one.overlap for one in found]) < 0.9
    (cause,) = order_causes(world[0], stored, "ip")
    assert cause.name == "metric" and f"says ip and ranks by {name}" in cause.sentence


def test_a_metric_that_it_does_name(world):
    _, stored = answers_by(world, cosine)
    (cause,) = order_causes(world[0], stored, "cosine")
    assert cause.name == "metric" and cause.sentence.startswith("the collection compares by cosine, expected ip")


def test_worst_first(world):
    found, stored = answers_by(world, lambda query, documents: -inner(query, documents))
    assert max(one.overlap for one in found) == 0 and [one.tau for one in found] == pytest.approx([-1.0] * 20)
    (cause,) = order_causes(world[0], stored, "ip")
    assert cause.name == "reversed"


@pytest.mark.parametrize(
    ("transform", "says"), [(lambda score: -score, "negative"), (lambda score: 1 - score, "1 minus")]
)
def test_a_distance_in_place_of_a_score(world, transform, says):
    found, _ = answers_by(world, inner, transform)
    (cause,) = score_causes(found)
    assert cause.name == "scores" and says in cause.sentence


def test_ties_are_right_in_any_order():
    documents = np.ones((30, 4), dtype=np.float32)
    rows = {str(row): row for row in range(30)}
    found = answer([Found(str(row), 4.0) for row in (29, 3, 17)], documents[0], rows, documents, 4.0, 3)
    assert (found.overlap, found.tau) == (1.0, 1.0) and found.same_scores.all()


def test_a_document_twice_and_one_that_nobody_knows_take_no_place():
    documents = np.diag([4.0, 3.0, 2.0]).astype(np.float32)
    rows = {str(row): row for row in range(3)}
    query = np.ones(3, dtype=np.float32)
    found = answer([Found("0", 4), Found("0", 4), Found("x", 9)], query, rows, documents, 3.0, 2)
    assert found.overlap == 0.5 and list(found.same_scores) == [True]


def test_too_few_documents_are_missed():
    documents = np.eye(3, dtype=np.float32)
    found = answer([], documents[0], {}, documents, 0.0, 3)
    assert found.overlap == 0.0 and np.isnan(found.tau) and len(found.same_scores) == 0


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12, unique=True))
def test_rank_agreement_is_kendalls_tau(scores):
    concordant = [
        np.sign(scores[i] - scores[j]) for i in range(len(scores)) for j in range(i + 1, len(scores))
    ]  # one pair of positions each; no ties
    assert rank_agreement(np.array(scores), 0.0) == pytest.approx(np.mean(concordant))


@given(st.permutations(range(6)))
def test_scores_within_a_tie_may_come_in_any_order(order):
    scores = np.array([3.0, 2.0, 1.0])[np.array(order) // 2]
    expected = 1.0 if list(scores) == sorted(scores, reverse=True) else None
    value = rank_agreement(scores, 1e-6)
    assert value == pytest.approx(1.0) if expected else value < 1.0
