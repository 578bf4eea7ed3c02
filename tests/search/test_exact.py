from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from offsphere.errors import ConfigError, EncoderError
from offsphere.search import exact
from offsphere.search.exact import ExactSearch
from offsphere.similarity import Similarity


def slow(queries, documents, k, excluded=(), order=None, gamma_d=0.0):
    """The definition: every pair by itself in float64, rounded to float32, sorted by (score, place in the order)."""
    prepared = Similarity(0.0, gamma_d).prepare_document(np.asarray(documents, float))
    place = {row: place for place, row in enumerate(range(len(documents)) if order is None else order)}
    rows, scores = np.full((len(queries), k), -1), np.full((len(queries), k), -np.inf, np.float32)
    for number, query in enumerate(np.asarray(queries, float)):
        scored = [
            (-np.float32((query * document).sum()), place[row], row)
            for row, document in enumerate(prepared)
            if (number, row) not in excluded
        ]
        for column, (score, _, row) in enumerate(sorted(scored)[:k]):
            rows[number, column], scores[number, column] = row, -score
    return rows, scores


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def columns(pairs):
    return np.array(sorted(pairs, key=lambda pair: (pair[1], pair[0])), dtype=int).reshape(-1, 2).T


@pytest.fixture
def doubted(monkeypatch):
    """Number of queries of each search that were scanned twice."""
    numbers = []
    settle = ExactSearch._settle

    def spy(self, *arguments):
        numbers.append(len(arguments[4]))
        settle(self, *arguments)

    monkeypatch.setattr(ExactSearch, "_settle", spy)
    return numbers


@given(
    queries=arrays(np.int8, st.tuples(st.integers(0, 7), st.just(3)), elements=st.integers(-2, 2)),
    documents=arrays(np.int8, st.tuples(st.integers(0, 40), st.just(3)), elements=st.integers(-2, 2)),
    k=st.integers(1, 45),
    gamma_d=st.sampled_from([0.0, 0.3, 1.0, -0.5]),
    excluded=st.sets(st.tuples(st.integers(0, 6), st.integers(0, 39)), max_size=30),
    block_size=st.integers(1, 41),
    block_bytes=st.integers(1, 800),
    threads=st.sampled_from([1, 3]),
    seed=st.none() | st.integers(0, 9),
)
@settings(max_examples=100)
def test_equals_the_definition_on_rankings_full_of_ties(
    queries, documents, k, gamma_d, excluded, block_size, block_bytes, threads, seed
):
    order = None if seed is None else np.random.default_rng(seed).permutation(len(documents))
    queries, documents = queries.astype(np.float32), documents.astype(np.float32)
    blocks = {"block_size": block_size, "block_bytes": block_bytes, "threads": threads}
    search = ExactSearch(documents, gamma_d=gamma_d, order=order, **blocks)
    found = search.search(queries, k, columns(excluded))
    assert_same(found, slow(queries, documents, k, excluded, order, gamma_d))


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("count", [1, 3, 20])
def test_same_bits_for_every_block_size_and_number_of_threads(spread, count):
    rng = np.random.default_rng(0)
    documents = (rng.normal(size=(900, 24)) * np.exp(spread * rng.normal(size=(900, 1)))).astype(np.float32)
    documents[500:600] = documents[:100]  # ties
    queries = rng.normal(size=(count, 24)).astype(np.float32)
    expected = slow(queries, documents, 20)
    for block_size, block_bytes in itertools.product((50, 401, 899, 10**6), (500, 30_000, 10**6)):
        for threads in (1, 2, 5):
            search = ExactSearch(documents, block_size=block_size, block_bytes=block_bytes, threads=threads)
            assert_same(search.search(queries, 20), expected)


def test_scores_that_float32_cannot_tell_apart(doubted):
    rng = np.random.default_rng(1)
    base, steps = rng.normal(size=64), rng.permutation(2000)[:, None]
    documents = (base + 2e-7 * steps * rng.normal(size=64)).astype(np.float32)
    queries = (base + 0.1 * rng.normal(size=(5, 64))).astype(np.float32)
    expected = slow(queries, documents, 10)
    plain = np.argsort(-(queries @ documents.T), axis=1, kind="stable")[:, :10]
    assert (plain != expected[0]).any()  # a float32 ranking is not good enough here
    assert_same(ExactSearch(documents).search(queries, 10), expected)
    assert doubted == [5]


