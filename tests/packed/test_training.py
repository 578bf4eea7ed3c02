from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from offsphere.cached_inputs import cached_input
from offsphere.encoders import encode, set_dropout
from offsphere.losses import InfoNCELoss
from offsphere.packed import packed_input, transformer
from offsphere.packed.families import find_family
from offsphere.packed.transformer import PackedTransformer

Batch = Callable[..., dict[str, Any]]
Texts = Callable[..., list[str]]
TokensOf = Callable[..., Tensor]


def loss_and_gradients(model: SentenceTransformer, texts: Texts) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    columns = [model.preprocess(texts([3, 1, 1, 5], 1)), model.preprocess(texts([20, 7, 33, 7], 2))]
    loss = InfoNCELoss(model, "dot", scale=0.01)(columns, torch.arange(4)[:, None].expand(4, 2))
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("budget", [8, 4096])
def test_loss_and_gradients_of_every_parameter(
    packable: SentenceTransformer, texts: Texts, monkeypatch: pytest.MonkeyPatch, budget: int
):
    monkeypatch.setattr(transformer, "TOKENS", budget)
    set_dropout(packable.double().train(), 0.0)
    expected_loss, expected = loss_and_gradients(packable, texts)
    with packed_input(packable) as how:
        assert how.packed
        loss, gradients = loss_and_gradients(packable, texts)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=0)
    assert gradients.keys() == expected.keys()
    assert not [n for n, p in packable.named_parameters() if n not in gradients and "pooler" not in n]
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-8, atol=1e-10 * largest, msg=name)
    position_bias = [name for name in expected if "relative_attention_bias" in name]
    assert all(expected[name].abs().max() > 1e-8 * largest for name in position_bias)


def test_single_precision_is_as_close_to_double_as_the_ordinary_way(bert: SentenceTransformer, texts: Texts):
    """Rounding in the embeddings comes back in sums of gradients that nearly cancel, whichever way they go."""
    set_dropout(bert.train(), 0.0)
    counts = torch.randint(1, 38, (128,), generator=torch.Generator().manual_seed(0)).tolist()
    columns = [bert.preprocess(texts(counts[side::2], side)) for side in range(2)]

    def run(model: SentenceTransformer) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        loss = InfoNCELoss(model, "cosine")([dict(column) for column in columns])
        loss.backward()
        return loss.detach(), {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}

    exact_loss, exact = run(copy.deepcopy(bert).double())
    loss, ordinary = run(bert)
    with packed_input(bert) as how:
        assert how.packed
        packed_loss, packed = run(bert)
    assert packed_loss.item() == pytest.approx(exact_loss.item(), rel=1e-6)
    assert packed_loss.item() == pytest.approx(loss.item(), rel=1e-6)

    def apart(found: dict[str, Tensor]) -> float:
        return max(
            float((found[name] - one).abs().max() / one.abs().max()) for name, one in exact.items() if trained(one)
        )

    def trained(gradient: Tensor) -> bool:
        return bool(gradient.abs().max() > 1e-9)  # that of a key's bias is 0

    assert 1e-8 < apart(packed) < max(1e-5, 1.5 * apart(ordinary))


def test_frozen_parts_stay_frozen(mpnet: SentenceTransformer, texts: Texts):
    """Without a gradient for the bias the attention goes another way."""
    set_dropout(mpnet.double().train(), 0.0)
    for name, parameter in mpnet.named_parameters():
        parameter.requires_grad_("layer.1" in name)
    _, expected = loss_and_gradients(mpnet, texts)
    with packed_input(mpnet):
        _, gradients = loss_and_gradients(mpnet, texts)
    assert gradients.keys() == expected.keys() and {name.split("layer.")[1][0] for name in gradients} == {"1"}
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-8, atol=1e-12, msg=name)


def test_the_layers_above_a_frozen_trunk(
    packable: SentenceTransformer, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    set_dropout(packable, 0.0)
    passed: list[bool] = []
    through = transformer._through
    monkeypatch.setattr(
        transformer, "_through", lambda *given: (passed.append(given[-1] is not None), through(*given))[1]
    )
    with cached_input(packable, 1, tmp_path):
        expected_loss, expected = loss_and_gradients(packable, texts)
        with packed_input(packable) as how:
            assert how.packed and how.fused
            assert isinstance(packable[0].forward, PackedTransformer) and len(packable[0].forward.layers) == 1
            loss, gradients = loss_and_gradients(packable, texts)
            passed.clear()
            packed = packable.eval().encode(texts([4, 4, 9]))
            assert passed == [True], "canary: nothing was packed, or not fused"
        ordinary = packable.encode(texts([4, 4, 9]))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    assert gradients.keys() == expected.keys() and len(gradients) > 10
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-5 * largest, msg=name)
    np.testing.assert_allclose(packed, ordinary, rtol=0, atol=1e-5 * np.abs(ordinary).max())


