"""When a training has converged (paper, section 4): the last validations agree, and the best is not far above them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import stdev
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

LAST = 5
DEVIATION = 0.002
BELOW_BEST = 0.02


def has_converged(values: Sequence[float]) -> bool:
    """Whether the sample deviation of the last 5 values is below 0.002 and the best less than 0.02 above the last.

    Args:
        values: A measure of each validation after the first step, in order; fractions.
    """
    return len(values) >= LAST and stdev(values[-LAST:]) < DEVIATION and max(values) - values[-1] < BELOW_BEST


class Convergence(TrainerCallback):
    """Notes the step at which a training has converged, and ends it there if asked.

    Args:
        measure: What to look at, as ``validation.Validation`` names it.
        stop: End the training.

    Attributes:
        step: Of the first validation at which it had converged, or None.
    """

    def __init__(self, measure: str, stop: bool):
        self.measure = measure
        self.stop = stop
        self.step: int | None = None

    def recall(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Find out from the log of a trainer's state what this callback knew then."""
        values: list[float] = []
        for entry in history:
            if f"eval_{self.measure}" in entry and entry["step"] > 0:
                values.append(entry[f"eval_{self.measure}"])
                if self.step is None and has_converged(values):
                    self.step = int(entry["step"])

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look at the validations so far; the trainer has logged the newest."""
        self.recall(state.log_history)
        control.should_training_stop = control.should_training_stop or (self.stop and self.step is not None)
