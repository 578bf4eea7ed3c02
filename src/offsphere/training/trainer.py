"""SentenceTransformerTrainer with checkpoints that hold the trained weights, and a log that says what happened."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformerTrainer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from offsphere.losses import InfoNCELoss

WEIGHTS = "trained.safetensors"


class RetrieverTrainer(SentenceTransformerTrainer):
    """A trainer whose checkpoints are the trainable weights alone: what is frozen is not written again and again.

    Checkpoints therefore also work for encoders whose input module stands in for another one (``cached_inputs``).
    """

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """Leave out sentence-transformers' own card, which reads the whole dataset; ours replaces it."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(trainable_state(self.model), folder / WEIGHTS)

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        self.model.load_state_dict(load_file(Path(checkpoint_path) / WEIGHTS), strict=False)

    def _load_best_model(self) -> None:
        # The parent logs a failure and goes on with the last weights; a run must not be evaluated on those.
        if self.state.best_model_checkpoint is not None:
            self._load_from_checkpoint(self.state.best_model_checkpoint)


def trainable_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that take gradients, by name, on the CPU."""
    return {name: value.detach().cpu().contiguous() for name, value in model.named_parameters() if value.requires_grad}


class Telemetry(TrainerCallback):
    """Writes ``log.jsonl``: a line for each logged training step and each validation, and tells the progress.

    Args:
        path: The file; started anew.
        loss: Tells gammas, scale and the number of masked negatives.
        labels: Put into every line: which variant this is.
        on_step: Called after each optimiser step with the number of steps done.
    """

    def __init__(self, path: Path, loss: InfoNCELoss, labels: dict[str, Any], on_step: Callable[[int], None]):
        self.path = path
        self.loss = loss
        self.labels = labels
        self.on_step = on_step
        self.started = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tell how far the training is."""
        self.on_step(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the training loss with what was in force, and start counting masked negatives again."""
        if logs is None or "loss" not in logs:
            return
        values = {name: logs[name] for name in ("loss", "learning_rate", "grad_norm") if name in logs}
        self.write("train", state.global_step, values | self.loss.telemetry())
        self.loss.masked_negatives = 0

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a validation without the trainer's own timings."""
        timings = ("runtime", "samples_per_second", "steps_per_second", "loss", "model_preparation_time")
        values = {name.removeprefix("eval_"): value for name, value in (metrics or {}).items() if name != "epoch"}
        self.write("validation", state.global_step, {n: v for n, v in values.items() if n not in timings})

    def write(self, event: str, step: int, values: dict[str, Any]) -> None:
        """One line; numbers that are not finite become null, as JSON has none."""
        if event == "train":
            values = values | {"masked_negatives": self.loss.masked_negatives}
        line = {"event": event, **self.labels, "step": step, "seconds": time.monotonic() - self.started, **values}
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite, ensure_ascii=False) + "\n")
