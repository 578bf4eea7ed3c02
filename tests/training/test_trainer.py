"""What a training writes: checkpoints and the log."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from offsphere.cached_inputs import cached_input
from offsphere.data import TrainingPairs
from offsphere.losses import InfoNCELoss
from offsphere.similarity import NAMES, Similarity
from offsphere.training.batches import training_dataset
from offsphere.training.plan import Plan
from offsphere.training.trainer import BEST, WEIGHTS, Telemetry, trainable_state
from offsphere.training.validation import AS_COSINE, MEASURE
from offsphere.training.variant import Trained, Variant, train_variant

Train = Callable[..., Trained]

TRAIN_FIELDS = {
    *("loss", "learning_rate", "grad_norm", "scale", "gamma_q", "gamma_d", "masked_negatives", "negatives_per_query")
}
VALIDATION_FIELDS = {
    *(MEASURE, AS_COSINE, "query_norm_mean", "query_norm_cv", "document_norm_mean", "document_norm_cv"),
    *("temperature_p10", "temperature_p50", "temperature_p90"),
    *("gamma_q", "gamma_d", "scale"),
}
COMMON_FIELDS = {"event", "similarity", "seed", "step", "seconds"}


class TestCheckpoints:
    def test_they_hold_what_is_trained_and_nothing_else(
        self, bert_model: SentenceTransformer, train: Train, tmp_path: Path
    ) -> None:
        with cached_input(bert_model, 1, tmp_path):
            train(bert_model, "learnable", steps=2, checkpoint_every=1)
            expected = {name for name, value in bert_model.named_parameters() if value.requires_grad}
        (checkpoint,) = (tmp_path / "checkpoints").glob("step-*")  # only the newest
        assert checkpoint.name == "step-2"
        for file in (WEIGHTS, BEST):
            assert load_file(checkpoint / file).keys() == expected
        assert {"2.norm.gamma_q", "2.norm.gamma_d"} <= expected
        assert not [name for name in expected if "embeddings" in name or "layer.0" in name or "log_scale" in name]

    def test_a_short_training_needs_none(self, static_model: SentenceTransformer, train: Train, tmp_path: Path) -> None:
        train(static_model)
        assert [file.name for file in (tmp_path / "checkpoints").iterdir() if file.is_file()] == [BEST]

    def test_trainable_state_is_a_copy_on_the_cpu_of_what_takes_gradients(
        self, bert_model: SentenceTransformer
    ) -> None:
        bert_model[0].auto_model.embeddings.requires_grad_(False)
        held = trainable_state(bert_model)
        assert held.keys() == {name for name, value in bert_model.named_parameters() if value.requires_grad}
        assert not [value for value in held.values() if value.requires_grad or value.device.type != "cpu"]


class TestLog:
    @pytest.mark.parametrize("similarity", NAMES)
    def test_every_line_has_every_field(
        self,
        static_model: SentenceTransformer,
        train: Train,
        log: Callable[[str], list[dict[str, Any]]],
        similarity: str,
    ) -> None:
        train(static_model, similarity, seed=5, scale=7.0)
        training, validation = log("train"), log("validation")
        assert [line["step"] for line in training] == [1, 2, 3, 4, 5, 6, 7, 8]
        assert [line["step"] for line in validation] == [0, 2, 4, 6, 8]
        for lines, fields in ((training, TRAIN_FIELDS), (validation, VALIDATION_FIELDS)):
            for line in lines:
                assert line.keys() == fields | COMMON_FIELDS
                assert (line["similarity"], line["seed"]) == (similarity, 5)
                assert all(math.isfinite(line[name]) for name in fields), line
        assert validation[0]["scale"] == pytest.approx(7.0)
        seconds = [line["seconds"] for line in training]
        assert seconds == sorted(seconds)

    def test_the_trajectory_of_gammas_ends_where_the_model_does(
        self, static_model: SentenceTransformer, train: Train, log: Callable[[str], list[dict[str, Any]]]
    ) -> None:
        trained = train(static_model, "learnable", evaluate_every=1)
        (best,) = [line for line in log("validation") if line["step"] == trained.best_step]
        assert (best["gamma_q"], best["gamma_d"]) == trained.similarity.gammas
        assert log("validation")[0]["gamma_q"] == 0.5

    def test_masked_negatives_are_counted_anew_for_each_line(
        self,
        static_model: SentenceTransformer,
        plan: Plan,
        tmp_path: Path,
        log: Callable[[str], list[dict[str, Any]]],
    ) -> None:
        """Six questions, each with the same passage twice: in a batch of all rows each masks its double."""
        queries = [f"topic{i // 2}word0" for i in range(12)]
        passages = [f"topic{i // 2}word1" for i in range(12)]
        ids = [[f"{side}{i // 2}" for i in range(12)] for side in "qd"]
        relevant = {f"q{i}": frozenset({f"d{i}"}) for i in range(6)}
        pairs = TrainingPairs("made", queries, passages, [], *ids, [], relevant)
        variant = Variant(Similarity.parse("cosine"), 0)
        train_variant(static_model, *training_dataset(pairs), variant, 20.0, plan, [], tmp_path / "log.jsonl")
        assert [line["masked_negatives"] for line in log("train")] == [12] * 8
        assert [line["negatives_per_query"] for line in log("train")] == [10.0] * 8

    def test_numbers_that_are_not_finite_become_null(self, static_model: SentenceTransformer, tmp_path: Path) -> None:
        path = tmp_path / "new" / "log.jsonl"
        telemetry = Telemetry(path, InfoNCELoss(static_model), {"similarity": "dot"}, lambda step: None)
        telemetry.write("validation", 3, {"a": math.nan, "b": math.inf, "c": 0.5, "d": None})
        line = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
        assert line.pop("seconds") >= 0
        assert line == {
            "event": "validation", "similarity": "dot", "step": 3, "a": None, "b": None, "c": 0.5, "d": None,
        }  # fmt: skip

    def test_steps_are_told_as_they_end(self, static_model: SentenceTransformer, train: Train) -> None:
        told: list[int] = []
        train(static_model, on_step=told.append)
        assert told == [1, 2, 3, 4, 5, 6, 7, 8]
