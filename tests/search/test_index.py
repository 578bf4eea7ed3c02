from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from offsphere.data import load_collection
from offsphere.data.documents import Document
from offsphere.encoders import encode
from offsphere.errors import ConfigError, IndexFolderError, UsageError
from offsphere.evaluation.embedding import embed
from offsphere.evaluation.ranking import rank, write_trec
from offsphere.search import vectors
from offsphere.search.index import Index
from offsphere.similarity import Similarity, norms

ROOT = Path(__file__).parents[2]
NQ = ROOT / "datasets" / "nq_qed"
SIMILARITIES = ("cosine", "dot", "qnorm", "dnorm", "gamma_q=0.3,gamma_d=0.6")


def slow_search(index: Index, query: np.ndarray, similarity: str, documents: list[Document]) -> list[tuple]:
    """Every document with text in float64, best first."""
    vectors = encode(index.encoder, [one.passage for one in documents], "document")
    scores = Similarity.parse(similarity).scores(query[None].astype(np.float64), vectors.astype(np.float64))[0]
    ranked = sorted(((np.float32(score), one.id) for score, one in zip(scores, documents, strict=True) if one.passage))
    return [(identifier, float(score)) for score, identifier in reversed(ranked)]


class TestSearch:
    @pytest.mark.parametrize("similarity", SIMILARITIES)
    def test_finds_what_a_slow_search_finds(self, index, documents, similarity):
        query = encode(index.encoder, ["iron rust and sea"], "query")[0]
        hits = index.search("iron rust and sea", 8, similarity)
        assert [(hit.id, hit.score) for hit in hits] == slow_search(index, query, similarity, documents)[:8]

    def test_hits_carry_text_length_and_angle(self, index, documents):
        query = encode(index.encoder, ["bee honey"], "query").astype(np.float64)
        for hit in index.search("bee honey", 30):
            source = next(one for one in documents if one.id == hit.id)
            assert (hit.title, hit.text, hit.metadata) == (source.title, source.text, source.metadata)
            raw = encode(index.encoder, [source.passage], "document").astype(np.float64)
            assert hit.norm == pytest.approx(norms(raw)[0], rel=1e-6)
            assert hit.cosine == pytest.approx(Similarity.parse("cosine").scores(query, raw)[0, 0], abs=1e-6)
            # The score is the plain product of lengths and cosine; nothing rescaled it.
            assert hit.score == pytest.approx(norms(query)[0] * hit.norm * hit.cosine, rel=1e-5, abs=1e-5)

    def test_its_own_similarity_is_the_default_and_the_choice_matters(self, index):
        own, dot, cosine = (index.search("night star", 30, name) for name in (None, "dot", "cosine"))
        assert own == dot
        assert [hit.id for hit in dot] != [hit.id for hit in cosine]
        assert [hit.score for hit in cosine] == pytest.approx([hit.cosine for hit in cosine], abs=1e-6)

    def test_several_questions_have_an_answer_each(self, index):
        assert index.search(["bee", "moon tide"], 3) == [index.search("bee", 3), index.search("moon tide", 3)]

    def test_no_more_hits_than_documents(self, index):
        assert len(index.search("bee", 1000)) == 30

    def test_what_cannot_be_searched(self, index, tmp_path, model):
        for text in ("", " \n", ["bee", ""]):
            with pytest.raises(UsageError, match="a query without text has no direction"):
                index.search(text)
        with pytest.raises(ConfigError, match="k must be at least 1, found 0"):
            index.search("bee", 0)
        with pytest.raises(ConfigError, match="unknown similarity 'euclid'"):
            index.search("bee", similarity="euclid")
        empty = Index.create(tmp_path / "empty", model, similarity="dot")
        for unfilled in (empty, Index.open(tmp_path / "empty")):
            with pytest.raises(IndexFolderError, match="has no table yet"):
                unfilled.search("bee")
        index.delete(index.ids)
        with pytest.raises(IndexFolderError, match="holds no documents; add some with: offsphere index"):
            index.search("bee")

    def test_documents_without_text_are_kept_and_never_found(self, tmp_path, model):
        index = Index.create(tmp_path / "index", model, similarity="cosine")
        added = index.add([Document("empty"), Document("blank", " ", "\n"), Document("bee", "", "bee")])
        assert (added.new, added.empty, index.count()) == (3, 2, 3)
        assert dict(zip(index.ids, index.norms > 0, strict=True)) == {"empty": False, "blank": False, "bee": True}
        opposite = -encode(index.encoder, ["bee"], "query")
        ((hit,),) = index.search_embeddings(opposite)
        assert (hit.id, round(hit.score, 6)) == ("bee", -1.0)  # the empty ones would come first, with 0
        ((hit,),) = index.search_embeddings(opposite, where="norm < 100")
        assert hit.id == "bee"
        collection = load_collection_of({"empty": "", "blank": "", "bee": "bee"}, {"q": "bee"})
        assert list(index.rank(collection).run()["q"]) == ["bee"]  # as evaluation has it

    def test_equal_scores_are_won_by_the_greater_id(self, tmp_path, model):
        index = Index.create(tmp_path / "index", model, similarity="dot")
        ids = ["a", "b", "10", "9", "é", "💡"]
        index.add([Document(one, "", "moon") for one in ids])
        assert [hit.id for hit in index.search("moon")] == sorted(ids, reverse=True)

    @pytest.mark.parametrize(
        ("where", "found"),
        [
            ("lang = 'en'", lambda one: one.metadata["lang"] == "en"),
            ("number >= 10 AND number < 20.5", lambda one: 10 <= one.metadata["number"] < 20.5),
            ("id IN ('d3', 'd4', 'x')", lambda one: one.id in ("d3", "d4")),
            ("title = 'the' OR text LIKE '%bee%'", lambda one: one.title == "the" or "bee" in one.text),
            ("number > 1000", lambda one: False),
        ],
    )
    def test_filters(self, index, documents, where, found):
        query = encode(index.encoder, ["bee moon"], "query")[0]
        expected = slow_search(index, query, "dot", [one for one in documents if found(one)])
        for memory in (None, 0):
            hits = Index.open(index.folder, memory=memory).search("bee moon", 30, where=where)
            assert [(hit.id, hit.score) for hit in hits] == expected

    def test_a_filter_that_is_none_says_what_there_is(self, index):
        for where in ("langg = 'en'", "lang ==", "lang = 'en'; DROP TABLE documents", "vector"):
            with pytest.raises(
                ConfigError, match=r"cannot filter by .*\n.* the fields id, title, text, norm, number, lan"
            ):
                index.search("bee", where=where)
        assert index.count() == 30

    def test_memory_changes_nothing(self, index, monkeypatch):
        monkeypatch.setattr(vectors, "BLOCK", 7)
        little = Index.open(index.folder, memory=0)
        assert "read block by block" in little.explain()
        assert "block" not in Index.open(index.folder).explain()
        queries = ["bee", "moon tide sea", "the a of"]
        for similarity in SIMILARITIES:
            assert little.search(queries, 30, similarity) == index.search(queries, 30, similarity)
            assert little.search(queries, 4, similarity) == index.search(queries, 4, similarity)


