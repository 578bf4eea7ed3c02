from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from transformers import (
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    LlamaConfig,
    ModernBertConfig,
    MPNetConfig,
    PreTrainedConfig,
    RobertaConfig,
)

from offsphere.cached_inputs import CachedTokens, FrozenTrunk, cached_input, original_input
from offsphere.encoders import encode, limit_length, set_dropout
from offsphere.errors import ConfigError, EncoderError
from offsphere.losses import InfoNCELoss
from offsphere.training.trainer import trainable_state

QUERIES = ["topic1word1 noise2", "topic2word0", "topic3word3 topic3word4 noise1 noise2 noise3", "noise5"]
DOCUMENTS = [
    "topic1word1 topic1word2 topic1word3 noise0 noise9",
    "topic2word0 topic2word5",
    "topic3word3",
    "noise5 noise6 noise7 noise8 noise9 noise10 noise11",
]
PROMPT = "ask : "

Features = dict[str, torch.Tensor]
Preprocess = Callable[[list[str]], Features]


def loss_and_gradients(
    model: SentenceTransformer, preprocess: Preprocess
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """InfoNCE of the texts above, with the gradient of every parameter that has one."""
    model.zero_grad()
    features = [preprocess(QUERIES), preprocess(DOCUMENTS)]
    loss = InfoNCELoss(model, "dot", scale=0.5)(features, torch.arange(4)[:, None].expand(4, 2))
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def freeze(transformer: Transformer, layers: int) -> None:
    whole = transformer.auto_model
    for part in (whole.embeddings, *whole.encoder.layer[:layers]):
        part.requires_grad_(False)


class TestFrozenTrunk:
    @pytest.mark.parametrize("layers", [0, 1])
    def test_outputs_loss_and_gradients_are_those_of_the_whole_model(
        self, bert_model: SentenceTransformer, tmp_path: Path, layers: int
    ) -> None:
        set_dropout(bert_model, 0.0)
        plain = copy.deepcopy(bert_model)
        freeze(plain[0], layers)
        plain.train()
        expected_loss, expected = loss_and_gradients(plain, plain.preprocess)
        with cached_input(bert_model, layers, tmp_path):
            bert_model.train()
            loss, gradients = loss_and_gradients(bert_model, bert_model.preprocess)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
        renamed = {name.replace("0.transformer.", "0."): gradient for name, gradient in gradients.items()}
        assert renamed.keys() == expected.keys()
        largest = max(gradient.abs().max() for gradient in expected.values())
        assert largest > 1e-3, "gradients near zero would agree whatever the cache does"
        for name, gradient in expected.items():
            torch.testing.assert_close(renamed[name], gradient, rtol=1e-4, atol=1e-6 * float(largest), msg=name)

    def test_only_what_is_above_the_cut_takes_gradients(self, bert_model: SentenceTransformer, tmp_path: Path) -> None:
        with cached_input(bert_model, 1, tmp_path):
            _, gradients = loss_and_gradients(bert_model, bert_model.preprocess)
            asked = {name for name, parameter in bert_model.named_parameters() if parameter.requires_grad}
        assert {name.split("encoder.layer.")[-1][0] for name in gradients} == {"1"}
        assert not [name for name in asked if "embeddings" in name or "layer.0." in name]

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        order=st.permutations(range(len(QUERIES + DOCUMENTS))),
        cuts=st.sets(st.integers(1, len(QUERIES + DOCUMENTS) - 1)),
    )
    def test_what_else_is_in_the_batch_does_not_matter(
        self, bert_model: SentenceTransformer, order: list[int], cuts: set[int]
    ) -> None:
        texts = QUERIES + DOCUMENTS
        expected = bert_model.encode(texts)
        trunk = FrozenTrunk(copy.deepcopy(bert_model[0]), 1)
        found = np.empty_like(expected)
        with torch.no_grad():
            for batch in np.split(np.array(order), sorted(cuts)):
                features = trunk(trunk.preprocess([texts[i] for i in batch]))
                found[batch] = bert_model[1](features)["sentence_embedding"]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("include_prompt", [True, False])
    def test_prompts_are_part_of_the_text_and_pooled_as_the_model_says(
        self, bert_model: SentenceTransformer, tmp_path: Path, include_prompt: bool
    ) -> None:
        bert_model[1].include_prompt = include_prompt
        expected = bert_model.encode(QUERIES, prompt=PROMPT)
        with cached_input(bert_model, 1, tmp_path):
            found = bert_model.encode(QUERIES, prompt=PROMPT)
            without = bert_model.encode(QUERIES)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        assert np.abs(found - without).max() > 1e-2

    def test_long_texts_are_cut_as_in_the_whole_model(self, bert_model: SentenceTransformer, tmp_path: Path) -> None:
        limit_length(bert_model, 5)
        expected = bert_model.encode(DOCUMENTS)
        with cached_input(bert_model, 1, tmp_path):
            np.testing.assert_allclose(bert_model.encode(DOCUMENTS), expected, rtol=1e-4, atol=1e-5)
            assert bert_model.preprocess(DOCUMENTS)["input_ids"].shape == (4, 5)

    def test_the_frozen_part_runs_once_a_text(self, bert_model: SentenceTransformer, tmp_path: Path) -> None:
        """A change below the cut is seen by texts that are new, and not by those in the cache."""
        unchanged = bert_model.encode(DOCUMENTS)
        with cached_input(bert_model, 1, tmp_path):
            cached = bert_model.encode(QUERIES)
            with torch.no_grad():
                bert_model[0].transformer.auto_model.encoder.layer[0].output.dense.weight.mul_(30)
            np.testing.assert_array_equal(bert_model.encode(QUERIES), cached)
            assert np.abs(bert_model.encode(DOCUMENTS) - unchanged).max() > 1e-2

    def test_training_mode_does_not_drop_anything_from_the_cache(
        self, bert_model: SentenceTransformer, tmp_path: Path
    ) -> None:
        set_dropout(bert_model, 0.5)
        with cached_input(bert_model, 1, tmp_path):
            expected = bert_model.preprocess(QUERIES)["trunk_activations"]
        with cached_input(bert_model, 1, tmp_path):
            bert_model.train()
            torch.testing.assert_close(bert_model.preprocess(QUERIES)["trunk_activations"], expected)
            assert bert_model[0].transformer.training, "the mode is as it was"
            features = [bert_model(bert_model.preprocess(QUERIES))["sentence_embedding"] for _ in range(2)]
            assert not torch.equal(*features), "the trained layers still drop activations"

    def test_nothing_left_to_train_is_an_error(self, bert_model: SentenceTransformer, tmp_path: Path) -> None:
        original = bert_model[0]
        with pytest.raises(ConfigError, match=r"--freeze-layers 2 leaves nothing .* 2 layers"):
            with cached_input(bert_model, 2, tmp_path):
                pass
        assert bert_model[0] is original

    def test_activations_leave_nothing_in_the_folder(self, bert_model: SentenceTransformer, tmp_path: Path) -> None:
        with cached_input(bert_model, 1, tmp_path):
            bert_model[0].fill(DOCUMENTS)
        assert list(tmp_path.iterdir()) == []


