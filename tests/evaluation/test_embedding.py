from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from offsphere.data import Collection
from offsphere.encoders import encode
from offsphere.evaluation.embedding import embed


@pytest.fixture
def collection(sentences) -> Collection:
    texts = sentences(12, 0)
    documents = {f"d{i}": text for i, text in enumerate(texts[:7])} | {"empty": ""}
    queries = {f"q{i}": text for i, text in enumerate(texts[7:])}
    return Collection("made", "test", documents, queries, {query: {"d0": 1} for query in queries})


def test_rows_are_in_the_order_of_the_collection(encoder, collection):
    embedded = embed(encoder, collection, batch_size=3)
    assert embedded.collection is collection
    assert embedded.queries.dtype == embedded.documents.dtype == np.float32
    for texts, side, rows in (
        (collection.queries, "query", embedded.queries),
        (collection.documents, "document", embedded.documents),
    ):
        alone = np.concatenate([encode(encoder, [text], side) for text in texts.values()])
        np.testing.assert_allclose(rows, alone, rtol=1e-4, atol=1e-5)
    assert (embedded.documents[-1] == 0).all()


@pytest.mark.parametrize("side", ["query", "document"])
def test_prompts_of_the_collection_replace_those_of_the_model(encoder, collection, side):
    encoder.prompts |= {"query": "why: ", "document": "why: "}
    own = embed(encoder, collection)
    prompted = embed(encoder, dataclasses.replace(collection, prompts={side: "passage: "}))
    encoder.prompts[side] = "passage: "
    expected = embed(encoder, collection)
    np.testing.assert_array_equal(prompted.queries, expected.queries)
    np.testing.assert_array_equal(prompted.documents, expected.documents)
    assert np.abs(own.queries - prompted.queries).max() > 1e-3 or side == "document"
    assert np.abs(own.documents - prompted.documents).max() > 1e-3 or side == "query"


def test_with_a_cache_nothing_is_encoded_twice(encoder, collection, tmp_path, monkeypatch):
    first = embed(encoder, collection, cache=tmp_path)
    monkeypatch.setattr(type(encoder), "forward", lambda *arguments, **settings: pytest.fail("encoded again"))
    again = embed(encoder, collection, cache=tmp_path)
    monkeypatch.undo()
    np.testing.assert_array_equal(first.documents, again.documents)
    np.testing.assert_array_equal(first.queries, again.queries)
    expected = embed(encoder, collection)
    np.testing.assert_allclose(first.documents, expected.documents, rtol=1e-4, atol=1e-5)
