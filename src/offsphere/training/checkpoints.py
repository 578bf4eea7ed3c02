"""Checkpoints that a training goes on from as if nothing had happened: whole, or not there.

A checkpoint is a folder that is written under a hidden name and renamed at the end. ``whole.json`` holds the SHA-256 of
every file in it, so that one that a crash of the machine left damaged is never read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from offsphere import processes

WHOLE = "whole.json"
EVERY_SECONDS = 600.0
AT_THE_END = 60.0
"""A training that lasted so many seconds since its last checkpoint gets one more at its end, for what follows."""

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one training; only the newest is kept.

    Args:
        folder: Where they are; shared by all processes.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def latest(self) -> Path | None:
        """The newest checkpoint that is whole, or None; a damaged one is named in a warning."""
        steps = sorted(self.folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
        for checkpoint in reversed(steps):
            damage = find_damage(checkpoint)
            if damage is None:
                return checkpoint
            logger.warning("the checkpoint %s is damaged and not used: %s", checkpoint, damage)
        return None

    @contextmanager
    def write(self, step: int) -> Iterator[Path]:
        """A hidden folder for all processes to write their files into; it becomes the checkpoint of that step."""
        fresh = self.folder / f".step-{step}"
        if processes.is_first():
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
        processes.wait()
        yield fresh
        processes.wait()
        if processes.is_first():
            self._keep(fresh, self.folder / f"step-{step}")
        processes.wait()

    def _keep(self, fresh: Path, checkpoint: Path) -> None:
        files = sorted(path for path in fresh.iterdir() if path.is_file())
        digests = {path.name: _digest(path) for path in files}
        (fresh / WHOLE).write_text(json.dumps(digests, indent=2), encoding="utf-8")
        for path in (*files, fresh / WHOLE):
            with path.open("rb+") as file:
                os.fsync(file.fileno())  # the name must not reach the disk before what it names
        if checkpoint.exists():
            shutil.rmtree(checkpoint)
        fresh.rename(checkpoint)
        for other in (path for path in self.folder.glob("*step-*") if path != checkpoint):
            shutil.rmtree(other, ignore_errors=True)


def find_damage(checkpoint: Path) -> str | None:
    """What is wrong with the files of a checkpoint; None if they are as they were written."""
    try:
        digests = json.loads((checkpoint / WHOLE).read_text(encoding="utf-8"))
        changed = [name for name, digest in digests.items() if _digest(checkpoint / name) != digest]
    except (OSError, ValueError, AttributeError) as error:
        return str(error)
    return f"{', '.join(changed)} changed after it was written" if changed else None


class WhenToSave(TrainerCallback):
    """Asks for checkpoints, and ends a training after the step in which Ctrl-C was pressed.

    Args:
        every: Steps between checkpoints; by default one every ten minutes, so that short trainings need none.
        say: Told that the training stops after this step.

    Attributes:
        interrupted: Whether Ctrl-C was pressed.
    """

    def __init__(self, every: int | None, say: Callable[[str], None] = logger.info):
        self.every = every
        self.say = say
        self.interrupted = False
        self.last = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log and save at the end of this step if it is time to, in all processes at once."""
        due = state.global_step % self.every == 0 if self.every else time.monotonic() - self.last >= EVERY_SECONDS
        due, self.interrupted = processes.anyone(due, self.interrupted)
        if due or self.interrupted:
            # What is logged starts anew at each checkpoint, so that it has no sums to keep.
            control.should_log = control.should_save = True
        control.should_training_stop = control.should_training_stop or self.interrupted

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the time from here."""
        self.last = time.monotonic()

    def at_the_end(self) -> bool:
        """Whether the end of the training is worth a checkpoint, in all processes at once."""
        (worth,) = processes.anyone(bool(self.every) or time.monotonic() - self.last >= AT_THE_END)
        return worth

    @contextmanager
    def until_the_end_of_the_step(self) -> Iterator[None]:
        """Inside, the first Ctrl-C only sets ``interrupted``; the second one stops at once, as ever."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGINT)

        def stop_soon(*_: object) -> None:
            signal.signal(signal.SIGINT, before)
            self.interrupted = True
            self.say("stopping after this step, with a checkpoint; Ctrl-C again stops at once")

        signal.signal(signal.SIGINT, stop_soon)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
