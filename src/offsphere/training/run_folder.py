"""A run folder on disk: what a comparison has finished, so that the same command goes on where it stopped."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from offsphere import processes
from offsphere.atomic import write_atomically
from offsphere.encoders import replace_folder
from offsphere.errors import RunError
from offsphere.evaluation.results import (
    QueryValue,
    Result,
    read_query_values,
    read_results,
    write_query_values,
    write_results,
)
from offsphere.similarity import Similarity

CHECKPOINTS = "checkpoints"
WITHOUT_EFFECT = ("checkpoint_every", "tokens_per_batch", "gradient_checkpointing")
"""Settings that say how something is computed and not what, so that a run may go on with others, such as after it ran
out of memory. Micro-batches of other sizes draw dropout in another order."""
PACKAGES = ("offsphere", "torch", "sentence-transformers", "transformers", "datasets", "numpy", "ir-measures")


@dataclass(frozen=True)
class Finished:
    """One finished variant, as ``variant.json`` keeps it.

    Attributes:
        name: The folder under ``variants/``.
        similarity: As trained, learned gammas included; for the untrained encoder, the one that its author declares.
        trained_as: The name in results: one of the similarities, or ``pretrained``.
        seed: Of the training; None for the untrained encoder.
        scale: The inverse temperature at the end.
        best_step: The step of the weights that were kept.
        validation: The measure of these weights on the dev splits, where there are any.
        converged_step: The first validation at which the training had converged, if it had.
        collapse: What the collapse guard had to say, if anything.
    """

    name: str
    similarity: Similarity
    trained_as: str
    seed: int | None = None
    scale: float | None = None
    best_step: int = 0
    validation: float | None = None
    converged_step: int | None = None
    collapse: str | None = None


class RunFolder:
    """The folder of a comparison. A variant is in ``variants/`` once it is whole, and never before.

    Args:
        path: Created if it does not exist.
    """

    def __init__(self, path: Path):
        self.path = path
        self.variants = path / "variants"

    def begin(
        self, settings: dict[str, Any], fingerprints: Mapping[str, str], datasets: Mapping[str, Any] | None = None
    ) -> None:
        """Write ``config.yaml`` and ``environment.json``, or check that the folder belongs to the same request.

        Args:
            settings: As they were resolved.
            fingerprints: Of the data.
            datasets: What else is known of the data; settings and fingerprints decide whether a request is the same.

        Raises:
            RunError: If it holds a run with other settings or other data; nothing is changed then.
        """
        config, environment = self.path / "config.yaml", self.path / "environment.json"
        settings = dict(json.loads(json.dumps(settings)))
        if config.exists() and environment.exists():
            before = yaml.safe_load(config.read_text(encoding="utf-8"))
            for grid, found in (("lr_grid", "learning_rate"), ("alpha_grid", "alpha")):
                if settings.get(grid) and settings[found] is None:
                    settings[found] = before.get(found)
            data_before = json.loads(environment.read_text(encoding="utf-8"))["data"]
            differing = _differences(before, settings) + _differences(data_before, fingerprints)
            if differing:
                raise RunError(
                    f"{self.path} holds a run with other settings:\n  " + "\n  ".join(differing) + "\n"
                    "Give another --out, or the same settings to go on with it"
                )
            for unfinished in self.variants.glob(".*"):
                _clear(unfinished)
            return
        started = {environment.name, self.variants.name}  # what a start that was killed can leave
        if self.path.exists() and {entry.name for entry in self.path.iterdir()} - started:
            raise RunError(f"{self.path} is neither empty nor a run folder; give another --out")
        self.variants.mkdir(parents=True, exist_ok=True)
        described = describe_environment(fingerprints) | {"datasets": dict(datasets or {})}
        write_atomically(environment, json.dumps(described, indent=2, ensure_ascii=False) + "\n")
        write_atomically(config, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))

    def finished(self) -> list[Finished]:
        """The variants that are whole, by name."""
        return [self._read(folder) for folder in sorted(self.variants.glob("[!.]*/variant.json"))]

    def find(self, name: str) -> Finished | None:
        """That variant if it is whole."""
        file = self.variants / name / "variant.json"
        return self._read(file) if file.exists() else None

    def settle(self, decided: Mapping[str, Any]) -> None:
        """Put what the run itself has found out into ``config.yaml``."""
        config = self.path / "config.yaml"
        settings = yaml.safe_load(config.read_text(encoding="utf-8")) | decided
        write_atomically(config, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))

    @contextmanager
    def unfinished(self, name: str, parent: Path | None = None) -> Iterator[Path]:
        """A hidden folder to fill, which all processes see; it becomes ``variants/NAME`` at the end.

        What an interrupted training needs to go on (``checkpoints/`` and its log) stays in it until then, and so it
        does after an error.

        Args:
            name: Of the variant.
            parent: In place of ``variants/``.
        """
        parent = parent or self.variants
        folder = parent / f".{name}"
        if processes.is_first():
            _clear(folder)
            folder.mkdir(parents=True, exist_ok=True)
        processes.wait()
        try:
            yield folder
        except BaseException:
            if processes.is_first():
                _clear(folder)
            raise
        processes.wait()
        if processes.is_first():
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
            folder.replace(parent / name)

    def best(self, trained_as: str) -> Finished:
        """Of the seeds of a similarity, the one with the best validation."""
        same = [one for one in self.finished() if one.trained_as == trained_as]
        return max(same, key=lambda one: one.validation or 0.0)

    def gather(self, order: list[str]) -> tuple[list[Result], list[QueryValue]]:
        """Write the run's ``log.jsonl`` and, where anything was evaluated, its results.

        These are ``results.csv``, ``per_query.parquet``, ``norms.json`` and ``runs/``.

        Args:
            order: Names of finished variants, in the order in which their rows shall stand.
        """
        folders = [self.variants / name for name in order]
        results = [row for folder in folders for row in read_results(folder / "results.csv")]
        values = [row for folder in folders for row in read_query_values(folder / "per_query.parquet")]
        norms = [record for folder in folders for record in json.loads((folder / "norms.json").read_text("utf-8"))]
        logs = [folder / "log.jsonl" for folder in folders]
        write_atomically(self.path / "log.jsonl", "".join(log.read_text("utf-8") for log in logs if log.exists()))
        if not results:
            return results, values
        write_results(self.path / "results.csv", results)
        write_query_values(self.path / "per_query.parquet", values)
        write_atomically(self.path / "norms.json", json.dumps(norms))
        runs = self.path / "runs"
        runs.mkdir(exist_ok=True)
        for folder in folders:
            for file in folder.glob("runs/*.trec"):
                if not (runs / file.name).exists():
                    link_or_copy(file, runs / file.name)
        return results, values

    def remove_model(self, name: str) -> None:
        """Remove the saved model of a variant, if there is one; its results stay."""
        shutil.rmtree(self.variants / name / "model", ignore_errors=True)

    def recommend(self, name: str) -> None:
        """Put the model of that variant into ``model/``."""
        fresh = self.path / ".model"
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(self.variants / name / "model", fresh)
        replace_folder(fresh, self.path / "model")

    def _read(self, file: Path) -> Finished:
        stored = json.loads(file.read_text(encoding="utf-8"))
        return Finished(**(stored | {"similarity": Similarity.from_dict(stored["similarity"])}))


def _clear(folder: Path) -> None:
    """Remove what cannot be gone on with: all but whole checkpoints and the log, or all if there is no checkpoint."""
    checkpoints = folder / CHECKPOINTS
    if not list(checkpoints.glob("step-*")):
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.iterdir():
        if path.is_dir() and path != checkpoints:
            shutil.rmtree(path)
        elif path.is_file() and path.name != "log.jsonl":
            path.unlink()


def link_or_copy(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def write_variant(folder: Path, finished: Finished) -> None:
    """Write ``variant.json``."""
    stored = asdict(finished) | {"similarity": finished.similarity.to_dict()}
    write_atomically(folder / "variant.json", json.dumps(stored, indent=2) + "\n")


def describe_environment(fingerprints: Mapping[str, str]) -> dict[str, Any]:
    """Versions, hardware, data fingerprints and command line: what a reader needs to run it again."""
    import torch

    return {
        "command": ["offsphere", *sys.argv[1:]],
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "data": dict(fingerprints),
    }


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = [name for name in dict.fromkeys([*before, *now]) if name not in WITHOUT_EFFECT]
    return [f"{n}: it has {before.get(n)!r}, now {now.get(n)!r}" for n in names if before.get(n) != now.get(n)]
