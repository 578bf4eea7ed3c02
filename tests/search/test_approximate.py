from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from offsphere import Similarity, load_collection
from offsphere.errors import ConfigError, EncoderError, IndexFolderError
from offsphere.progress import Silent
from offsphere.search.approximate import EF_SEARCH, PERTURBED, REAL_QUERIES, ApproximateIndex, by_speed, choose
from offsphere.search.exact import ExactSearch
from offsphere.search.graphs import KINDS, ReductionGraph, load_faiss, new_graph
from offsphere.search.recall import Choice, Measured, Trial

ROOT = Path(__file__).parents[2]
DOT = Similarity.parse("dot")


def _benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_approximate", ROOT / "benchmarks" / "approximate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


benchmark = _benchmark()


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    faiss = load_faiss()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)


class Told:
    """Progress that remembers."""

    def __init__(self):
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def start(self, what: str, total: int):
        self.said.append(what)
        return lambda done: None


def embedded() -> tuple[np.ndarray, np.ndarray]:
    """Real passages and questions; the static table gives vectors whose lengths differ."""
    from offsphere.encoders import encode, open_encoder

    collection = load_collection(ROOT / "datasets" / "nq_qed", split="train").sample(None, 1500)
    encoder = open_encoder("package:wordllama", device="cpu")
    documents = encode(encoder, list(collection.documents.values()), "document")
    return documents, encode(encoder, list(collection.queries.values())[:1000], "query")


COLLECTIONS = {
    "real": embedded,
    "lognormal": lambda: benchmark.lognormal(2000, 32, 1000),
    "hub-heavy": lambda: benchmark.hub_heavy(2000, 32, 1000),
}


@pytest.fixture(scope="module")
def chosen():
    """For a name: documents, queries that no choice has seen, and the index chosen by 400 others; made once."""
    made: dict[str, tuple[np.ndarray, np.ndarray, ApproximateIndex]] = {}

    def make(name: str):
        if name not in made:
            documents, queries = COLLECTIONS[name]()
            assert len(queries) == 1000
            made[name] = documents, queries[400:], choose(documents, queries[:400], DOT)
        return made[name]

    return make


def recall(index: ApproximateIndex, documents: np.ndarray, queries: np.ndarray, k: int = 10) -> float:
    """Share of the k best by float64 products that the index finds."""
    scores = queries.astype(np.float64) @ documents.astype(np.float64).T
    right = np.argsort(-scores, axis=1)[:, :k]
    rows, _ = index.search(queries, k)
    return float(np.mean([len(set(one) & set(other)) / k for one, other in zip(rows, right, strict=True)]))


@pytest.mark.parametrize("name", COLLECTIONS)
def test_the_promise_holds_for_queries_that_took_no_part(name, chosen):
    documents, unseen, index = chosen(name)
    assert recall(index, documents, unseen) >= 0.95
    kept = index.choice.kept
    assert kept.documents == len(index) == len(documents)
    assert min(kept.bound, kept.held_out_bound) >= 0.95
    assert index.choice.source == REAL_QUERIES and index.choice.queries == 400
    assert index.choice.reason.startswith((f"{index.method} graph with efSearch {index.ef_search}", "exact search"))
    np.testing.assert_array_equal(index.documents, documents.astype(np.float32))


@pytest.mark.parametrize("name", COLLECTIONS)
def test_every_candidate_is_measured_to_one_beyond_the_first_that_suffices(name, chosen):
    choice = chosen(name)[2].choice
    assert choice.exact.recall == choice.exact.held_out == 1.0
    for row in (*choice.candidates, choice.exact):
        assert row.queries_per_second > 0 and len(row.deciles) == len(choice.decile_norms) == 10
        assert np.mean(row.deciles) == pytest.approx((row.recall + row.held_out) / 2, abs=1e-3)
    for method in KINDS:
        rows = [row for row in choice.candidates if row.method == method]
        assert [row.ef_search for row in rows] == list(EF_SEARCH[: len(rows)])
        assert all(row.bound < 0.95 for row in rows[:-2])
        assert len(rows) == len(EF_SEARCH) or rows[-2].bound >= 0.95
    assert sum(row.bound >= 0.95 for row in choice.candidates) >= 2


def test_the_inner_product_graph_fails_among_hubs(chosen):
    documents, _, index = chosen("hub-heavy")
    rows = [row for row in index.choice.candidates if row.method == "inner-product"]
    assert max(row.held_out for row in rows) < 0.2 and max(max(row.deciles) for row in rows) < 0.3
    assert index.method != "inner-product"
    assert max(row.bound for row in index.choice.candidates if row.method == "reduction") >= 0.95  # it is the remedy
    # The answers are short, and next to none of them is a hub.
    assert index.choice.decile_norms[-1] < 0.1 * np.linalg.norm(documents, axis=1).max()


