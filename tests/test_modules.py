from __future__ import annotations

import copy
import json
import math
import re

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from offsphere.encoders import open_encoder
from offsphere.errors import ConfigError
from offsphere.modules import LEARNED_PARAMETERS, LearnedSimilarity, learned_similarity
from offsphere.similarity import Similarity, norms

LEARNABLE = Similarity.parse("learnable")


def with_gammas(model: SentenceTransformer, gamma_q: float, gamma_d: float, **settings) -> SentenceTransformer:
    model.append(LearnedSimilarity(Similarity(gamma_q, gamma_d, learned=True), **settings))
    return model


def test_starts_at_one_half_with_the_parameters_at_zero():
    module = LearnedSimilarity(LEARNABLE, scale=20.0)
    assert {name: value.item() for name, value in module.norm.items()} == {
        "gamma_q": 0,
        "gamma_d": 0,
        "log_scale": pytest.approx(math.log(20)),
    }
    assert module.similarity.detached() == LEARNABLE and module.scale.item() == pytest.approx(20)


@pytest.mark.parametrize("learn_scale", [False, True])
def test_what_is_trained(learn_scale):
    learned = LearnedSimilarity(LEARNABLE, learn_scale=learn_scale)
    fixed = LearnedSimilarity(Similarity.parse("qnorm"), learn_scale=learn_scale)

    def trained(module):
        return {name for name, value in module.named_parameters() if value.requires_grad}

    scale = {"norm.log_scale"} if learn_scale else set()
    assert trained(learned) == {"norm.gamma_q", "norm.gamma_d"} | scale
    assert trained(fixed) == scale
    assert fixed.similarity == Similarity.parse("qnorm")


def test_gradients_reach_gammas_and_scale():
    module = LearnedSimilarity(Similarity(0.3, 0.8, learned=True), scale=5.0, learn_scale=True)
    random = np.random.default_rng(0)
    queries, documents = (torch.tensor(random.normal(size=(1, 4)) * 3, dtype=torch.float32) for _ in range(2))
    score = module.similarity.pairwise(queries, documents)[0]
    (score * module.scale).backward()
    for side, vectors, gamma in (("gamma_q", queries, 0.3), ("gamma_d", documents, 0.8)):
        expected = -math.log(norms(vectors).item()) * score.item() * 5.0 * gamma * (1 - gamma)
        assert module.norm[side].grad.item() == pytest.approx(expected, rel=1e-4)
    assert module.norm["log_scale"].grad.item() == pytest.approx(score.item() * 5.0, rel=1e-5)


def test_everything_learned_is_in_the_state_of_the_model(static):
    model = with_gammas(copy.deepcopy(static), 0.3, 0.8, scale=7.0)
    names = {name for name in model.state_dict() if "norm." in name}
    assert names == {"1.norm.gamma_q", "1.norm.gamma_d", "1.norm.log_scale"}
    other = with_gammas(copy.deepcopy(static), 0.5, 0.5)
    other.load_state_dict(model.state_dict())
    assert other[1].similarity.gammas == model[1].similarity.gammas
    assert other[1].scale.item() == model[1].scale.item() == pytest.approx(7)


def test_the_pattern_of_learned_parameters_matches_these_and_no_others(transformer):
    transformer.append(LearnedSimilarity(LEARNABLE))
    matched = {name for name, _ in transformer.named_parameters() if re.search(LEARNED_PARAMETERS, name)}
    assert matched == {"2.norm.gamma_q", "2.norm.gamma_d", "2.norm.log_scale"}


