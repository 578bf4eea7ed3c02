from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offsphere.data import Collection
from offsphere.diagnosis import gamma_curve as module
from offsphere.diagnosis.gamma_curve import gamma_curve
from offsphere.evaluation import EmbeddedCollection, per_query, rank
from offsphere.similarity import Similarity

GAMMAS = np.linspace(-0.5, 1.5, 9)


def made(seed: int, n_queries: int = 7, n_documents: int = 60, **settings) -> EmbeddedCollection:
    """Lengths over three orders of magnitude, coarse values that tie, zero vectors, several grades."""
    random = np.random.default_rng(seed)
    documents = random.integers(-2, 3, (n_documents, 3)) * 10.0 ** random.uniform(-1, 2, (n_documents, 1))
    documents[: n_documents // 3] = np.round(documents[: n_documents // 3])
    ids = [f"d{i}" for i in random.permutation(n_documents)]
    qrels = {
        f"q{i}": {ids[d]: int(random.integers(-1, 4)) for d in random.choice(n_documents, 12)} for i in range(n_queries)
    }
    for grades in qrels.values():
        grades[ids[0]] = 1
    collection = Collection("made", "test", dict.fromkeys(ids, "text"), dict.fromkeys(qrels, "text"), qrels, **settings)
    queries = random.normal(size=(n_queries, 3))
    return EmbeddedCollection(collection, queries.astype(np.float32), documents.astype(np.float32))


def slow_curve(embedded: EmbeddedCollection, gammas: np.ndarray, k: int = 10) -> np.ndarray:
    """Ranked and measured by the evaluation itself, gamma by gamma."""
    measure, qrels = f"nDCG@{k}", embedded.collection.qrels
    columns = [per_query(rank(embedded, Similarity(1.0, g), k).run(), qrels, (measure,))[measure] for g in gammas]
    return np.array([[column[query] for column in columns] for query in embedded.collection.queries])


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_equals_ranking_and_measuring_every_gamma(seed):
    embedded = made(seed)
    np.testing.assert_allclose(gamma_curve(embedded, GAMMAS), slow_curve(embedded, GAMMAS), rtol=0, atol=1e-12)


def test_the_curve_depends_on_gamma_here():
    curve = gamma_curve(made(0, n_queries=30), GAMMAS)
    assert np.ptp(curve, axis=1).mean() > 0.05  # or agreement above would show nothing


@pytest.mark.parametrize("k", [1, 5, 100])
def test_any_depth(k):
    embedded = made(1)
    np.testing.assert_allclose(gamma_curve(embedded, GAMMAS, k=k), slow_curve(embedded, GAMMAS, k), rtol=0, atol=1e-12)


def test_exclusions_are_those_of_the_ranking():
    plain = made(2)
    best = rank(plain, Similarity(1.0, 0.0), 3).run()
    excluded = {query: frozenset(documents) for query, documents in best.items()}
    for settings_ in ({"excluded": excluded}, {"exclude_self": True}):
        embedded = made(2, **settings_)
        np.testing.assert_allclose(gamma_curve(embedded, GAMMAS), slow_curve(embedded, GAMMAS), rtol=0, atol=1e-12)
    assert (gamma_curve(made(2, excluded=excluded), GAMMAS) != gamma_curve(plain, GAMMAS)).any()


@pytest.mark.parametrize("n_documents", [1, 4, 12])
def test_few_documents(n_documents):
    embedded = made(3, n_documents=n_documents)
    np.testing.assert_allclose(gamma_curve(embedded, GAMMAS), slow_curve(embedded, GAMMAS), rtol=0, atol=1e-12)


def test_blocks_of_queries_change_nothing_and_progress_ends_at_their_number(monkeypatch):
    embedded = made(4, n_queries=11)
    whole = gamma_curve(embedded, GAMMAS)
    monkeypatch.setattr(module, "SCORES_AT_ONCE", 3 * 60)
    told: list[int] = []
    np.testing.assert_array_equal(gamma_curve(embedded, GAMMAS, on_queries=told.append), whole)
    assert told == [3, 6, 9, 11]


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_no_document_of_a_top_ten_is_missed_between_the_ends_and_most_others_are_left_out(seed):
    """The bound itself, on lengths like those of encoders, at gammas that are no ends of its intervals."""
    import torch

    random = np.random.default_rng(seed)
    scores = torch.from_numpy(random.normal(size=(5, 500)))
    log_lengths = torch.from_numpy(random.normal(1.5, 0.2, 500))
    kept = module._candidates(scores, log_lengths, GAMMAS, 10)
    for gamma in random.uniform(-0.5, 1.5, 20):
        best = (scores * (-gamma * log_lengths).exp()).topk(10, dim=1).indices
        assert kept.gather(1, best).all()
    assert kept.double().mean() < 0.15