def test_ordinary_vectors_are_proven_in_one_scan(doubted):
    rng = np.random.default_rng(2)
    documents = rng.normal(size=(20_000, 64)).astype(np.float32)
    queries = rng.normal(size=(30, 64)).astype(np.float32)
    rows, _ = ExactSearch(documents).search(queries, 100)
    assert doubted == [0]
    assert (np.argsort(-(queries.astype(float) @ documents.astype(float).T))[:, :100] == rows).all()


def test_one_document_of_enormous_length_hides_no_other(doubted):
    rng = np.random.default_rng(3)
    documents, queries = rng.normal(size=(4000, 32)).astype(np.float32), rng.normal(size=(6, 32)).astype(np.float32)
    documents[77] = -1e6 * queries[0]  # far below for one query, and what its rounding may be dwarfs every other score
    assert_same(ExactSearch(documents).search(queries, 10), slow(queries, documents, 10))
    assert doubted[0] > 0


@pytest.mark.parametrize("count", [2, 9])
def test_all_scores_equal(count):
    documents = np.ones((5000, 4), np.float32)
    queries = np.arange(-1, count - 1)[:, None] * np.ones((count, 4), np.float32)
    rows, scores = ExactSearch(documents, block_size=600).search(queries, 7)
    assert (rows == np.arange(7)).all()
    assert (scores == np.arange(-4, 4 * (count - 1), 4)[:, None]).all()
    backwards = ExactSearch(documents, order=np.arange(5000)[::-1]).search(queries, 3)[0]
    assert (backwards == [4999, 4998, 4997]).all()


def test_zero_vectors_score_zero_among_negative_scores():
    documents = np.array([[-1, 0], [0, 0], [2, 0], [-3, 0], [0, 5]], np.float32)
    queries = np.array([[1, 0], [-1, 0], [0, 0], [0, -1]], np.float32)
    assert ExactSearch(documents).search(queries, 5)[0].tolist() == [
        [2, 1, 4, 0, 3],
        [3, 0, 1, 4, 2],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4],
    ]
    for gamma_d in (0.0, 1.0, 0.5):
        rows, scores = ExactSearch(documents, gamma_d=gamma_d).search(queries, 5)
        assert_same((rows, scores), slow(queries, documents, 5, gamma_d=gamma_d))
        assert not np.signbit(scores[scores == 0]).any()


def test_a_corpus_sorted_from_worst_to_best_and_back():
    rng = np.random.default_rng(4)
    query = rng.normal(size=(1, 16)).astype(np.float32)
    documents = rng.normal(size=(30_000, 16)).astype(np.float32)
    documents = documents[np.argsort(documents @ query[0])]
    queries = np.concatenate([query, -query, rng.normal(size=(6, 16)).astype(np.float32)])
    expected = ExactSearch(documents).search(queries, 50)
    assert (expected[0][0] == np.arange(29_999, 29_949, -1)).all() and (expected[0][1] == np.arange(50)).all()
    for block_size in (1000, 4000, 9000):
        assert_same(ExactSearch(documents, block_size=block_size).search(queries, 50), expected)


def test_excluded_pairs_are_refilled_in_any_order():
    documents = np.arange(1, 6, dtype=np.float32)[:, None]
    queries = np.array([[1], [-1], [2]], np.float32)
    excluded = np.array([2, 0, 0, 2]), np.array([4, 3, 4, 0])
    rows, scores = ExactSearch(documents).search(queries, 4, excluded)
    assert rows.tolist() == [[2, 1, 0, -1], [0, 1, 2, 3], [3, 2, 1, -1]]
    assert scores.tolist() == [[3, 2, 1, -np.inf], [-1, -2, -3, -4], [8, 6, 4, -np.inf]]
    everything = np.repeat(np.arange(3), 5), np.tile(np.arange(5), 3)
    assert (ExactSearch(documents).search(queries, 2, everything)[0] == -1).all()


def test_excluded_pairs_of_a_query_in_doubt(doubted):
    documents = np.ones((3000, 2), np.float32)
    queries = np.array([[0, 1], [1, 1], [5, 0]], np.float32)
    documents[:200] += 0.5  # enough that only the ties below them raise doubt
    rows = ExactSearch(documents).search(queries, 3, (np.array([0, 2, 2]), np.array([1, 0, 2999])))[0]
    assert doubted == [3]
    assert rows.tolist() == [[0, 2, 3], [0, 1, 2], [1, 2, 3]]


