from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("offsphere", deadline=None)  # the time of one example says nothing on a busy machine
settings.load_profile("offsphere")

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub: no test reaches a network

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = (
    "the a of what why how does do is are iron rust water moon sea tide salt bee dance honey sun light leaf green "
    "ice cold fire hot wind sand stone river fish bird song night star"
).split()


@pytest.fixture(scope="session")
def _transformer(tmp_path_factory: pytest.TempPathFactory):
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("bert")
    marks = [":", "?", ".", "0", "1", "2"]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *LETTERS, *(f"##{c}" for c in LETTERS), *marks]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(vocabulary)), encoding="utf-8")
    tokenizer = BertTokenizerFast(vocab=str(folder / "vocab.txt"))
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=48,
        initializer_range=0.4,  # the usual 0.02 would give every text nearly the same vector
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return SentenceTransformer(modules=[Transformer(str(folder)), Pooling(32)], device="cpu")


@pytest.fixture(scope="session")
def _static():
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(["[UNK]", *WORDS, "query", "passage", ":"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    random = np.random.default_rng(0)
    table = random.normal(size=(len(vocabulary), 16)) * 4.0 ** random.uniform(-1, 1, (len(vocabulary), 1))
    module = StaticEmbedding(tokenizer, embedding_weights=table.astype(np.float32))
    return SentenceTransformer(modules=[module], device="cpu")


@pytest.fixture
def transformer(_transformer):
    """A BERT of 2 layers and 32 dimensions with mean pooling; 48 positions; declares no similarity."""
    return copy.deepcopy(_transformer)


@pytest.fixture
def static(_static):
    """A static table of 16 dimensions whose rows differ in length by up to 16; declares no similarity."""
    return copy.deepcopy(_static)


@pytest.fixture(params=["transformer", "static"])
def encoder(request: pytest.FixtureRequest):
    """Each of the two kinds of encoder."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def sentences() -> Callable[[int, int], list[str]]:
    """Makes that many different texts of 1 to 8 known words from a seed."""

    def make(count: int, seed: int) -> list[str]:
        random = np.random.default_rng(seed)
        texts: dict[str, None] = {}
        while len(texts) < count:
            texts[" ".join(random.choice(WORDS, random.integers(1, 9)))] = None
        return list(texts)

    return make


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Saves an encoder as sentence-transformers does, and gives the folder."""

    def save(model, name: str = "encoder") -> Path:
        model.save_pretrained(str(tmp_path / name), create_model_card=False)
        return tmp_path / name

    return save
