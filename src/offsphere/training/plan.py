"""Every number that a training needs, decided from the settings, the encoder and the size of the data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

from offsphere.config import CompareConfig
from offsphere.errors import ConfigError


@dataclass(frozen=True)
class Plan:
    """Settings with nothing left open.

    Attributes:
        steps: Optimiser steps.
        batch_size: Pairs a batch.
        encode_batch_size: Texts in one forward pass without gradients.
        learning_rate: Peak rate of the weights.
        gamma_learning_rate: Peak rate of gammas and scale.
        schedule: Name of the schedule in transformers.
        warmup_steps: Steps with a rising rate.
        weight_decay: Of AdamW; none for gammas, scale, biases and layer norms.
        learn_scale: Whether the scale is trained.
        on_collapse: ``warn`` or ``stop``, see ``training.collapse``.
        evaluate_every: Steps between validations.
        log_every: Steps between lines of the training log.
    """

    steps: int
    batch_size: int
    encode_batch_size: int
    learning_rate: float
    gamma_learning_rate: float
    schedule: str
    warmup_steps: int
    weight_decay: float
    learn_scale: bool
    on_collapse: Literal["warn", "stop"]
    evaluate_every: int
    log_every: int

    def resolve(self, config: CompareConfig) -> dict[str, Any]:
        """The settings, less the folder, with what the plan decided in place of what was left open."""
        decided = {"steps": self.steps, "batch_size": self.batch_size, "learning_rate": self.learning_rate}
        return config.model_dump(mode="json", exclude={"out"}) | decided | {"epochs": None}


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


def make_plan(config: CompareConfig, model: SentenceTransformer, n_pairs: int) -> Plan:
    """The plan for this encoder and this many pairs.

    Raises:
        ConfigError: If there are fewer than two pairs: the second one's passage is the first one's only negative.
    """
    if n_pairs < 2:
        raise ConfigError(f"in-batch negatives need at least 2 training pairs, found {n_pairs}")
    default = STATIC if isinstance(model[0], StaticEmbedding) else TRANSFORMER
    batch_size = min(config.batch_size or default.batch_size, n_pairs)
    steps = config.steps or max(1, math.ceil((config.epochs or default.epochs) * (n_pairs // batch_size)))
    return Plan(
        steps=steps,
        batch_size=batch_size,
        encode_batch_size=default.encode_batch_size,
        learning_rate=config.learning_rate or default.learning_rate,
        gamma_learning_rate=config.gamma_learning_rate,
        schedule=config.schedule,
        warmup_steps=round(config.warmup_ratio * steps),
        weight_decay=config.weight_decay,
        learn_scale=config.learn_scale,
        on_collapse=config.on_collapse,
        evaluate_every=max(1, math.ceil(steps / config.evaluations)),
        log_every=max(1, steps // 50),
    )
