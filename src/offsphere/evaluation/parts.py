"""What an evaluation has finished, one folder a model and data set, so that the same command goes on from there."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from offsphere.atomic import write_atomically
from offsphere.encoders import replace_folder
from offsphere.evaluation.results import Result
from offsphere.training.run_folder import link_or_copy

FILE = "part.json"
RUN_SUFFIX = ".trec"


@dataclass(frozen=True)
class Part:
    """One model on one data set, finished.

    Attributes:
        request: All that decides the outcome: the encoder, its prompts and limits, the data, what to rank under.
        data: What a reader of the results must know about the data: its size, what was excluded, prompts, notes.
        results: Rows for ``results.csv``.
        values: ``values[similarity][measure][query]``; empty for scored sentence pairs.
        cohens_d: Of the lengths of relevant and irrelevant documents; None where it is not defined.
        runs: Similarity to the checksum of its run file.
    """

    request: dict[str, Any]
    data: dict[str, Any]
    results: list[Result]
    values: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    cohens_d: float | None = None
    runs: dict[str, str] = field(default_factory=dict)

    @property
    def dataset(self) -> str:
        """What results call the data."""
        return self.results[0].dataset

    @property
    def similarities(self) -> list[str]:
        """The similarities that were asked for, in that order."""
        return list(dict.fromkeys(row.scored_as for row in self.results))


class Parts:
    """The folder ``parts`` of an evaluation; a part is there once it is whole, and never before.

    Args:
        folder: Of the evaluation.
    """

    def __init__(self, folder: Path):
        self._folder = folder / "parts"

    def find(self, model: str, dataset: str, request: Mapping[str, Any]) -> Part | None:
        """The finished part that answers this request; None where there is none, or its files were changed."""
        folder = self._place(model, dataset)
        try:
            stored = json.loads((folder / FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if stored["request"] != json.loads(json.dumps(request)):
            return None
        if any(_checksum(folder / f"{name}{RUN_SUFFIX}") != known for name, known in stored["runs"].items()):
            return None
        return Part(**(stored | {"results": [Result(**row) for row in stored["results"]]}))

    def unfinished(self, model: str, dataset: str) -> Path:
        """An empty hidden folder for the run files of a part, ``SIMILARITY.trec``; ``finish`` puts it in place."""
        folder = self._place(model, dataset)
        fresh = folder.with_name(f".{folder.name}")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        return fresh

    def finish(self, model: str, dataset: str, part: Part) -> Part:
        """Put the part and the run files of its unfinished folder in place, in one step."""
        folder = self._place(model, dataset)
        fresh = folder.with_name(f".{folder.name}")
        part.runs.update({file.stem: _checksum(file) for file in sorted(fresh.glob(f"*{RUN_SUFFIX}"))})
        write_atomically(fresh / FILE, json.dumps(asdict(part)) + "\n")
        replace_folder(fresh, folder)
        return part

    def gather(self, model: str, dataset: str, similarity: str, target: Path) -> None:
        """Give a run file of a part the name under which readers look for it."""
        target.unlink(missing_ok=True)
        link_or_copy(self._place(model, dataset) / f"{similarity}{RUN_SUFFIX}", target)

    def _place(self, model: str, dataset: str) -> Path:
        return self._folder / slug(model) / dataset


def slug(model: str) -> str:
    """The name of an encoder as a file name can have it, such as ``wordllama`` for ``package:wordllama``."""
    return re.sub(r"[^\w.]+", "-", model.removeprefix("package:")).strip("-.") or "model"


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
