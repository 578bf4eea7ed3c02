"""LoRA: what is trained, what stays, and that others load the result without peft or offsphere."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from offsphere.encoders import add_lora, encode, merged_lora, open_encoder, save_encoder
from offsphere.errors import ConfigError
from offsphere.losses import InfoNCELoss
from offsphere.modules import LearnedSimilarity
from offsphere.packed import packed_input
from offsphere.similarity import Similarity
from offsphere.training.trainer import trainable_state

TEXTS = ["iron rust water", "moon", "the sea does dance", "green leaf ice cold fire"]


@pytest.fixture(params=["decoder", "transformer"])
def model(request: pytest.FixtureRequest, decoder_folder) -> SentenceTransformer:
    """A decoder and a BERT."""
    if request.param == "decoder":
        return open_encoder(decoder_folder(), device="cpu")
    return request.getfixturevalue("transformer")


def state(model: SentenceTransformer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(model: SentenceTransformer, steps: int = 4) -> list[float]:
    """The losses of some steps, and leaves the model trained."""
    torch.manual_seed(0)
    loss = InfoNCELoss(model, "dot", "auto")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    values = []
    for _ in range(steps + 1):
        value = loss([model.preprocess(TEXTS), model.preprocess([f"the {text}" for text in TEXTS])])
        values.append(value.item())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    model.eval()
    return values


def test_embeddings_stay_as_they_are_until_it_is_trained(model):
    before = encode(model, TEXTS, "query")
    add_lora(model, 4)
    np.testing.assert_array_equal(encode(model, TEXTS, "query"), before)
    train(model)
    assert np.abs(encode(model, TEXTS, "query") - before).max() > 0.01


def test_adapters_alone_are_trained(model):
    add_lora(model, 4)
    names = list(trainable_state(model))
    assert names and all("lora_" in name for name in names) and not any("pooler" in name for name in names)
    layers = sum(isinstance(part, torch.nn.Linear) and "lora" not in n and "pooler" not in n
                 for n, part in model.named_modules())  # fmt: skip
    assert len(names) == 2 * layers, "every linear layer has its pair"
    before = state(model)
    losses = train(model)
    assert losses[-1] < 0.9 * losses[0]
    changed = {name for name, value in state(model).items() if not torch.equal(value, before[name])}
    assert changed == set(names)


def test_the_rank_is_that_of_the_change(model):
    add_lora(model, 3)
    train(model)
    ranks = {torch.linalg.matrix_rank(part.get_delta_weight("default")).item()
             for part in model.modules() if hasattr(part, "get_delta_weight")}  # fmt: skip
    assert ranks == {3}


def test_adapters_depend_on_the_seed_alone(model):
    found = []
    for number, seed in enumerate((1, 1, 2)):
        torch.manual_seed(number)
        one = copy.deepcopy(model)
        add_lora(one, 4, seed)
        found.append(trainable_state(one))
    same = [all(torch.equal(found[0][name], other[name]) for name in found[0]) for other in found[1:]]
    assert same == [True, False]


def test_a_saved_model_is_a_plain_one(model, tmp_path):
    """Adapters are merged: sentence-transformers alone loads it, with no adapter in sight."""
    add_lora(model, 4)
    train(model)
    save_encoder(model, tmp_path / "model", Similarity.parse("dot"), "# Adapted\n")
    assert not list((tmp_path / "model").rglob("adapter*"))
    assert "peft" not in json.dumps(json.loads((tmp_path / "model" / "config.json").read_text()))
    plain = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert not any("lora" in name for name in plain.state_dict())
    np.testing.assert_allclose(plain.encode(TEXTS), encode(model, TEXTS, "query"), rtol=1e-4, atol=1e-5)


def test_a_saved_model_carries_learned_gammas(model, tmp_path):
    add_lora(model, 4)
    train(model)
    model.append(LearnedSimilarity(Similarity(0.3, 0.8, learned=True)))
    save_encoder(model, tmp_path / "model", Similarity(0.3, 0.8, learned=True), "# Adapted\n")
    opened = open_encoder(tmp_path / "model", device="cpu")
    np.testing.assert_allclose(encode(opened, TEXTS, "query"), encode(model, TEXTS, "query"), rtol=1e-4, atol=1e-5)


def test_merging_leaves_every_bit_as_it_was(model):
    """The next variant of a comparison starts from the same weights; adding and subtracting would round them."""
    add_lora(model, 4)
    train(model)
    before, embeddings = state(model), encode(model, TEXTS, "query")
    with merged_lora(model):
        assert not any("lora" in name for name in model.state_dict())
        merged = encode(model, TEXTS, "query")
    after = state(model)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    np.testing.assert_array_equal(encode(model, TEXTS, "query"), embeddings)
    np.testing.assert_allclose(merged, embeddings, rtol=1e-4, atol=1e-5)
    assert train(model)[0] > 0 and not all(torch.equal(after[n], v) for n, v in state(model).items()), "it still trains"


def test_merging_undoes_itself_when_saving_fails(model):
    add_lora(model, 4)
    before = state(model)
    with pytest.raises(OSError, match="the disk is gone"), merged_lora(model):
        raise OSError("the disk is gone")
    assert before.keys() == state(model).keys()


def test_a_model_without_adapters_is_not_touched(model, static):
    for one in (model, static):
        before = state(one)
        with merged_lora(one):
            assert state(one).keys() == before.keys()


def test_packing_goes_with_adapters(transformer):
    add_lora(transformer, 4)
    train(transformer)
    ordinary = transformer.encode(TEXTS)
    with packed_input(transformer) as how:
        assert how.packed
        np.testing.assert_allclose(transformer.encode(TEXTS), ordinary, rtol=1e-4, atol=1e-5)


def test_a_table_has_no_layers(static):
    with pytest.raises(ConfigError, match="--lora needs a transformer; this encoder begins with StaticEmbedding"):
        add_lora(static, 4)
