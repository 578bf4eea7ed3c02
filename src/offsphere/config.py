"""Settings of a run: typed, read from YAML, overridden by flags, and written back in full."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from offsphere.errors import ConfigError
from offsphere.similarity import NAMES, Similarity


class RunConfig(BaseModel):
    """What every training is asked; None means that the plan decides from the encoder and the data.

    Defaults follow the paper's recipe (section 4) where they do not depend on the size of encoder and data.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str = Field(description="encoder: hub name, folder, or package:NAME")
    train: list[str] = Field(min_length=1, description="collections or files of pairs to train on")
    eval: list[str] = Field(default=[], description="collections to evaluate on")
    out: Path = Field(description="run folder")
    seeds: list[Annotated[int, Field(ge=0, lt=2**32)]] = Field(
        default=[0], min_length=1, description="one training a seed"
    )
    init: Literal["pretrained", "random"] = Field("pretrained", description="start from pretrained or random weights")

    split: str = Field("test", description="split of the evaluation collections")
    max_pairs: int | None = Field(None, gt=0, description="train on a random sample of the pairs")
    max_queries: int | None = Field(None, gt=0, description="evaluate on a random sample of the queries")
    max_documents: int | None = Field(None, gt=0, description="evaluate on the relevant documents and a random sample")

    steps: int | None = Field(None, gt=0, description="optimiser steps")
    epochs: float | None = Field(None, gt=0, description="passes over the pairs, when steps are not given")
    batch_size: int | None = Field(None, gt=1, description="pairs a batch, of each process")
    tokens_per_batch: Annotated[int, Field(gt=0)] | Literal["auto"] = Field(
        "auto", description="the most tokens that go through the encoder together: a number, or auto by the memory"
    )
    accumulate: int = Field(1, gt=0, description="batches whose gradients are added up in a step; adds no negatives")
    processes: int | None = Field(None, gt=0, description="how many train together, as torchrun starts them")
    max_length: int | None = Field(None, gt=1, description="tokens kept of each text")
    pooling: str | None = Field(
        None, description="how token embeddings become one: mean, cls, lasttoken; the encoder's own by default"
    )
    precision: Literal["float32", "bf16", "fp16"] = Field(
        "float32", description="float32, bf16 or fp16 in the encoder; lengths, scores and loss stay float32"
    )
    lora: int | None = Field(None, gt=0, description="train adapters of this rank in place of the weights (LoRA)")
    gradient_checkpointing: bool = Field(
        False, description="compute activations again and keep them no longer: less memory, more time"
    )
    learning_rate: float | None = Field(None, gt=0, description="peak rate of the encoder's weights")
    lr_grid: list[Annotated[float, Field(gt=0)]] | None = Field(
        None, min_length=2, description="rates to try under cosine; the best on the dev splits is used for all"
    )
    gamma_learning_rate: float = Field(0.01, gt=0, description="rate of gammas and scale")
    scale: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto", description="inverse temperature: a number, or auto, which makes it of alpha and the lengths"
    )
    alpha: float | None = Field(None, gt=0, description="inverse temperature of cosine under scale auto; 20 by default")
    alpha_grid: list[Annotated[float, Field(gt=0)]] | None = Field(
        None, min_length=2, description="alphas to try under cosine, with every rate; the best is used for all"
    )
    learn_scale: bool = Field(False, description="train the scale too")
    freeze_layers: int | None = Field(None, ge=0, description="keep the first N layers, and cache what they give")
    dropout: float | None = Field(None, ge=0, lt=1, description="in training; the encoder's own by default")
    weight_decay: float = Field(0.01, ge=0, description="of AdamW; none for gammas, scale, biases, layer norms")
    max_grad_norm: float = Field(1.0, ge=0, description="longer gradients are cut to this length; 0 cuts none")
    warmup_ratio: float = Field(0.0, ge=0, lt=1, description="share of the steps with a rising rate")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="how the learning rate goes: cosine, linear, or constant"
    )
    query_prompt: str | None = Field(None, description="text put before each query; stored with the model")
    document_prompt: str | None = Field(None, description="text put before each document; stored with the model")

    evaluations: int = Field(5, gt=0, description="validations during training")
    measure: str = Field("nDCG@10", description="of the dev splits: picks the weights and the learning rate")
    stop_when_converged: bool = Field(False, description="end a training whose last 5 validations agree")
    on_collapse: Literal["warn", "stop"] = Field(
        "warn", description="when a model ranks by length more than by direction: warn, or stop that training"
    )
    checkpoint_every: int | None = Field(
        None, gt=0, description="steps between checkpoints; by default one every ten minutes"
    )
    validation_queries: int = Field(200, gt=0, description="queries of each dev split that validation uses")
    validation_documents: int = Field(1000, gt=0, description="documents of each dev split that validation uses")
    run_files: Literal["none", "first", "all"] = Field(
        "first", description="write the run files of none, first, all seeds"
    )
    device: str | None = Field(None, description="cpu, cuda, mps, or auto: the best at hand, as by default")
    strict: bool = Field(False, description="refuse judgements of documents that the corpus lacks")

    @property
    def trained(self) -> list[str]:
        """The names of the similarities to train with."""
        raise NotImplementedError

    @field_validator("seeds")
    @classmethod
    def _distinct_seeds(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"a seed is named twice in {seeds}; the same seed gives the same run")
        return seeds

    @field_validator("measure")
    @classmethod
    def _known_measure(cls, name: str) -> str:
        from offsphere.evaluation.measures import parse_measures

        try:
            return name if name == cls.model_fields["measure"].default else str(parse_measures([name])[0])
        except ConfigError as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give steps or epochs, not both")
        if self.init == "random" and self.freeze_layers is not None:
            raise ValueError("freeze_layers would keep random layers as they are; leave it out with init: random")
        if self.init == "random" and self.lora is not None:
            raise ValueError("lora would keep random weights as they are; leave it out with init: random")
        if self.lr_grid is not None and self.learning_rate not in (None, *self.lr_grid):
            raise ValueError("give a learning rate or a grid to find it, not both")
        if self.alpha_grid is not None and self.alpha not in (None, *self.alpha_grid):
            raise ValueError("give alpha or a grid to find it, not both")
        if self.scale != "auto" and (self.alpha is not None or self.alpha_grid is not None):
            raise ValueError(
                f"scale {self.scale:g} is the inverse temperature of every variant as it is, so alpha would change "
                "nothing; leave scale out, or alpha"
            )
        return self

    @property
    def grids(self) -> dict[str, list[float]]:
        """The values to try of every setting that a grid is still to find."""
        grids = {"learning_rate": self.lr_grid, "alpha": self.alpha_grid}
        return {name: sorted(set(grid)) for name, grid in grids.items() if grid and getattr(self, name) is None}

    def prompts(self) -> dict[str, str]:
        """The prompts that were given, by side."""
        both = {"query": self.query_prompt, "document": self.document_prompt}
        return {side: prompt for side, prompt in both.items() if prompt is not None}


