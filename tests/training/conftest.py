"""Encoders small enough to train in a test, and collections that they can learn something from."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, BertConfig, PreTrainedConfig, PreTrainedTokenizerFast

from offsphere.config import CompareConfig, TrainConfig
from offsphere.data import Collection, TrainingPairs, load_collection, load_pairs
from offsphere.similarity import Similarity
from offsphere.training.batches import training_dataset
from offsphere.training.compare import compare
from offsphere.training.plan import Plan
from offsphere.training.train import TrainedModel
from offsphere.training.train import train as train_model
from offsphere.training.variant import Trained, Variant, train_variant

TOPICS, TOPIC_WORDS, WIDTH = 12, 6, 32
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
NOISE = [f"noise{i}" for i in range(16)]
WORDS = [
    *SPECIAL,
    *NOISE,
    *(f"topic{t}word{w}" for t in range(TOPICS) for w in range(TOPIC_WORDS)),
    "ask",
    "answer",
    ":",
]


def word_tokenizer() -> Tokenizer:
    """A token a word."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def bert_config(layers: int = 2, **settings: object) -> BertConfig:
    return BertConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=40,
        **settings,
    )


def write_transformer(config: PreTrainedConfig, folder: Path) -> Path:
    """A transformer with random weights and its tokenizer, as transformers writes them."""
    tokenizer = word_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL, strict=True))
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **named).save_pretrained(folder)
    return folder


def write_encoder(folder: Path, config: PreTrainedConfig, pooling: str = "mean") -> Path:
    """A sentence-transformers folder around a random transformer."""
    transformer = Transformer(str(write_transformer(config, folder / "parts")))
    model = SentenceTransformer(modules=[transformer, Pooling(WIDTH, pooling)], device="cpu")
    model.save(str(folder / "encoder"), create_model_card=False)
    return folder / "encoder"


def write_collection(folder: Path, splits: dict[str, int], seed: int, settings: str = "") -> Path:
    """As many queries a split as said, each with one relevant document of its topic."""
    random = np.random.default_rng(seed)
    documents, queries, qrels = [], [], {split: ["query-id\tcorpus-id\tscore"] for split in splits}
    for number, split in enumerate(split for split, size in splits.items() for _ in range(size)):
        words = [f"topic{number % TOPICS}word{w}" for w in random.permutation(TOPIC_WORDS)]
        noise = random.choice(NOISE, 6)
        documents.append({"_id": f"d{number}", "title": "", "text": " ".join([*words[:3], *noise[:4]])})
        queries.append({"_id": f"q{number}", "text": " ".join([*words[2:4], *noise[4:]])})
        qrels[split].append(f"q{number}\td{number}\t1")
    (folder / "qrels").mkdir(parents=True)
    for name, rows in (("corpus", documents), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for split, lines in qrels.items():
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if settings:
        (folder / "collection.yaml").write_text(settings, encoding="utf-8")
    return folder


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below the folder: when it changed, and what is in it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection to train on."""
    return write_collection(tmp_path_factory.mktemp("data") / "home", {"train": 48, "dev": 24, "test": 24}, seed=1)


@pytest.fixture(scope="session")
def away(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection that nothing trains on."""
    return write_collection(tmp_path_factory.mktemp("data") / "away", {"test": 24}, seed=2)


@pytest.fixture(scope="session")
def static_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(3)
    table = random.normal(size=(len(WORDS), WIDTH)) * random.uniform(0.3, 3, size=(len(WORDS), 1))
    folder = tmp_path_factory.mktemp("encoders") / "static"
    module = StaticEmbedding(word_tokenizer(), embedding_weights=table.astype(np.float32))
    SentenceTransformer(modules=[module], device="cpu").save(str(folder), create_model_card=False)
    return folder


@pytest.fixture(scope="session")
def bert_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("bert"), bert_config())


@pytest.fixture
def static_model(static_encoder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(static_encoder), device="cpu")


@pytest.fixture
def bert_model(bert_encoder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(bert_encoder), device="cpu")


