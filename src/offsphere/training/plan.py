"""Every number that a training needs, decided from the settings, the encoder and the size of the data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

from offsphere.config import RunConfig
from offsphere.encoders import Precision
from offsphere.errors import ConfigError
from offsphere.losses import ALPHA
from offsphere.training.convergence import LAST
from offsphere.training.validation import MEASURE


@dataclass(frozen=True)
class Plan:
    """Settings with nothing left open.

    Attributes:
        steps: Optimiser steps.
        batch_size: Pairs a batch.
        encode_batch_size: Texts in one forward pass without gradients.
        learning_rate: Peak rate of the weights.
        alpha: Inverse temperature of cosine; of the others it follows, unless a scale is given.
        gamma_learning_rate: Peak rate of gammas and scale.
        schedule: Name of the schedule in transformers.
        warmup_steps: Steps with a rising rate.
        weight_decay: Of AdamW; none for gammas, scale, biases and layer norms.
        learn_scale: Whether the scale is trained.
        on_collapse: ``warn`` or ``stop``, see ``training.collapse``.
        evaluate_every: Steps between validations.
        log_every: Steps between lines of the training log.
        tokens_per_batch: The most tokens that go through the encoder together; None for all of a column.
        tokens_kept: Of how many tokens the activations are kept (see ``training.memory_plan``).
        accumulate: Batches whose gradients are added up in a step.
        max_grad_norm: Longer gradients are cut to this length; 0 leaves them as they are.
        measure: Of the dev splits; picks the weights that are kept.
        stop_when_converged: End a training that ``training.convergence`` calls converged.
        checkpoint_every: Steps between checkpoints; None is one every ten minutes.
        processes: That train together; each takes its own batches.
        precision: That the encoder computes in; in fp16 the trainer scales the loss.
    """

    steps: int
    batch_size: int
    encode_batch_size: int
    learning_rate: float
    alpha: float
    gamma_learning_rate: float
    schedule: str
    warmup_steps: int
    weight_decay: float
    learn_scale: bool
    on_collapse: Literal["warn", "stop"]
    evaluate_every: int
    log_every: int
    tokens_per_batch: int | None = None
    tokens_kept: int = 0
    accumulate: int = 1
    max_grad_norm: float = 1.0
    measure: str = MEASURE
    stop_when_converged: bool = False
    checkpoint_every: int | None = None
    processes: int = 1
    precision: Precision = "float32"

    def resolve(self, config: RunConfig) -> dict[str, Any]:
        """The settings, less the folder, with what the plan decided in place of what was left open.

        What a grid is still to find stays open.
        """
        decided: dict[str, Any] = {"steps": self.steps, "batch_size": self.batch_size, "processes": self.processes}
        if config.lr_grid is None:
            decided["learning_rate"] = self.learning_rate
        if config.alpha_grid is None and config.scale == "auto":
            decided["alpha"] = self.alpha
        return config.model_dump(mode="json", exclude={"out"}) | decided | {"epochs": None}

    @property
    def negatives(self) -> int:
        """In-batch negatives of a query, before known positives are taken out and without hard negatives."""
        return self.batch_size * self.processes - 1


@dataclass(frozen=True)
class _Defaults:
    batch_size: int
    encode_batch_size: int
    learning_rate: float
    epochs: float


# The paper's rates (2e-6, 5e-6) belong to tens of thousands of steps; a run of a few hundred needs larger ones. A
# static embedding moves only the rows of the tokens that it meets, so it takes, and needs, far larger steps.
STATIC = _Defaults(batch_size=256, encode_batch_size=2048, learning_rate=1e-2, epochs=2.0)
TRANSFORMER = _Defaults(batch_size=64, encode_batch_size=64, learning_rate=2e-5, epochs=1.0)

LORA_RATE = 10
"""Adapters, which start at a product of zero, take a rate that is larger by this factor than that of the weights."""


def make_plan(config: RunConfig, model: SentenceTransformer, n_pairs: int, processes: int = 1) -> Plan:
    """The plan for this encoder and this many pairs.

    Args:
        config: The settings.
        model: The encoder.
        n_pairs: To train on.
        processes: That train together.

    Raises:
        ConfigError: If there are fewer than two pairs a process: the second one's passage is the first one's only
            negative. If the settings ask for another number of processes, or for validations that cannot converge.
    """
    if n_pairs < 2 * processes:
        raise ConfigError(f"in-batch negatives need at least {2 * processes} training pairs, found {n_pairs}")
    if config.processes not in (None, processes):
        raise ConfigError(
            f"these settings are those of {config.processes} processes, and {processes} would train; start with: "
            f"torchrun --nproc-per-node {config.processes} -m offsphere ..."
        )
    if config.stop_when_converged and config.evaluations <= LAST:
        raise ConfigError(
            f"--stop-when-converged looks at the last {LAST} validations, so it needs more than {LAST} in all; give "
            "--evaluations, such as 20"
        )
    default = STATIC if isinstance(model[0], StaticEmbedding) else TRANSFORMER
    batch_size = min(config.batch_size or default.batch_size, n_pairs // processes)
    batches = n_pairs // (batch_size * processes)
    epoch = math.ceil(batches / config.accumulate)
    steps = config.steps or max(1, math.ceil((config.epochs or default.epochs) * epoch))
    return Plan(
        steps=steps,
        batch_size=batch_size,
        encode_batch_size=default.encode_batch_size,
        learning_rate=config.learning_rate or default.learning_rate * (1 if config.lora is None else LORA_RATE),
        alpha=config.alpha or ALPHA,
        gamma_learning_rate=config.gamma_learning_rate,
        # The one that transformers calls constant leaves the warm-up out.
        schedule="constant_with_warmup" if config.schedule == "constant" else config.schedule,
        warmup_steps=round(config.warmup_ratio * steps),
        weight_decay=config.weight_decay,
        learn_scale=config.learn_scale,
        on_collapse=config.on_collapse,
        evaluate_every=max(1, math.ceil(steps / config.evaluations)),
        log_every=max(1, steps // 50),
        accumulate=config.accumulate,
        max_grad_norm=config.max_grad_norm,
        measure=config.measure,
        stop_when_converged=config.stop_when_converged,
        checkpoint_every=config.checkpoint_every,
        processes=processes,
        precision=config.precision,
    )
