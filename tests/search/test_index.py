from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from offsphere.data import load_collection
from offsphere.data.documents import Document
from offsphere.diagnosis import subject
from offsphere.encoders import encode
from offsphere.errors import ConfigError, DataError, EncoderError, IndexFolderError, UsageError
from offsphere.evaluation.embedding import embed
from offsphere.evaluation.ranking import rank, write_trec
from offsphere.modules import LearnedSimilarity
from offsphere.search import indexing, vectors
from offsphere.search.index import Index
from offsphere.search.manifest import read_manifest, writing
from offsphere.similarity import Similarity, norms

ROOT = Path(__file__).parents[2]
NQ = ROOT / "datasets" / "nq_qed"
SIMILARITIES = ("cosine", "dot", "qnorm", "dnorm", "gamma_q=0.3,gamma_d=0.6")


class Lines:
    """Remembers what long work says."""

    def __init__(self):
        self.said: list[str] = []
        self.steps: list[int] = []

    def say(self, text):
        self.said.append(text)

    def start(self, what, total):
        return self.steps.append


@pytest.fixture
def model(static, save) -> str:
    return str(save(static))


@pytest.fixture
def documents(sentences) -> list[Document]:
    return [
        Document(f"d{number}", text.split()[0], text, {"number": number, "lang": "en" if number % 2 else "de"})
        for number, text in enumerate(sentences(30, 0))
    ]


@pytest.fixture
def index(tmp_path, model, documents) -> Index:
    made = Index.create(tmp_path / "index", model, similarity="dot")
    made.add(documents)
    return made


def content(index: Index) -> dict[str, tuple]:
    """All that is stored, by id; an id that is there twice fails."""
    records = [record for batch in index.records(7, Similarity.parse("dot")) for record in batch]
    assert len({record.id for record in records}) == len(records) == index.count()
    return {one.id: (one.vector.tobytes(), one.norm, one.title, one.text, one.metadata) for one in records}


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


