"""Length survives LangChain from end to end, and its own in-memory store shows what losing it does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from langchain_core.vectorstores import InMemoryVectorStore

from offsphere.data.documents import Document
from offsphere.encoders import encode
from offsphere.errors import EncoderError, UsageError
from offsphere.search.exact import ExactSearch
from offsphere.search.index import Index
from offsphere.search.langchain import OffsphereEmbeddings, OffsphereRetriever
from offsphere.similarity import Similarity, norms

PROMPTS = {"query": "moon : ", "document": "bee : "}


@pytest.fixture
def model(static, save) -> str:
    static.prompts.update(PROMPTS)
    static.similarity_fn_name = "dot"
    return str(save(static))


@pytest.fixture
def index(tmp_path, model, sentences) -> Index:
    made = Index.create(tmp_path / "index", model)
    made.add([Document(f"d{i}", "sea" * (i == 0), text, {"n": i}) for i, text in enumerate(sentences(60, 0))])
    return made


@pytest.mark.parametrize("name", [None, "cosine", "qnorm", "dnorm", "gamma_q=0.3,gamma_d=0.6"])
def test_embeddings_are_prepared_and_keep_their_length(name, model, static, sentences):
    """T-B3."""
    texts = [*sentences(40, 0), ""]
    embeddings = OffsphereEmbeddings(model, name, device="cpu")
    similarity = Similarity.parse(name or "dot")
    assert embeddings.similarity.gammas == similarity.gammas
    raw = encode(static, texts, "document", prompt=PROMPTS["document"])
    vectors = np.array(embeddings.embed_documents(texts))
    np.testing.assert_allclose(vectors, similarity.prepare_document(raw), rtol=1e-6)
    np.testing.assert_allclose(norms(vectors), norms(raw) ** (1 - similarity.gammas[1]) * (norms(raw) > 0), rtol=1e-5)
    assert norms(raw)[:-1].std() > 0.1 * norms(raw)[:-1].mean()  # or keeping it would prove nothing
    query = encode(static, texts[:1], "query", prompt=PROMPTS["query"])
    np.testing.assert_allclose(embeddings.embed_query(texts[0]), similarity.prepare_query(query)[0], rtol=1e-6)


def test_the_inner_product_of_embeddings_ranks_as_the_index_and_a_cosine_store_does_not(index, model, sentences):
    embeddings = OffsphereEmbeddings(model, device="cpu")
    documents = index.documents(index.ids)
    queries = sentences(20, 1)
    vectors = np.array(embeddings.embed_documents([one.passage for one in documents]), np.float32)
    asked = np.array([embeddings.embed_query(query) for query in queries], np.float32)
    rows, scores = ExactSearch(vectors).search(asked, 5)
    store = InMemoryVectorStore(embeddings)  # which compares by cosine
    store.add_texts([one.passage for one in documents], ids=[one.id for one in documents])
    kept = lost = 0
    for query, hits, row, score in zip(queries, index.search(queries, 5), rows, scores, strict=True):
        np.testing.assert_allclose([hit.score for hit in hits], score, rtol=1e-5)
        kept += [hit.id for hit in hits] == [documents[i].id for i in row]
        lost += [one.id for one in store.similarity_search(query, 5)] != [hit.id for hit in hits]
    assert kept >= 19 and lost >= 15


def test_the_retriever_answers_as_the_index(index):
    retriever = OffsphereRetriever(index=index, k=7)
    found = retriever.invoke("bee dance moon")
    (hits,) = index.search(["bee dance moon"], 7)
    assert [(one.id, one.page_content) for one in found] == [(hit.id, hit.text) for hit in hits]
    for one, hit in zip(found, hits, strict=True):
        title = {"title": hit.title} if hit.title else {}
        assert one.metadata == {**hit.metadata, **title, "score": hit.score, "norm": hit.norm, "cosine": hit.cosine}
    by_cosine = OffsphereRetriever(index=index, k=60, similarity="cosine", where="n < 9").invoke("bee dance moon")
    assert {one.metadata["n"] for one in by_cosine} == set(range(9))
    assert all(one.metadata["score"] == one.metadata["cosine"] for one in by_cosine)
    assert "title" in next(one for one in by_cosine if one.id == "d0").metadata


def test_what_cannot_be_embedded_is_named(static, save):
    silent = str(save(static, "silent"))
    settings = Path(silent, "config_sentence_transformers.json")
    stored = json.loads(settings.read_text(encoding="utf-8"))
    settings.write_text(json.dumps(stored | {"similarity_fn_name": None}), encoding="utf-8")
    with pytest.raises(UsageError, match="does not say which similarity it was trained with"):
        OffsphereEmbeddings(silent)
    with pytest.raises(UsageError, match="unknown similarity"):
        OffsphereEmbeddings(silent, "euclid")
    static[0].embedding.weight.data[static.tokenizer.token_to_id("fire")] = float("nan")
    broken = OffsphereEmbeddings(str(save(static, "broken")), "dot", device="cpu")
    for ask in (lambda: broken.embed_query("fire"), lambda: broken.embed_documents(["sea", "fire"])):
        with pytest.raises(EncoderError, match="NaN or infinite"):
            ask()


def test_a_missing_package_is_named_with_what_to_type(monkeypatch):
    monkeypatch.delitem(sys.modules, "offsphere.search.langchain")
    monkeypatch.setitem(sys.modules, "langchain_core.documents", None)
    with pytest.raises(UsageError, match=r"pip install 'offsphere\[langchain\]'"):
        import offsphere.search.langchain  # noqa: F401
