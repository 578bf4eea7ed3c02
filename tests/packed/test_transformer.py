from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor

from offsphere.encoders import encode, limit_length
from offsphere.packed import packed_input, transformer

Batch = Callable[..., dict[str, Any]]
Texts = Callable[..., list[str]]
TokensOf = Callable[..., Tensor]

LENGTHS = [[1], [7], [4, 4, 4], [9, 1, 3, 40, 2], [5, 2, 5, 2, 1, 1, 40, 5], list(range(12, 0, -1))]
EACH_FAMILY = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


def both(tokens_of: TokensOf, model: SentenceTransformer, features: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The ordinary and the packed token embeddings of a model in double precision."""
    model.double()
    expected = tokens_of(model, features)
    with packed_input(model) as how:
        assert how.packed
        return expected, tokens_of(model, features)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@torch.no_grad()
def test_token_embeddings_in_double_precision(
    packable: SentenceTransformer, batch: Batch, lengths: list[int], tokens_of: TokensOf
):
    expected, found = both(tokens_of, packable.eval(), batch(lengths))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))


@EACH_FAMILY
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=10), budget=st.integers(1, 60), seed=st.integers(0, 9))
@torch.no_grad()
def test_any_lengths_in_any_micro_batches(
    packable: SentenceTransformer, batch: Batch, lengths: list[int], budget: int, seed: int, tokens_of: TokensOf
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "TOKENS", budget)
        expected, found = both(tokens_of, packable.eval(), batch(lengths, seed))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))


@torch.no_grad()
def test_in_single_precision_with_fused_products(packable: SentenceTransformer, texts: Texts):
    passages = texts([1, 30, 4, 4, 0, 12, 4, 9])
    expected = packable.encode(passages)
    with packed_input(packable) as how:
        assert how.packed and how.fused and how.reason is None and str(how) == "packed forward pass, fused"
        found = packable.encode(passages)
    assert found.dtype == expected.dtype and not np.array_equal(found, expected), "canary: nothing was packed"
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(packable.encode(passages), expected)


@torch.no_grad()
def test_padding_is_zero(bert: SentenceTransformer, batch: Batch):
    features = batch([3, 5])
    with packed_input(bert):
        found = bert[0](features)["token_embeddings"]
    assert found.shape == (2, 5, 24) and found[0, 3:].abs().max() == 0


@torch.no_grad()
def test_token_types(bert: SentenceTransformer, batch: Batch, tokens_of: TokensOf):
    features = batch([6, 3, 4])
    without, _ = both(tokens_of, bert.eval(), features)
    features["token_type_ids"] = (torch.arange(6) > 1).long().expand(3, 6).clone()
    expected, found = both(tokens_of, bert, features)
    assert (expected - without).abs().max() > 1e-2, "canary: token types change nothing"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))


@torch.no_grad()
def test_a_padding_token_in_the_middle_of_a_text(packable: SentenceTransformer, batch: Batch, tokens_of: TokensOf):
    """Encoders like RoBERTa do not count it."""
    features = batch([6, 3, 4])
    features["input_ids"][0, 2] = 1
    expected, found = both(tokens_of, packable.eval(), features)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("mode", [*Pooling.POOLING_MODES, ("cls", "mean")])
def test_every_pooling_with_prompts(bert: SentenceTransformer, texts: Texts, mode: Any, include_prompt: bool):
    bert[1] = Pooling(24, mode, include_prompt=include_prompt)
    bert.double()
    passages = texts([1, 30, 4, 4, 12, 7, 36, 37, 50])
    expected, without = bert.encode(passages, prompt="ask word1 "), bert.encode(passages)
    with packed_input(bert):
        found = bert.encode(passages, prompt="ask word1 ", batch_size=4)
    assert np.abs(expected - without).max() > 1e-2
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


def test_token_embeddings_can_be_asked_for(bert: SentenceTransformer, texts: Texts):
    passages = texts([4, 1, 9])
    expected = bert.encode(passages, output_value="token_embeddings")
    with packed_input(bert):
        found = bert.encode(passages, output_value="token_embeddings")
    assert [len(one) for one in found] == [6, 3, 11]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))


def test_long_texts_are_cut(packable: SentenceTransformer, texts: Texts):
    limit_length(packable, 6)
    passages = texts([1, 3, 4, 5, 30])
    expected = packable.encode(passages)
    with packed_input(packable):
        assert packable.preprocess(passages)["input_ids"].shape == (5, 6)
        np.testing.assert_allclose(packable.encode(passages), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_our_own_encode_is_packed(bert: SentenceTransformer, texts: Texts):
    passages = [*texts([1, 30, 4, 4, 12]), "", " "]
    expected = bert.encode(passages)
    expected[-2:] = 0
    found = encode(bert, passages, "document", batch_size=3)
    with packed_input(bert):
        np.testing.assert_array_equal(bert.encode(passages, batch_size=3)[:5], found[:5])
    assert not np.array_equal(found, expected), "canary: nothing was packed"
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert np.abs(found[-2:]).max() == 0