class TestAdding:
    def test_only_what_is_new_or_changed_is_encoded(self, index, documents, monkeypatch):
        encoded: list[str] = []

        def counted(model, texts, *rest, **more):
            encoded.extend(texts)
            return encode(model, texts, *rest, **more)

        monkeypatch.setattr(indexing, "encode", counted)
        version = index._table.version
        added = index.add(documents)
        assert (added.new, added.changed, added.unchanged, encoded) == (0, 0, 30, [])
        assert index._table.version == version
        other = [
            Document("new", "", "honey"),
            Document("d3", "", "salt"),
            Document("d4", documents[4].title, documents[4].text, {"lang": "fr"}),
        ]
        added = index.add(other)
        assert (added.new, added.changed, added.unchanged) == (1, 2, 0)
        assert sorted(encoded) == sorted(["honey", "salt", documents[4].passage])
        everything = {one.id: one for one in [*documents, *other]}
        assert {one.id: one for one in index.documents([*everything, "x"])} == everything
        assert index.search("salt", 1, "cosine")[0].id == "d3"
        assert [hit.id for hit in index.search("salt", where="lang = 'fr'")] == ["d4"]

    def test_documents_that_are_gone_stay_unless_asked(self, index, documents):
        assert index.add(documents[:10]).deleted == 0
        assert index.count() == 30
        assert index.add(documents[5:10], delete_missing=True).deleted == 25
        assert sorted(index.ids) == sorted(one.id for one in documents[5:10])
        with pytest.raises(UsageError, match="nothing to index"):
            index.add(delete_missing=True)

    def test_delete(self, index, tmp_path, model):
        awkward = ["a'b", 'q"q', "back\\slash", "new\nline", "a/b", "💡", " ", "%", "'); --", "e\u0301", "\u00e9"]
        index.add([Document(one, "", "bee") for one in awkward])
        assert index.count() == 30 + len(awkward)
        for one in awkward:
            assert [document.id for document in index.documents([one])] == [one]
            assert index.delete([one, "nowhere"]) == 1
            assert one not in index.ids
        assert index.count() == 30
        assert index.delete([]) == 0

    def test_an_id_twice_is_refused_before_anything_is_encoded(self, index, documents):
        with pytest.raises(DataError, match="the id 'x' occurs twice, in the given documents and in the given"):
            index.add([Document("y", "", "bee"), Document("x", "", "bee")], [Document("x", "", "moon")])
        assert index.count() == 30

    def test_a_malformed_line_is_found_before_anything_is_encoded(self, index, tmp_path):
        lines = [json.dumps({"_id": f"x{number}", "text": "bee"}) for number in range(5)]
        (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{"]), encoding="utf-8")
        with pytest.raises(DataError, match=r"a\.jsonl:6: malformed JSON"):
            index.add(tmp_path / "a.jsonl")
        assert index.count() == 30

    def test_an_iterator_is_read_once(self, index):
        assert index.add(Document(f"x{number}", "", "bee") for number in range(3)).new == 3

    def test_texts_of_a_megabyte_and_of_nothing(self, index):
        long = "moon " * 200_000
        added = index.add([Document("long", "", long.strip()), Document("nothing")])
        assert (added.new, added.empty) == (2, 1)
        (document,) = index.documents(["long"])
        assert document.text == long.strip()

    def test_cut_texts_and_lost_tokens_are_counted(self, tmp_path, transformer, save):
        index = Index.create(tmp_path / "index", save(transformer), similarity="dot", max_length=6)
        texts = ["moon", "moon sea tide salt", "moon sea tide salt bee honey", ""]
        added = index.add([Document(str(number), "", text) for number, text in enumerate(texts)])
        assert (added.cut, added.tokens_lost, added.empty) == (1, 2, 1)  # [CLS] and [SEP] count

    def test_batches_and_their_order_change_no_static_embedding(self, index, documents, tmp_path, model):
        other = Index.create(tmp_path / "other", model, similarity="dot")
        other.add(documents[20:])
        other.add(list(reversed(documents)), batch_size=2)
        assert content(other) == content(index)
        raw = encode(index.encoder, [one.passage for one in index.documents(index.ids)], "document")
        np.testing.assert_array_equal(index.embeddings, raw)
        np.testing.assert_array_equal(index.norms, norms(raw))

    def test_a_broken_embedding_is_refused_and_the_rest_kept(self, index, monkeypatch):
        monkeypatch.setattr(indexing, "BATCHES", 1)
        monkeypatch.setattr(indexing, "COMMIT_SECONDS", 0.0)

        def broken(model, texts, *rest, **more):
            vectors = encode(model, texts, *rest, **more)
            vectors[[text == "salt" for text in texts]] = math.nan
            return vectors

        monkeypatch.setattr(indexing, "encode", broken)
        with pytest.raises(EncoderError, match=r"NaN or infinite, such as that of 'x4'"):
            index.add([Document(f"x{n}", "", "salt" if n == 4 else "moon sea tide") for n in range(5)], batch_size=2)
        assert sorted(set(index.ids) - {f"d{n}" for n in range(30)}) == ["x0", "x1", "x2", "x3"]


class TestFields:
    def test_kinds(self, index):
        index.add([Document("x", "", "bee", {"year": 1999, "ok": True, "tags": ["a"], "my field": "y", "Größe": 1.5})])
        assert {name: index.manifest.fields[name] for name in ("year", "ok", "tags", "my field", "Größe")} == {
            "year": "number",
            "ok": "flag",
            "tags": None,
            "my field": "text",
            "Größe": "number",
        }
        for where in ("year = 1999", "ok", "`my field` = 'y'", "`Größe` > 1", "lang IS NULL"):
            assert [hit.id for hit in index.search("bee", where=where)] == ["x"]
        assert index.search("bee", 1, "cosine")[0].metadata["tags"] == ["a"]
        with pytest.raises(ConfigError, match="lists, objects or of mixed kinds cannot"):
            index.search("bee", where="tags = 'a'")

    def test_a_field_of_two_kinds_can_no_longer_be_filtered_by_and_says_so(self, index):
        index.add([Document("x", "", "bee", {"number": "seven"})])
        assert index.manifest.fields == {"number": None, "lang": "text"}
        with pytest.raises(ConfigError, match="the fields id, title, text, norm, lang"):
            index.search("bee", where="number = 7")
        assert {one.metadata["number"] for one in index.documents(["x", "d3"])} == {"seven", 3}
        index.add([Document("y", "", "bee", {"number": 8})])  # not back with nulls for all others
        assert index.manifest.fields["number"] is None

    def test_names_that_sql_or_the_table_cannot_hold_are_kept_as_json(self, index):
        names = ["a.b", "vector", "digest", "_rowid", "tick`", "", "id", "x" * 200]
        index.add([Document("x", "", "bee", dict.fromkeys(names, 1) | {"big": 2**60})])
        assert [index.manifest.fields[name] for name in (*names, "big")] == [None] * 9
        (document,) = index.documents(["x"])
        assert document.metadata == dict.fromkeys(names, 1) | {"big": 2**60}

    def test_columns_are_mended_where_a_process_was_stopped_before_them(self, index, monkeypatch):
        manifest = read_manifest(index.folder)
        object.__setattr__(manifest, "fields", {"lang": None, "number": "number", "late": "text"})
        manifest.write(index.folder)
        again = Index.open(index.folder)
        again.add([Document("x", "", "bee", {"late": "yes"})])
        assert sorted(again._table.fields()) == ["late", "number"]
        assert [hit.id for hit in again.search("bee", where="late = 'yes'")] == ["x"]


class TestManifest:
    def test_learned_gammas_are_those_of_the_model(self, tmp_path, static, save, documents):
        learned = Similarity(0.9, 0.1, learned=True)
        static.append(LearnedSimilarity(learned))
        index = Index.create(tmp_path / "index", save(static))
        index.add(documents)
        gammas = index.similarity.gammas
        assert index.similarity.name == "learnable" and gammas != (0.5, 0.5)
        assert read_manifest(index.folder).similarity == index.similarity
        np.testing.assert_array_equal(
            index.embeddings, encode(static, [d.passage for d in index.documents(index.ids)], "document")
        )
        opened = Index.open(index.folder)
        for name in (None, "learnable", "own", Similarity(*gammas)):
            assert opened.search("bee moon", 30, name) == index.search("bee moon", 30)
        assert "ranked under dot, not learnable as the index is meant" in opened.explain("dot")

    def test_a_model_that_declares_nothing_needs_a_similarity(self, tmp_path, static, monkeypatch):
        """T-A2. sentence-transformers stores cosine when it saves such a model, so this one is not saved."""
        monkeypatch.setattr(subject, "open_encoder", lambda *arguments, **more: static)
        with pytest.raises(UsageError, match="does not say which similarity"):
            Index.create(tmp_path / "index", "mine")
        assert not (tmp_path / "index").exists()
        assert Index.create(tmp_path / "index", "mine", similarity="dot").similarity.name == "dot"

    @pytest.mark.parametrize("name", ["multi-qa-mpnet-base-dot-v1", "all-cosine-normalized"])
    def test_the_name_of_a_model_says_nothing(self, tmp_path, static, save, name):
        """T-A7. What it ranks under is stored in it, or asked for; nobody reads it out of its name."""
        folder = save(static, name)
        settings = folder / "config_sentence_transformers.json"
        stored = json.loads(settings.read_text(encoding="utf-8"))
        settings.write_text(json.dumps(stored | {"similarity_fn_name": None}), encoding="utf-8")
        with pytest.raises(UsageError, match="does not say which similarity"):
            Index.create(tmp_path / "index", folder)
        other = "cosine" if "dot" in name else "dot"
        settings.write_text(json.dumps(stored | {"similarity_fn_name": other}), encoding="utf-8")
        assert Index.create(tmp_path / "index", folder).similarity.name == other

    def test_what_it_says(self, tmp_path, model, static):
        index = Index.create(tmp_path / "index", model, similarity="qnorm", prompts={"query": "query : "}, max_length=5)
        index.add([Document("a", "", "bee")])
        stored = json.loads((tmp_path / "index" / "manifest.json").read_text(encoding="utf-8"))
        assert len(stored.pop("fingerprint")) == 32
        assert stored == {
            "format": 1,
            "model": model,
            "similarity": {"gamma_q": 1.0, "gamma_d": 0.0},
            "prompts": {"query": "query : ", "document": ""},
            "max_length": 5,
            "dimension": 16,
            "fields": {},
            "approximate": None,
        }
        assert (index.similarity.name, index.stamp.similarity.name, index.stamp.prompt) == ("qnorm", "qnorm", "")

    def test_the_model_is_found_from_any_folder(self, tmp_path, model, monkeypatch):
        monkeypatch.chdir(Path(model).parent)
        index = Index.create("index", Path(model).name, similarity="dot")
        index.add([Document("a", "", "bee")])
        monkeypatch.chdir("/")
        assert Index.open(tmp_path / "index").search("bee")[0].id == "a"

    def test_prompts_are_applied_each_on_its_side(self, tmp_path, model):
        plain = Index.create(tmp_path / "plain", model, similarity="dot")
        prompted = Index.create(
            tmp_path / "prompted", model, similarity="dot", prompts={"query": "query : ", "document": "passage : "}
        )
        for index in (plain, prompted):
            index.add([Document("a", "", "bee")])
        raw = {name: encode(plain.encoder, [name], "query", prompt="")[0] for name in ("passage : bee", "query : bee")}
        np.testing.assert_array_equal(prompted.embeddings[0], raw["passage : bee"])
        assert (plain.embeddings[0] != prompted.embeddings[0]).any()
        (hit,) = Index.open(tmp_path / "prompted").search("bee")
        assert hit.score == pytest.approx(float(raw["query : bee"] @ raw["passage : bee"]), rel=1e-5)

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"similarity": "cosine"}, r"its similarity is 'dot', not 'cosine'|its similarity is dot, not cosine"),
            (
                {"prompts": {"document": "passage : "}},
                r"its document prompt is '', not 'passage : ' \(keep it with --doc",
            ),
            ({"max_length": 5}, r"cut at the limit of the model, not at 5 \(leave out --max-length"),
        ],
    )
    def test_adding_in_another_way_is_refused(self, index, model, changed, message):
        with pytest.raises(IndexFolderError, match=message):
            Index.create(index.folder, model, **changed)
        assert Index.create(index.folder, model).similarity == index.similarity  # what is left out stays as it is
        assert Index.create(index.folder, model, similarity="dot", prompts={"query": ""}).count() == 30

    def test_another_model_is_refused(self, index, tmp_path, static, save):
        import torch

        with torch.no_grad():
            static[0].embedding.weight[0, 0] += 1
        other = save(static, "other")
        for attempt in (lambda: Index.open(index.folder, other), lambda: Index.create(index.folder, other)):
            with pytest.raises(IndexFolderError, match=r"was made with .* another model .*\n.*--out ANOTHER_FOLDER"):
                attempt()
        Path(index.manifest.model).rename(tmp_path / "moved")
        assert Index.open(index.folder, tmp_path / "moved").search("bee", 3) == index.search("bee", 3)
        (tmp_path / "other").rename(index.manifest.model)  # the folder that the manifest names has other weights now
        with pytest.raises(IndexFolderError, match="another model"):
            Index.open(index.folder).search("bee")

    def test_what_is_no_index_says_what_to_do(self, index, tmp_path, model):
        with pytest.raises(IndexFolderError, match="nowhere is not a folder; make an index with: offsphere index"):
            Index.open(tmp_path / "nowhere")
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "precious.txt").write_text("kept", encoding="utf-8")
        for attempt in (Index.open, lambda folder: Index.create(folder, model, similarity="dot")):
            with pytest.raises(IndexFolderError, match=r"has no manifest.json, so it is no index"):
                attempt(tmp_path / "other")
        manifest = index.folder / "manifest.json"
        stored = manifest.read_text(encoding="utf-8")
        for text, message in (
            (stored.replace('"format": 1', '"format": 2'), "has format 2, and this version"),
            (stored[:50], "is damaged"),
            ("[]", "is damaged"),
            (stored.replace("dimension", "dimensions"), "is damaged"),
            (stored.replace('"dimension": 16', '"dimension": 17'), "have 16 dimensions, but its manifest says 17"),
        ):
            manifest.write_text(text, encoding="utf-8")
            with pytest.raises(IndexFolderError, match=message):
                Index.open(index.folder, model).add([Document("x", "", "bee")])
        manifest.unlink()
        for attempt in (Index.open, lambda folder: Index.create(folder, model, similarity="dot")):
            with pytest.raises(IndexFolderError, match=r"has documents\.lance but no manifest\.json"):
                attempt(index.folder)

    def test_object_storage_is_no_folder(self, tmp_path, model, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(IndexFolderError, match=r"a folder on this machine, found s3:/.*--to lancedb:s3://"):
            Index.create("s3://bucket/index", model, similarity="dot")
        assert not list(tmp_path.glob("s3*"))

    def test_folders_with_awkward_names(self, tmp_path, model):
        folder = tmp_path / "größe %20 #1 ?x=1 'q'"
        Index.create(folder, model, similarity="dot").add([Document("a", "", "bee")])
        assert Index.open(folder).search("bee")[0].id == "a"
        assert sorted(one.name for one in tmp_path.iterdir()) == ["encoder", folder.name]


ADD = """
import sys
from offsphere.search import indexing
from offsphere.search.index import Index

indexing.WINDOW, indexing.BATCHES, indexing.COMMIT_SECONDS = 500, 1, 0.0


class Shown:
    def say(self, text):
        pass

    def start(self, what, total):
        return lambda done: print(done, flush=True)


Index.create(sys.argv[1], sys.argv[2]).add(sys.argv[3], batch_size=100, progress=Shown())
"""


class TestStops:
    def test_killed_while_adding_and_changing(self, tmp_path, model, sentences):
        """Half of the documents are there and have changed, the other half is new; the process is killed among them."""
        texts = sentences(2000, 1)
        (tmp_path / "corpus").mkdir()
        rows = [{"_id": f"d{number}", "text": f"{text} moon", "n": number} for number, text in enumerate(texts)]
        corpus = tmp_path / "corpus" / "corpus.jsonl"
        corpus.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        before = [Document(f"d{number}", "", f"{text} bee", {"n": number}) for number, text in enumerate(texts)][::2]
        whole, index = (Index.create(tmp_path / name, model, similarity="dot") for name in ("whole", "index"))
        for one in (whole, index):
            one.add(before)

        with subprocess.Popen(
            [sys.executable, "-c", ADD, str(index.folder), model, str(corpus.parent)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        ) as process:
            for line in process.stdout:
                if int(line) >= 500:
                    process.send_signal(signal.SIGKILL)
                    break
            rest = process.stdout.read().split()
            assert process.wait() == -signal.SIGKILL
        assert "2000" not in rest

        index = Index.create(index.folder, model)
        there = content(index)  # which fails where an id is twice
        assert 1000 < len(there) < 2000
        assert index.search("bee", 3)  # and can be searched at once
        changed = sum(there[one.id][3] != one.text for one in before)
        added = index.add(corpus.parent)
        assert (added.new, added.changed) == (2000 - len(there), 1000 - changed)
        assert 200 <= changed < 1000
        whole.add(corpus.parent)
        assert content(index) == content(whole)
        assert index.search("moon tide", 20) == whole.search("moon tide", 20)

    def test_stopped_before_the_table(self, tmp_path, model):
        Index.create(tmp_path / "index", model, similarity="dot")  # a manifest, and nothing else
        (tmp_path / "index" / "documents.lance" / "data").mkdir(parents=True)  # what a stopped creation leaves
        index = Index.create(tmp_path / "index", model)
        assert index.add([Document("a", "", "bee")]).new == 1
        assert Index.open(tmp_path / "index").search("bee")[0].id == "a"

    def test_stopped_before_the_manifest(self, tmp_path, model):
        (tmp_path / "index").mkdir()
        (tmp_path / "index" / "index.lock").touch()
        (tmp_path / "index" / "manifest.json.17.tmp").write_text('{"form', encoding="utf-8")
        assert Index.create(tmp_path / "index", model, similarity="dot").count() == 0

    def test_two_writers_at_once(self, index):
        with writing(index.folder):
            for attempt in (lambda: index.add([Document("x", "", "bee")]), lambda: index.delete(["d1"])):
                with pytest.raises(IndexFolderError, match=r"another process is writing to .*; wait until it ends"):
                    attempt()
            assert len(index.search("bee", 3)) == 3  # reading goes on
        assert index.add([Document("x", "", "bee")]).new == 1

    def test_a_reader_keeps_its_version_while_another_writes(self, index):
        reader = Index.open(index.folder)
        before = reader.search("bee moon", 30)
        index.add([Document("x", "", "bee"), Document("d3", "", "bee")])
        index.delete(["d1"])
        assert reader.search("bee moon", 30) == before
        assert {"x"} <= {hit.id for hit in Index.open(index.folder).search("bee moon", 30)}

    def test_an_index_that_was_made_anew_is_noticed(self, index, tmp_path, model):
        import shutil

        other = Index.open(index.folder)
        shutil.rmtree(index.folder)
        Index.create(index.folder, model, similarity="cosine")
        with pytest.raises(IndexFolderError, match="was made anew in the meantime"):
            other.add([Document("x", "", "bee")])
