"""The paper's rule for convergence, and trainings that end by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sentence_transformers import SentenceTransformer

from offsphere.training.convergence import has_converged
from offsphere.training.validation import MEASURE, Validation
from offsphere.training.variant import Trained

FLAT = [0.5, 0.501, 0.502, 0.501, 0.5]


@pytest.mark.parametrize(
    ("values", "converged"),
    [
        (FLAT, True),
        (FLAT[:4], False),
        ([0.9, *FLAT], False),  # the best is 0.4 above the last
        ([0.519, *FLAT], True),
        ([0.5205, *FLAT], False),
        ([0.1, 0.5, 0.501, 0.5, 0.501], False),  # the first of the last five is far off
        ([0.5, 0.504, 0.5, 0.504, 0.5], False),  # deviation 0.0022
        ([0.5, 0.503, 0.5, 0.503, 0.5], True),  # deviation 0.0016
        ([0.5] * 5, True),
        ([], False),
    ],
)
def test_the_rule(values: list[float], converged: bool) -> None:
    assert has_converged(values) == converged


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[float]], None]:
    """Makes validation give these values in turn, the first one before the first step."""

    def script(values: list[float]) -> None:
        left = iter(values)

        class Scripted(Validation):
            def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
                return super().__call__(*args, **kwargs) | {MEASURE: next(left)}

        monkeypatch.setattr("offsphere.training.variant.Validation", Scripted)

    return script


@pytest.mark.parametrize(("stop", "last"), [(True, 6), (False, 8)])
def test_a_training_ends_there_if_asked(
    static_model: SentenceTransformer, train: Callable[..., Trained], scripted: Any, stop: bool, last: int
) -> None:
    """The value before training does not count: it alone would make the rule true one step earlier."""
    scripted([0.5, 0.49, *FLAT, 0.6, 0.7])
    steps: list[int] = []
    trained = train(static_model, evaluate_every=1, stop_when_converged=stop, on_step=steps.append)
    assert steps[-1] == last
    assert trained.converged_step == 6
    assert trained.best_step == (4 if stop else 8)


def test_without_convergence_there_is_no_step(
    static_model: SentenceTransformer, train: Callable[..., Trained], scripted: Any
) -> None:
    scripted([0.5, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    assert train(static_model, evaluate_every=1, stop_when_converged=True).converged_step is None
