"""Runs on other backbones and in other ways: decoders, LoRA, gradient checkpointing, bf16, random weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import LlamaConfig, PreTrainedTokenizerFast

from offsphere.config import CompareConfig, TrainConfig
from offsphere.encoders import add_lora, encode, open_encoder
from offsphere.errors import ConfigError
from offsphere.evaluation.results import read_results
from offsphere.training.compare import compare
from offsphere.training.plan import make_plan
from offsphere.training.train import train

TEXTS = ["topic1word2 topic1word3", "noise1 topic4word0", "topic7word5"]


class Said:
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def start(self, what: str, total: int) -> Callable[[int], None]:
        return lambda done: None


@pytest.fixture(scope="module")
def decoder(write_transformer, bert_config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare causal language model in a folder, whose tokenizer ends texts by itself."""
    config = LlamaConfig(
        vocab_size=bert_config().vocab_size, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=40, initializer_range=0.2,
    )  # fmt: skip
    folder = write_transformer(config, tmp_path_factory.mktemp("decoder"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.eos_token = "[SEP]"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def uneven(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a last norm layer that lets lengths differ, as training leaves it."""
    model = open_encoder(decoder, device="cpu")
    torch.manual_seed(1)
    torch.nn.init.uniform_(model[0].auto_model.norm.weight, 0.2, 2.0)
    folder = tmp_path_factory.mktemp("uneven") / "encoder"
    model.save_pretrained(str(folder), create_model_card=False)
    return folder


@pytest.fixture(scope="module")
def adapted(settings: Callable[..., CompareConfig], uneven: Path, tmp_path_factory: pytest.TempPathFactory):
    """A comparison of a decoder with everything at once, and what it said."""
    said = Said()
    config = settings(
        tmp_path_factory.mktemp("runs") / "adapted", model=str(uneven), seeds=[0], lora=4, gradient_checkpointing=True,
        precision="bf16", similarities=["cosine", "qnorm", "learnable"], learning_rate=0.02, evaluations=1, steps=12,
    )  # fmt: skip
    compare(config, said)
    return config, said.lines


def test_a_run_says_how_it_computes(adapted):
    _, lines = adapted
    assert any("LoRA adapters of rank 4 trained" in line for line in lines)
    assert "computes       ordinary forward pass, in bf16 under autocast" in lines


@pytest.mark.parametrize("name", ["cosine", "qnorm"])
def test_its_models_load_without_offsphere_and_peft(adapted, name):
    config, _ = adapted
    folder = config.out / "variants" / f"{name}-seed0" / "model"
    assert not list(folder.rglob("adapter*"))
    plain = SentenceTransformer(str(folder), device="cpu")
    assert not any("lora" in key for key in plain.state_dict())
    np.testing.assert_allclose(
        plain.encode(TEXTS), encode(open_encoder(folder, device="cpu"), TEXTS, "query"), rtol=1e-5, atol=1e-6
    )


def test_it_learned(adapted, uneven):
    config, _ = adapted
    folder = config.out / "variants" / "qnorm-seed0" / "model"
    before, after = load_file(uneven / "model.safetensors"), load_file(folder / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    linear = {name for name in before if "_proj" in name}
    assert changed == linear, "every linear layer took its adapter in, and nothing else moved"
    values = {
        row.seed: row.value
        for row in read_results(config.out / "results.csv")
        if (row.dataset, row.measure, row.scored_as) == ("away", "nDCG@10", "cosine")
        if row.similarity == "cosine" or row.seed is None
    }
    assert values[0] > values[None] + 0.02


def trained(out: Path, settings: Callable[..., CompareConfig], **changed: object) -> dict[str, torch.Tensor]:
    """The weights of one training."""
    given = settings(out, **changed).model_dump(exclude={"similarities", "seeds", "eval"})
    train(TrainConfig(**given, seeds=[0], similarity="qnorm"))
    return load_file(out / "model" / "model.safetensors")


def test_every_variant_starts_from_the_same_weights(adapted, settings, tmp_path):
    """Saving merges the adapters and takes them off again: what comes next must not see it, not by one bit."""
    config, _ = adapted
    alone = trained(tmp_path / "alone", settings, **config.model_dump(exclude={"out"}))
    after_others = load_file(config.out / "variants" / "qnorm-seed0" / "model" / "model.safetensors")
    assert alone.keys() == after_others.keys()
    assert all(torch.equal(alone[name], after_others[name]) for name in alone)


def test_checkpointing_changes_no_weight(settings, uneven, tmp_path):
    usual = {"model": str(uneven), "learning_rate": 0.01}
    plain = trained(tmp_path / "plain", settings, **usual)
    again = trained(tmp_path / "again", settings, **usual, gradient_checkpointing=True)
    for name, weights in plain.items():
        torch.testing.assert_close(again[name], weights, rtol=1e-5, atol=1e-6)


def test_bf16_changes_the_weights_a_little(settings, bert_encoder, tmp_path):
    usual = {"model": str(bert_encoder), "learning_rate": 0.001, "dropout": 0.0}
    single = trained(tmp_path / "single", settings, **usual)
    half = trained(tmp_path / "half", settings, **usual, precision="bf16")
    assert {weights.dtype for weights in half.values()} == {torch.float32}
    differences = [(half[name] - single[name]).abs().max().item() for name in single]
    assert 1e-6 < max(differences) < 0.02


def test_a_decoder_from_random_weights(settings, decoder, tmp_path):
    """Its last norm layer starts at 1, so that all lengths are equal; training lets them come apart."""
    weights = trained(tmp_path / "run", settings, model=str(decoder), init="random", learning_rate=0.01)
    assert weights["norm.weight"].std() > 0
    found = encode(open_encoder(tmp_path / "run" / "model", device="cpu"), TEXTS, "document")
    assert np.linalg.norm(found, axis=1).std() > 1e-4


def test_adapters_in_bf16_go_on_to_the_same_bits(uneven, train, tmp_path):
    """Interrupted after step 5, with its last checkpoint at step 3, and gone on with, as if nothing had been."""

    def run(on_step: Callable[[int], None]) -> dict[str, torch.Tensor]:
        model = open_encoder(uneven, device="cpu")
        add_lora(model, 4)
        train(model, "qnorm", on_step=on_step, checkpoint_every=3, precision="bf16")
        return model.state_dict()

    def stop(step: int) -> None:
        if step == 5:
            raise RuntimeError("the lights go out")

    steps: list[int] = []
    whole = run(steps.append)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(RuntimeError, match="the lights go out"):
        run(stop)
    resumed = run(steps.append)
    assert steps == [*range(1, 9), *range(4, 9)]
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize(("lora", "rate"), [(None, 2e-5), (4, 2e-4)])
def test_adapters_take_a_larger_rate(settings, bert_model, tmp_path, lora, rate):
    plan = make_plan(settings(tmp_path / "run", lora=lora, learning_rate=None), bert_model, 48)
    assert plan.learning_rate == pytest.approx(rate)


def test_another_pooling(settings, uneven, tmp_path):
    trained(tmp_path / "run", settings, model=str(uneven), pooling="mean", steps=1)
    assert SentenceTransformer(str(tmp_path / "run" / "model"), device="cpu")[1].pooling_mode == "mean"


def test_settings_that_cannot_be(settings, static_encoder, bert_encoder, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(ValueError, match="lora would keep random weights"):
        settings(out, init="random", lora=4)
    for changed, message in (
        ({"model": str(static_encoder), "lora": 4}, "--lora needs a transformer"),
        ({"model": str(static_encoder), "gradient_checkpointing": True}, "--gradient-checkpointing needs a transf"),
        ({"model": str(bert_encoder), "precision": "fp16"}, "--precision fp16 needs a GPU"),
        ({"model": str(bert_encoder), "pooling": "median"}, "--pooling is one of"),
        ({"model": str(bert_encoder), "device": "cuda:7"}, "--device cuda:7: this machine"),
    ):
        with pytest.raises(ConfigError, match=message):
            compare(settings(out, **changed))
        assert not out.exists()
