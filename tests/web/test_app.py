"""What the routes give, and what they refuse, over a real server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from offsphere.encoders import encode

QUERY = "When was the zeppelin built?"


def test_health(site: Any) -> None:
    answer = site.ask("/healthz")
    assert (answer.status, answer.json) == (200, {"status": "ok"})


def test_the_index_is_described(site: Any, index: Any) -> None:
    said = site.ask("/index").json
    assert (said["documents"], said["dimension"]) == (len(index.ids), index.embeddings.shape[1])
    assert (said["similarity"], said["gamma_q"], said["gamma_d"]) == ("qnorm", 1.0, 0.0)
    assert said["model"] == "package:wordllama"


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"similarity": "cosine"},
        {"similarity": "dot", "k": 3},
        {"similarity": "gamma_q=0.2,gamma_d=0.9"},
        {"gamma_d": 0.35, "k": 25},
        {"filter": "kind = 'nasty'"},
        {"filter": "kind IS NULL AND norm > 1", "gamma_d": -0.5},
    ],
    ids=str,
)
def test_search_gives_what_the_index_finds(site: Any, index: Any, asked: dict[str, Any]) -> None:
    by_get, by_post = (
        site.ask("/search", {"query": QUERY, **asked}),
        site.ask("/search", body={"query": QUERY, **asked}),
    )
    assert by_get.status == by_post.status == 200
    assert by_get.json == by_post.json
    similarity = {"gamma_q": 1.0, "gamma_d": asked["gamma_d"]} if "gamma_d" in asked else asked.get("similarity")
    expected = index.search(QUERY, asked.get("k", 10), similarity, asked.get("filter"))
    assert expected
    assert by_get.json["hits"] == [vars(hit) for hit in expected]


def test_search_says_what_it_ranked_under(site: Any) -> None:
    said = site.ask("/search", {"query": QUERY, "gamma_d": 0.25}).json
    assert (said["similarity"], said["gamma_q"], said["gamma_d"]) == ("gamma_q=1,gamma_d=0.25", 1.0, 0.25)


def test_a_filter_may_leave_nothing(site: Any) -> None:
    answer = site.ask("/search", {"query": QUERY, "filter": "kind = 'none'"})
    assert (answer.status, answer.json["hits"]) == (200, [])


def test_embeddings_are_raw(site: Any, index: Any) -> None:
    texts = [QUERY, "", "two words"]
    for side in ("query", "document"):
        said = site.ask("/embed", body={"texts": texts, "side": side}).json
        expected = encode(index.encoder, texts, side)
        np.testing.assert_array_equal(np.array(said["vectors"], np.float32), expected)
        np.testing.assert_allclose(said["norms"], np.sqrt((expected.astype(np.float64) ** 2).sum(1)), rtol=1e-6)
        assert said["norms"][1] == 0
        assert abs(said["norms"][0] - 1) > 0.1  # canary: a normalising server would give 1
        assert said["fingerprint"] == index.stamp.fingerprint


def test_a_document_whole(site: Any, documents: list[Any]) -> None:
    for document in documents[-3:]:
        answer = site.ask("/documents", {"id": document.id})
        assert answer.status == 200
        assert answer.json == {
            "id": document.id,
            "title": document.title,
            "text": document.text,
            "metadata": document.metadata,
        }
    missing = site.ask("/documents", {"id": "no/such' id"})
    assert missing.status == 404
    assert "no/such' id" in missing.json["detail"]


@pytest.mark.parametrize(
    ("path", "asked", "says"),
    [
        ("/search", {}, "query: Field required"),
        ("/search", {"query": ""}, "query: String should have at least 1 character"),
        ("/search", {"query": " \n"}, "query"),
        ("/search", {"query": "a" * 10_001}, "query: String should have at most 10000 characters"),
        ("/search", {"query": "a", "k": 0}, "k: Input should be greater than or equal to 1"),
        ("/search", {"query": "a", "k": 1001}, "k: Input should be less than or equal to 1000"),
        ("/search", {"query": "a", "k": "many"}, "k: Input should be a valid integer"),
        ("/search", {"query": "a", "K": 5}, "K: Extra inputs are not permitted"),
        ("/search", {"query": "a", "similarity": "cosin"}, "expected one of cosine, dot"),
        ("/search", {"query": "a", "gamma_d": 5}, "gamma_d: Input should be less than or equal to 2"),
        ("/search", {"query": "a", "gamma_d": 0.5, "similarity": "dot"}, "not both"),
        ("/search", {"query": "a", "filter": "nothing here ="}, "cannot filter by"),
        ("/search", {"query": "a", "filter": "'; DROP TABLE documents"}, "cannot filter by"),
        ("/search", {"query": "a", "filter": "a" * 1001}, "filter: String should have at most 1000"),
        ("/embed", {"texts": [], "side": "query"}, "texts: List should have at least 1 item"),
        ("/embed", {"texts": ["a"] * 257, "side": "query"}, "texts: List should have at most 256 items"),
        ("/embed", {"texts": ["a" * 100_001], "side": "query"}, "texts.0: String should have at most 100000"),
        ("/embed", {"texts": ["a"], "side": "passage"}, "side: Input should be 'query' or 'document'"),
        ("/embed", {"texts": [1], "side": "query"}, "texts.0: Input should be a valid string"),
        ("/embed", b"{", "JSON"),
        ("/embed", b'{"texts": ["\\ud800"], "side": "query"}', "texts.0"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_request_is_refused_in_words(site: Any, path: str, asked: Any, says: str) -> None:
    answer = site.ask(path, body=asked)
    assert answer.status == 422
    assert says in answer.json["detail"]
    assert len(answer.body) < 2000  # what was sent does not come back


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400", "half"])
def test_an_exponent_is_a_finite_number(site: Any, value: str) -> None:
    for path in ("/search", "/explore"):
        answer = site.ask(path, {"query": "a", "gamma_d": value})
        assert answer.status == 422
        assert "gamma_d" in answer.json["detail"]


@pytest.mark.parametrize(
    ("path", "method", "status"), [("/nothing", "GET", 404), ("/index", "DELETE", 405), ("/embed", "GET", 405)]
)
def test_unknown_routes_answer_in_json(site: Any, path: str, method: str, status: int) -> None:
    answer = site.ask(path, method=method)
    assert answer.status == status
    assert answer.json["detail"]


def test_explore_gives_both_rankings(site: Any, explorer: Any) -> None:
    said = site.ask("/explore", {"query": QUERY, "gamma_d": 0.2, "k": 7}).json
    length, trained, cosine = explorer.explore(QUERY, 0.2, 7)
    assert said == {
        "query_length": length,
        "trained": [vars(row) for row in trained],
        "cosine": [vars(row) for row in cosine],
    }
    assert max(len(row["excerpt"]) for row in said["trained"] + said["cosine"]) <= 400


def test_requests_at_the_same_time_get_their_own_answers(site: Any) -> None:
    texts = [f"query number {number} " + "word " * (number % 7) for number in range(24)]

    def ask(text: str) -> tuple[Any, Any]:
        found = site.ask("/search", {"query": text, "gamma_d": 0.3}).json["hits"]
        return found, site.ask("/embed", body={"texts": [text, "long " * 40], "side": "query"}).json

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, texts))
    assert together == [ask(text) for text in texts]
    assert len({str(one) for one in together}) == len(texts)


def test_an_empty_index_answers(empty_explorer: Any, serving: Any) -> None:
    with serving(empty_explorer) as site:
        assert site.ask("/index").json["documents"] == 0
        assert site.ask("/search", {"query": QUERY}).json["hits"] == []
        assert site.ask("/explore", {"query": QUERY, "gamma_d": 0}).json["trained"] == []


def test_openapi_describes_every_route(site: Any) -> None:
    paths = site.ask("/openapi.json").json["paths"]
    assert set(paths) == {"/healthz", "/index", "/search", "/embed", "/explore", "/documents"}
    for methods in paths.values():
        for said in methods.values():
            assert said["description"]


def test_nothing_is_loaded_from_elsewhere(site: Any) -> None:
    for path in ("/", "/docs", "/page/explorer.css", "/page/explorer.js", "/page/ranking.js", "/page/histogram.js"):
        text = site.ask(path).body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in text.replace("// ", "") or "http" not in text, path
        assert "http:" not in text and "https:" not in text and "innerHTML" not in text, path
