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
        validation: nDCG@10 of these weights on the dev splits, where there are any.
        collapse: What the collapse guard had to say, if anything.
    """

    name: str
    similarity: Similarity
    trained_as: str
    seed: int | None = None
    scale: float | None = None
    best_step: int = 0
    validation: float | None = None
    collapse: str | None = None


class RunFolder:
    """The folder of a comparison. A variant is in ``variants/`` once it is whole, and never before.

    Args:
        path: Created if it does not exist.
    """

    def __init__(self, path: Path):
        self.path = path
        self.variants = path / "variants"

    def begin(self, settings: Mapping[str, Any], fingerprints: Mapping[str, str]) -> None:
        """Write ``config.yaml`` and ``environment.json``, or check that the folder belongs to the same request.

        Raises:
            RunError: If it holds a run with other settings or other data; nothing is changed then.
        """
        config, environment = self.path / "config.yaml", self.path / "environment.json"
        settings = json.loads(json.dumps(settings))
        if config.exists() and environment.exists():
            before = yaml.safe_load(config.read_text(encoding="utf-8"))
            data_before = json.loads(environment.read_text(encoding="utf-8"))["data"]
            differing = _differences(before, settings) + _differences(data_before, fingerprints)
            if differing:
                raise RunError(
                    f"{self.path} holds a run with other settings:\n  " + "\n  ".join(differing) + "\n"
                    "Give another --out, or the same settings to go on with it"
                )
            for unfinished in self.variants.glob(".*"):
                shutil.rmtree(unfinished)
            return
        started = {environment.name, self.variants.name}  # what a start that was killed can leave
        if self.path.exists() and {entry.name for entry in self.path.iterdir()} - started:
            raise RunError(f"{self.path} is neither empty nor a run folder; give another --out")
        self.variants.mkdir(parents=True, exist_ok=True)
        write_atomically(environment, json.dumps(describe_environment(fingerprints), indent=2) + "\n")
        write_atomically(config, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))

    def finished(self) -> list[Finished]:
        """The variants that are whole, by name."""
        return [self._read(folder) for folder in sorted(self.variants.glob("[!.]*/variant.json"))]

    def find(self, name: str) -> Finished | None:
        """That variant if it is whole."""
        file = self.variants / name / "variant.json"
        return self._read(file) if file.exists() else None

    @contextmanager
    def unfinished(self, name: str) -> Iterator[Path]:
        """A hidden folder to fill; it becomes ``variants/NAME`` at the end, and is removed after an error."""
        folder = self.variants / f".{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            yield folder
            folder.replace(self.variants / name)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def gather(self, order: list[str]) -> tuple[list[Result], list[QueryValue]]:
        """Write the run's ``results.csv``, ``per_query.parquet``, ``norms.json``, ``log.jsonl`` and ``runs/``.

        Args:
            order: Names of finished variants, in the order in which their rows shall stand.
        """
        folders = [self.variants / name for name in order]
        results = [row for folder in folders for row in read_results(folder / "results.csv")]
        values = [row for folder in folders for row in read_query_values(folder / "per_query.parquet")]
        norms = [record for folder in folders for record in json.loads((folder / "norms.json").read_text("utf-8"))]
        write_results(self.path / "results.csv", results)
        write_query_values(self.path / "per_query.parquet", values)
        write_atomically(self.path / "norms.json", json.dumps(norms))
        logs = [folder / "log.jsonl" for folder in folders]
        write_atomically(self.path / "log.jsonl", "".join(log.read_text("utf-8") for log in logs if log.exists()))
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


def write_atomically(path: Path, text: str) -> None:
    """Write a text file under a temporary name and rename it, so that a reader sees all of it or the old one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


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
    names = dict.fromkeys([*before, *now])
    return [f"{n}: it has {before.get(n)!r}, now {now.get(n)!r}" for n in names if before.get(n) != now.get(n)]
