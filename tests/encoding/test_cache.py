"""The cache of embeddings by text: no text goes through the model twice, and no wrong one comes back."""

from __future__ import annotations

import sqlite3

import numpy as np
import pytest

from offsphere.data.documents import read_documents
from offsphere.encoders import encode, limit_length, strip_normalize
from offsphere.encoding import encode_cached, encode_collection
from offsphere.encoding.cache import Encoded, TextCache
from offsphere.encoding.storage import MATRIX
from offsphere.errors import EmbeddingsError


@pytest.fixture
def counted(monkeypatch):
    """The number of texts that went through a model."""
    seen: list[int] = []
    from offsphere.encoding import cache as module

    original = module.tokenise

    def tokenise(model, texts, *rest):
        seen.append(len(texts))
        return original(model, texts, *rest)

    monkeypatch.setattr(module, "tokenise", tokenise)
    return seen


def test_a_second_collection_encodes_only_its_own_texts(model, collection, tmp_path):
    first, second = collection(30), collection(40, "second", seed=0)
    settings = {"cache": tmp_path / "cache", "shard_size": 8}
    (one,) = encode_collection(model, first, tmp_path / "one", **settings)
    assert (one.encoded, one.cached) == (28 + 0, 1)  # the last text is the first one again, in another shard
    (two,) = encode_collection(model, second, tmp_path / "two", **settings)
    shared = {text.passage for text in read_documents(first)} & {text.passage for text in read_documents(second)} - {""}
    assert len(shared) == 28 and two.encoded == 39 - 1 - 28
    (again,) = encode_collection(model, first, tmp_path / "again", **settings)
    assert again.encoded == 0 and again.cached == 29
    assert (tmp_path / "again" / MATRIX).read_bytes() == (tmp_path / "one" / MATRIX).read_bytes()
    for count in ("tokens", "cut", "tokens_lost", "empty"):
        assert again.manifest.total(count) == one.manifest.total(count)
    encode_collection(model, second, tmp_path / "without")
    np.testing.assert_allclose(np.load(tmp_path / "two" / MATRIX), np.load(tmp_path / "without" / MATRIX), atol=1e-5)


def test_the_key_has_model_prompt_side_limit_and_text(transformer, tmp_path, counted):
    def embed(texts, side="document", **settings):
        return encode_cached(transformer, texts, side, cache=tmp_path, **settings)

    embed(["moon", "tide"])
    embed(["tide", "moon", "salt", "salt", ""])
    assert counted == [2, 2]  # salt, and the empty text
    embed(["moon"], prompt="why : ")
    embed(["moon"], side="query")
    limit_length(transformer, 5)
    embed(["moon"])
    transformer[0].auto_model.embeddings.word_embeddings.weight.data += 1
    changed = embed(["moon"])
    assert counted == [2, 2, 1, 1, 1, 1]
    np.testing.assert_allclose(changed, encode(transformer, ["moon"], "document"), rtol=1e-5)


def test_the_result_is_that_of_encode(encoder, tmp_path):
    strip_normalize(encoder)
    texts = ["moon", "the tide of the sea", "", "moon", " "]
    for _ in range(2):
        found = encode_cached(encoder, texts, "document", cache=tmp_path)
        np.testing.assert_allclose(found, encode(encoder, texts, "document"), rtol=1e-4, atol=1e-5)
        assert found.dtype == np.float32
    assert encode_cached(encoder, [], "document").shape == (0, found.shape[1])


def test_a_damaged_row_is_not_used(tmp_path):
    cache = TextCache(tmp_path, "fingerprint", "document", "")
    vectors = np.arange(6, dtype=np.float32).reshape(2, 3)
    cache.put(["a", "b"], Encoded(vectors, np.array([3, 4]), np.array([0, 1])))
    assert {text: (row.tolist(), *counts) for text, (row, *counts) in cache.get(["a", "b", "c"]).items()} == {
        "a": ([0, 1, 2], 3, 0),
        "b": ([3, 4, 5], 4, 1),
    }
    with sqlite3.connect(cache.path) as rows:
        rows.execute("UPDATE texts SET vector = ? WHERE read = 3", (vectors[1].tobytes(),))
    assert list(cache.get(["a", "b"])) == ["b"]


def test_more_texts_than_one_question_takes(tmp_path):
    texts = [f"text {i}" for i in range(1203)]
    cache = TextCache(tmp_path, "fingerprint", "document", "")
    vectors = np.random.default_rng(0).normal(size=(1203, 4)).astype(np.float32)
    cache.put(texts, Encoded(vectors, np.ones(1203, np.int64), np.zeros(1203, np.int64)))
    cache.close()
    found = TextCache(tmp_path, "fingerprint", "document", "").get(texts)
    np.testing.assert_array_equal(np.stack([found[text][0] for text in texts]), vectors)


def test_a_file_that_is_no_database_is_named(tmp_path):
    path = TextCache(tmp_path, "fingerprint", "document", "").path
    path.write_bytes(b"not a database at all, but long enough to be looked at" * 20)
    with pytest.raises(EmbeddingsError, match=r"cannot open the cache .*sqlite.*Delete the file if it is damaged"):
        TextCache(tmp_path, "fingerprint", "document", "")
