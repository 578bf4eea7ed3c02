"""Encoders of every family that has a packed forward pass, with random weights, and batches of given lengths."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    AutoModel,
    BertConfig,
    CamembertConfig,
    DistilBertConfig,
    MPNetConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    XLMRobertaConfig,
)

WORDS = [f"word{number}" for number in range(40)]
SPECIAL = ["[CLS]", "[PAD]", "[SEP]", "[UNK]"]
PADDING = 1
"""Not 0, so that positions counted from behind it are told from columns."""
HIDDEN = 24
LONGEST = 40

SIZES: dict[str, Any] = {
    "vocab_size": len(SPECIAL + WORDS) + 1,
    "pad_token_id": PADDING,
    "max_position_embeddings": LONGEST + 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "initializer_range": 0.4,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "BertModel": BertConfig(**SIZES),
    "RobertaModel": RobertaConfig(**SIZES),
    "XLMRobertaModel": XLMRobertaConfig(**SIZES),
    "CamembertModel": CamembertConfig(**SIZES),
    "MPNetModel": MPNetConfig(**SIZES),
    "DistilBertModel": DistilBertConfig(
        **{name: value for name, value in SIZES.items() if name not in ("intermediate_size", "hidden_size")},
        dim=HIDDEN,
        hidden_dim=40,
    ),
}

Features = dict[str, Any]


def make_encoder(folder: Path, config: PreTrainedConfig) -> SentenceTransformer:
    """A token a word, random weights from one seed, mean pooling."""
    words = {word: number for number, word in enumerate([*SPECIAL, *WORDS, "ask"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 2)]
    )
    named = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token"), SPECIAL, strict=True))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModel.from_config(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=LONGEST, **named).save_pretrained(folder)
    return SentenceTransformer(modules=[Transformer(str(folder)), Pooling(HIDDEN)], device="cpu")


@pytest.fixture(scope="session")
def _encoders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SentenceTransformer]:
    made: dict[str, SentenceTransformer] = {}

    def make(name: str) -> SentenceTransformer:
        if name not in made:
            made[name] = make_encoder(tmp_path_factory.mktemp(name), CONFIGS[name])
        return copy.deepcopy(made[name])

    return make


@pytest.fixture(params=CONFIGS)
def packable(request: pytest.FixtureRequest, _encoders: Callable[[str], SentenceTransformer]) -> SentenceTransformer:
    """An encoder of each family: 2 layers, 3 heads, 24 dimensions, 40 tokens."""
    return _encoders(request.param)


@pytest.fixture
def bert(_encoders: Callable[[str], SentenceTransformer]) -> SentenceTransformer:
    """The one of BERT's family."""
    return _encoders("BertModel")


@pytest.fixture
def mpnet(_encoders: Callable[[str], SentenceTransformer]) -> SentenceTransformer:
    """The one whose attention has a bias."""
    return _encoders("MPNetModel")


@pytest.fixture(scope="session")
def batch() -> Callable[[Sequence[int], int], Features]:
    """Makes padded random tokens of texts of the given lengths, from a seed."""

    def make(lengths: Sequence[int], seed: int = 0) -> Features:
        generator = torch.Generator().manual_seed(seed)
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        tokens = torch.randint(len(SPECIAL), SIZES["vocab_size"], mask.shape, generator=generator)
        return {"input_ids": tokens.where(mask.bool(), PADDING), "attention_mask": mask}

    return make


@pytest.fixture(scope="session")
def texts() -> Callable[[Sequence[int], int], list[str]]:
    """Makes texts of the given numbers of words, from a seed."""

    def make(counts: Sequence[int], seed: int = 0) -> list[str]:
        generator = torch.Generator().manual_seed(seed)
        drawn = (torch.randint(len(WORDS), (count,), generator=generator).tolist() for count in counts)
        return [" ".join(WORDS[number] for number in numbers) for numbers in drawn]

    return make


@pytest.fixture(scope="session")
def tokens_of() -> Callable[[SentenceTransformer, Features], Tensor]:
    """Gives (tokens, width): what a model's transformer makes of the tokens that are not padding."""

    def compute(model: SentenceTransformer, features: Features) -> Tensor:
        return model[0](dict(features))["token_embeddings"][features["attention_mask"].bool()]

    return compute
