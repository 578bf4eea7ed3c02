from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from transformers import BertConfig, ElectraConfig

from offsphere.packed import packed_input
from offsphere.packed.families import Family
from offsphere.packed.fused import FusedLinears

Batch = Callable[..., dict[str, Any]]
Texts = Callable[..., list[str]]
TokensOf = Callable[..., Tensor]


def assert_ordinary(model: SentenceTransformer, reason: str) -> None:
    """It must not be packed, for that reason, and compute as ever, to the bit."""
    features = model.preprocess(["word1 word2 word3", "word4"])
    with torch.no_grad():
        expected = model.eval()(dict(features))["sentence_embedding"]
        with packed_input(model) as how:
            assert not how.packed and not how.fused
            assert reason in how.reason and reason in str(how) and "ordinary" in str(how)
            assert torch.equal(model(dict(features))["sentence_embedding"], expected)


# What is not packed


def skew_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = Family.positions

    def skewed(self: Family, model: nn.Module, token_ids: Tensor) -> Tensor:
        right = positions(self, model, token_ids).clone()
        right[:, 5:6] += 1
        return right

    monkeypatch.setattr(Family, "positions", skewed)


def test_one_position_off_is_found(packable: SentenceTransformer, monkeypatch: pytest.MonkeyPatch):
    skew_positions(monkeypatch)
    assert_ordinary(packable, "the outputs differ by")


def test_a_changed_attention_is_found(bert: SentenceTransformer):
    bert[0].auto_model.encoder.layer[1].attention.self.scaling *= 1.01
    assert_ordinary(bert, "the outputs differ by")


def test_a_layer_that_fails_is_found(bert: SentenceTransformer):
    layer = bert[0].auto_model.encoder.layer[1]
    layer.intermediate.extra = layer.intermediate.intermediate_act_fn
    layer.intermediate.intermediate_act_fn = None
    layer.intermediate.forward = lambda hidden: layer.intermediate.extra(layer.intermediate.dense(hidden))
    assert_ordinary(bert, "the packed forward pass fails")


def test_a_hook_that_would_be_passed_by_is_found(bert: SentenceTransformer):
    with packed_input(bert) as how:
        assert how.packed
    bert[0].auto_model.encoder.layer[0].register_forward_hook(lambda module, given, output: output * 1.001)
    assert_ordinary(bert, "the outputs differ by")


def test_wrong_fused_products_are_left_out(
    bert: SentenceTransformer, batch: Batch, monkeypatch: pytest.MonkeyPatch, tokens_of: TokensOf
):
    linear = FusedLinears.__call__
    monkeypatch.setattr(FusedLinears, "__call__", lambda *given, **options: linear(*given, **options) * 1.001)
    with packed_input(bert.eval()) as how, torch.no_grad():
        assert how.packed and not how.fused and "fused, the outputs differ by" in how.reason
        found = tokens_of(bert, batch([4, 2]))
        expected = type(bert[0]).forward(bert[0], batch([4, 2]))["token_embeddings"][
            [0, 0, 0, 0, 1, 1], [0, 1, 2, 3, 0, 1]
        ]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_another_activation_is_not_fused(_encoders: Any, batch: Batch):
    model = _encoders("DistilBertModel").eval()
    for layer in model[0].auto_model.transformer.layer:
        layer.ffn.activation = nn.ReLU()
    with packed_input(model) as how:
        assert how.packed and not how.fused and "the activation is not the exact GELU" in how.reason


def test_other_encoders(static: SentenceTransformer, tmp_path: Path, request: pytest.FixtureRequest):
    make, sizes = request.getfixturevalue("make_other"), request.getfixturevalue("sizes")
    electra = make(ElectraConfig(**sizes, embedding_size=24))
    assert_ordinary(electra, "ElectraModel is none of BertModel, RobertaModel")
    with packed_input(static) as how:
        assert "begins with StaticEmbedding" in how.reason
        assert static.encode(["iron"]).shape == (1, 16)


@pytest.fixture
def sizes() -> dict[str, Any]:
    return {
        "vocab_size": 45, "pad_token_id": 1, "max_position_embeddings": 44, "num_hidden_layers": 1,
        "num_attention_heads": 3, "hidden_size": 24, "intermediate_size": 40,
    }  # fmt: skip


@pytest.fixture
def make_other(bert: SentenceTransformer) -> Callable[[Any], SentenceTransformer]:
    """Puts another architecture in the place of BERT's."""

    def make(config: Any) -> SentenceTransformer:
        from transformers import AutoModel

        model = copy.deepcopy(bert)
        model[0].model = AutoModel.from_config(config)
        return model

    return make


def test_a_decoder(make_other: Callable[[Any], SentenceTransformer], sizes: dict[str, Any]):
    assert_ordinary(make_other(BertConfig(**sizes, is_decoder=True)), "the model is a decoder")


def test_all_hidden_states(bert: SentenceTransformer):
    bert[0].auto_model.config.output_hidden_states = True
    assert_ordinary(bert, "all hidden states")