def test_the_reduction_and_the_direction_fail_where_lengths_vary(chosen):
    at = {(row.method, row.ef_search): row for row in chosen("lognormal")[2].choice.candidates}
    assert at["inner-product", 32].bound > 0.95
    assert at["reduction", 32].held_out < 0.9 and at["direction", 32].held_out < 0.6
    # It is the long answers that they miss.
    assert at["direction", 64].deciles[0] > 0.9 and at["direction", 64].deciles[9] < 0.4


def test_where_the_only_candidate_fails_exact_search_stays():
    documents, queries = benchmark.hub_heavy(1500, 16, 300)
    told = Told()
    index = choose(documents, queries, DOT, methods=["inner-product"], progress=told)
    assert index.method == "exact" and index.ef_search is None and index.choice.kept == index.choice.exact
    assert index.choice.reason.startswith("exact search stays: no candidate reached a recall@10 of 0.95; the nearest")
    assert told.said[-1] == index.choice.reason
    exact = ExactSearch(documents.astype(np.float32)).search(queries.astype(np.float32), 10)
    for found, expected in zip(index.search(queries), exact, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_candidates_see_a_sample_and_the_promise_sees_everything():
    documents, queries = benchmark.lognormal(3000, 16, 300)
    index = choose(documents, queries, DOT, 0.9, sample=1000, most_queries=200)
    assert {row.documents for row in index.choice.candidates} == {1000}
    assert index.choice.exact.documents == index.choice.kept.documents == len(index) == 3000
    assert index.choice.queries == 200 and recall(index, documents, queries[200:]) > 0.9


def test_a_similarity_prepares_both_sides():
    documents, queries = benchmark.lognormal(800, 16, 250)
    cosine = Similarity.parse("cosine")
    index = choose(documents, 7 * queries, cosine, 0.9)
    np.testing.assert_array_equal(index.documents, cosine.prepare_document(documents.astype(np.float32)))
    _, scores = index.search(cosine.prepare_query(queries[:20]), 5)
    best = np.sort(cosine.scores(queries[:20], documents), axis=1)[:, : -1 - 5 : -1]
    assert np.isclose(scores, best, atol=1e-6).mean() > 0.9


def test_without_queries_perturbed_documents_stand_in_and_it_says_so():
    documents, _ = benchmark.lognormal(1500, 16, 10)
    index = choose(documents, None, DOT, 0.9, most_queries=200)
    assert index.choice.source == PERTURBED and index.choice.queries == 200
    if index.method != "exact":
        assert "measure with real ones before you rely on it" in index.choice.reason
    nearest = (index._queries @ documents.T).max(axis=1)
    assert (np.abs(index._queries[:, None] - documents[None]).max(axis=2).min(axis=1) > 1e-3).all()
    assert (nearest > 0).all()


def test_too_few_queries_prove_nothing():
    documents, queries = benchmark.lognormal(500, 16, 60)
    zeros, again = np.zeros((50, 16)), queries
    index = choose(documents, np.concatenate((queries, zeros, again)), DOT)
    reason = "exact search stays: 60 queries cannot prove a recall@10 of 0.95; it takes 104 different ones at least"
    assert index.choice.reason == reason and index.choice.kept is None and index.choice.candidates == ()
    assert index.method == "exact" and recall(index, documents, queries) == 1.0
    certain = choose(documents, queries, DOT, 1.0)
    assert certain.choice.reason == "exact search stays: 60 queries cannot prove a recall@10 of 1"


def test_the_same_seed_measures_the_same_recalls():
    documents, queries = benchmark.lognormal(500, 16, 150)

    def table(seed: int) -> list[tuple]:
        rows = choose(documents, queries, DOT, sample=400, most_queries=120, seed=seed).choice.candidates
        return [(row.method, row.ef_search, row.recall, row.held_out, row.deciles) for row in rows]

    assert table(0) == table(0) != table(1)


def row(method: str, ef_search: int, bound: float, speed: float) -> Measured:
    return Measured(method, ef_search, 100, bound + 0.01, bound + 0.01, bound, bound, (1.0,) * 10, speed)


def test_the_fastest_that_reaches_the_recall_comes_first():
    table = [
        row("inner-product", 16, 0.94, 900),
        row("inner-product", 32, 0.96, 500),
        row("inner-product", 64, 0.99, 510),
        row("reduction", 16, 0.2, 950),
        row("direction", 16, 0.95, 600),
        row("direction", 32, 0.97, 300),
    ]
    assert by_speed(table, 0.95) == [table[4], table[2]]
    assert by_speed(table, 0.999) == []


def graph_index(method: str, documents: np.ndarray, queries: np.ndarray, promise: float, ef: int) -> ApproximateIndex:
    """An index whose choice is already made, whatever the clock says."""
    graph = new_graph(method, documents.shape[1])
    graph.add(documents.astype(np.float32))
    kept = row(method, ef, promise, 1000.0)
    kept = Measured.from_dict(kept.to_dict() | {"documents": len(documents)})
    choice = Choice(promise, 10, len(queries), REAL_QUERIES, (kept,), (1.0,) * 10, kept, kept, "so")
    return ApproximateIndex(graph, ef, choice, queries.astype(np.float32))


def test_ef_search_is_raised_until_the_promise_holds():
    documents, queries = benchmark.lognormal(1500, 16, 600)
    index = graph_index("direction", documents, queries[:300], 0.95, 16)
    before = recall(index, documents, queries[300:])
    kept = index.keep_promise(Trial(index.documents, queries[:300].astype(np.float32), 10), Silent())
    assert kept is not None and kept.ef_search == index.ef_search > 16
    assert min(kept.bound, kept.held_out_bound) >= 0.95
    assert before < 0.9 < 0.95 <= recall(index, documents, queries[300:])


def test_longer_lists_walk_further():
    documents, queries = benchmark.lognormal(1500, 16, 100)
    index = graph_index("inner-product", documents, queries, 0.9, 16)
    assert recall(index, documents, queries, 100) > 0.95
    rows, scores = index.search(queries, 1000)
    assert rows.shape == scores.shape == (100, 1000)


@pytest.mark.parametrize("method", KINDS)
def test_added_documents_are_found_and_the_promise_is_measured_again(method):
    documents, queries = benchmark.lognormal(1500, 16, 500)
    index = graph_index(method, documents[:1000], queries[:300], 0.9, 256)
    index.add(documents[1000:1050])
    assert index.choice.kept.documents == 1000 and len(index) == 1050  # too few to measure again
    index.add(3 * documents[1050:])
    everything = np.concatenate((documents[:1050], 3 * documents[1050:]))
    kept = index.choice.kept
    assert kept.documents == len(index) == 1500 and min(kept.bound, kept.held_out_bound) >= 0.9
    assert recall(index, everything, queries[300:]) >= 0.9
    assert (index.search(queries[300:])[0] >= 1050).mean() > 0.5
    np.testing.assert_array_equal(index.documents, everything.astype(np.float32))
    index.add(documents[:0])
    assert len(index) == 1500


def test_exact_search_takes_over_when_growth_breaks_the_promise():
    documents, queries = benchmark.lognormal(1500, 16, 300)
    index = graph_index("direction", documents[:1000], queries, 0.9999, 64)
    told = Told()
    index.add(documents[1000:], told)
    assert index.method == "exact" and index.ef_search is None and len(index) == 1500
    assert index.choice.reason == told.said[-1]
    assert "with 1500 documents the graph no longer keeps its promise" in index.choice.reason
    assert recall(index, documents, queries) == 1.0
    index.add(2 * documents[:10])
    assert recall(index, np.concatenate((documents, 2 * documents[:10])), queries) == 1.0


def same(one: ApproximateIndex, other: ApproximateIndex, queries: np.ndarray) -> None:
    assert one.settings == other.settings and one.choice == other.choice
    for found, expected in zip(one.search(queries), other.search(queries), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("count", [0, 1, 9])
@pytest.mark.parametrize("given", [True, False])
def test_too_few_documents_are_searched_exactly(count, given, tmp_path):
    documents, queries = benchmark.lognormal(9, 16, 200)
    index = choose(documents[:count], queries if given else None, DOT)
    assert index.choice.reason == f"exact search stays: {count} documents are fewer than an answer of 10"
    index.save(tmp_path)
    loaded = ApproximateIndex.load(tmp_path)
    assert ((loaded.search(queries[:3])[0] >= 0).sum(axis=1) == count).all()
    loaded.add(documents)
    assert len(loaded) == count + 9 and (loaded.search(queries[:3], 9)[0] >= 0).all()


@pytest.mark.parametrize("method", [*KINDS, "exact"])
def test_an_index_is_loaded_as_it_was_saved(method, tmp_path):
    documents, queries = benchmark.lognormal(500, 16, 100)
    if method == "exact":
        index = choose(documents, queries, DOT, 1.0)
    else:
        index = graph_index(method, documents, queries, 0.9, 64)
        index.add(5 * documents[:20])
    index.save(tmp_path / "deep" / "graph")
    loaded = ApproximateIndex.load(tmp_path / "deep" / "graph")
    same(loaded, index, queries)
    if method == "reduction":
        assert isinstance(loaded._found_by, ReductionGraph) and len(loaded._found_by.overflow) > 0
    loaded.add(documents[:100])  # enough to measure again
    assert len(loaded) == len(index) + 100
    assert method == "exact" or loaded.choice.kept.documents == 620
    loaded.save(tmp_path / "deep" / "graph")
    same(ApproximateIndex.load(tmp_path / "deep" / "graph"), loaded, queries)
    assert len(list((tmp_path / "deep" / "graph").iterdir())) == 2


@pytest.mark.parametrize("step", ["queries", "graph", "settings", "clean"])
def test_an_interrupted_save_leaves_an_index(step, tmp_path, monkeypatch):
    documents, queries = benchmark.lognormal(500, 16, 100)
    old = graph_index("inner-product", documents[:300], queries, 0.9, 64)
    new = graph_index("direction", documents, queries, 0.9, 64)
    old.save(tmp_path)

    def interrupt(*arguments, **keywords):
        raise KeyboardInterrupt

    target = {
        "queries": (np, "save"),
        "graph": (type(new._found_by), "write"),
        "settings": (Path, "replace"),
        "clean": (shutil, "rmtree"),
    }[step]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*target, interrupt)
        new.save(tmp_path)
    same(ApproximateIndex.load(tmp_path), new if step == "clean" else old, queries)
    new.save(tmp_path)
    same(ApproximateIndex.load(tmp_path), new, queries)
    assert len(list(tmp_path.glob("parts-*"))) == 1


def test_a_damaged_index_is_refused(tmp_path):
    documents, queries = benchmark.lognormal(300, 16, 50)
    with pytest.raises(IndexFolderError, match=r"holds no approximate index: no .*settings.json"):
        ApproximateIndex.load(tmp_path)
    graph_index("direction", documents, queries, 0.9, 64).save(tmp_path)
    whole = json.loads((tmp_path / "settings.json").read_text())
    for change, message in [
        ({"format": 99}, "has format 99, this version reads 1"),
        ({"documents": 5}, "say \\(5, 16\\)"),
        ({"parts": "gone"}, "cannot be read"),
        ({"choice": {}}, "cannot be read: KeyError"),
    ]:
        (tmp_path / "settings.json").write_text(json.dumps(whole | change))
        with pytest.raises(IndexFolderError, match=f"{message}.*Build it again"):
            ApproximateIndex.load(tmp_path)
    (tmp_path / "settings.json").write_text(json.dumps(whole)[:100])
    with pytest.raises(IndexFolderError, match="cannot be read"):
        ApproximateIndex.load(tmp_path)
    (tmp_path / "settings.json").write_text(json.dumps(whole))
    graph = next(tmp_path.glob("parts-*")) / "graph.faiss"
    graph.write_bytes(graph.read_bytes()[:1000])
    with pytest.raises(IndexFolderError, match="cannot be read"):
        ApproximateIndex.load(tmp_path)


def test_what_cannot_be_searched_is_refused():
    documents, queries = benchmark.lognormal(300, 16, 50)
    broken = documents.copy()
    broken[7, 3] = np.nan
    for bad_documents, bad_queries, message in [
        (broken, queries, "1 of 300 documents are NaN or infinite, such as row 7"),
        (documents, queries[:, :8], r"queries have shape \(50, 8\); expected \(count, 16\)"),
        (documents[0], queries, r"documents have shape \(16,\); expected \(count, dimension\)"),
    ]:
        with pytest.raises(EncoderError, match=message):
            choose(bad_documents, bad_queries, DOT)
    for settings in ({"recall": 0.0}, {"recall": 1.1}, {"k": 0}, {"sample": 5}):
        with pytest.raises(ConfigError, match="needs a recall above 0 and up to 1"):
            choose(documents, queries, DOT, **settings)
    index = graph_index("direction", documents, queries, 0.9, 64)
    with pytest.raises(EncoderError, match="NaN"):
        index.add(broken)
    assert len(index) == 300
    with pytest.raises(EncoderError, match="queries have shape"):
        index.search(queries[0])
    with pytest.raises(ConfigError, match="k must be at least 1"):
        index.search(queries, 0)


def test_the_benchmark_prints_the_table(tmp_path, capsys):
    documents, queries = benchmark.lognormal(600, 16, 200, seed=3)
    np.savez(tmp_path / "real.npz", documents=documents, queries=queries)
    size = ["--documents", "600", "--dimension", "16", "--queries", "150"]
    files = [f"--{kind}={tmp_path / kind}" for kind in ("json", "markdown")]
    benchmark.main([*size, *files, "--vectors", str(tmp_path / "real.npz"), "--recall", "0.9"])
    text = (tmp_path / "markdown").read_text()
    assert text in capsys.readouterr().out
    figures = json.loads((tmp_path / "json").read_text())
    for name in COLLECTIONS:
        assert f"### {name}: 600 documents of 16 dimensions" in text
        assert f"Kept: {figures[name]['choice']['reason']}" in text
    tables = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(tables) == sum(1 + len(figures[name]["choice"]["candidates"]) + 1 for name in COLLECTIONS) >= 3 * 8
    assert {line.count("|") for line in tables} == {16}
