"""report.html of a training: how it went, how its model ranks, and how to use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from offsphere.atomic import write_atomically
from offsphere.evaluation.results import PRETRAINED, Result, read_results
from offsphere.report import figures
from offsphere.report.page import Figure, template, usage
from offsphere.report.run import part_of_run, read_config, read_json, read_log
from offsphere.report.runs import Table
from offsphere.report.summary import count, points

if TYPE_CHECKING:
    from offsphere.training.grid import Tried
    from offsphere.training.run_folder import Finished


@dataclass(frozen=True)
class TrainingRecord:
    """One similarity, trained with one seed or several.

    Attributes:
        folder: Of the run.
        config: The resolved settings (config.yaml).
        environment: Versions, hardware, data fingerprints (environment.json).
        results: The rows of results.csv; none without evaluation.
        best: The seed that the saved model is of.
        log: The events of log.jsonl, in order.
        tried: The rows of grid.csv; none without a grid.
        used: The one of them that training went on with.
    """

    folder: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    results: Sequence[Result]
    best: Finished
    log: Sequence[Mapping[str, Any]]
    tried: Sequence[Tried]
    used: Tried | None

    @property
    def similarities(self) -> tuple[str, ...]:
        """The one that was trained with."""
        return (self.best.trained_as,)

    @property
    def measure(self) -> str:
        """The one that validation was by."""
        return str(self.config["measure"])

    def events(self, kind: str) -> list[Mapping[str, Any]]:
        """The "train", "validation" or "collapse" events of the log."""
        return [event for event in self.log if event.get("event") == kind]


def is_training(folder: Path | str) -> bool:
    """Whether ``offsphere train`` made the run folder, and not ``offsphere compare``.

    Raises:
        RunError: If it is no run folder.
        DataError: If its config.yaml is malformed.
    """
    return "similarity" in read_config(Path(folder))


def read_training(folder: Path | str) -> TrainingRecord:
    """The record of a run folder that ``offsphere train`` finished.

    Raises:
        RunError: If a file is missing; names it and the command that makes it.
        DataError: If a file is malformed; names it.
    """
    from offsphere.training.grid import best_of, read_grid
    from offsphere.training.run_folder import RunFolder

    folder = Path(folder)
    config = read_config(folder)
    part_of_run(folder, "model/modules.json", config)
    results, tried = folder / "results.csv", read_grid(folder / "grid.csv")
    return TrainingRecord(
        folder=folder,
        config=config,
        environment=read_json(part_of_run(folder, "environment.json", config)),
        results=tuple(read_results(results)) if results.exists() else (),
        best=RunFolder(folder).best(config["similarity"]),
        log=tuple(read_log(part_of_run(folder, "log.jsonl", config))),
        tried=tried,
        used=best_of(tried) if tried else None,
    )


def write_training_report(record: TrainingRecord, out: Path | None = None) -> Path:
    """The path of the page on a training: ``report.html`` in its folder where no other is given."""
    page = out or record.folder / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page, render_training(record))
    return page


def render_training(record: TrainingRecord) -> str:
    """The whole page as HTML, with its style and its figures inside; every text from the run is escaped."""
    return template("training.html.jinja").render(
        record=record,
        model=record.config["model"],
        sentence=_sentence(record),
        facts=_facts(record),
        tables=[table for table in (_results(record), _grid(record)) if table.rows],
        collapses=record.events("collapse"),
        figures=[figure for figure in _figures(record) if figure.panels],
        usage=usage(record.folder / "model", record.best.trained_as, record.best.similarity.gammas[1]),
        settings=yaml.safe_dump(dict(record.config), sort_keys=False, allow_unicode=True),
        environment=yaml.safe_dump(dict(record.environment), sort_keys=False, allow_unicode=True),
    )


def _sentence(record: TrainingRecord) -> str:
    """What validation says of the model that was saved."""
    at_start = [
        event for event in record.events("validation") if (event["step"], event["seed"]) == (0, record.best.seed)
    ]
    before = "".join(f", from {points(event[record.measure])} before training" for event in at_start)
    return f"{record.measure} on the dev splits: {points(record.best.validation or 0.0)}{before}."


def _facts(record: TrainingRecord) -> list[tuple[str, str]]:
    config, best = record.config, record.best
    gamma_q, gamma_d = best.similarity.gammas
    batch = config["batch_size"] * config["accumulate"] * config["processes"]
    seeds = ", ".join(map(str, config["seeds"]))
    facts = [
        ("Encoder", str(config["model"])),
        ("Training data", ", ".join(map(str, config["train"]))),
        ("Training", f"{config['steps']:,} steps of {count(batch, 'pair')}, learning rate {config['learning_rate']:g}"),
        ("Similarity", f"{best.trained_as}: gamma_q {gamma_q:.3g}, gamma_d {gamma_d:.3g}"),
        ("Seeds", seeds if len(config["seeds"]) == 1 else f"{seeds}; the model is of seed {best.seed}"),
        ("Weights kept", f"of step {best.best_step:,}"),
    ]
    if best.scale is not None:
        facts.append(("Scale", f"{best.scale:.4g} at the end (inverse temperature)"))
    if best.converged_step is not None:
        facts.append(("Converged", f"at step {best.converged_step:,}, by the paper's rule"))
    return facts


def _results(record: TrainingRecord) -> Table:
    """The saved model, ranked as it was trained, above the untrained encoder: ranked alike, or as cosine."""
    name = record.best.trained_as
    own = [row for row in record.results if (row.scored_as, row.seed) == (name, record.best.seed)]
    before = [row for row in record.results if row.similarity == PRETRAINED]
    alike = name if any(row.scored_as == name for row in before) else "cosine"  # what was learned is not known before
    measures = tuple(dict.fromkeys(row.measure for row in own))
    rows = []
    for dataset in dict.fromkeys(row.dataset for row in own):
        for encoder, scored_as, found in (("trained", name, own), ("untrained", alike, before)):
            of_it = {row.measure: row for row in found if (row.dataset, row.scored_as) == (dataset, scored_as)}
            if of_it:
                queries = f"{next(iter(of_it.values())).n_queries:,}"
                rows.append((dataset, queries, encoder, scored_as, *(points(of_it[one].value) for one in measures)))
    return Table("Evaluation", ("dataset", "queries", "encoder", "scored as", *measures), rows, "Scores × 100")


def _grid(record: TrainingRecord) -> Table:
    """What the grid tried."""
    rows = [(f"{one.learning_rate:g}", f"{one.alpha:g}", points(one.validation)) for one in record.tried]
    best = frozenset((number, 2) for number, one in enumerate(record.tried) if one == record.used)
    headers = ("learning rate", "alpha", f"validation {record.measure}")
    return Table("Tried under cosine", headers, rows, "Bold is what was used", best)


def _figures(record: TrainingRecord) -> list[Figure]:
    return [
        Figure(
            "Validation",
            "Thin lines are seeds, thick lines their mean. A model whose own score stays while its score as cosine "
            "falls keeps its ranking in the lengths and gives up direction.",
            figures.learning_curves(record, "training"),
            "",
        ),
        Figure("Loss", "InfoNCE of the training batches.", figures.loss_curves(record, "training"), ""),
        Figure(
            "What the learnable similarity learned",
            "Both exponents start at 0.5. At 1 the length is removed, at 0 it is kept whole.",
            figures.gamma_trajectories(record, "training"),
            "",
        ),
        Figure(
            "Lengths and temperatures",
            "Mean lengths of embeddings on the dev splits. Where a query keeps some of its length, each has a "
            "temperature of its own, |q|^(gamma_q - 1) / scale.",
            figures.length_curves(record, "training"),
            "",
        ),
    ]
