"""A run folder as one typed record: everything that the tables, the figures and the page say comes from here."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

from offsphere.errors import DataError, RunError
from offsphere.evaluation.comparison import IN_DOMAIN, OUT_OF_DOMAIN, Comparison, Difference, Verdict
from offsphere.evaluation.results import PRETRAINED, Result, read_results
from offsphere.similarity import FIXED, NAMES


@dataclass(frozen=True)
class Score:
    """A measure averaged over datasets, then over seeds.

    Attributes:
        mean: Mean over seeds, a fraction.
        deviation: Sample standard deviation over seeds; None with one seed.
        by_seed: The value of every seed.
    """

    mean: float
    deviation: float | None
    by_seed: Mapping[int | None, float]


@dataclass(frozen=True)
class RunRecord:
    """One finished comparison of one encoder.

    Attributes:
        folder: Where it was read from, as the caller wrote it.
        config: The resolved settings (config.yaml).
        environment: Versions, hardware, data fingerprints (environment.json).
        results: The rows of results.csv.
        comparison: Means, differences to cosine, and the verdict (comparison.json).
        norms: One mapping for each similarity, seed and dataset, as ``evaluation.norms.norm_record`` made it.
        log: The events of log.jsonl, in order.
    """

    folder: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    results: tuple[Result, ...]
    comparison: Comparison
    norms: tuple[Mapping[str, Any], ...]
    log: tuple[Mapping[str, Any], ...]

    @cached_property
    def similarities(self) -> tuple[str, ...]:
        """The similarities trained with: the five names in their usual order, then any other."""
        return _usual_order(row.similarity for row in self.results if row.similarity != PRETRAINED)

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """The training seeds, sorted."""
        return tuple(
            sorted({row.seed for row in self.results if row.similarity != PRETRAINED and row.seed is not None})
        )

    @cached_property
    def scored_as(self) -> tuple[str, ...]:
        """The similarities that ranked, in the same order."""
        return _usual_order(row.scored_as for row in self.results)

    @property
    def measure(self) -> str:
        """The one that the comparison decides on, and that validation was by."""
        return self.comparison.measure

    @property
    def has_pretrained(self) -> bool:
        """Whether the untrained encoder was measured too."""
        return any(row.similarity == PRETRAINED for row in self.results)

    @property
    def domains(self) -> dict[str, tuple[str, ...]]:
        """The datasets of "in domain" and of "out of domain", without the one that has none."""
        both = {IN_DOMAIN: self.comparison.in_domain, OUT_OF_DOMAIN: self.comparison.out_of_domain}
        return {name: datasets for name, datasets in both.items() if datasets}

    @property
    def command(self) -> str:
        """The command line that makes this run again."""
        stored = self.config.get("command") or self.environment.get("command") or ""
        return stored if isinstance(stored, str) else shlex.join(map(str, stored))

    @property
    def opener(self) -> tuple[str, str]:
        """The module and the function that open the recommended model."""
        return opener_of(self.comparison.verdict.similarity)

    @property
    def recommended_value(self) -> float:
        """The mean of the recommended similarity on the deciding scope, a fraction."""
        verdict = self.comparison.verdict
        return self.comparison.means[verdict.similarity][verdict.scope][0]

    @property
    def contender(self) -> str | None:
        """The winner; where cosine stays, the similarity that came closest. None if only cosine was trained."""
        if self.comparison.verdict.beats_cosine:
            return self.comparison.verdict.similarity
        deciding = [found for found in self.comparison.differences if found.scope == self.comparison.verdict.scope]
        return max(deciding, key=lambda found: found.difference).similarity if deciding else None

    @cached_property
    def _values(self) -> dict[tuple[str, str, str, str], dict[int | None, float]]:
        values: dict[tuple[str, str, str, str], dict[int | None, float]] = {}
        for row in self.results:
            key = (row.similarity, row.scored_as, row.dataset, row.measure)
            values.setdefault(key, {})[row.seed] = row.value
        return values

    def score(self, trained: str, scored_as: str, datasets: Sequence[str], measure: str | None = None) -> Score | None:
        """The mean over datasets of a model trained with one similarity and ranked with another.

        Args:
            trained: Similarity of the training, or "pretrained".
            scored_as: Similarity of the ranking.
            datasets: Averaged with equal weight; only seeds that have all of them count.
            measure: As ir-measures prints it; by default the measure that the comparison decides on.

        Returns:
            The score, or None where results.csv has no such rows.
        """
        measure = measure or self.comparison.measure
        columns = [self._values.get((trained, scored_as, dataset, measure), {}) for dataset in datasets]
        seeds = [seed for seed in columns[0] if all(seed in column for column in columns)] if columns else []
        if not seeds:
            return None
        by_seed = {seed: fmean(column[seed] for column in columns) for seed in seeds}
        deviation = stdev(by_seed.values()) if len(seeds) > 1 else None
        return Score(fmean(by_seed.values()), deviation, by_seed)

    def difference(self, similarity: str, scope: str) -> Difference | None:
        """The difference to cosine on a scope ("in domain", "out of domain" or a dataset), where it was tested."""
        found = (row for row in self.comparison.differences if (row.similarity, row.scope) == (similarity, scope))
        return next(found, None)

    def events(self, kind: str) -> list[Mapping[str, Any]]:
        """The "train", "validation" or "collapse" events of the log."""
        return [event for event in self.log if event.get("event") == kind]


def _usual_order(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(dict.fromkeys(names), key=lambda name: NAMES.index(name) if name in NAMES else len(NAMES)))


def opener_of(similarity: str) -> tuple[str, str]:
    """The module and the function that open a model of a similarity: offsphere's own where it carries exponents."""
    return ("sentence_transformers", "SentenceTransformer") if similarity in FIXED else ("offsphere", "open_encoder")


