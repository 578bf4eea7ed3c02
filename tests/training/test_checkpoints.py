"""Checkpoints: whole or not there, and what a training does with them after each kind of end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import TrainerControl, TrainerState

from offsphere.errors import TrainingError
from offsphere.losses import InfoNCELoss
from offsphere.training.checkpoints import Checkpoints, WhenToSave, find_damage
from offsphere.training.trainer import RetrieverTrainer
from offsphere.training.variant import Trained

Train = Callable[..., Trained]


def write(checkpoints: Checkpoints, step: int, text: str = "weights") -> Path:
    with checkpoints.write(step) as folder:
        (folder / "a").write_text(text * 1000, encoding="utf-8")
        (folder / "b").write_text("moments", encoding="utf-8")
    return checkpoints.folder / f"step-{step}"


class TestWholeOrNotThere:
    @pytest.fixture
    def checkpoints(self, tmp_path: Path) -> Checkpoints:
        return Checkpoints(tmp_path / "checkpoints")

    def test_the_newest_alone_is_kept(self, checkpoints: Checkpoints) -> None:
        assert checkpoints.latest() is None
        for step in (9, 10):
            write(checkpoints, step)
        assert [path.name for path in checkpoints.folder.iterdir()] == ["step-10"]
        assert checkpoints.latest() == checkpoints.folder / "step-10"

    @pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
    def test_one_that_is_being_written_is_none(self, checkpoints: Checkpoints, error: type[BaseException]) -> None:
        before = write(checkpoints, 3)
        with pytest.raises(error), checkpoints.write(6) as folder:
            (folder / "a").write_text("half")
            assert checkpoints.latest() == before
            raise error
        assert checkpoints.latest() == before
        assert write(checkpoints, 6) == checkpoints.latest()
        assert [path.name for path in checkpoints.folder.iterdir()] == ["step-6"]

    @pytest.mark.parametrize("file", ["a", "b", "whole.json"])
    @pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "flipped"])
    def test_a_damaged_one_is_never_used(
        self, checkpoints: Checkpoints, file: str, damage: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        older = write(checkpoints, 3)
        older.rename(checkpoints.folder / "kept")
        newer = write(checkpoints, 6)
        (checkpoints.folder / "kept").rename(older)
        path = newer / file
        content = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            changed = bytes([content[0] ^ 1]) + content[1:]
            path.write_bytes({"truncated": content[:-1], "empty": b"", "flipped": changed}[damage])
        assert find_damage(newer)
        assert find_damage(older) is None
        assert checkpoints.latest() == older
        assert "step-6 is damaged and not used" in caplog.text


@pytest.mark.parametrize(
    ("every", "step", "seconds", "saves"),
    [(None, 7, 0, False), (None, 7, 601, True), (3, 6, 0, True), (3, 7, 601, False)],
)
def test_when_a_checkpoint_is_due(every: int | None, step: int, seconds: int, saves: bool) -> None:
    """By steps if they are given, else every ten minutes; the log starts anew there."""
    rule, state, control = WhenToSave(every), TrainerState(), TrainerControl()
    rule.last -= seconds
    state.global_step = step
    rule.on_step_end(None, state, control)
    assert (control.should_save, control.should_log, control.should_training_stop) == (saves, saves, False)
    assert rule.at_the_end() == (every is not None or seconds > 60)


def weights(model: SentenceTransformer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class TestGoingOn:
    """In one process; ``test_together`` kills real ones."""

    @pytest.fixture
    def fresh(self, static_encoder: Path) -> Callable[[], SentenceTransformer]:
        return lambda: SentenceTransformer(str(static_encoder), device="cpu")

    @pytest.fixture
    def uninterrupted(self, fresh: Callable[[], SentenceTransformer], train: Train, tmp_path: Path) -> Any:
        model = fresh()
        trained = train(model, "learnable", checkpoint_every=3)
        log = (tmp_path / "log.jsonl").read_text("utf-8")
        for path in (tmp_path / "checkpoints").rglob("*"):
            if path.is_file():
                path.unlink()
        return trained, weights(model), log

    @pytest.mark.parametrize("kind", ["ctrl-c", "nan", "memory"])
    def test_what_ends_it_leaves_a_checkpoint_to_go_on_from(
        self,
        kind: str,
        uninterrupted: Any,
        fresh: Callable[[], SentenceTransformer],
        train: Train,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        calls = []

        class Failing(InfoNCELoss):
            def compute_loss_from_embeddings(self, queries: torch.Tensor, *others: Any) -> torch.Tensor:
                calls.append(1)
                if len(calls) == 6:
                    if kind == "ctrl-c":
                        os.kill(os.getpid(), signal.SIGINT)
                    elif kind == "nan":
                        queries = queries * torch.inf
                    else:
                        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
                return super().compute_loss_from_embeddings(queries, *others)

        said: list[str] = []
        expected = {
            "ctrl-c": (KeyboardInterrupt, None),
            "nan": (TrainingError, "the loss is nan"),
            "memory": (TrainingError, "--tokens-per-batch"),
        }
        error, message = expected[kind]
        with monkeypatch.context() as patch:
            patch.setattr("offsphere.training.variant.InfoNCELoss", Failing)
            with pytest.raises(error, match=message):
                train(fresh(), "learnable", checkpoint_every=3, say=said.append)
        step = 6 if kind == "ctrl-c" else 3
        assert Checkpoints(tmp_path / "checkpoints").latest() == tmp_path / "checkpoints" / f"step-{step}"
        assert said == (
            ["stopping after this step, with a checkpoint; Ctrl-C again stops at once"] if step == 6 else []
        )
        steps: list[int] = []
        model = fresh()
        trained = train(model, "learnable", checkpoint_every=3, on_step=steps.append, say=said.append)
        assert steps == list(range(step + 1, 9))
        assert said[-1] == f"goes on after step {step}"
        assert trained == uninterrupted[0]
        assert same(weights(model), uninterrupted[1])
        without_time = [
            [json.loads(line) | {"seconds": 0} for line in log.splitlines()]
            for log in (uninterrupted[2], (tmp_path / "log.jsonl").read_text("utf-8"))
        ]
        assert without_time[0] == without_time[1]

    def test_a_second_ctrl_c_stops_at_once(self) -> None:
        rule = WhenToSave(None, say=lambda text: None)
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), rule.until_the_end_of_the_step():
            os.kill(os.getpid(), signal.SIGINT)
            assert rule.interrupted
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before

    def test_a_training_that_is_done_is_not_trained_again(
        self, fresh: Callable[[], SentenceTransformer], train: Train, tmp_path: Path
    ) -> None:
        """Its evaluation may have been what was interrupted."""
        first, second = fresh(), fresh()
        trained = train(first, "learnable", checkpoint_every=3)
        steps: list[int] = []
        assert train(second, "learnable", checkpoint_every=3, on_step=steps.append) == trained
        assert steps == []
        assert same(weights(first), weights(second))

    def test_the_optimizer_matters(
        self,
        uninterrupted: Any,
        fresh: Callable[[], SentenceTransformer],
        train: Train,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A canary for the tests above: without the moments of Adam it would end elsewhere."""
        with pytest.raises(ValueError, match="stop"):
            train(fresh(), "learnable", checkpoint_every=3, on_step=stop_at(5))
        monkeypatch.setattr(RetrieverTrainer, "_load_optimizer_and_scheduler", lambda self, checkpoint: None)
        model = fresh()
        train(model, "learnable", checkpoint_every=3)
        assert not same(weights(model), uninterrupted[1])

    def test_another_number_of_processes_is_refused(
        self, fresh: Callable[[], SentenceTransformer], train: Train, tmp_path: Path
    ) -> None:
        with pytest.raises(ValueError, match="stop"):
            train(fresh(), checkpoint_every=3, on_step=stop_at(5))
        checkpoint = tmp_path / "checkpoints" / "step-3"
        progress = json.loads((checkpoint / "progress.json").read_text("utf-8")) | {"processes": 4}
        with Checkpoints(checkpoint.parent).write(4) as folder:
            for path in checkpoint.iterdir():
                if path.name != "whole.json":
                    (folder / path.name).write_bytes(path.read_bytes())
            (folder / "progress.json").write_text(json.dumps(progress), encoding="utf-8")
        with pytest.raises(TrainingError, match=r"written by 4 processes.*torchrun --nproc-per-node 4"):
            train(fresh(), checkpoint_every=3)


def stop_at(step: int) -> Callable[[int], None]:
    def on_step(done: int) -> None:
        if done == step:
            raise ValueError("stop")

    return on_step