def test_an_optimizer_steps_as_ever(bert: SentenceTransformer, texts: Texts):
    set_dropout(bert.double(), 0.0)
    trained = {}
    for name in ("ordinary", "packed"):
        model = copy.deepcopy(bert).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            if name == "packed":
                with packed_input(model):
                    loss_and_gradients(model, texts)
            else:
                loss_and_gradients(model, texts)
            optimizer.step()
        trained[name] = model.state_dict()
    moved = max(float((trained["ordinary"][n] - value).abs().max()) for n, value in bert.state_dict().items())
    assert moved > 1e-2
    for name, value in trained["ordinary"].items():
        if "key.bias" not in name:  # its gradient is 0 but for rounding, which Adam makes as large as any other
            torch.testing.assert_close(trained["packed"][name], value, rtol=0, atol=1e-6, msg=name)


def moments(model: SentenceTransformer, features: dict[str, Any]) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        found = model(dict(features))["sentence_embedding"].double()
    return found.mean(0), found.var(0)


@pytest.mark.parametrize(("where", "share"), [("attention", 0.06), ("elsewhere", 0.015)])
def test_dropout_has_the_distribution_of_the_ordinary_one(
    packable: SentenceTransformer, batch: Batch, where: str, share: float
):
    """One text 4000 times over: means to five standard errors; variances to a quarter, and to 10% in sum.

    The shares are small, because a random network that loses more is as random as it gets.
    """
    features = {name: value.expand(4000, -1) for name, value in batch([5]).items()}
    model = packable[0].auto_model
    on_weights = [layer.attention_dropout for layer in find_family(model).layers(model)]

    def drop_there(share: float) -> None:
        set_dropout(packable.train(), share if where == "elsewhere" else 0.0)
        for module in on_weights:
            module.p = share if where == "attention" else 0.0

    drop_there(share)
    torch.manual_seed(0)
    mean, variance = moments(packable, features)
    with packed_input(packable) as how:
        assert how.packed
        packed_mean, packed_variance = moments(packable, features)
        drop_there(share / 2)
        _, of_half_the_share = moments(packable, features)
    assert variance.min() > 1e-3
    assert ((packed_mean - mean).abs() < 5 * (2 * variance / 4000).sqrt()).all()
    torch.testing.assert_close(packed_variance, variance, rtol=0.25, atol=0)
    torch.testing.assert_close(packed_variance.sum(), variance.sum(), rtol=0.1, atol=0)
    assert of_half_the_share.sum() < 0.8 * variance.sum(), "canary: the variance does not tell what is dropped"


def test_replay_of_a_forward_pass_with_dropout(packable: SentenceTransformer, batch: Batch):
    """What a gradient cache needs: the same bits without a graph and with one."""
    features = batch([5, 2, 5, 30])
    packable.train()
    with packed_input(packable):
        torch.manual_seed(5)
        with torch.no_grad():
            first, other = (packable(dict(features))["sentence_embedding"] for _ in range(2))
        torch.manual_seed(5)
        again = packable(dict(features))["sentence_embedding"]
    assert torch.equal(first, again.detach()) and again.requires_grad
    assert not torch.equal(first, other)


def test_dropout_may_change_inside(bert: SentenceTransformer, batch: Batch):
    features = batch([5, 2, 5])
    with packed_input(bert), torch.no_grad():
        bert.train()
        set_dropout(bert, 0.0)
        one, other = (bert(dict(features))["sentence_embedding"] for _ in range(2))
        assert torch.equal(one, other)
        set_dropout(bert, 0.5)
        assert not torch.equal(bert(dict(features))["sentence_embedding"], one)


class Adapted(nn.Module):
    """A linear layer with a low-rank change, as adapters have it."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear, self.change = linear, nn.Linear(linear.in_features, linear.out_features, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden) + self.change(hidden)


def test_adapters_are_part_of_it(bert: SentenceTransformer, texts: Texts):
    with packed_input(bert) as how:
        assert how.fused
    attention = bert[0].auto_model.encoder.layer[0].attention.self
    attention.query = Adapted(attention.query)
    set_dropout(bert.double(), 0.0)
    _, expected = loss_and_gradients(bert, texts)
    with packed_input(bert) as how:
        assert how.packed and not how.fused and "Adapted" in how.reason
        _, gradients = loss_and_gradients(bert, texts)
    (changed,) = [name for name in expected if "change" in name]
    assert expected[changed].abs().max() > 1e-6
    torch.testing.assert_close(gradients[changed], expected[changed], rtol=1e-8, atol=1e-12)


def test_encoding_between_steps_uses_the_weights_of_now(bert: SentenceTransformer, texts: Texts):
    passages = texts([40] * 40)  # enough tokens that weights are laid out
    optimizer = torch.optim.AdamW(bert.parameters(), 1e-3, fused=True)
    found = []
    with packed_input(bert, trained=True):
        for _ in range(3):
            found.append(encode(bert, passages, "document"))
            loss_and_gradients(bert, texts)
            optimizer.step()
        found.append(encode(bert, passages, "document"))
    expected = encode(copy.deepcopy(bert), passages, "document")
    np.testing.assert_array_equal(found[-1], expected)
    assert np.abs(found[1] - found[0]).max() > 1e-3, "canary: a step changes nothing"