def test_no_document_one_document_and_no_query():
    queries = np.ones((2, 3), np.float32)
    for count in (0, 1):
        search = ExactSearch(np.ones((count, 3), np.float32))
        rows, scores = search.search(queries, 4)
        assert len(search) == count
        assert rows.tolist() == [([0] * count + [-1] * 4)[:4]] * 2
        assert scores.tolist() == [([3.0] * count + [-np.inf] * 4)[:4]] * 2
        assert search.search(queries[:0], 4)[0].shape == (0, 4)


def test_raw_vectors_with_gamma_d_score_as_those_prepared_in_float64():
    rng = np.random.default_rng(5)
    raw = (rng.normal(size=(800, 16)) * 4.0 ** rng.uniform(-2, 2, (800, 1))).astype(np.float32)
    queries = rng.normal(size=(20, 16))
    for gamma_d in (0.2, 1.0):
        found = ExactSearch(raw, gamma_d=gamma_d).search(queries, 30)
        prepared = Similarity(0.0, gamma_d).prepare_document(raw.astype(np.float64))
        assert_same(found, ExactSearch(prepared).search(queries, 30))
        assert (ExactSearch(raw).search(queries, 30)[0] != found[0]).any()


@pytest.mark.parametrize("gamma_d", [-1.0, 0.5, 1.0, 2.0])
def test_lengths_from_the_smallest_to_the_largest(gamma_d):
    rng = np.random.default_rng(6)
    smallest, largest = (-15, 9) if gamma_d in (-1.0, 2.0) else (-40, 29)  # so that scores fit float32
    documents = rng.normal(size=(400, 8))
    documents *= 10.0 ** rng.uniform(smallest, largest, (400, 1)) / np.abs(documents).max(axis=1, keepdims=True)
    documents = documents.astype(np.float32)  # from 1e-38 on they lose digits, and some become zero
    documents[::7] = 0
    queries = rng.normal(size=(6, 8)).astype(np.float32)
    found = ExactSearch(documents, gamma_d=gamma_d).search(queries, 40)
    rows, scores = slow(queries, documents, 40, gamma_d=gamma_d)
    np.testing.assert_allclose(found[1], scores, rtol=1e-6)
    assert (found[0] == rows).mean() > 0.99  # lengths below 1e-30 are not exact to the last bit of float32


