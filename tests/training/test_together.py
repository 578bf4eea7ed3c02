"""Several processes train as one, and an interrupted training ends as one that was not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

PROCESSES = [(world, rank) for world in (2, 3) for rank in range(world)]
CANARIES = ("canary: no gradient", "canary: PNNPNN", "canary: order of ranks")


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory, bert_encoder: Path, home: Path, away: Path) -> Path:
    """What ``workers.py`` leaves."""
    folder = tmp_path_factory.mktemp("together")
    for name, source in (("encoder", bert_encoder), ("home", home), ("away", away)):
        shutil.copytree(source, folder / name)
    command = [sys.executable, str(Path(__file__).with_name("workers.py")), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONWARNINGS": "default"})
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class TestContract:
    """W processes on batches b give the loss and the gradients of one process on the batch W * b."""

    @pytest.fixture
    def alone(self, work: Path) -> dict[str, dict[str, Any]]:
        return torch.load(work / "contract-1-0.pt")

    @pytest.fixture(params=PROCESSES, ids=lambda one: "process {1} of {0}".format(*one))
    def found(self, request: pytest.FixtureRequest, work: Path) -> dict[str, dict[str, Any]]:
        return torch.load(work / "contract-{}-{}.pt".format(*request.param))

    def test_loss_gradients_and_masks_are_those_of_one_process(self, alone: dict, found: dict) -> None:
        """Batches are unequal; five similarities, hard negatives, masks over processes, gradient cache, DDP."""
        for name, one in alone.items():
            if name in CANARIES:
                continue
            tolerance = 1e-6 if name == "float32" else 1e-9
            assert found[name]["loss"] == pytest.approx(one["loss"], abs=tolerance), name
            assert found[name]["masked"] == one["masked"] >= 5, name
            assert found[name]["gradients"].keys() == one["gradients"].keys()
            for parameter, gradient in one["gradients"].items():
                difference = (found[name]["gradients"][parameter] - gradient).abs().max()
                rounding = 5 * tolerance * max(1.0, float(gradient.abs().max()))  # a sum over all tokens
                assert difference <= rounding, (name, parameter)

    def test_learned_scalars_have_gradients_of_their_own(self, alone: dict) -> None:
        for name in ("gamma_q", "gamma_d", "log_scale"):
            assert alone["learnable, 2 hard negatives"]["gradients"][f"2.norm.{name}"].abs() > 1e-4

    def test_processes_stay_in_step(self, work: Path) -> None:
        """Bit for bit the same gradients everywhere, so the same weights and learned scalars after every step."""
        for world in (2, 3):
            first, *others = (torch.load(work / f"contract-{world}-{rank}.pt") for rank in range(world))
            for other in others:
                for name, case in first.items():
                    assert same(case["gradients"], other[name]["gradients"]), name

    def test_a_gather_without_gradients_would_be_seen(self, alone: dict, found: dict) -> None:
        broken, right = found["canary: no gradient"], alone["cosine, 2 hard negatives"]
        assert broken["loss"] == pytest.approx(right["loss"], abs=1e-9)
        name = "0.model.embeddings.word_embeddings.weight"
        assert not torch.allclose(broken["gradients"][name], right["gradients"][name], atol=1e-3)

    @pytest.mark.parametrize("layout", CANARIES[1:])
    def test_a_wrong_layout_would_be_seen(self, alone: dict, found: dict, layout: str) -> None:
        assert abs(found[layout]["loss"] - alone["cosine, 2 hard negatives"]["loss"]) > 1e-2


def log(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{path.parent.name}/{name}": value
        for path in sorted((folder / "model").rglob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class TestKilled:
    """Killed after 8 of 10 steps, with checkpoints after 3, 6 and 9, dropout on; then the same command again."""

    @pytest.mark.parametrize("name", ["alone", "two"])
    def test_it_ends_as_one_that_was_not(self, work: Path, name: str) -> None:
        """Bit for bit: weights, gammas, scale; the log is the same line for line."""
        assert same(weights(work / name), weights(work / f"{name}-killed"))
        assert log(work / name) == log(work / f"{name}-killed")
        assert (work / name / "results.csv").read_bytes() == (work / f"{name}-killed" / "results.csv").read_bytes()
        assert len(weights(work / name)) > 30

    def test_forgotten_random_states_would_be_seen(self, work: Path) -> None:
        before, forgetful = log(work / "alone"), log(work / "alone-forgetful")
        steps = [[line["loss"] for line in lines if line["event"] == "train"] for lines in (before, forgetful)]
        assert steps[0][:6] == steps[1][:6]
        assert steps[0][6:] != steps[1][6:]
        assert not same(weights(work / "alone"), weights(work / "alone-forgetful"))

    def test_the_loss_does_not_jump(self, work: Path) -> None:
        """Other dropout, but the same weights and moments: the loss of step 7 is near."""
        losses = {line["step"]: line["loss"] for line in log(work / "alone-forgetful") if line["event"] == "train"}
        reference = {line["step"]: line["loss"] for line in log(work / "alone") if line["event"] == "train"}
        assert losses[7] == pytest.approx(reference[7], rel=0.1)
        assert reference[1] - losses[7] > 3 * abs(losses[7] - reference[7])

    def test_nothing_of_the_way_there_is_left(self, work: Path) -> None:
        for name in ("alone-killed", "two-killed"):
            assert not list((work / name).rglob("*checkpoint*"))
            assert not list((work / name / "variants").glob(".*"))


class TestTwoProcesses:
    def test_they_train_as_one_does_with_twice_the_batch(self, work: Path) -> None:
        """Without dropout, whose draws differ; six steps in float32."""
        one, two = log(work / "still-1"), log(work / "still-2")
        assert len(one) == len(two)
        for line, other in zip(one, two, strict=True):
            assert line.keys() == other.keys()
            for name, value in line.items():
                near = value if isinstance(value, str) else pytest.approx(value, rel=1e-4, abs=1e-6)
                assert other[name] == near, (line["step"], name)
        for name, value in weights(work / "still-1").items():
            assert torch.allclose(weights(work / "still-2")[name], value, rtol=1e-4, atol=1e-5), name

    def test_every_query_meets_the_documents_of_both(self, work: Path) -> None:
        for name in ("still-1", "still-2"):
            assert {line["negatives_per_query"] for line in log(work / name) if line["event"] == "train"} == {11.0}
        said = (work / "said.txt").read_text()
        assert "processes      2; the documents of all are negatives for the queries of each: 11 in-batch" in said

    def test_the_run_says_how_many_they_were(self, work: Path) -> None:
        settings = yaml.safe_load((work / "two" / "config.yaml").read_text("utf-8"))
        assert (settings["processes"], settings["batch_size"]) == (2, 6)
