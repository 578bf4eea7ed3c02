"""SentenceTransformerTrainer that can be interrupted and split over processes, and a log that says what happened."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformerTrainer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from offsphere import processes
from offsphere.errors import TrainingError
from offsphere.losses import InfoNCELoss
from offsphere.training.checkpoints import Checkpoints
from offsphere.training.run_folder import link_or_copy

WEIGHTS = "trained.safetensors"
BEST = "best.safetensors"
PROGRESS = "progress.json"


class RetrieverTrainer(SentenceTransformerTrainer):
    """A trainer whose checkpoints are the trainable weights alone: what is frozen is not written again and again.

    Checkpoints therefore also work for encoders whose input module stands in for another one (``cached_inputs``). They
    hold all that the next step depends on, so that a training that goes on from one ends as if it had not stopped:
    weights, optimizer, schedule, the position in the data, random states of every process, the best weights so far, and
    where the log ends. Where several processes train, this trainer averages their gradients itself (see ``processes``).

    Args:
        checkpoints: Where checkpoints go; without it none are written, and the last weights stay.
        telemetry: The log, which goes on where the checkpoint left it.
        **arguments: Those of ``SentenceTransformerTrainer``.
    """

    def __init__(self, checkpoints: Checkpoints | None = None, telemetry: Telemetry | None = None, **arguments: Any):
        self.checkpoints = checkpoints
        self.telemetry = telemetry
        super().__init__(**arguments)
        # DistributedDataParallel expects one backward pass through its forward a step; see average_gradients.
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    def go_on(self, say: Callable[[str], None]) -> None:
        """Train to the end, from the newest checkpoint if there is one.

        Args:
            say: Told from which step.

        Raises:
            TrainingError: If the checkpoint was written by another number of processes.
        """
        found = processes.first(self.checkpoints.latest) if self.checkpoints is not None else None
        if found is None:
            processes.same_start(value for value in self.model.parameters() if value.requires_grad)
            self.train()
            return
        is_finished = self._recall(found)
        self.state = TrainerState.load_from_json(str(found / TRAINER_STATE_NAME))
        say(f"goes on after step {self.state.global_step}")
        if is_finished or self.state.global_step >= self.args.max_steps:
            self._load_from_checkpoint(str(found))
        else:
            self.args.eval_on_start = False
            self.train(resume_from_checkpoint=str(found))

    def finish(self, keep: bool) -> None:
        """Take the weights of the best validation, if there was one.

        Args:
            keep: Write a last checkpoint first, from which this training is not trained any further.
        """
        if keep and self.optimizer is not None:  # there is none where the checkpoint was already that of the end
            self._save_checkpoint(finished=True)
        processes.wait()  # for the first process, which may still write them
        if self.checkpoints is not None and self.state.best_global_step:
            self._load(self.checkpoints.folder / BEST)

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        """As the parent's; after the last batch of a step every process has the mean of their gradients."""
        loss = super().training_step(*arguments, **named)
        if self.accelerator.sync_gradients:
            processes.average_gradients(self.model.parameters())
        return loss

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """Leave out sentence-transformers' own card, which reads the whole dataset; ours replaces it."""

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        is_best = super()._determine_best_metric(metrics, trial)
        if is_best:
            self.state.best_global_step = self.state.global_step
            if self.checkpoints is not None and processes.is_first():
                self._write(self.checkpoints.folder / BEST)
        return is_best

    def _save_checkpoint(self, model: Any = None, trial: Any = None, finished: bool = False) -> None:
        if self.checkpoints is None:
            return
        with self.checkpoints.write(self.state.global_step) as folder:
            if self.args.should_save:
                self._write(folder / WEIGHTS)
                if self.state.best_global_step:
                    link_or_copy(self.checkpoints.folder / BEST, folder / BEST)
                self.state.save_to_json(str(folder / TRAINER_STATE_NAME))
                progress = {"finished": finished, "processes": processes.count()}
                progress |= self.telemetry.progress() if self.telemetry is not None else {}
                (folder / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")
            self._save_optimizer_and_scheduler(str(folder))
            self._save_scaler(str(folder))
            self._save_rng_state(str(folder))

    def _recall(self, checkpoint: Path) -> bool:
        """Make the log and the best weights those of the checkpoint; returns whether the training was at its end."""
        progress = json.loads((checkpoint / PROGRESS).read_text(encoding="utf-8"))
        if progress["processes"] != processes.count():
            raise TrainingError(
                f"{checkpoint} was written by {progress['processes']} processes, and {processes.count()} would go on "
                f"from it; start with torchrun --nproc-per-node {progress['processes']}, or give another --out"
            )
        if self.telemetry is not None:
            self.telemetry.recall(progress)
        if processes.is_first() and (checkpoint / BEST).exists():
            (checkpoint.parent / BEST).unlink(missing_ok=True)
            link_or_copy(checkpoint / BEST, checkpoint.parent / BEST)
        processes.wait()
        return bool(progress["finished"])

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        self._load(Path(checkpoint_path) / WEIGHTS)

    def _load(self, path: Path) -> None:
        found = load_file(path)
        if differing := trainable_state(self.model).keys() ^ found.keys():
            raise TrainingError(f"{path} does not fit the encoder: {', '.join(sorted(differing)[:3])} ...")
        self.model.load_state_dict(found, strict=False)

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}")
        save_file(trainable_state(self.model), fresh)
        fresh.replace(path)


def trainable_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that take gradients, by name, on the CPU."""
    return {name: value.detach().cpu().contiguous() for name, value in model.named_parameters() if value.requires_grad}


class Telemetry(TrainerCallback):
    """Writes ``log.jsonl``: a line for each logged training step and each validation, and tells the progress.

    Only the first process writes; numbers are those of all processes.

    Args:
        path: The file; started anew unless ``recall`` says where it goes on.
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

    def progress(self) -> dict[str, Any]:
        """Where the log ends, and how long the training has lasted."""
        length = self.path.stat().st_size if self.path.exists() else 0
        return {"log_bytes": length, "seconds": time.monotonic() - self.started}

    def recall(self, progress: dict[str, Any]) -> None:
        """Go on where the log was then: lines of steps that will be made again are taken out."""
        self.started = time.monotonic() - progress["seconds"]
        if processes.is_first():
            with self.path.open("ab") as file:
                file.truncate(min(progress["log_bytes"], file.tell()))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the log anew, unless the training goes on from a checkpoint."""
        if state.global_step == 0 and processes.is_first():
            self.path.write_text("", encoding="utf-8")

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
        """Write the training loss with what was in force, and start counting negatives again."""
        if logs is None or "loss" not in logs:
            return
        values = {name: logs[name] for name in ("loss", "learning_rate", "grad_norm") if name in logs}
        loss = self.loss
        masked, scored, queries = map(
            processes.total, (loss.masked_negatives, loss.scored_negatives, loss.scored_queries)
        )
        counted = {"masked_negatives": int(masked), "negatives_per_query": scored / max(queries, 1)}
        self.write("train", state.global_step, values | loss.telemetry() | counted)
        loss.masked_negatives = loss.scored_negatives = loss.scored_queries = 0

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
        if not processes.is_first():
            return
        line = {"event": event, **self.labels, "step": step, "seconds": time.monotonic() - self.started, **values}
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite, ensure_ascii=False) + "\n")