def test_gradient_checkpointing(bert: SentenceTransformer):
    bert[0].auto_model.activation_checkpointing_enable()
    assert_ordinary(bert, "gradient checkpointing is on")


def test_half_precision(bert: SentenceTransformer):
    assert_ordinary(bert.to(torch.bfloat16), "the weights are bfloat16 on cpu")


@pytest.mark.parametrize("kind", ["left padding", "a hole", "an empty row", "positions", "arguments", "autocast"])
@torch.no_grad()
def test_batches_that_go_the_ordinary_way(bert: SentenceTransformer, batch: Batch, kind: str):
    features, arguments = batch([6, 3, 5]), {}
    if kind == "left padding":
        features = {name: value.flip(1) for name, value in features.items()}
    elif kind == "a hole":
        features["attention_mask"][0, 2] = 0
    elif kind == "an empty row":
        features["attention_mask"][1] = 0
    elif kind == "positions":
        features["position_ids"] = torch.arange(6).flip(0).expand(3, 6)
    elif kind == "arguments":
        arguments = {"position_ids": torch.arange(6).flip(0).expand(3, 6)}
    bert.eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        expected = bert[0](dict(features), **arguments)["token_embeddings"]
        with packed_input(bert) as how:
            assert how.packed
            found = bert[0](dict(features), **arguments)["token_embeddings"]
    assert torch.equal(found, expected)


# The model itself stays as it is


def test_saving_inside_saves_the_model_as_ever(bert: SentenceTransformer, save: Any, texts: Texts):
    bert.encode(texts([1, 2]))  # which leaves its mark on the tokenizer, packed or not
    outside = save(bert, "outside")
    with packed_input(bert):
        inside = save(bert, "inside")
    files = {path.relative_to(outside) for path in outside.rglob("*") if path.is_file()}
    assert files == {path.relative_to(inside) for path in inside.rglob("*") if path.is_file()}
    for file in files:
        assert (inside / file).read_bytes() == (outside / file).read_bytes(), file
    assert "offsphere" not in json.dumps(json.loads((inside / "modules.json").read_text()))
    weights = load_file(inside / "model.safetensors")
    assert weights.keys() == {name.removeprefix("0.model.") for name in bert.state_dict()}


def test_parameters_and_their_names_are_the_same(bert: SentenceTransformer):
    before, names = {n: id(p) for n, p in bert.named_parameters()}, list(bert.state_dict())
    modules = [id(module) for module in bert.modules()]
    with packed_input(bert):
        assert {n: id(p) for n, p in bert.named_parameters()} == before and list(bert.state_dict()) == names
        assert [id(module) for module in bert.modules()] == modules
        assert bert[0].forward.original is bert[0]


def test_weights_loaded_inside_are_used(bert: SentenceTransformer, batch: Batch, tokens_of: TokensOf):
    changed = {name: value * 1.5 for name, value in bert.state_dict().items()}
    bert.eval()
    with packed_input(bert), torch.no_grad():
        before = tokens_of(bert, batch([4, 2]))
        bert.load_state_dict(changed)
        after = tokens_of(bert, batch([4, 2]))
    expected = tokens_of(bert, batch([4, 2])).detach()
    assert (before - after).abs().max() > 1e-2
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_the_ordinary_forward_pass_is_back_afterwards(bert: SentenceTransformer):
    with pytest.raises(KeyError), packed_input(bert), packed_input(bert) as inner:
        assert inner.packed and "forward" in vars(bert[0])
        raise KeyError
    assert "forward" not in vars(bert[0])


def test_a_copy_made_inside_stands_on_its_own(bert: SentenceTransformer, batch: Batch, tokens_of: TokensOf):
    with packed_input(bert.eval()), torch.no_grad():
        twin = copy.deepcopy(bert)
        expected = tokens_of(bert, batch([4, 2]))
        for parameter in bert.parameters():
            parameter.zero_()
        assert torch.equal(tokens_of(twin, batch([4, 2])), expected)


def test_a_forward_pass_that_another_replaced_is_left_alone(bert: SentenceTransformer):
    own = bert[0].forward
    bert[0].forward = lambda features: own(features)
    assert_ordinary(bert, "something else has replaced its forward pass")
    assert "forward" in vars(bert[0])


def test_the_check_leaves_no_trace(bert: SentenceTransformer):
    bert.train()
    bert[0].auto_model.pooler.eval()
    training = [module.training for module in bert.modules()]
    state = torch.get_rng_state()
    with packed_input(bert):
        pass
    assert [module.training for module in bert.modules()] == training
    assert torch.equal(torch.get_rng_state(), state)


def test_the_check_runs_once_until_the_parts_change(bert: SentenceTransformer, monkeypatch: pytest.MonkeyPatch):
    runs: list[Sequence[str]] = []
    preprocess = bert[0].preprocess
    monkeypatch.setattr(bert[0], "preprocess", lambda texts, **options: (runs.append(texts), preprocess(texts))[1])
    counts = []
    for change in (lambda: None, lambda: None, bert.double, lambda: None):
        change()
        with packed_input(bert):
            counts.append(len(runs))
    assert counts == [2, 2, 3, 3]  # packed and fused; nothing is fused in double precision
