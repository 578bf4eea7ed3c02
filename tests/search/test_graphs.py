from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offsphere.errors import ConfigError, UsageError
from offsphere.search import graphs
from offsphere.search.graphs import KINDS, InnerProductGraph, ReductionGraph, load_faiss, new_graph


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    faiss = load_faiss()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)


def vectors(count: int, seed: int, dimension: int = 8) -> np.ndarray:
    random = np.random.default_rng(seed)
    lengths = np.exp(random.normal(0, 0.5, (count, 1)))
    return (random.normal(size=(count, dimension)) * lengths).astype(np.float32)


def exact(documents: np.ndarray, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Slow: every product in float64, rounded once, sorted in Python."""
    rows, scores = [], []
    for query in queries.astype(np.float64):
        products = [float(np.float32(np.sum(query * document))) for document in documents.astype(np.float64)]
        order = sorted(range(len(products)), key=lambda row: (-products[row], row))[:k]
        rows.append(order)
        scores.append([products[row] for row in order])
    return np.array(rows), np.array(scores, np.float32)


def filled(method: str, *batches: np.ndarray):
    graph = new_graph(method, batches[0].shape[1], neighbours=16, construction=100)
    for batch in batches:
        graph.add(batch)
    return graph


@pytest.mark.parametrize("method", KINDS)
def test_a_wide_walk_finds_what_exact_search_finds(method):
    documents, queries = vectors(400, 0), vectors(50, 1)
    rows, scores = filled(method, documents).search(queries, 10, 400)
    right, right_scores = exact(documents, queries, 10)
    assert np.mean([len(set(one) & set(other)) for one, other in zip(rows, right, strict=True)]) > 9.8
    same = rows == right
    np.testing.assert_array_equal(scores[same], right_scores[same])
    assert rows.dtype == np.int64 and scores.dtype == np.float32


@pytest.mark.parametrize("method", KINDS)
def test_scores_are_those_of_the_documents_however_narrow_the_walk(method):
    documents, queries = vectors(400, 2), vectors(20, 3)
    rows, scores = filled(method, documents).search(queries, 10, 10)
    for query, found, given_scores in zip(queries.astype(np.float64), rows, scores, strict=True):
        assert len(set(found[found >= 0])) == np.count_nonzero(found >= 0)
        expected = (documents[found].astype(np.float64) * query).sum(axis=1).astype(np.float32)
        np.testing.assert_array_equal(given_scores[found >= 0], expected[found >= 0])
        assert sorted(given_scores, reverse=True) == given_scores.tolist()


@pytest.mark.parametrize("method", KINDS)
def test_of_equal_documents_the_lower_row_comes_first(method):
    documents = np.repeat(vectors(5, 4), 3, axis=0)
    rows, scores = filled(method, documents).search(documents[:1], 3, 15)
    assert np.unique(scores).size == 1 and (np.diff(rows[0]) == 1).all()


@pytest.mark.parametrize("method", KINDS)
def test_there_may_be_fewer_documents_than_asked_for(method):
    documents = vectors(4, 5)
    rows, scores = filled(method, documents).search(documents[:2], 6, 10)
    assert sorted(rows[0]) == [-1, -1, 0, 1, 2, 3] and (rows[:, 4:] == -1).all()
    assert np.isneginf(scores[:, 4:]).all() and np.isfinite(scores[:, :4]).all()


@pytest.mark.parametrize("method", KINDS)
def test_many_queries_are_answered_in_blocks_as_one_by_one(method, monkeypatch):
    documents, queries = vectors(100, 6), vectors(9, 7)
    graph = filled(method, documents)
    together = graph.search(queries, 5, 32)
    monkeypatch.setattr(graphs, "VALUES_AT_ONCE", 2 * 32 * 8)
    for found, expected in zip(graph.search(queries, 5, 32), together, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("method", KINDS)
def test_zero_vectors_score_zero(method):
    documents = np.concatenate((np.zeros((3, 8), np.float32), vectors(20, 8)))
    rows, scores = filled(method, documents).search(documents[[5]], 23, 64)
    assert np.isin([0, 1, 2], rows[0]).all()
    assert (scores[0][np.isin(rows[0], [0, 1, 2])] == 0).all()
    assert (filled(method, np.zeros((5, 8), np.float32)).search(documents[[5]], 5, 16)[1] == 0).all()


@pytest.mark.parametrize("method", KINDS)
def test_one_thread_builds_the_same_graph_twice(method):
    documents, queries = vectors(1000, 9), vectors(50, 10)
    first, second = (filled(method, documents).search(queries, 10, 12) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    other = filled(method, documents[::-1].copy()).search(queries, 10, 12)
    assert (999 - other[0] != first[0]).any()  # the walk is narrow enough to tell graphs apart


@pytest.mark.parametrize("method", KINDS)
def test_a_graph_is_read_as_it_was_written_and_grows_on(method, tmp_path):
    documents, more, queries = vectors(200, 11), 3 * vectors(40, 12), vectors(20, 13)
    graph = filled(method, documents, more)
    graph.write(tmp_path)
    read = new_graph(method, 8, neighbours=16, construction=100)
    read.read(tmp_path, graph.settings)
    assert read.settings == graph.settings and len(read) == 240
    np.testing.assert_array_equal(read.documents, graph.documents)
    np.testing.assert_array_equal(read.documents, np.concatenate((documents, more)))
    np.testing.assert_array_equal(read.search(queries, 10, 20)[0], graph.search(queries, 10, 20)[0])
    read.add(3 * vectors(30, 14))
    everything = np.concatenate((documents, more, 3 * vectors(30, 14)))
    np.testing.assert_array_equal(read.documents, everything)
    assert (read.search(queries, 10, 270)[0] == exact(everything, queries, 10)[0]).mean() > 0.95


def test_the_reduction_finds_documents_longer_than_its_bound():
    documents, queries = vectors(500, 15), vectors(50, 16)
    longer = 20 * vectors(60, 17)
    graph = filled("reduction", documents, longer)
    assert isinstance(graph, ReductionGraph)
    assert len(graph.overflow) > 40 and graph.bound == pytest.approx(np.sqrt((documents**2).sum(1)).max(), rel=1e-6)
    right, _ = exact(np.concatenate((documents, longer)), queries, 10)
    assert np.isin(right, graph.overflow).mean() > 0.9
    np.testing.assert_array_equal(graph.search(queries, 10, 128)[0], right)

    graph.overflow = graph.overflow[:0]  # without the list they are ranked too low, and missed
    assert (graph.search(queries, 10, 16)[0] == right).mean() < 0.9


def test_the_reduction_is_built_again_once_too_many_exceed_its_bound(monkeypatch):
    monkeypatch.setattr(graphs, "LONGEST_OVERFLOW", 50)
    documents, queries = vectors(300, 18), vectors(30, 19)
    graph = filled("reduction", documents, 50 * vectors(30, 20))
    assert isinstance(graph, ReductionGraph)
    bound, done = graph.bound, []
    assert len(graph.overflow) == 30
    graph.add(90 * vectors(25, 21), done.append)
    everything = np.concatenate((documents, 50 * vectors(30, 20), 90 * vectors(25, 21)))
    assert graph.bound > bound and not len(graph.overflow) and done[-1] == 25
    np.testing.assert_array_equal(graph.documents, everything)
    np.testing.assert_array_equal(graph.search(queries, 10, 355)[0], exact(everything, queries, 10)[0])


@settings(max_examples=25)
@given(
    scales=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5),
    limit=st.integers(0, 12),
    seed=st.integers(0, 2**16),
)
def test_the_reduction_is_right_whatever_lengths_come_in_whatever_order(scales, limit, seed):
    batches = [np.float32(scale) * vectors(6, seed + place, 4) for place, scale in enumerate(scales)]
    queries = vectors(4, seed + 99, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "LONGEST_OVERFLOW", limit)
        graph = filled("reduction", *batches)
        assert isinstance(graph, ReductionGraph) and len(graph.overflow) <= limit
        rows, scores = graph.search(queries, 5, 32)
    right, right_scores = exact(np.concatenate(batches), queries, 5)
    np.testing.assert_array_equal(rows, right)
    np.testing.assert_array_equal(scores, right_scores)


def test_progress_counts_documents(monkeypatch):
    monkeypatch.setattr(graphs, "BLOCK", 40)
    for method in KINDS:
        done: list[int] = []
        new_graph(method, 8).add(vectors(100, 22), done.append)
        assert done == [40, 80, 100]


def test_a_graph_that_is_no_graph():
    with pytest.raises(ConfigError, match=r"unknown method 'hnsw'.*inner-product, reduction, direction"):
        new_graph("hnsw", 8)
    with pytest.raises(ConfigError, match="found 1 and 200"):
        new_graph("direction", 8, neighbours=1)


def test_without_faiss_it_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UsageError, match=r"pip install 'offsphere\[faiss\]'"):
        InnerProductGraph(8)
