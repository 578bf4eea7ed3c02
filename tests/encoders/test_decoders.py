"""Causal language models as encoders: which token is the embedding, and that padding has no say in it."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from offsphere.encoders import encode, limit_length, open_encoder, randomise, save_encoder, set_pooling
from offsphere.encoders.decoders import complete_decoder, is_decoder
from offsphere.errors import ConfigError, EncoderError
from offsphere.losses import InfoNCELoss
from offsphere.similarity import NAMES, Similarity, norms

TEXTS = [
    "iron",
    "the moon does dance",
    "what is salt water",
    "bee",
    "why are a river and the sea salt water of the sun",
]
EOS = 2


@pytest.fixture
def decoder(decoder_folder):
    return open_encoder(decoder_folder(), device="cpu")


def ids(model, text):
    features = model.preprocess([text])
    return features["input_ids"][0].tolist()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("head", [True, False], ids=["with its head", "bare"])
def test_a_causal_language_model_becomes_an_encoder(decoder_folder, kind, head):
    model = open_encoder(decoder_folder(kind, head=head), device="cpu")
    assert is_decoder(model) and model[1].pooling_mode == "lasttoken" and len(model) == 2
    embeddings = encode(model, TEXTS, "document")
    assert embeddings.dtype == np.float32 and norms(embeddings).std() > 0.01 * norms(embeddings).mean()
    tokens = torch.tensor([ids(model, TEXTS[1])])
    state = model[0].auto_model(input_ids=tokens).last_hidden_state[0, -1]
    np.testing.assert_allclose(embeddings[1], state.detach().numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("pooling", [None, "mean"])
def test_a_batch_of_one_is_a_batch_of_many(decoder_folder, kind, pooling):
    model = open_encoder(decoder_folder(kind), pooling=pooling, device="cpu")
    together = encode(model, TEXTS, "document")
    alone = np.concatenate([encode(model, [text], "document") for text in TEXTS])
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)


def test_the_side_of_the_padding_does_not_change_the_vector(decoder):
    sides = {}
    for side in ("right", "left"):
        decoder.tokenizer.padding_side = side
        padded = decoder.preprocess(TEXTS)["attention_mask"]
        assert not padded[0, 0 if side == "left" else -1], "nothing is padded on that side"
        sides[side] = encode(decoder, TEXTS, "document")
    np.testing.assert_allclose(sides["left"], sides["right"], rtol=1e-4, atol=1e-5)


def test_padding_on_the_left_would_shift_a_model_that_counts_positions(decoder_folder):
    """Why it is set to the right: the same model with padding on the left gives other vectors."""
    model = open_encoder(decoder_folder("gpt2"), device="cpu")
    assert model.tokenizer.padding_side == "right"
    right = encode(model, TEXTS, "document")
    model.tokenizer.padding_side = "left"
    assert np.abs(encode(model, TEXTS, "document") - right).max() > 0.01


def test_the_pooling_makes_a_difference(decoder_folder):
    """What makes the tests of last-token pooling ones that can fail."""
    folder = decoder_folder()
    by_mode = {mode: encode(open_encoder(folder, pooling=mode, device="cpu"), TEXTS, "document")
               for mode in ("lasttoken", "mean")}  # fmt: skip
    assert np.abs(by_mode["mean"] - by_mode["lasttoken"]).max(1).min() > 0.01


def test_every_text_ends_in_the_end_token(decoder_folder):
    for begins in (False, True):
        model = open_encoder(decoder_folder(begins=begins), device="cpu")
        assert ids(model, "the moon")[-1] == EOS and ids(model, "the moon").count(EOS) == 1
        assert (ids(model, "the moon")[0] == 1) == begins
        limit_length(model, 4)
        assert len(ids(model, TEXTS[-1])) == 4 and ids(model, TEXTS[-1])[-1] == EOS, "a cut text ends in it too"
    by_itself = SentenceTransformer(str(decoder_folder()), device="cpu").tokenizer
    assert by_itself("the moon")["input_ids"][-1] != EOS, "it must be taught"


def test_a_tokenizer_that_ends_texts_is_left_as_it_is(decoder):
    once = ids(decoder, "the moon")
    complete_decoder(decoder)
    assert ids(decoder, "the moon") == once


def test_the_end_token_has_a_say(decoder_folder, decoder):
    bare = SentenceTransformer(str(decoder_folder()), device="cpu")
    bare.tokenizer.pad_token = "</s>"
    bare[1] = Pooling(32, "lasttoken")
    assert np.abs(encode(bare, TEXTS, "query") - encode(decoder, TEXTS, "query")).max() > 0.01


def test_a_tokenizer_without_an_end_token(decoder_folder):
    with pytest.raises(EncoderError, match="no end-of-text token"):
        open_encoder(decoder_folder(eos=None), device="cpu")


def test_a_tokenizer_that_cannot_be_taught(decoder, caplog):
    """The embedding is then that of the text's last token, and a warning says so."""

    class Stubborn:
        eos_token, eos_token_id, all_special_ids = "</s>", 2, [2]
        backend_tokenizer = None

        def __call__(self, text, **settings):
            return {"input_ids": [7]}

    from offsphere.encoders.decoders import end_texts

    with caplog.at_level(logging.WARNING, "offsphere"):
        end_texts(Stubborn())
    assert "Stubborn cannot be made to end texts in </s>" in caplog.text


