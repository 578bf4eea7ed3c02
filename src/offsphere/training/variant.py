"""One training: one encoder, one similarity, one seed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from offsphere.data import Collection
from offsphere.losses import InfoNCELoss, KnownPositives
from offsphere.modules import LEARNED_PARAMETERS, LearnedSimilarity
from offsphere.similarity import Similarity
from offsphere.training.collapse import CollapseGuard
from offsphere.training.plan import Plan
from offsphere.training.trainer import RetrieverTrainer, Telemetry
from offsphere.training.validation import MEASURE, Validation


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
        validation: Its nDCG@10 on the dev splits, by its own similarity; None where there was none.
        collapse: What the collapse guard had to say, if anything.
    """

    similarity: Similarity
    scale: float
    best_step: int
    validation: float | None
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
) -> Trained:
    """Train the model in place and leave it with the weights of its best validation.

    The order of the batches depends on the seed and the data alone, so every similarity sees the same ones.

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
    """
    similarity, seed = variant.similarity, variant.seed
    if similarity.learned or plan.learn_scale:
        model.append(LearnedSimilarity(similarity, scale, plan.learn_scale).to(model.device))
    loss = InfoNCELoss(model, similarity, scale, known_positives)
    sides = {column: "query" if column == "query" else "document" for column in dataset.column_names}
    prompts = {column: model.prompts[side] for column, side in sides.items() if model.prompts.get(side)}
    with tempfile.TemporaryDirectory(dir=log.parent, prefix="checkpoints-") as folder:
        telemetry = Telemetry(log, loss, {"similarity": similarity.name, "seed": seed}, on_step)
        guard = CollapseGuard(
            plan.on_collapse,
            say=lambda sentence: telemetry.write("collapse", trainer.state.global_step, {"sentence": sentence}),
        )
        trainer = RetrieverTrainer(
            model=model,
            args=training_arguments(plan, seed, folder, bool(dev), loss.learned is not None, prompts),
            train_dataset=dataset,
            loss=loss,
            evaluator=Validation(dev, loss, plan.encode_batch_size) if dev else None,
            callbacks=[telemetry, guard],
        )
        for noisy in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(noisy)
        trainer.train()
    model.eval()
    best = trainer.state.best_metric
    in_force = loss.telemetry()
    return Trained(
        similarity=loss.similarity.detached(),
        scale=float(in_force["scale"] or scale),
        best_step=trainer.state.best_global_step or trainer.state.global_step,
        validation=None if best is None else float(best),
        collapse=guard.collapse.sentence if guard.collapse is not None else None,
    )


def training_arguments(
    plan: Plan, seed: int, folder: str, validate: bool, learned: bool, prompts: dict[str, str]
) -> SentenceTransformerTrainingArguments:
    """The paper's recipe (section 4) for the trainer: AdamW (0.9, 0.98), clipping 1, the best validation kept."""
    best: dict[str, Any] = {"eval_strategy": "no", "save_strategy": "no"}
    if validate:
        best = {
            "eval_strategy": "steps",
            "eval_steps": plan.evaluate_every,
            "eval_on_start": True,
            "save_strategy": "best",
            "save_only_model": True,
            "save_total_limit": 1,
            "load_best_model_at_end": True,
            "metric_for_best_model": MEASURE,
            "greater_is_better": True,
        }
    return SentenceTransformerTrainingArguments(
        output_dir=folder,
        prompts=prompts or None,
        max_steps=plan.steps,
        per_device_train_batch_size=plan.batch_size,
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
        max_grad_norm=1.0,
        seed=seed,
        data_seed=seed,
        logging_steps=plan.log_every,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        **best,
    )
