"""What every destination must do, asked of each with the same words."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from offsphere.errors import StoreError
from offsphere.search.stores import KINDS
from offsphere.search.stores.store import Found, Record, Store
from offsphere.similarity import NAMES, Similarity

K = 10
WRITER = Path(__file__).with_name("writer_to_be_killed.py")
NAMES_OF_COLLECTIONS = ["documents", 'it\'s "quoted"', "two words", "Ångström-文書", "x" * 300]

pytestmark = pytest.mark.parametrize("kind", sorted(KINDS))


@pytest.fixture
def small(created) -> Callable[[str], Store]:
    """Makes a collection of 5 dimensions that holds ``a`` and ``b``."""

    def make(kind: str) -> Store:
        store = created(kind, dimension=5)
        store.write([record("a", [1, 2, 3, 4, 5]), record("b", [0, -1, 0, 2, 0])])
        return store

    return make


def record(name: str, vector: list[float], **more) -> Record:
    values = np.array(vector, dtype=np.float32)
    return Record(name, values, **({"norm": 7.5, "title": "A title", "text": "Its text"} | more))


def assert_exact(answer: list[Found], scores: np.ndarray, ids: list[str]) -> None:
    """The answer is the top K of the true scores (float64) of the documents, in order but for ties."""
    truth = dict(zip(ids, scores.tolist(), strict=True))
    found = [hit.id for hit in answer]
    assert len(set(found)) == len(found) == K
    np.testing.assert_allclose([hit.score for hit in answer], [truth[name] for name in found], rtol=1e-4, atol=1e-4)
    tie = 1e-6 * np.abs(scores).max()
    np.testing.assert_allclose([truth[name] for name in found], np.sort(scores)[::-1][:K], rtol=0, atol=tie)


@pytest.mark.parametrize("similarity", NAMES)
def test_the_live_top_10_is_the_exact_one(kind, similarity, created, target, opened, xquad):
    parsed = Similarity.parse(similarity)
    records = xquad.records(similarity)
    store = created(kind, dimension=xquad.documents.shape[1], similarity=similarity)
    for start in range(0, len(records), 100):
        store.write(records[start : start + 100])
    store.close()
    live = opened(target(kind))
    queries = parsed.prepare_query(xquad.queries)
    exact = parsed.scores(xquad.queries.astype(np.float64), xquad.documents.astype(np.float64))
    answers = live.search(queries, K)
    for answer, scores in zip(answers, exact, strict=True):
        assert_exact(answer, scores, xquad.ids)
    assert live.count() == len(records)
    np.testing.assert_allclose(live.vectors(xquad.ids[:3]), [r.vector for r in records[:3]], rtol=1e-6)
    assert live.digests(xquad.ids) == {r.id: r.digest for r in records}


def test_the_similarities_rank_this_collection_apart(kind, xquad):
    # Otherwise the test above would not notice a destination that normalises.
    raw = xquad.queries.astype(np.float64), xquad.documents.astype(np.float64)
    best = {name: Similarity.parse(name).scores(*raw).argmax(axis=1) for name in ("cosine", "dot")}
    assert (best["cosine"] != best["dot"]).mean() > 0.2


def test_a_new_collection_says_what_it_is(kind, target, opened, xquad):
    store = opened(target(kind))
    assert not store.exists()
    store.create(16, xquad.stamp("learnable"))
    assert store.exists()
    store.close()
    again = opened(target(kind))
    assert (again.kind, again.exists(), again.metric(), again.dimension(), again.count()) == (kind, True, "ip", 16, 0)
    assert again.stamp() == xquad.stamp("learnable")
    assert again.search(np.ones((2, 16), dtype=np.float32), K) == [[], []]


def test_it_is_made_once(kind, small, xquad):
    store = small(kind)
    with pytest.raises(StoreError, match="documents"):
        store.create(5, xquad.stamp("dot"))
    assert store.count() == 2


def test_writing_twice_is_writing_once(kind, small):
    store = small(kind)
    before = store.digests(["a", "b"])
    store.write([record("a", [1, 2, 3, 4, 5]), record("b", [0, -1, 0, 2, 0])])
    assert store.count() == 2
    assert store.digests(["a", "b"]) == before
    assert [hit.id for hit in store.search(np.ones((1, 5), dtype=np.float32), K)[0]] == ["a", "b"]


def test_a_changed_document_replaces_the_old_one(kind, small, target, opened):
    store = small(kind)
    changed = record("b", [9, 9, 9, 9, 9], text="Another text", metadata={"year": 2024})
    store.write([changed, record("c", [0, 0, 0, 0, 1])])
    store.close()
    again = opened(target(kind))
    assert again.count() == 3
    assert again.digests(["b", "c"]) == {"b": changed.digest, "c": record("c", [0, 0, 0, 0, 1]).digest}
    np.testing.assert_array_equal(again.vectors(["b", "a"]), [[9, 9, 9, 9, 9], [1, 2, 3, 4, 5]])
    (answer,) = again.search(np.ones((1, 5), dtype=np.float32), K)
    assert [(hit.id, round(hit.score, 3)) for hit in answer] == [("b", 45), ("a", 15), ("c", 1)]


def test_a_deleted_document_is_gone(kind, small, target, opened):
    store = small(kind)
    store.delete(["a", "never there"])
    assert (store.count(), store.digests(["a"])) == (1, {})
    store.close()
    again = opened(target(kind))
    assert again.count() == 1
    assert [hit.id for hit in again.search(np.ones((1, 5), dtype=np.float32), K)[0]] == ["b"]
    again.write([record("a", [1, 1, 1, 1, 1])])
    assert again.count() == 2
    np.testing.assert_array_equal(again.vectors(["a"]), [[1, 1, 1, 1, 1]])


def test_ids_that_are_not_there(kind, small):
    store = small(kind)
    assert set(store.digests(["a", "it's", "🐝", "b"])) == {"a", "b"}
    assert store.digests([]) == {}
    store.delete([])
    store.write([])
    with pytest.raises(StoreError, match="missing-one"):
        store.vectors(["a", "missing-one"])
    np.testing.assert_array_equal(store.vectors(["b", "a", "b"])[:, 3], [2, 4, 2])


def test_a_vector_of_another_dimension_is_refused(kind, small):
    store = small(kind)
    with pytest.raises(StoreError, match=r"'d'.*5 dimensions"):
        store.write([record("c", [1, 1, 1, 1, 1]), record("d", [1, 2, 3])])
    assert (store.count(), store.dimension()) == (2, 5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_vector_is_refused(kind, value, small):
    store = small(kind)
    with pytest.raises(StoreError, match="'broken' is NaN or infinite"):
        store.write([record("broken", [1, value, 3, 4, 5])])
    assert store.count() == 2


def test_a_zero_vector_scores_zero(kind, small):
    store = small(kind)
    store.write([record("zero", [0, 0, 0, 0, 0], norm=0.0)])
    (answer,) = store.search(np.array([[0, 1, 0, 0, 0]], dtype=np.float32), K)
    assert [(hit.id, round(hit.score, 5) + 0.0) for hit in answer] == [("a", 2), ("zero", 0), ("b", -1)]


def test_extreme_lengths_keep_their_score(kind, created):
    # One distance is 1 minus the score in float32, which costs small scores their last digits, and no more.
    lengths = [1e-3, 1.0, 1e3]
    store = created(kind)
    store.write([record(f"{length:g}", [length, 0, 0]) for length in lengths])
    (answer,) = store.search(np.array([[2, 0, 0]], dtype=np.float32), 3)
    assert [hit.id for hit in answer] == ["1000", "1", "0.001"]
    np.testing.assert_allclose([hit.score for hit in answer], [2e3, 2, 2e-3], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    ["a/b\\c", "it's", 'say "hi"', "100% {x} $1 :y %s", "🐝 bee", "two\nlines\tand a tab", " padded ", "x" * 500, "7"],
)
def test_ids_with_all_sorts_of_characters(kind, name, small, target, opened):
    store = small(kind)
    kept = record(name, [0, 0, 0, 0, 50], metadata={"näme": ["it's", None, 1.5, {"deep": True}]})
    store.write([kept])
    store.close()
    again = opened(target(kind))
    assert again.count() == 3
    assert again.digests([name]) == {name: kept.digest}
    assert again.search(np.ones((1, 5), dtype=np.float32), 1)[0][0].id == name
    again.delete([name])
    assert (again.count(), again.digests([name])) == (2, {})


@pytest.mark.parametrize("text", ["", "\u00e9 word " * 125_000, "nul \0 inside"], ids=["empty", "1 MB", "NUL"])
def test_texts_are_stored_or_refused_by_name(kind, text, small, target, opened):
    store = small(kind)
    kept = record("the-text", [0, 0, 0, 0, 50], title="", text=text)
    try:
        store.write([kept])
    except StoreError as error:
        assert "the-text" in str(error)
        assert text
        assert store.count() == 2
        assert store.digests(["the-text"]) == {}
        return
    store.close()
    again = opened(target(kind))
    assert again.digests(["the-text"]) == {"the-text": kept.digest}
    assert again.search(np.ones((1, 5), dtype=np.float32), 1)[0][0].id == "the-text"


@pytest.mark.parametrize("name", NAMES_OF_COLLECTIONS)
def test_names_of_collections_work_or_are_refused(kind, name, target, opened, xquad):
    try:
        store = opened(target(kind, name))
        assert not store.exists()
        store.create(3, xquad.stamp("dot"))
    except StoreError as error:
        assert name != "documents"
        assert re.search(r"name|may contain|long|characters", str(error))
        return
    store.write([record("a", [1, 2, 3])])
    store.close()
    again = opened(target(kind, name))
    assert (again.exists(), again.count(), again.stamp()) == (True, 1, xquad.stamp("dot"))


def test_a_collection_that_is_not_there(kind, target, opened):
    store = opened(target(kind))
    assert not store.exists()
    for ask in (store.metric, store.dimension, store.count, lambda: store.write([record("a", [1])])):
        with pytest.raises(StoreError):
            ask()
    assert not store.exists()


def test_many_answers_and_few(kind, created, xquad):
    records = xquad.records("dot")
    store = created(kind, dimension=xquad.documents.shape[1])
    store.write(records)
    (everything,) = store.search(xquad.queries[:1], len(records) + 5)
    assert {hit.id for hit in everything} == set(xquad.ids)
    assert len(everything) == len(records)
    assert [hit.score for hit in everything] == sorted((hit.score for hit in everything), reverse=True)
    assert len(store.search(xquad.queries[:1], 1)[0]) == 1


def test_a_killed_process_loses_nothing_that_it_stored(kind, target, opened):
    writer = runpy.run_path(str(WRITER))
    at = target(kind)
    command = [sys.executable, str(WRITER), at]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            for number in range(4):
                assert process.stdout.readline() == f"{number}\n", process.stderr.read()
        finally:
            process.kill()  # most likely in the middle of a batch
    store = opened(at)
    assert store.stamp() == writer["STAMP"]
    batches = [writer["batch"](number) for number in range(writer["BATCHES"])]
    stored = store.digests([r.id for batch in batches for r in batch])
    assert {r.id: r.digest for batch in batches[:4] for r in batch}.items() <= stored.items()
    assert store.digests([writer["GONE"]]) == {} and store.metric() == "ip"
    for batch in batches:
        store.write([r for r in batch if r.id not in stored])
    store.close()
    again = opened(at)
    records = [r for batch in batches for r in batch]
    assert again.count() == len(records)
    vectors = np.array([r.vector for r in records])
    np.testing.assert_allclose(again.vectors([r.id for r in records]), vectors, rtol=1e-6)
    assert [answer[0].id for answer in again.search(10 * vectors[:20], 1)] == [
        records[row].id for row in (vectors[:20] @ vectors.T).argmax(axis=1)
    ]


def test_a_stamp_can_be_put_on_what_is_there(kind, small, opened, target, xquad):
    store = small(kind)
    stamp = xquad.stamp("gamma_q=0.1,gamma_d=0.5")
    store.sign(stamp)
    store.close()
    again = opened(target(kind))
    assert (again.stamp(), again.metric(), again.dimension(), again.count()) == (stamp, "ip", 5, 2)
    np.testing.assert_array_equal(again.vectors(["a"]), [[1, 2, 3, 4, 5]])
    again.write([record("c", [1, 0, 0, 0, 0])])
    assert again.stamp() == stamp and again.count() == 3