def read_run(folder: Path | str) -> RunRecord:
    """The record of a run folder that ``offsphere compare`` finished.

    Raises:
        RunError: If a file is missing; names it and the command that makes it.
        DataError: If a file is malformed; names the file and, where it has lines, the line.
    """
    folder = Path(folder)
    config = read_config(folder)
    return RunRecord(
        folder=folder,
        config=config,
        environment=read_json(part_of_run(folder, "environment.json", config)),
        results=tuple(read_results(part_of_run(folder, "results.csv", config))),
        comparison=_read_comparison(part_of_run(folder, "comparison.json", config)),
        norms=tuple(read_json(part_of_run(folder, "norms.json", config))),
        log=tuple(read_log(part_of_run(folder, "log.jsonl", config))),
    )


def part_of_run(folder: Path, name: str, config: Mapping[str, Any]) -> Path:
    """A file of a run folder.

    Args:
        folder: Of the run.
        name: Of the file.
        config: The settings, with the command that makes the folder, if they have it.

    Raises:
        RunError: If it is missing; names it and the command that makes it.
    """
    if (folder / name).is_file():
        return folder / name
    command = config.get("command") or f"offsphere compare --model M --train C --eval C --out {folder}"
    command = command if isinstance(command, str) else shlex.join(map(str, command))
    raise RunError(f"{folder} has no {name}, which a finished run has; to make it or to finish the run: {command}")


def read_config(folder: Path) -> Mapping[str, Any]:
    """The settings of a run folder.

    Raises:
        RunError: If it has none.
        DataError: If they are no mapping in YAML.
    """
    path = part_of_run(folder, "config.yaml", {})
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise DataError(f"expected YAML, found: {error}", path) from error
    if not isinstance(config, dict):
        raise DataError(f"expected a mapping of settings, found {type(config).__name__}", path)
    return config


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        DataError: If it is none; names the line.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"expected JSON, found: {error.msg}", path, error.lineno) from error


def _read_comparison(path: Path) -> Comparison:
    stored = read_json(path)
    try:
        return Comparison(
            model=stored["model"],
            measure=stored["measure"],
            in_domain=tuple(stored["in_domain"]),
            out_of_domain=tuple(stored["out_of_domain"]),
            means={
                name: {scope: tuple(pair) for scope, pair in means.items()} for name, means in stored["means"].items()
            },
            differences=tuple(Difference(**row) for row in stored["differences"]),
            verdict=Verdict(**stored["verdict"]),
        )
    except (KeyError, TypeError) as error:
        raise DataError(f"expected the comparison that offsphere compare writes, but {error!r}", path) from error


def read_log(path: Path) -> Iterator[Mapping[str, Any]]:
    """The events of a log.jsonl.

    Raises:
        DataError: If a line is not JSON; names it.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"expected one JSON object a line, found: {error.msg}", path, number) from error
