"""One training: one encoder, one similarity, one seed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from transformers import set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from offsphere import processes
from offsphere.data import Collection
from offsphere.encoders import computing_in
from offsphere.errors import TrainingError
from offsphere.losses import InfoNCELoss, KnownPositives
from offsphere.modules import LEARNED_PARAMETERS, LearnedSimilarity
from offsphere.similarity import Similarity
from offsphere.training.checkpoints import Checkpoints, WhenToSave
from offsphere.training.collapse import CollapseGuard
from offsphere.training.convergence import Convergence
from offsphere.training.memory_plan import out_of_memory_explained
from offsphere.training.plan import Plan
from offsphere.training.run_folder import CHECKPOINTS
from offsphere.training.trainer import RetrieverTrainer, Telemetry
from offsphere.training.validation import Validation

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Variant:
    """One cell of the comparison.

    Attributes:
        similarity: What to train with.
        seed: Of the order of batches, of dropout, and of the weights where they start at random.
    """

    similarity: Similarity
    seed: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.similarity.name}-seed{self.seed}"


@dataclass(frozen=True)
class Trained:
    """What came out of one training, beside the weights that are now in the model.

    Attributes:
        similarity: With the gammas as trained.
        scale: The inverse temperature at the end.
        best_step: The step of the checkpoint that was kept.
        validation: The plan's measure on the dev splits, by its own similarity; None where there was none.
        converged_step: The first validation at which it had converged, if it had (see ``training.convergence``).
        collapse: What the collapse guard had to say, if anything.
    """

    similarity: Similarity
    scale: float
    best_step: int
    validation: float | None
    converged_step: int | None
    collapse: str | None


def train_variant(
    model: SentenceTransformer,
    dataset: Dataset,
    known_positives: KnownPositives,
    variant: Variant,
    scale: float,
    plan: Plan,
    dev: Sequence[Collection],
    log: Path,
    on_step: Callable[[int], None] = lambda step: None,
    say: Callable[[str], None] = logger.info,
) -> Trained:
    """Train the model in place and leave it with the weights of its best validation.

    The order of the batches depends on the seed and the data alone, so every similarity sees the same ones. W processes
    take them in turn: in step t, process r takes batch t * W + r, so that together they have the batch that one process
    would have with W times the batch size. Dropout is drawn from the seed plus the number of the process.

    Checkpoints and the best weights are in ``checkpoints/`` beside the log. The same call again goes on from there, and
    on a CPU ends with the same bits as if it had not been interrupted.

    Args:
        model: The encoder as it starts, without Normalize. Learned scalars are appended to it as a module.
        dataset: Columns query, positive, negatives, label (see ``training_dataset``).
        known_positives: By the keys in ``label``.
        variant: Similarity and seed.
        scale: Inverse temperature to start with.
        plan: Every number that training needs.
        dev: Validation collections; without any, the last weights are kept.
        log: The file that telemetry goes to.
        on_step: Called after each step.
        say: Told where a training goes on, and that it ends early.

    Raises:
        KeyboardInterrupt: After the step in which Ctrl-C was pressed, and its checkpoint.
        TrainingError: If the loss is not finite, or the memory not large enough; the last checkpoint stays.
    """
    similarity, seed = variant.similarity, variant.seed
    if similarity.learned or plan.learn_scale:
        model.append(LearnedSimilarity(similarity, scale, plan.learn_scale).to(model.device))
    tokens = plan.tokens_per_batch
    loss = InfoNCELoss(model, similarity, scale, known_positives, tokens_per_batch=tokens, tokens_kept=plan.tokens_kept)
    sides = {column: "query" if column == "query" else "document" for column in dataset.column_names}
    prompts = {column: model.prompts[side] for column, side in sides.items() if model.prompts.get(side)}
    checkpoints = Checkpoints(log.parent / CHECKPOINTS)
    telemetry = Telemetry(log, loss, {"similarity": similarity.name, "seed": seed}, on_step)
    guard = CollapseGuard(
        plan.on_collapse,
        say=lambda sentence: telemetry.write("collapse", trainer.state.global_step, {"sentence": sentence}),
    )
    convergence = Convergence(plan.measure, plan.stop_when_converged)
    saving = WhenToSave(plan.checkpoint_every, say)
    trainer = RetrieverTrainer(
        model=model,
        args=training_arguments(plan, seed, checkpoints.folder, model, bool(dev), loss.learned is not None, prompts),
        train_dataset=dataset,
        loss=loss,
        evaluator=Validation(dev, loss, plan.encode_batch_size, plan.measure) if dev else None,
        callbacks=[telemetry, guard, convergence, saving],
        checkpoints=checkpoints,
        telemetry=telemetry,
    )
    for noisy in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(noisy)
    set_seed(seed + processes.rank())
    with (
        saving.until_the_end_of_the_step(),
        out_of_memory_explained(plan.batch_size, tokens),
        computing_in(model, plan.precision),
    ):
        trainer.go_on(say)
    if saving.interrupted:
        raise KeyboardInterrupt
    trainer.finish(keep=saving.at_the_end())
    for callback in (guard, convergence):
        callback.recall(trainer.state.log_history)
    model.eval()
    best = trainer.state.best_metric
    in_force = loss.telemetry()
    return Trained(
        similarity=loss.similarity.detached(),
        scale=float(in_force["scale"] or scale),
        best_step=trainer.state.best_global_step or trainer.state.global_step,
        validation=None if best is None else float(best),
        converged_step=convergence.step,
        collapse=guard.collapse.sentence if guard.collapse is not None else None,
    )


def training_arguments(
    plan: Plan,
    seed: int,
    folder: Path,
    model: SentenceTransformer,
    validate: bool,
    learned: bool,
    prompts: dict[str, str],
) -> SentenceTransformerTrainingArguments:
    """The paper's recipe (section 4) for the trainer: AdamW (0.9, 0.98), clipping 1, the best validation kept."""
    best: dict[str, Any] = {"eval_strategy": "no"}
    if validate:
        best = {
            "eval_strategy": "steps",
            "eval_steps": plan.evaluate_every,
            "eval_on_start": True,
            "metric_for_best_model": plan.measure,
            "greater_is_better": True,
        }
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        prompts=prompts or None,
        max_steps=plan.steps,
        per_device_train_batch_size=plan.batch_size,
        gradient_accumulation_steps=plan.accumulate,
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        learning_rate=plan.learning_rate,
        learning_rate_mapping={LEARNED_PARAMETERS: plan.gamma_learning_rate} if learned else {},
        lr_scheduler_type=plan.schedule,
        warmup_steps=plan.warmup_steps,
        weight_decay=plan.weight_decay,
        adam_beta1=0.9,
        adam_beta2=0.98,
        adam_epsilon=1e-8,
        max_grad_norm=plan.max_grad_norm,
        seed=seed,
        data_seed=seed,
        logging_steps=plan.log_every,
        logging_nan_inf_filter=False,
        save_strategy="no",  # see WhenToSave
        use_cpu=model.device.type == "cpu",
        fp16=plan.precision == "fp16",
        ddp_timeout=int(processes.TIMEOUT.total_seconds()),
        report_to="none",
        disable_tqdm=True,
        **best,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # one process, one device: never DataParallel
    if arguments.device.type != model.device.type or (arguments.device.index or 0) != (model.device.index or 0):
        raise TrainingError(
            f"the encoder is on {model.device}, and the trainer would train on {arguments.device}; leave --device out "
            "and choose a GPU with CUDA_VISIBLE_DEVICES"
        )
    return arguments