COMMON = {"num_attention_heads": 2, "intermediate_size": 64, "hidden_size": 32, "max_position_embeddings": 40}


def configurations(vocabulary: int) -> dict[str, PreTrainedConfig]:
    sizes = {"vocab_size": vocabulary, "num_hidden_layers": 3, **COMMON}
    return {
        "bert": BertConfig(**sizes),
        "roberta": RobertaConfig(**sizes, pad_token_id=0),
        "mpnet": MPNetConfig(**sizes, pad_token_id=0),
        "distilbert": DistilBertConfig(
            vocab_size=vocabulary, dim=32, n_layers=3, n_heads=2, hidden_dim=64, max_position_embeddings=40
        ),
        "modernbert": ModernBertConfig(
            **sizes,
            local_attention=4,
            global_attn_every_n_layers=2,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
        ),
        "electra": ElectraConfig(**sizes, embedding_size=16),
        "llama": LlamaConfig(**sizes),
    }


@pytest.fixture
def open_transformer(
    tmp_path: Path, write_transformer: Callable[[PreTrainedConfig, Path], Path], bert_config: Callable[..., BertConfig]
) -> Callable[[str], Transformer]:
    def make(name: str) -> Transformer:
        config = configurations(bert_config().vocab_size)[name]
        return Transformer(str(write_transformer(config, tmp_path / name))).eval()

    return make