def load_collection_of(documents, queries, **more):
    from offsphere.data import Collection

    qrels = {query: {next(iter(documents)): 1} for query in queries}
    return Collection("small", "test", documents, queries, qrels, **more)


@pytest.fixture(scope="module")
def nq(tmp_path_factory):
    """An index of nq_qed, its collection with a sample of queries, and what evaluation embeds."""
    index = Index.create(tmp_path_factory.mktemp("nq") / "index", "package:wordllama")
    index.add(NQ)
    collection = load_collection(NQ).sample(300, None)
    return index, collection, embed(index.encoder, collection)


class TestParity:
    @pytest.mark.parametrize("similarity", SIMILARITIES)
    @pytest.mark.parametrize("memory", [None, 0])
    def test_the_run_file_is_the_one_of_evaluation(self, nq, tmp_path, similarity, memory, monkeypatch):
        monkeypatch.setattr(vectors, "BLOCK", 3000)
        index, collection, embedded = nq
        write_trec(rank(embedded, Similarity.parse(similarity)), tmp_path / "evaluation.trec", "tag")
        opened = Index.open(index.folder, memory=memory)
        write_trec(opened.rank(collection, similarity), tmp_path / "search.trec", "tag")
        assert (tmp_path / "search.trec").read_bytes() == (tmp_path / "evaluation.trec").read_bytes()
        assert len((tmp_path / "search.trec").read_text().splitlines()) == 30_000

    def test_search_finds_the_beginning_of_the_run(self, nq):
        index, collection, _ = nq
        queries = [*collection.queries][:20]
        run = index.rank(collection).run()
        answers = index.search([collection.queries[query] for query in queries])
        for query, hits in zip(queries, answers, strict=True):
            assert [(hit.id, hit.score) for hit in hits] == [*run[query].items()][:10]

    @pytest.mark.parametrize("memory", [None, 0])
    def test_exclusions_are_kept_and_refilled(self, index, documents, memory, monkeypatch):
        monkeypatch.setattr(vectors, "BLOCK", 7)
        texts = {one.id: one.passage for one in documents}
        queries = {"d3": "bee", "q": "moon"}
        excluded = {"q": frozenset({"d1", "d2", "d5", "nowhere"})}
        collection = load_collection_of(texts, queries, excluded=excluded, exclude_self=True)
        expected = rank(embed(index.encoder, collection), Similarity.parse("dot"), 28).run()
        found = Index.open(index.folder, memory=memory).rank(collection, k=28).run()
        assert found == expected
        assert [len(found[query]) for query in queries] == [28, 27]
        assert not {"d1", "d2", "d5"} & found["q"].keys()