@pytest.fixture(scope="session")
def pairs(home: Path) -> TrainingPairs:
    return load_pairs(home)


@pytest.fixture(scope="session")
def dev(home: Path) -> Collection:
    return load_collection(home, "dev")


@pytest.fixture
def plan() -> Plan:
    """Eight steps of twelve pairs, validated four times: two epochs of the pairs."""
    return Plan(
        steps=8,
        batch_size=12,
        encode_batch_size=16,
        alpha=20.0,
        learning_rate=0.02,
        gamma_learning_rate=0.05,
        schedule="cosine",
        warmup_steps=0,
        weight_decay=0.01,
        learn_scale=False,
        on_collapse="warn",
        evaluate_every=2,
        log_every=1,
    )


@pytest.fixture
def train(pairs: TrainingPairs, dev: Collection, plan: Plan, tmp_path: Path) -> Callable[..., Trained]:
    """Trains a model on the small collection, with anything changed; the log is ``tmp_path / log.jsonl``."""

    def run(
        model: SentenceTransformer,
        similarity: str = "cosine",
        seed: int = 0,
        scale: float = 20.0,
        dev: Sequence[Collection] = (dev,),
        on_step: Callable[[int], None] = lambda step: None,
        say: Callable[[str], None] = lambda text: None,
        **changed: Any,
    ) -> Trained:
        return train_variant(
            model=model,
            dataset=training_dataset(pairs)[0],
            known_positives=training_dataset(pairs)[1],
            variant=Variant(Similarity.parse(similarity), seed),
            scale=scale,
            plan=replace(plan, **changed),
            dev=dev,
            log=tmp_path / "log.jsonl",
            on_step=on_step,
            say=say,
        )

    return run


@pytest.fixture
def log(tmp_path: Path) -> Callable[[str], list[dict[str, Any]]]:
    """The lines of one event."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    def read(event: str) -> list[dict[str, Any]]:
        lines = (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()
        return [line for line in (json.loads(text, parse_constant=refuse) for text in lines) if line["event"] == event]

    return read


@pytest.fixture(scope="session")
def settings(home: Path, away: Path, static_encoder: Path) -> Callable[..., CompareConfig]:
    """Settings of a small comparison on the static encoder."""

    def make(out: Path, **changed: object) -> CompareConfig:
        small = {
            "model": str(static_encoder),
            "train": [str(home)],
            "eval": [str(home), str(away)],
            "seeds": [0, 1],
            "steps": 6,
            "learning_rate": 0.1,
            "batch_size": 12,
            "evaluations": 3,
            "device": "cpu",
        }
        return CompareConfig(**(small | changed), out=out)

    return make


@pytest.fixture(scope="session")
def finished_run(settings: Callable[..., CompareConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of all similarities with two seeds that nothing interrupted; tests leave it as it is."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    compare(settings(out))
    return out


write_transformer_fixture = pytest.fixture(name="write_transformer", scope="session")(lambda: write_transformer)
write_encoder_fixture = pytest.fixture(name="write_encoder", scope="session")(lambda: write_encoder)
write_collection_fixture = pytest.fixture(name="write_collection", scope="session")(lambda: write_collection)
bert_config_fixture = pytest.fixture(name="bert_config", scope="session")(lambda: bert_config)
content_fixture = pytest.fixture(name="content", scope="session")(lambda: content)


class Listener:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.started: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def start(self, what: str, total: int) -> Callable[[int], None]:
        self.started.append(what)
        return lambda done: None

    @property
    def text(self) -> str:
        return "\n".join(self.said)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def run(static_encoder: Path, home: Path, tmp_path: Path, listener: Listener) -> Callable[..., TrainedModel]:
    """Trains the static encoder into ``tmp_path / run``."""

    def run(**changed: Any) -> TrainedModel:
        small = {
            "model": str(static_encoder), "train": [str(home)], "steps": 6, "learning_rate": 0.1, "batch_size": 12,
            "evaluations": 3, "device": "cpu", "out": tmp_path / "run",
        }  # fmt: skip
        return train_model(TrainConfig(**small | changed), listener)

    return run
