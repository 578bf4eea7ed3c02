"""Two rankings of the whole index against a slow float64 reference and against ``Index.search``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from offsphere.encoders import encode
from offsphere.similarity import Similarity, norms
from offsphere.web import explorer as module
from offsphere.web.explorer import Explorer

QUERIES = ["When was the zeppelin built?", "how does the immune system work", "players of the super bowl"]
GAMMAS = [-0.5, 0.0, 0.37, 1.0, 1.5]


@pytest.fixture(scope="module")
def raw(index: Any) -> dict[str, np.ndarray]:
    return {query: encode(index.encoder, [query], "query").astype(np.float64) for query in QUERIES}


@pytest.mark.parametrize("gamma_d", GAMMAS)
@pytest.mark.parametrize("query", QUERIES)
def test_scores_and_ranks_are_those_of_the_definition(
    explorer: Explorer, index: Any, raw: dict[str, np.ndarray], query: str, gamma_d: float
) -> None:
    documents = index.embeddings.astype(np.float64)
    lengths = np.sqrt((documents**2).sum(1))
    filled = lengths > 0
    products, length = documents @ raw[query][0], float(np.sqrt((raw[query] ** 2).sum()))
    safe = np.where(filled, lengths, 1)
    scores = dict(zip(index.ids, products / length / safe**gamma_d, strict=True))  # qnorm: gamma_q is 1
    cosines = dict(zip(index.ids, products / length / safe, strict=True))
    length_of = dict(zip(index.ids, lengths, strict=True))

    query_length, trained, by_angle = explorer.explore(query, gamma_d, 20)
    assert query_length == pytest.approx(length, rel=1e-6)
    assert len(trained) == len(by_angle) == 20
    for rows, reference in ((trained, scores), (by_angle, cosines)):
        assert [row.rank for row in rows] == list(range(1, 21))
        assert [row.score for row in rows] == pytest.approx([reference[row.id] for row in rows], rel=2e-6, abs=2e-6)
        assert [row.score for row in rows] == sorted((row.score for row in rows), reverse=True)
        outside = [reference[id] for id in reference if filled[index.ids.index(id)] and id not in {r.id for r in rows}]
        assert max(outside) <= rows[-1].score * (1 + 2e-6)
        for row in rows:
            assert row.cosine == pytest.approx(cosines[row.id], abs=1e-6)
            assert np.cos(np.radians(row.angle)) == pytest.approx(row.cosine, abs=1e-6)
            assert row.length == pytest.approx(length_of[row.id], rel=1e-6)
            assert row.longer_than == np.mean([one < length_of[row.id] - 1e-9 for one in lengths[filled]])
    order = sorted((id for id in scores if length_of[id] > 0), key=lambda id: -scores[id])
    for row in by_angle:
        assert abs(order.index(row.id) + 1 - row.other_rank) <= 1  # a near tie may be rounded the other way


@pytest.mark.parametrize("gamma_d", GAMMAS)
def test_the_ranking_is_that_of_search(explorer: Explorer, index: Any, gamma_d: float) -> None:
    for query in QUERIES:
        _, trained, by_angle = explorer.explore(query, gamma_d, 20)
        for rows, similarity in ((trained, Similarity(1.0, gamma_d)), (by_angle, Similarity(1.0, 1.0))):
            hits = index.search(query, 20, similarity)
            assert [row.id for row in rows] == [hit.id for hit in hits]
            assert [row.score for row in rows] == pytest.approx([hit.score for hit in hits], rel=1e-6)


def test_rankings_differ_where_length_counts_and_agree_where_it_does_not(explorer: Explorer) -> None:
    differ = 0
    for query in QUERIES:
        _, trained, by_angle = explorer.explore(query, 0.0, 10)
        differ += [row.id for row in trained] != [row.id for row in by_angle]
        _, trained, by_angle = explorer.explore(query, 1.0, 50)
        assert [vars(row) for row in trained] == [vars(row) for row in by_angle]
        assert {row.why for row in trained} == {"same place in both"}
    assert differ == len(QUERIES)


def test_a_document_without_text_is_never_shown(explorer: Explorer, index: Any) -> None:
    assert "empty" in index.ids
    _, trained, by_angle = explorer.explore("anything", -0.5, 100_000)
    shown = len(index.ids) - 1
    assert len(trained) == len(by_angle) == shown
    assert "empty" not in {row.id for row in trained}
    assert explorer.describe()["without_text"] == 1


def test_moving_the_slider_encodes_nothing(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def counted(model: Any, texts: list[str], side: str) -> np.ndarray:
        calls.append(list(texts))
        return encode(model, texts, side)

    monkeypatch.setattr(module, "encode", counted)
    for gamma_d in np.arange(-0.5, 1.5, 0.1):
        explorer.explore("a query that nobody asked before", float(gamma_d), 10)
    assert calls == [["a query that nobody asked before"]]


def test_memory_of_queries_is_bounded(index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 3 * 8 * len(index.ids))
    monkeypatch.setattr(module, "SHOWN", 15)
    small = Explorer(index)
    first = small.explore("query 0", 0.3, 10)
    for number in range(10):
        small.explore(f"query {number}", 0.0, 10)
    assert len(small._asked) == 3
    assert len(small._shown) == 15
    assert small.explore("query 0", 0.3, 10) == first


def test_the_histogram_counts_every_document_with_text(explorer: Explorer, index: Any) -> None:
    said = explorer.describe()
    counts, edges = said["lengths"]["counts"], said["lengths"]["edges"]
    assert sum(counts) == said["documents"] - 1 == len(index.ids) - 1
    assert len(edges) == len(counts) + 1
    lengths = norms(index.embeddings)
    assert edges[0] >= lengths[lengths > 0].min() - 1e-6
    assert edges[-1] <= lengths.max() + 1e-6


def test_threads_get_what_one_thread_gets(explorer: Explorer) -> None:
    asked = [(f"{query} {number}", gamma_d) for number in range(4) for query in QUERIES for gamma_d in (0.0, 0.5)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda one: explorer.explore(*one, 10), asked))
    fresh = Explorer(explorer.index)
    assert together == [fresh.explore(*one, 10) for one in asked]


def test_an_empty_index_has_no_answers(empty_explorer: Explorer) -> None:
    length, trained, by_angle = empty_explorer.explore("anything", 0.5, 10)
    assert length > 0
    assert trained == by_angle == []
    assert empty_explorer.search("anything", 10, Similarity(0.0, 0.0), None) == []
    assert empty_explorer.document("x") is None
    assert empty_explorer.describe()["documents"] == 0
