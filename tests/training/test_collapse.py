"""A model of one dimension has only a sign for cosine to see, so what dot teaches it beyond a sign is length."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from offsphere.data import Collection, TrainingPairs
from offsphere.errors import ConfigError
from offsphere.losses import InfoNCELoss
from offsphere.similarity import Similarity
from offsphere.training.batches import training_dataset
from offsphere.training.collapse import CollapseGuard
from offsphere.training.plan import Plan
from offsphere.training.trainer import RetrieverTrainer
from offsphere.training.validation import Validation
from offsphere.training.variant import Variant, train_variant, training_arguments

RANKS, DOCUMENTS, PAIRS = 4, 40, 96
WORDS = ["ask", *(f"rank{r}" for r in range(RANKS)), *(f"note{i}" for i in range(DOCUMENTS))]
TEXTS = {f"d{i}": f"rank{i % RANKS} note{i}" for i in range(DOCUMENTS)}


def one_dimension() -> SentenceTransformer:
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="ask"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    table = np.random.default_rng(0).normal(0.2, 0.1, (len(WORDS), 1)).astype(np.float32)
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=table)], device="cpu")


def pairs() -> TrainingPairs:
    """Each row prefers a document of one rank to one of the rank below; all from there upwards are known to be good."""
    random = np.random.default_rng(0)
    better = random.integers(1, RANKS, PAIRS)
    positives, negatives = (
        [f"d{RANKS * random.integers(DOCUMENTS // RANKS) + rank}" for rank in ranks] for ranks in (better, better - 1)
    )
    queries = [f"q{i}" for i in range(PAIRS)]
    good = {
        q: frozenset(f"d{i}" for i in range(DOCUMENTS) if i % RANKS >= r) for q, r in zip(queries, better, strict=True)
    }
    texts = ["ask" + f" note{i % DOCUMENTS}" * (1 + i // DOCUMENTS) for i in range(PAIRS)]
    of = TEXTS.__getitem__
    columns = [list(map(of, positives)), [list(map(of, negatives))], queries, positives, [negatives]]
    return TrainingPairs("ranks", texts, *columns, good)


def dev() -> Collection:
    queries = {f"q{i}": f"ask note{i}" for i in range(20)}
    best = {f"d{i}": 1 for i in range(DOCUMENTS) if i % RANKS == RANKS - 1}
    return Collection("ranks", "dev", TEXTS, queries, dict.fromkeys(queries, best))


@pytest.fixture
def trained(plan: Plan, tmp_path) -> Callable[..., tuple[CollapseGuard, int, list[str]]]:
    """Trains with a guard; gives it, the last step, and what it said."""

    def run(similarity: str, rate: float, on_collapse: str = "warn") -> tuple[CollapseGuard, int, list[str]]:
        said: list[str] = []
        guard, model = CollapseGuard(on_collapse, say=said.append), one_dimension()
        settled = Plan(**(vars(plan) | {"steps": 24, "evaluate_every": 4, "learning_rate": rate}))
        dataset, known_positives = training_dataset(pairs())
        loss = InfoNCELoss(model, similarity, 20.0, known_positives)
        trainer = RetrieverTrainer(
            model=model,
            args=training_arguments(settled, 0, tmp_path, model, True, False, {}),
            train_dataset=dataset,
            loss=loss,
            evaluator=Validation([dev()], loss, 64),
            callbacks=[guard],
        )
        for noisy in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(noisy)
        trainer.train()
        return guard, trainer.state.global_step, said

    return run


def test_a_high_rate_under_dot_collapses_and_is_told_once(trained):
    guard, last, said = trained("dot", 0.1)
    assert guard.collapse is not None
    assert guard.collapse.own - guard.collapse.as_cosine >= 0.1
    assert 0 < guard.collapse.step < last == 24  # it went on, and the gap grew without another word
    assert said == [guard.collapse.sentence]
    assert all(part in said[0] for part in ("step", "training went on", "--learning-rate", "--scale auto", "dnorm"))


def test_stop_ends_the_training_at_that_validation(trained):
    guard, last, said = trained("dot", 0.1, "stop")
    assert guard.collapse is not None
    assert last == guard.collapse.step < 24
    assert "training was stopped" in said[0]


@pytest.mark.parametrize(("similarity", "rate"), [("dnorm", 0.1), ("cosine", 0.1), ("dot", 0.001)])
def test_without_document_length_or_with_a_low_rate_nothing_is_told(trained, similarity, rate):
    guard, last, said = trained(similarity, rate, "stop")
    assert (guard.collapse, last, said) == (None, 24, [])


@pytest.mark.parametrize(("similarity", "told"), [("dot", True), ("dnorm", False)])
def test_a_variant_says_that_it_collapsed(plan: Plan, tmp_path, similarity, told):
    settled = Plan(**(vars(plan) | {"steps": 24, "evaluate_every": 4, "learning_rate": 0.1}))
    dataset, known_positives = training_dataset(pairs())
    variant = Variant(Similarity.parse(similarity), 0)
    log = tmp_path / "log.jsonl"
    outcome = train_variant(one_dimension(), dataset, known_positives, variant, 20.0, settled, [dev()], log)
    events = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    sentences = [event["sentence"] for event in events if event["event"] == "collapse"]
    assert sentences == ([outcome.collapse] if told else [])
    assert (outcome.collapse is not None) == told


def evaluate(guard: CollapseGuard, metrics: dict | None, step: int = 5) -> bool:
    """Whether the guard wants to stop."""
    control, state = TrainerControl(), TrainerState()
    state.global_step = step
    guard.on_evaluate(None, state, control, metrics)
    return control.should_training_stop


@pytest.mark.parametrize(
    ("own", "as_cosine", "collapsed"),
    [(0.944, 0.227, True), (0.5, 0.375, True), (0.5, 0.45, False), (0.3, 0.9, False), (float("nan"), 0.2, False)],
)
def test_the_gap_decides(own, as_cosine, collapsed):
    guard = CollapseGuard("stop", gap=0.125)
    assert evaluate(guard, {"eval_nDCG@10": own, "eval_nDCG@10_as_cosine": as_cosine}) == collapsed
    assert (guard.collapse is not None) == collapsed


def test_validations_without_both_values_or_before_training_are_passed_over():
    guard = CollapseGuard("stop")
    large = {"eval_nDCG@10": 0.9, "eval_nDCG@10_as_cosine": 0.1}
    assert not evaluate(guard, large, step=0)
    assert not evaluate(guard, None)
    assert not evaluate(guard, {"eval_nDCG@10": 0.9})
    assert guard.collapse is None
    assert evaluate(guard, large)


def test_a_stop_of_another_callback_stays():
    control = TrainerControl(should_training_stop=True)
    state = TrainerState(global_step=5)
    CollapseGuard("warn").on_evaluate(None, state, control, {"eval_nDCG@10": 0.9, "eval_nDCG@10_as_cosine": 0.1})
    assert control.should_training_stop


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="--on-collapse must be warn or stop, found 'halt'"):
        CollapseGuard("halt")  # type: ignore[arg-type]
    for gap in (0, 1.5):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            CollapseGuard(gap=gap)
