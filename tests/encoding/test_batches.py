"""Texts in batches of a similar number of tokens: the same embeddings as one by one."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offsphere.encoders import encode, limit_length, token_counts
from offsphere.encoding import batches
from offsphere.encoding.batches import ahead, forward, tokenise
from offsphere.packed import packed_input
from offsphere.similarity import norms

TEXTS = ["moon", "the tide of the sea and the salt", "", "  ", "zyx zyx zyx", "ice ice ice ice ice ice cold", "moon"]


def embed(model, texts, tokens=4096, prompt="", packed=True):
    tokenised = tokenise(model, texts, "document", prompt, tokens)
    if not packed:
        return forward(model, tokenised, "document")
    with packed_input(model):
        return forward(model, tokenised, "document")


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, in share of the length."""
    some = norms(expected) > 0
    return float((np.abs(found - expected).max(1)[some] / norms(expected)[some]).max())


def test_the_embeddings_are_those_of_encode(encoder):
    found = embed(encoder, TEXTS, prompt="why : ")
    expected = encode(encoder, TEXTS, "document", prompt="why : ")
    assert found.dtype == np.float32 and found.shape == expected.shape
    assert relative(found, expected) < 1e-6
    assert (found[2:4] == 0).all() and (found[[0, 1, 4]] != 0).any(1).all()
    assert relative(embed(encoder, TEXTS), expected) > 1e-3  # the prompt counts


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=12),
    tokens=st.integers(1, 200),
    packed=st.booleans(),
)
def test_any_batch_gives_the_same(_transformer, lengths, tokens, packed):
    texts = [" ".join("moon tide salt ice".split()[i % 4] for i in range(length)) for length in lengths]
    one = np.concatenate([embed(_transformer, [text], packed=packed) for text in texts])
    found = embed(_transformer, texts, tokens, packed=packed)
    if any(lengths):
        assert relative(found, one) < 1e-6
    assert ((found == 0).all(1) == (np.array(lengths) == 0)).all()


def test_no_batch_is_larger_than_asked(transformer):
    texts = ["moon " * length for length in (1, 2, 3, 4, 5, 30, 40, 47)]
    tokenised = tokenise(transformer, texts, "document", "", tokens=40)
    sizes = [tuple(features["input_ids"].shape) for _, features in tokenised.batches]
    assert all(texts * longest <= 40 or texts == 1 for texts, longest in sizes)
    assert sum(texts for texts, _ in sizes) == len(texts) and len(sizes) < len(texts)
    for rows, features in tokenised.batches:
        np.testing.assert_array_equal(features["attention_mask"].sum(1), tokenised.read[rows])


def test_chunks_do_not_show(transformer, monkeypatch, sentences):
    texts = sentences(20, 3)
    expected = tokenise(transformer, texts, "document", "")
    monkeypatch.setattr(batches, "CHUNK", 3)  # rows of chunks of other widths meet in one batch
    found = tokenise(transformer, texts, "document", "")
    assert len(found.batches) == len(expected.batches) == 1
    for key, values in expected.batches[0][1].items():
        if hasattr(values, "shape"):
            assert (values == found.batches[0][1][key]).all()


def test_padding_on_the_left_stays_there(transformer):
    transformer.tokenizer.padding_side = "left"
    _, features = tokenise(transformer, ["moon", "moon tide salt"], "document", "").batches[0]
    assert features["attention_mask"].tolist() == [[1] * 5, [0, 0, 1, 1, 1]]
    assert features["input_ids"][1, :2].tolist() == [transformer.tokenizer.pad_token_id] * 2


def test_tokens_read_and_lost(encoder):
    """T-J4."""
    limit_length(encoder, 6)
    texts = ["moon", "moon tide salt ice " * 5, "", "moon tide salt"]
    tokenised = tokenise(encoder, texts, "document", "why : ")
    counts = token_counts(encoder, ["why : " + text for text in texts]) * [1, 1, 0, 1]
    np.testing.assert_array_equal(tokenised.read + tokenised.lost, counts)
    np.testing.assert_array_equal(tokenised.read, np.minimum(counts, 6))
    assert tokenised.lost[1] > 10 and tokenised.lost[0] == 0


def test_a_thread_is_one_item_ahead():
    made: list[tuple[int, str]] = []

    def items():
        for number in range(4):
            made.append((number, threading.current_thread().name))
            yield number

    following = ahead(items())
    assert next(following) == 0
    assert [*following] == [1, 2, 3]
    assert [number for number, _ in made] == [0, 1, 2, 3]
    assert all(name.startswith("ahead") for _, name in made)


def test_an_error_ahead_comes_out():
    def items():
        yield 1
        raise ValueError("broken line")

    following = ahead(items())
    assert next(following) == 1
    with pytest.raises(ValueError, match="broken line"):
        next(following)