def test_encoders_of_others_are_not_touched(transformer, save):
    """A folder with modules.json is as its author made it, a decoder's too; so is a bidirectional one without."""
    assert not is_decoder(transformer)
    bert = save(transformer)
    (bert / "modules.json").unlink()
    assert open_encoder(bert, device="cpu")[1].pooling_mode == "mean"


def test_a_decoder_with_modules_keeps_its_pooling(decoder_folder, save):
    model = SentenceTransformer(str(decoder_folder()), device="cpu")
    model.tokenizer.pad_token = "<unk>"
    model[1] = Pooling(32, "weightedmean")
    opened = open_encoder(save(model), device="cpu")
    assert opened[1].pooling_mode == "weightedmean" and ids(opened, "moon")[-1] != EOS


@pytest.mark.parametrize("setting", ["is_causal", "use_bidirectional_attention"])
def test_a_decoder_turned_bidirectional_is_none(decoder, setting):
    setattr(decoder[0].config, setting, setting != "is_causal")
    assert not is_decoder(decoder)


# Pooling of other encoders


@pytest.mark.parametrize("mode", ["cls", "max", "lasttoken"])
def test_another_pooling_is_saved_with_the_model(transformer, save, sentences, mode):
    texts = sentences(5, 0)
    folder = save(transformer)
    opened = open_encoder(folder, pooling=mode, device="cpu")
    reopened = open_encoder(save(opened, "pooled"), device="cpu")
    np.testing.assert_array_equal(encode(reopened, texts, "query"), encode(opened, texts, "query"))
    assert np.abs(encode(opened, texts, "query") - encode(transformer, texts, "query")).max() > 0.01


def test_a_pooling_that_cannot_be(transformer, static):
    with pytest.raises(ConfigError, match=r"--pooling is one of cls, .*found 'median'"):
        set_pooling(transformer, "median")
    with pytest.raises(ConfigError, match="--pooling mean: this encoder, StaticEmbedding first, has no Pooling"):
        set_pooling(static, "mean")


# Saving, training, random weights


@pytest.mark.parametrize("similarity", NAMES[:4])
def test_a_saved_decoder_needs_no_offsphere(decoder, tmp_path, similarity):
    save_encoder(decoder, tmp_path / "model", Similarity.parse(similarity), "# A decoder\n")
    plain = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    np.testing.assert_allclose(plain.encode(TEXTS), encode(decoder, TEXTS, "document"), rtol=1e-5, atol=1e-6)
    assert plain.similarity_fn_name == ("cosine" if similarity in ("cosine", "dnorm") else "dot")
    assert ids(plain, "moon")[-1] == EOS


def steps(model, count=3, rate=1e-2):
    """The losses of some steps on five pairs, and those after them."""
    torch.manual_seed(0)
    loss = InfoNCELoss(model, "qnorm", "auto")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    values = []
    for _ in range(count + 1):
        queries, documents = model.preprocess(TEXTS), model.preprocess([f"the {text} passage" for text in TEXTS])
        value = loss([queries, documents])
        values.append(value.item())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return values


def test_training_lowers_the_loss_of_a_decoder(decoder):
    values = steps(decoder)
    assert values[-1] < 0.9 * values[0]


def test_random_weights(decoder):
    before = encode(decoder, TEXTS, "query")
    found = []
    for seed in (1, 1, 2):
        model = copy.deepcopy(decoder)
        randomise(model, seed)
        found.append(encode(model, TEXTS, "query"))
    np.testing.assert_array_equal(found[0], found[1])
    assert not np.allclose(found[0], found[2]) and not np.allclose(found[0], before)