@given(
    seed=st.integers(0, 10**6),
    dimension=st.integers(1, 500),
    exponent=st.integers(-42, 29),
    gamma_d=st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(max_examples=60)
def test_the_bound_on_rounding_holds(seed, dimension, exponent, gamma_d):
    rng = np.random.default_rng(seed)
    documents = (rng.normal(size=(30, dimension)) * rng.choice([1e-8, 1.0], (30, dimension))).astype(np.float64)
    documents = (documents * 10.0**exponent / np.abs(documents).max()).astype(np.float32)
    search = ExactSearch(documents, gamma_d=gamma_d)
    queries = Similarity(1.0, 0.0).prepare_query(rng.normal(size=(7, dimension)))
    right = queries @ Similarity(0.0, gamma_d).prepare_document(documents.astype(np.float64)).T
    for first, start, scores in search._scan(queries.astype(np.float32), 5, exact._sorted(None), map):
        assert (first, start) == (0, 0)
        off = np.abs(scores.T - right)
        assert (off <= search._errors).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_dtypes_are_converted_a_block_at_a_time(dtype):
    rng = np.random.default_rng(7)
    documents, queries = rng.normal(size=(500, 12)).astype(dtype), rng.normal(size=(8, 12))
    found = ExactSearch(documents, block_bytes=900).search(queries, 15)
    assert_same(found, slow(queries, documents, 15))


@pytest.mark.parametrize("layout", [np.asfortranarray, lambda a: np.repeat(a, 2, axis=1)[:, ::2], lambda a: a[::-1]])
def test_any_layout_in_memory(layout):
    rng = np.random.default_rng(8)
    documents, queries = layout(rng.normal(size=(300, 6)).astype(np.float32)), rng.normal(size=(9, 6))
    for some in (queries, queries[:2]):
        assert_same(ExactSearch(documents).search(some, 5), slow(some, documents, 5))


def test_documents_on_disk_are_only_read(tmp_path):
    rng = np.random.default_rng(9)
    documents = rng.normal(size=(2000, 8)).astype(np.float32)
    np.save(tmp_path / "documents.npy", documents)
    mapped = np.load(tmp_path / "documents.npy", mmap_mode="r")
    queries = rng.normal(size=(6, 8)).astype(np.float32)
    assert_same(ExactSearch(mapped).search(queries, 5), slow(queries, documents, 5))
    np.testing.assert_array_equal(np.load(tmp_path / "documents.npy"), documents)


def test_memory_stays_within_its_bound(tmp_path):
    script = tmp_path / "search.py"
    script.write_text(
        textwrap.dedent(
            """
            import resource, sys
            import numpy as np
            from offsphere.search.exact import ExactSearch
            path, count, dimension = sys.argv[1], 100_000, 256
            documents = np.memmap(path, np.float32, "r", shape=(count, dimension))
            queries = np.random.default_rng(0).normal(size=(300, dimension)).astype(np.float32)
            queries[0] = 0  # ties with every document, so that it is scanned twice
            ExactSearch(documents[:2000], block_bytes=2**19).search(queries, 5)  # threads and their stacks
            used = int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1]) * 1024
            spare = 8 * 2**19 + 40 * count + 2 * 12 * 300 * 20 + 2**23  # 8 MB of what Python and threads take
            resource.setrlimit(resource.RLIMIT_DATA, (used + spare, used + spare))
            search = ExactSearch(documents, block_bytes=2**19)
            rows, scores = search.search(queries, 20)
            assert rows[0].tolist() == list(range(20))
            try:
                np.array(documents)
            except MemoryError:
                print("bounded", spare < documents.nbytes / 5)
            """
        )
    )
    rng = np.random.default_rng(0)
    mapped = np.memmap(tmp_path / "documents", np.float32, "w+", shape=(100_000, 256))
    for start in range(0, 100_000, 20_000):
        mapped[start : start + 20_000] = rng.standard_normal((20_000, 256), np.float32)
    mapped.flush()
    done = subprocess.run(
        [sys.executable, script, tmp_path / "documents"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == "bounded True\n", done.stderr


NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[1.0], [NAN], [INF], [-INF]], r"3 of 4 documents are NaN or infinite, such as row 1; encode in float32"),
        ([1.0, 2.0], r"documents have shape \(2,\) and dtype float64; expected floating numbers"),
        ([[]], r"documents have shape \(1, 0\)"),
        ([[1, 2]], r"dtype int64; expected floating"),
        ([[1.0], [3e30]], r"row 1 of the documents has length 3.0e\+30; expected at most 1e\+30"),
    ],
)
def test_documents_that_cannot_be_ranked_are_named(documents, message):
    with pytest.raises(EncoderError, match=message):
        ExactSearch(np.array(documents))


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        ([[1.0, NAN]], r"1 of 1 queries are NaN or infinite, such as row 0"),
        ([[1.0]], r"queries have 1 dimensions and documents 2; encode both with the same model"),
        ([1.0, 2.0], r"queries have shape \(2,\)"),
        ([[1e20, 0.0]], r"scores may reach 2.0e\+40, more than float32 holds \(3.4e\+38\)"),
    ],
)
def test_queries_that_cannot_be_ranked_are_named(queries, message):
    with pytest.raises(EncoderError, match=message):
        ExactSearch(np.array([[2e20, 0.0]])).search(np.array(queries), 1)


@pytest.mark.parametrize("setting", ["block_size", "block_bytes", "threads"])
def test_impossible_settings_are_named(setting):
    with pytest.raises(ConfigError, match=f"{setting}.* must be at least 1, found"):
        ExactSearch(np.ones((2, 2)), **{setting: 0})
    with pytest.raises(ConfigError, match="k must be at least 1, found 0"):
        ExactSearch(np.ones((2, 2))).search(np.ones((1, 2)), 0)


@pytest.mark.parametrize("order", [[0], [0, 0], [1, 2]])
def test_an_order_that_is_none_is_named(order):
    with pytest.raises(ConfigError, match="expected each of the 2 rows once"):
        ExactSearch(np.ones((2, 2)), order=np.array(order))