@pytest.mark.parametrize("learn_scale", [False, True])
@pytest.mark.parametrize("start", [LEARNABLE, Similarity(0.2, 0.9), Similarity.parse("dnorm")], ids=str)
def test_save_and_load_keep_what_was_trained(encoder, save, start, learn_scale):
    module = LearnedSimilarity(start, scale=3.0, learn_scale=learn_scale)
    with torch.no_grad():
        for number, value in enumerate(module.norm.values(), 1):
            value.fill_(0.7 * number)
    encoder.append(module)
    loaded = open_encoder(save(encoder), device="cpu")[-1]
    assert isinstance(loaded, LearnedSimilarity)
    assert loaded.similarity.detached() == module.similarity.detached()
    assert loaded.scale.item() == pytest.approx(module.scale.item(), rel=1e-6)
    assert loaded.start == start and loaded.learn_scale == learn_scale
    assert {n: p.requires_grad for n, p in loaded.named_parameters()} == {
        n: p.requires_grad for n, p in module.named_parameters()
    }


def test_a_loaded_model_encodes_as_before(encoder, save, sentences):
    with_gammas(encoder, 0.3, 0.8)
    folder = save(encoder)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        SentenceTransformer(str(folder), device="cpu")
    texts = sentences(6, 0)
    for loaded in (
        open_encoder(folder, device="cpu"),
        SentenceTransformer(str(folder), device="cpu", trust_remote_code=True),
    ):
        for method in ("encode_query", "encode_document", "encode"):
            np.testing.assert_array_equal(getattr(loaded, method)(texts), getattr(encoder, method)(texts))


def test_each_side_is_prepared_for_the_inner_product(encoder, sentences):
    texts = sentences(9, 0)
    queries, documents = encoder.encode(texts[:4]), encoder.encode(texts[4:])
    with_gammas(encoder, 0.3, 0.8)
    prepared = encoder.encode_query(texts[:4]), encoder.encode_document(texts[4:])
    expected = Similarity(0.3, 0.8).scores(queries, documents)
    np.testing.assert_allclose(prepared[0] @ prepared[1].T, expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(prepared[0] @ prepared[1].T, queries @ documents.T)


def test_raw_embeddings_on_request_and_without_a_side(encoder, sentences):
    texts = sentences(5, 0)
    raw = encoder.encode(texts)
    with_gammas(encoder, 0.3, 0.8)
    assert "raw" in encoder.get_model_kwargs()
    for embeddings in (
        encoder.encode(texts),
        encoder.encode_query(texts, raw=True),
        encoder.encode_document(texts, raw=True),
    ):
        np.testing.assert_array_equal(embeddings, raw)
    assert not np.allclose(encoder.encode_query(texts), raw)


def test_a_training_pass_is_raw(encoder, sentences):
    texts = sentences(5, 0)
    raw = torch.from_numpy(encoder.encode(texts))
    with_gammas(encoder, 0.3, 0.8)
    embedded = encoder.eval()(encoder.preprocess(texts))["sentence_embedding"]
    torch.testing.assert_close(embedded.detach(), raw, rtol=1e-5, atol=1e-6)


def test_the_configuration_is_readable(static, save):
    folder = save(with_gammas(static, 0.25, 0.75, scale=8.0, learn_scale=True))
    (file,) = folder.rglob(LearnedSimilarity.config_file_name)
    stored = json.loads(file.read_text(encoding="utf-8"))
    assert stored == {
        "similarity": {"gamma_q": 0.25, "gamma_d": 0.75, "learned": True},
        "scale": pytest.approx(8),
        "learn_scale": True,
    }
    modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    assert modules[-1]["type"] == "offsphere.modules.LearnedSimilarity"


def test_finding_the_module(static):
    assert learned_similarity(static) is None
    with_gammas(static, 0.5, 0.5)
    assert learned_similarity(static) is static[1]


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_without_a_logarithm(scale):
    with pytest.raises(ConfigError, match="scale must be a positive number"):
        LearnedSimilarity(LEARNABLE, scale=scale)


@pytest.mark.parametrize("gammas", [(0.0, 0.5), (0.5, 1.0), (-0.1, 0.5), (0.5, 1.5)])
def test_a_gamma_that_no_sigmoid_gives(gammas):
    with pytest.raises(ConfigError, match=r"between 0 and 1, both excluded; found Similarity\("):
        LearnedSimilarity(Similarity(*gammas, learned=True))
    LearnedSimilarity(Similarity(*gammas))  # fixed ones may have any value