class TrainConfig(RunConfig):
    """What ``offsphere train`` does: one similarity."""

    similarity: str = Field("cosine", description="similarity to train with")

    @field_validator("similarity", mode="before")
    @classmethod
    def _name(cls, given: Any) -> Any:
        return Similarity.parse(given).name if isinstance(given, str | dict) else given

    @property
    def trained(self) -> list[str]:
        """The one similarity."""
        return [self.similarity]


class CompareConfig(RunConfig):
    """What ``offsphere compare`` does: several similarities, the same conditions for each."""

    eval: list[str] = Field(min_length=1, description="collections to evaluate on")
    similarities: list[str] = Field(default=list(NAMES), description="similarities to compare")
    seeds: list[Annotated[int, Field(ge=0, lt=2**32)]] = Field(
        default=[0, 42, 1337], min_length=1, description="one training a similarity and seed"
    )

    @property
    def trained(self) -> list[str]:
        """The similarities that are compared."""
        return self.similarities

    @field_validator("similarities", mode="before")
    @classmethod
    def _names(cls, given: Any) -> Any:
        return [Similarity.parse(one).name for one in given] if isinstance(given, list) else given

    @field_validator("similarities")
    @classmethod
    def _distinct_with_cosine(cls, names: list[str]) -> list[str]:
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"named twice: {', '.join(repeated)}")
        if "cosine" not in names:
            raise ValueError("cosine must be among the similarities: every other one is compared with it")
        return names


Config = TypeVar("Config", bound=RunConfig)


def read_config(kind: type[Config], path: Path | None, flags: dict[str, Any]) -> Config:
    """Settings from a YAML file, with flags that are not None in place of the file's.

    Args:
        kind: ``TrainConfig`` or ``CompareConfig``.
        path: The file, if there is one.
        flags: By the name of the setting.

    Raises:
        ConfigError: If the file is no mapping, a setting is unknown (with the nearest known one) or impossible.
    """
    settings: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --config {path} as UTF-8: {error}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not YAML: {error}") from error
        if not isinstance(loaded, dict):
            raise ConfigError(f"{path}: expected settings such as 'model: NAME', found {type(loaded).__name__}")
        settings.update({str(name): value for name, value in loaded.items()})
    settings.update({name: value for name, value in flags.items() if value is not None})
    try:
        return kind(**settings)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item, kind) for item in error.errors())) from error


def _explain(item: Any, kind: type[RunConfig]) -> str:
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, kind.model_fields, n=1)
        return f"unknown setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    if item["type"] == "missing":
        return f"{name} is missing; give --{name.replace('_', '-')} or '{name}:' in the configuration file"
    found = "" if isinstance(item["input"], dict) else f", found {item['input']!r}"
    return f"{name + ': ' if name else ''}{item['msg'].removeprefix('Value error, ')}{found}"
