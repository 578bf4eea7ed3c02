from __future__ import annotations

import numpy as np
import pytest

from offsphere.data import Collection
from offsphere.errors import ConfigError, EncoderError
from offsphere.evaluation import EmbeddedCollection
from offsphere.search.exact import ExactSearch
from offsphere.search.quantise import KINDS, measure, quantise
from offsphere.similarity import Similarity, norms

COSINE, DOT = Similarity.parse("cosine"), Similarity.parse("dot")
SIMILARITIES = [COSINE, DOT, Similarity.parse("qnorm"), Similarity.parse("dnorm"), Similarity(0.3, 0.6)]


def made(spread, documents=4000, queries=60, dimension=64, seed=0):
    """Vectors in 40 clusters whose lengths are lognormal with this deviation."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(40, dimension))
    sides = [centres[rng.integers(0, 40, n)] + 0.8 * rng.normal(size=(n, dimension)) for n in (queries, documents)]
    return sides[0].astype(np.float32), (sides[1] * np.exp(spread * rng.normal(size=(documents, 1)))).astype(np.float32)


def overlap(found, exact):
    return np.mean([len(set(one) & set(other)) / len(other) for one, other in zip(found, exact, strict=True)])


def exact_rows(queries, documents, similarity, k=10):
    prepared = similarity.prepare_query(queries.astype(np.float64))
    return ExactSearch(documents, gamma_d=similarity.gammas[1]).search(prepared, k)


def test_whole_vectors_lose_the_ranking_where_lengths_vary_and_directions_do_not():
    """Reported for inner products in 7 bits: recall 0.94 becomes 0.36 (apache/lucene issue 13350)."""
    queries, documents = made(spread=1.5)
    exact = exact_rows(queries, documents, DOT)[0]
    shares = {
        (kind, keep): overlap(quantise(documents, kind, DOT, keep_length=keep).search(queries, 10, rescore=0)[0], exact)
        for kind in KINDS
        for keep in (True, False)
    }
    assert shares["int8", True] > 0.97 and shares["int8", False] < 0.75
    assert shares["binary", True] > 0.6 and shares["binary", False] < 0.2


def test_rescoring_repairs_what_directions_lose_but_not_what_whole_vectors_lose():
    queries, documents = made(spread=1.5)
    exact = exact_rows(queries, documents, DOT)[0]
    shares = {
        (kind, keep): overlap(quantise(documents, kind, DOT, keep_length=keep).search(queries, 10)[0], exact)
        for kind in KINDS
        for keep in (True, False)
    }
    assert shares["int8", True] == 1.0 and shares["int8", False] < 0.9
    assert shares["binary", True] > 0.9 and shares["binary", False] < 0.4


@pytest.mark.parametrize("similarity", SIMILARITIES, ids=str)
def test_scores_of_rescored_answers_are_exact(similarity):
    queries, documents = made(spread=0.7, documents=900)
    rows, scores = exact_rows(queries, documents, similarity)
    found, own = quantise(documents, "int8", similarity).search(queries, 10, rescore=10)
    np.testing.assert_array_equal(found, rows)
    np.testing.assert_array_equal(own, scores)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("similarity", SIMILARITIES, ids=str)
def test_codes_score_as_the_decoded_documents_do(kind, similarity):
    queries, documents = made(spread=0.7, documents=300, queries=7)
    quantised = quantise(documents, kind, similarity)
    scores = similarity.prepare_query(queries.astype(float)) @ quantised.decode(0, 300).astype(float).T
    rows, own = quantised.search(queries, 300, rescore=0)
    np.testing.assert_allclose(own, -np.sort(-scores, axis=1), rtol=1e-5, atol=1e-5 * np.abs(scores).max())
    np.testing.assert_allclose(np.take_along_axis(scores, rows, axis=1), own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("similarity", SIMILARITIES, ids=str)
def test_length_is_kept_to_float32(kind, similarity):
    _, documents = made(spread=2.0, documents=500)
    quantised = quantise(documents, kind, similarity)
    prepared = norms(similarity.prepare_document(documents.astype(float)))
    np.testing.assert_allclose(norms(quantised.decode(0, 500).astype(float)), prepared, rtol=1e-6)
    fidelity = quantised.fidelity()
    assert fidelity.length_error_max < 1e-6
    assert fidelity.cosine_min > (0.9995 if kind == "int8" else 0.6)
    whole = quantise(documents, kind, DOT, keep_length=False).fidelity()
    assert whole.length_error_max > 0.5  # the shortest and the longest documents lose most of theirs


def test_fidelity_is_the_definition_over_every_block(monkeypatch):
    _, documents = made(spread=1.0, documents=100, dimension=12)
    documents[::9] = 0
    full = documents[norms(documents) > 0].astype(float)
    expected = quantise(documents, "binary", DOT).fidelity()
    signs = np.sign(full)
    cosines = (full * signs).sum(axis=1) / np.sqrt((full**2).sum(axis=1) * 12)
    assert expected.cosine_mean == pytest.approx(cosines.mean())
    assert expected.cosine_min == pytest.approx(cosines.min())
    monkeypatch.setattr("offsphere.search.quantise.BLOCK", 7)
    again = quantise(documents, "binary", DOT)
    assert again.fidelity().cosine_mean == pytest.approx(expected.cosine_mean, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rescore", [0, 3])
def test_same_answer_for_every_block_size(monkeypatch, kind, rescore):
    queries, documents = made(spread=1.0, documents=700, queries=9, dimension=20)
    expected = quantise(documents, kind, DOT).search(queries, 8, rescore=rescore)
    for block, at_once in ((1, 4), (64, 1), (699, 100)):
        monkeypatch.setattr("offsphere.search.quantise.BLOCK", block)
        monkeypatch.setattr("offsphere.search.quantise.QUERIES_AT_ONCE", at_once)
        rows, scores = quantise(documents, kind, DOT).search(queries, 8, rescore=rescore)
        np.testing.assert_array_equal(rows, expected[0])
        np.testing.assert_allclose(scores, expected[1], rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("similarity", [COSINE, DOT], ids=str)
def test_zero_vectors_score_zero(kind, similarity):
    documents = np.array([[0, 0, 0], [1, 2, 3], [-1, -2, -3]], np.float32)
    rows, scores = quantise(documents, kind, similarity).search(documents[1:2], 3, rescore=0)
    assert rows.tolist() == [[1, 0, 2]] and scores[0, 1] == 0
    empty = quantise(documents[:1], kind, similarity).fidelity()
    assert (empty.cosine_mean, empty.length_error_max) == (1.0, 0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep_length", [True, False])
def test_no_document_and_a_longer_list_than_documents(kind, keep_length):
    documents = np.ones((2, 5), np.float32)
    for count in (0, 2):
        quantised = quantise(documents[:count], kind, DOT, keep_length=keep_length)
        for rescore in (0, 4):
            rows, scores = quantised.search(documents, 4, rescore=rescore)
            assert rows.tolist() == [([0, 1][:count] + [-1] * 4)[:4]] * 2
            assert (np.isneginf(scores) == (rows < 0)).all()


@pytest.mark.parametrize("rescore", [0, 4])
def test_excluded_pairs_are_refilled(rescore):
    queries, documents = made(spread=0.5, documents=50, queries=3)
    quantised = quantise(documents, "int8", DOT)
    rows, _ = quantised.search(queries, 4, rescore=rescore)
    excluded = np.array([2, 0]), np.array([rows[2, 0], rows[0, 1]])
    fewer, _ = quantised.search(queries, 3, rescore=rescore, excluded=excluded)
    assert fewer.tolist() == [rows[0, [0, 2, 3]].tolist(), rows[1, :3].tolist(), rows[2, 1:].tolist()]


def test_a_prefix_is_cut_before_its_length_is_removed():
    queries, documents = made(spread=1.0, documents=400)
    cut_queries, cut = queries[:, :16], documents[:, :16]
    found = quantise(documents, "int8", COSINE, dimension=16).search(queries, 10, rescore=8)
    rows, scores = exact_rows(cut_queries, cut, COSINE)
    np.testing.assert_array_equal(found[0], rows)
    np.testing.assert_array_equal(found[1], scores)
    late = COSINE.prepare_document(documents)[:, :16]  # length removed before the cut: not a cosine of prefixes
    assert (exact_rows(cut_queries, late, DOT)[0] != rows).any()


def test_bytes_per_vector_are_those_of_the_arrays():
    _, documents = made(spread=1.0, documents=100, dimension=60)
    for kind, expected in (("int8", 60), ("binary", 8)):
        for keep_length in (True, False):
            quantised = quantise(documents, kind, DOT, keep_length=keep_length)
            assert quantised.codes.nbytes == 100 * expected
            assert quantised.bytes_per_vector == expected + 4 * keep_length
            assert len(quantised) == 100


def test_measured_beside_whole_vectors_on_a_collection():
    queries, documents = made(spread=1.5, documents=1500, queries=20)
    best = exact_rows(queries, documents, DOT)[0]
    ids = [f"d{row}" for row in range(1500)]
    qrels = {f"q{row}": {ids[best[row, 1]]: 1, ids[best[row, 2]]: 2} for row in range(20)}
    excluded = {"q3": frozenset({ids[best[3, 0]]})}
    collection = Collection(
        "made", "test", dict.fromkeys(ids, "text"), dict.fromkeys(qrels, "text"), qrels, excluded=excluded
    )
    measured = measure(EmbeddedCollection(collection, queries, documents), DOT, rescore=(0, 4))
    by_way = {(one.kind, one.keeps_length, one.rescore): one for one in measured}
    assert len(measured) == len(by_way) == 9
    exact = by_way["float32", True, 0]
    assert (exact.bytes_per_vector, exact.overlap, exact.fidelity) == (256, 1.0, None)
    assert exact.ndcg > 0.6
    assert by_way["int8", True, 4].ndcg == exact.ndcg and by_way["int8", True, 4].overlap == 1.0
    assert by_way["int8", True, 0].overlap > by_way["int8", False, 0].overlap + 0.1
    assert by_way["binary", True, 4].ndcg > by_way["binary", False, 4].ndcg + 0.3
    assert by_way["binary", True, 0].bytes_per_vector == 12


@pytest.mark.parametrize(
    ("documents", "settings", "error", "message"),
    [
        (np.ones((2, 3)), {"kind": "int4"}, ConfigError, "unknown kind of quantisation 'int4'; expected one of int8"),
        (np.ones((2, 3)), {"dimension": 4}, EncoderError, r"shape \(2, 3\); expected at least 4 dimensions"),
        (np.ones((2, 3)), {"dimension": 0}, ConfigError, "at least 1 dimension, found 0"),
        (np.array([[1.0, np.nan]]), {}, EncoderError, "1 of 1 documents are NaN or infinite, such as row 0"),
        (np.ones(3), {}, EncoderError, r"shape \(3,\)"),
    ],
)
def test_what_cannot_be_quantised_is_named(documents, settings, error, message):
    with pytest.raises(error, match=message):
        quantise(documents, **{"kind": "int8", "similarity": DOT, **settings})


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_searched_is_named(kind):
    quantised = quantise(np.ones((2, 3), np.float32), kind, COSINE)
    for value in (np.nan, np.inf):
        with pytest.raises(EncoderError, match="1 of 1 queries are NaN or infinite"):
            quantised.search(np.array([[1.0, value, 0.0]]), 1)
    with pytest.raises(EncoderError, match="expected at least 3 dimensions"):
        quantised.search(np.ones((1, 2)), 1)
    with pytest.raises(ConfigError, match="found 0 and 4"):
        quantised.search(np.ones((1, 3)), 0)
    with pytest.raises(ConfigError, match="found 1 and -1"):
        quantised.search(np.ones((1, 3)), 1, rescore=-1)
