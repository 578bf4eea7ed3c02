"""Magnitude collapse: a model that keeps its relevance in lengths and gives up direction, seen while it trains.

Source: the paper's E5 without its Normalize module, whose embeddings score 0.944 by dot and 0.227 by cosine.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from offsphere.errors import ConfigError
from offsphere.training.validation import AS_COSINE, MEASURE

GAP = 0.1

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Collapse:
    """A validation at which a model ranked much better by its own similarity than by direction alone.

    Attributes:
        step: Of the training.
        own: nDCG@10 on the dev splits, ranked by the model's own similarity.
        as_cosine: The same, ranked by cosine.
        stopped: Whether the training was ended there.
    """

    step: int
    own: float
    as_cosine: float
    stopped: bool

    @property
    def sentence(self) -> str:
        """What happened and what to try, for the terminal, the report and the model card."""
        end = "training was stopped" if self.stopped else "training went on"
        return (
            f"magnitude collapse at step {self.step}: {MEASURE} {self.own:.3f} by its own similarity and "
            f"{self.as_cosine:.3f} by cosine, so the model ranks by length more than by direction; {end}. Try a lower "
            "--learning-rate, --scale auto, or a similarity that removes the document's length (dnorm, cosine)"
        )


class CollapseGuard(TrainerCallback):
    """Watches the gap between own-scored and cosine-scored validation nDCG@10, and tells of it once.

    It reads the metrics of ``validation.Validation``: ``eval_nDCG@10`` and ``eval_nDCG@10_as_cosine``. Validations
    without them, and the one before the first step, are passed over: what a model came with did not collapse here.

    Args:
        on_collapse: ``warn`` to go on, ``stop`` to end the training at that validation.
        gap: The gap that counts as collapse.
        say: Told the sentence once; it goes to the log by default.

    Attributes:
        collapse: The first validation with such a gap, or None.

    Raises:
        ConfigError: If ``on_collapse`` is another word, or the gap is not between 0 and 1.
    """

    def __init__(
        self,
        on_collapse: Literal["warn", "stop"] = "warn",
        *,
        gap: float = GAP,
        say: Callable[[str], None] = logger.warning,
    ):
        if on_collapse not in ("warn", "stop"):
            raise ConfigError(f"--on-collapse must be warn or stop, found {on_collapse!r}")
        if not 0 < gap <= 1:
            raise ConfigError(f"the gap that counts as collapse must be between 0 and 1, found {gap!r}")
        self.stop = on_collapse == "stop"
        self.gap = gap
        self.say = say
        self.collapse: Collapse | None = None

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Compare the two values of a validation."""
        if self.collapse is None:
            self.recall([{**(metrics or {}), "step": state.global_step}])
            if self.collapse is not None:
                control.should_training_stop = control.should_training_stop or self.stop
                self.say(self.collapse.sentence)

    def recall(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Find out from the log of a trainer's state what this guard knew then."""
        for entry in history:
            own, as_cosine = (entry.get(f"eval_{name}", math.nan) for name in (MEASURE, AS_COSINE))
            if self.collapse is None and entry["step"] > 0 and own - as_cosine >= self.gap:
                self.collapse = Collapse(int(entry["step"]), float(own), float(as_cosine), self.stop)