class TestArchitectures:
    @pytest.mark.parametrize("layers", [0, 1, 2])
    @pytest.mark.parametrize("name", ["bert", "roberta", "mpnet", "distilbert", "modernbert"])
    def test_split_outputs_are_the_whole_ones(
        self, open_transformer: Callable[[str], Transformer], name: str, layers: int
    ) -> None:
        transformer = open_transformer(name)
        features = transformer.preprocess(DOCUMENTS)
        mask = features["attention_mask"].bool()
        with torch.no_grad():
            expected = transformer(features)["token_embeddings"][mask]
            trunk = FrozenTrunk(transformer, layers)
            found = trunk(trunk.preprocess(DOCUMENTS))["token_embeddings"][mask]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", ["bert", "roberta", "mpnet", "distilbert", "modernbert"])
    def test_training_moves_nothing_that_the_cache_depends_on(
        self, open_transformer: Callable[[str], Transformer], name: str
    ) -> None:
        """MPNet's layers share their position biases: were they trained, the cache would describe another model."""
        transformer = open_transformer(name)
        trunk = FrozenTrunk(transformer, 1)
        trained = [parameter for parameter in trunk.parameters() if parameter.requires_grad]
        optimiser = torch.optim.SGD(trained, lr=0.1)
        before = trunk(trunk.preprocess(DOCUMENTS))["token_embeddings"].detach()
        trunk(trunk.preprocess(DOCUMENTS))["token_embeddings"].pow(2).mean().backward()
        optimiser.step()
        features = transformer.preprocess(DOCUMENTS)
        mask = features["attention_mask"].bool()
        with torch.no_grad():
            whole, split = (
                module(inputs)["token_embeddings"][mask]
                for module, inputs in ((transformer, features), (trunk, trunk.preprocess(DOCUMENTS)))
            )
        assert (whole - before[mask]).abs().max() > 1e-4, "a step that changes nothing proves nothing"
        torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", ["electra", "llama"])
    def test_one_that_cannot_be_split_is_refused(
        self, open_transformer: Callable[[str], Transformer], name: str
    ) -> None:
        with pytest.raises(EncoderError, match=r"(?i)electra.* cannot be split|where the layers of Llama"):
            FrozenTrunk(open_transformer(name), 1)

    def test_a_split_that_gives_other_numbers_is_refused(
        self, open_transformer: Callable[[str], Transformer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("offsphere.cached_inputs.FrozenTrunk._read", shifted(FrozenTrunk._read))
        with pytest.raises(EncoderError, match=r"BertModel cannot be split exactly \(the outputs differ by"):
            FrozenTrunk(open_transformer("bert"), 1)


def shifted(read: Callable[[FrozenTrunk, str], tuple[torch.Tensor, torch.Tensor]]):
    def reads_wrongly(trunk: FrozenTrunk, text: str) -> tuple[torch.Tensor, torch.Tensor]:
        ids, activations = read(trunk, text)
        return ids, activations + torch.linspace(0, 1, activations.shape[1])

    return reads_wrongly


class TestCachedTokens:
    TEXTS = (*QUERIES, "", *DOCUMENTS, "words of no vocabulary", QUERIES[0])

    @pytest.mark.parametrize("prompt", [None, "", PROMPT])
    @pytest.mark.parametrize("max_length", [None, 3])
    def test_features_are_those_of_the_static_embedding(
        self, static_model: SentenceTransformer, max_length: int | None, prompt: str | None
    ) -> None:
        if max_length is not None:
            limit_length(static_model, max_length)
        expected = static_model[0].preprocess(list(self.TEXTS), prompt=prompt)
        cached = CachedTokens(static_model[0])
        for _ in range(2):
            found = cached.preprocess(self.TEXTS, prompt=prompt)
            assert found.keys() == expected.keys()
            for name in expected:
                torch.testing.assert_close(found[name], expected[name])

    def test_embeddings_and_gradients_are_those_of_the_static_embedding(
        self, static_model: SentenceTransformer, tmp_path: Path
    ) -> None:
        plain = copy.deepcopy(static_model)
        expected_loss, expected = loss_and_gradients(plain, plain.preprocess)
        with cached_input(static_model, None, tmp_path):
            loss, gradients = loss_and_gradients(static_model, static_model.preprocess)
            np.testing.assert_array_equal(encode(static_model, self.TEXTS, "query"), encode(plain, self.TEXTS, "query"))
        assert torch.equal(loss, expected_loss)
        assert torch.equal(gradients["0.static.embedding.weight"], expected["0.embedding.weight"])

    def test_a_text_is_tokenised_once(self, static_model: SentenceTransformer) -> None:
        cached = CachedTokens(static_model[0])
        cached.fill(QUERIES)
        before = cached.preprocess(QUERIES)["input_ids"]
        static_model[0].tokenizer.enable_truncation(1)
        assert torch.equal(cached.preprocess(QUERIES)["input_ids"], before)
        assert len(cached.preprocess([DOCUMENTS[0]])["input_ids"]) == 1


class TestCachedInput:
    @pytest.mark.parametrize("layers", [None, 1])
    def test_the_model_is_as_before_at_the_end_and_after_an_error(
        self, request: pytest.FixtureRequest, tmp_path: Path, layers: int | None
    ) -> None:
        model = request.getfixturevalue("static_model" if layers is None else "bert_model")
        original, trainable = model[0], trainable_state(model).keys()
        with cached_input(model, layers, tmp_path):
            assert isinstance(model[0], CachedTokens if layers is None else FrozenTrunk)
        assert model[0] is original
        with pytest.raises(KeyError), cached_input(model, layers, tmp_path):
            raise KeyError
        assert model[0] is original
        assert trainable_state(model).keys() == trainable

    def test_a_transformer_that_is_trained_whole_stays(self, bert_model: SentenceTransformer, tmp_path: Path) -> None:
        original = bert_model[0]
        with cached_input(bert_model, None, tmp_path):
            assert bert_model[0] is original

    def test_layers_of_a_static_embedding_are_refused(self, static_model: SentenceTransformer, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"--freeze-layers needs a transformer.*StaticEmbedding"):
            with cached_input(static_model, 1, tmp_path):
                pass

    @pytest.mark.parametrize("layers", [None, 1])
    def test_what_is_saved_opens_without_offsphere_s_modules(
        self, request: pytest.FixtureRequest, tmp_path: Path, layers: int | None
    ) -> None:
        model = request.getfixturevalue("static_model" if layers is None else "bert_model")
        with cached_input(model, layers, tmp_path):
            stand_in = model[0]
            with original_input(model):
                model.save(str(tmp_path / "saved"), create_model_card=False)
            assert model[0] is stand_in
            expected = model.encode(DOCUMENTS)
        assert "offsphere" not in (tmp_path / "saved" / "modules.json").read_text()
        opened = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
        np.testing.assert_allclose(opened.encode(DOCUMENTS), expected, rtol=1e-4, atol=1e-5)

    def test_original_input_of_a_model_without_a_stand_in_changes_nothing(
        self, bert_model: SentenceTransformer
    ) -> None:
        original = bert_model[0]
        with original_input(bert_model):
            assert bert_model[0] is original
        assert bert_model[0] is original
