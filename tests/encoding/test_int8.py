"""Feed-forward layers in 8 bits: near float32, gone afterwards, and refused where lengths are too far off."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from offsphere.encoding import encode_collection
from offsphere.encoding.batches import forward, tokenise
from offsphere.encoding.int8 import Fidelity, check_fidelity, int8_layers
from offsphere.encoding.int8_linear import Int8Linear
from offsphere.encoding.ways import computing
from offsphere.errors import ConfigError, EncoderError


@pytest.mark.parametrize("bias", [True, False])
def test_one_layer_against_float64(bias):
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias)
    values = torch.randn(600, 64, generator=generator) * torch.logspace(-3, 3, 600)[:, None]
    values[5] = 0
    layer, exact = Int8Linear(linear), linear.double()(values.double())
    found = layer(values.view(20, 30, 64)).view(600, 48).double()
    # Each input is off by at most half a step of its row, each weight by half a step of its output.
    weights = linear.weight.detach()
    step, weight_step = values.abs().amax(1, keepdim=True) / 254, weights.abs().amax(1) / 254
    bound = step * weights.abs().sum(1) + values.abs().sum(1, keepdim=True) * weight_step + 64 * step * weight_step
    assert ((found - exact).abs() <= bound.double() * 1.001 + 1e-6).all()
    assert (found - exact).abs().max() > 1e-6  # the canary: it does compute in 8 bits
    torch.testing.assert_close(layer.pointwise(values, gelu=True), nn.functional.gelu(layer(values)))
    plus = torch.randn(600, 48, generator=generator)
    torch.testing.assert_close(layer.pointwise(values, plus=plus), layer(values) + plus)


def test_a_row_does_not_depend_on_the_others():
    layer = Int8Linear(nn.Linear(32, 16))
    values = torch.randn(700, 32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(layer(values)[300:303], layer(values[300:303]))


def test_the_model_is_near_and_the_same_afterwards(transformer, sentences):
    texts = sentences(40, 5)
    before = {name: weights.clone() for name, weights in transformer.state_dict().items()}
    tokenised = tokenise(transformer, texts, "document", "")
    with computing(transformer, "float32"):
        exact = forward(transformer, tokenised, "document")
    with computing(transformer, "int8"):
        assert sum(isinstance(part, Int8Linear) for part in transformer.modules()) == 4  # two in each of two layers
        found = forward(transformer, tokenised, "document")
    fidelity = Fidelity.between(exact, found)
    assert 0 < fidelity.norm_error_mean < 0.02 and fidelity.cosine_min > 0.99
    with computing(transformer, "float32"):
        np.testing.assert_array_equal(forward(transformer, tokenised, "document"), exact)
    after = transformer.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_fidelity_in_numbers():
    exact = np.array([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]], np.float32)
    found = np.array([[0.0, 1.1], [0.0, 2.0], [0.0, 0.0]], np.float32)
    measured = Fidelity.between(exact, found)
    assert measured == Fidelity(2, 0.5, 0.0, *map(pytest.approx, (0.05, 0.1)))


def test_the_gate(transformer, sentences, model, collection, tmp_path):
    texts = sentences(40, 6)
    passed = check_fidelity(transformer, texts, "document", "", 0.05)
    assert passed.texts == 40
    with pytest.raises(EncoderError, match=r"int8 is too far from float32 .* encode in float32, or accept more"):
        check_fidelity(transformer, texts, "document", "", passed.norm_error_mean * 0.99)
    settings = {"precision": "int8", "max_norm_error": 0.05}
    (done,) = encode_collection(model, collection(), tmp_path / "out", **settings)
    assert done.manifest.precision == "int8" and done.manifest.fidelity["norm_error_mean"] < 0.05
    with pytest.raises(EncoderError, match=r"the limit is 0\.00%"):
        encode_collection(model, tmp_path / "collection", tmp_path / "no", precision="int8", max_norm_error=0.0)
    assert not (tmp_path / "no" / "manifest.json").exists()


def test_an_encoder_without_feed_forward_layers(static, transformer):
    with pytest.raises(ConfigError, match="is for transformers whose forward pass can be packed"), int8_layers(static):
        pass
    with pytest.raises(ConfigError, match="is for transformers"), int8_layers(transformer):  # not inside packed_input
        pass
