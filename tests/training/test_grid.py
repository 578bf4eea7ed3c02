"""Learning rate and alpha by a grid on the cosine variant."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from offsphere.config import CompareConfig, TrainConfig
from offsphere.errors import TrainingError
from offsphere.training.compare import compare
from offsphere.training.grid import Tried, best_of, read_grid, warn_of_edges, write_grid
from offsphere.training.train import TrainedModel

TRIED = (Tried(1e-6, 20.0, 0.50, 4), Tried(2e-6, 20.0, 0.62, 6, 5), Tried(5e-6, 20.0, 0.61, 2))


def test_the_best_is_taken() -> None:
    assert best_of(TRIED).learning_rate == 2e-6
    assert best_of([*TRIED, Tried(1e-5, 5.0, 0.62, 1)]).learning_rate == 2e-6
    assert best_of([*TRIED, Tried(2e-6, 5.0, 0.62, 1)]).alpha == 5.0
    assert warn_of_edges(TRIED) == []


@pytest.mark.parametrize(("kept", "message"), [((1, 2), "smallest.* 2e-06.*7e-07"), ((0, 1), "largest.*6e-06")])
def test_an_edge_is_warned_of(kept: tuple[int, int], message: str) -> None:
    (warning,) = warn_of_edges([TRIED[i] for i in kept])
    assert re.search(message, warning) and "--lr-grid" in warning


def test_each_side_of_the_grid_has_edges() -> None:
    tried = [*TRIED, Tried(2e-6, 50.0, 0.7, 3)]
    (warning,) = warn_of_edges(tried)
    assert "the best alpha is the largest of the grid, 50;" in warning and "such as 1e+02 to --alpha-grid" in warning
    assert len(warn_of_edges([*tried, Tried(5e-6, 50.0, 0.8, 3)])) == 2


def test_the_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = tmp_path / "grid.csv"
    assert read_grid(table) == []
    write_grid(table, TRIED[::-1])
    assert read_grid(table) == list(TRIED)
    assert [line.split(",")[-1] for line in table.read_text().splitlines()] == ["best", "0", "1", "0"]


@pytest.mark.parametrize(("grid", "name"), [("lr_grid", "learning_rate"), ("alpha_grid", "alpha")])
def test_a_value_beside_the_grid_is_refused(tmp_path: Path, grid: str, name: str) -> None:
    settings = {"model": "m", "train": ["t"], "out": tmp_path, grid: [0.1, 0.2]}
    with pytest.raises(ValueError, match="not both"):
        TrainConfig(**settings, **{name: 0.3})
    assert getattr(TrainConfig(**settings, **{name: 0.2}), name) == 0.2  # as a finished run's config.yaml has it


@pytest.mark.parametrize("settings", [{"alpha": 20.0}, {"alpha_grid": [10.0, 20.0]}])
def test_alpha_beside_a_scale_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="scale 5 is the inverse temperature of every variant as it is"):
        TrainConfig(model="m", train=["t"], out=tmp_path, scale=5.0, **settings)


def test_compare_fixes_what_cosine_found_for_all(settings: Callable[..., CompareConfig], tmp_path: Path, listener: Any):
    asked = {
        "learning_rate": None, "lr_grid": [0.3, 1e-4, 0.03], "alpha_grid": [20.0, 2.0], "seeds": [1],
        "similarities": ["cosine", "dot"],
    }  # fmt: skip
    out = tmp_path / "run"
    compare(settings(out, **asked), listener)
    tried = read_grid(out / "grid.csv")
    assert [(one.learning_rate, one.alpha) for one in tried] == [
        (rate, alpha) for rate in (1e-4, 0.03, 0.3) for alpha in (2.0, 20.0)
    ]
    best = best_of(tried)
    stored = yaml.safe_load((out / "config.yaml").read_text())
    assert (stored["learning_rate"], stored["alpha"]) == (best.learning_rate, best.alpha)
    variants = {name: out / "variants" / f"{name}-seed1" for name in ("cosine", "dot")}
    finished = {name: json.loads((folder / "variant.json").read_text()) for name, folder in variants.items()}
    assert (finished["cosine"]["validation"], finished["cosine"]["best_step"]) == (best.validation, best.best_step)
    assert finished["cosine"]["scale"] == pytest.approx(best.alpha)
    assert finished["dot"]["scale"] < best.alpha  # divided by the lengths
    for folder in variants.values():
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert max(line["learning_rate"] for line in lines if line["event"] == "train") == best.learning_rate
    said = f"learning rate {best.learning_rate:g}, alpha {best.alpha:g}, for every variant and seed"
    assert said in listener.said
    assert [what for what in listener.started if "rate" in what] == [
        f"learning rate {rate}, alpha {alpha}" for rate in ("0.0001", "0.03", "0.3") for alpha in (2, 20)
    ]
    assert {f"warning: {warning}" for warning in warn_of_edges(tried)} <= set(listener.said)
    assert "rate the best of 0.0001, 0.03, 0.3 under cosine, scale auto, alpha the best of 2, 20" in listener.text

    listener.started.clear()
    compare(settings(out, **asked), listener)
    assert listener.started == []


def test_alpha_changes_what_is_trained(run: Callable[..., TrainedModel], tmp_path: Path) -> None:
    trained = [run(similarity="dnorm", out=tmp_path / f"{alpha}", alpha=alpha).finished for alpha in (None, 20.0, 5.0)]
    assert trained[0] == trained[1]
    assert trained[2].scale == pytest.approx(trained[0].scale / 4)


def test_an_interrupted_grid_goes_on(
    run: Callable[..., TrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listener: Any
) -> None:
    from offsphere.training import run as module

    original, calls = module.train_variant, []

    def stops(**arguments: Any) -> Any:
        calls.append(arguments["plan"].learning_rate)
        if len(calls) == 2:
            raise TrainingError("stop")
        return original(**arguments)

    asked = {"learning_rate": None, "lr_grid": [0.1, 0.01], "similarity": "dnorm"}
    with monkeypatch.context() as patch:
        patch.setattr(module, "train_variant", stops)
        with pytest.raises(TrainingError, match="stop"):
            run(**asked)
    table = tmp_path / "run" / "grid.csv"
    assert [one.learning_rate for one in read_grid(table)] == [0.01]
    listener.started.clear()
    trained = run(**asked)
    assert "learning rate 0.01" not in listener.started
    assert trained.learning_rate == best_of(read_grid(table)).learning_rate
