"""report.html: one file that opens anywhere, from a phone to a printer, without a network or JavaScript."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from offsphere.atomic import write_atomically
from offsphere.errors import RunError
from offsphere.evaluation.comparison import Difference
from offsphere.evaluation.results import write_results
from offsphere.report import figures, summary
from offsphere.report.run import RunRecord, opener_of, read_run

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True)
class Figure:
    """Panels with a caption; ``missing`` is said in their place where there are none."""

    heading: str
    caption: str
    panels: list[str]
    missing: str


def write_report(folders: Sequence[Path | str], out: Path | str) -> Path:
    """The path of a page on one or several run folders; several also get their results in one results.csv beside it.

    Raises:
        RunError: If a folder lacks a file of a finished run, or if the results.csv of several runs would replace that
            of one of them.
        DataError: If a file of a run folder is malformed.
    """
    out = Path(out)
    records = [read_run(folder) for folder in folders]
    if len(records) > 1 and any(record.folder.resolve() == out.parent.resolve() for record in records):
        raise RunError(f"{out.parent}/results.csv belongs to one run; write the page on several to another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    if len(records) > 1:
        write_results(out.parent / "results.csv", [row for record in records for row in record.results])
    write_atomically(out, render_report(records))
    return out


def render_report(records: Sequence[RunRecord]) -> str:
    """The whole page as HTML, with its style and its figures inside; every text from a run is escaped.

    Args:
        records: One for each encoder, in the order of the page.
    """
    page = template("page.html.jinja")
    return page.render(sections=[_section(record, f"run-{i}") for i, record in enumerate(records, start=1)])


def template(name: str) -> Template:
    """A page of this folder by its file name, which escapes every text that it is given."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"signed": summary.signed, "p_value": summary.p_value, "count": summary.count}
    return environment.get_template(name)


def _section(record: RunRecord, name: str) -> dict[str, Any]:
    """What the template shows of one record."""
    columns = {domain: summary.domain_columns(record, domain) for domain in record.domains}
    headers, rows = summary.measure_rows(record)
    recommended = record.comparison.verdict.similarity
    gammas = [row.gamma_d for row in record.results if row.similarity == recommended and row.gamma_d is not None]
    return {
        "id": name,
        "record": record,
        "comparison": record.comparison,
        "verdict": record.comparison.verdict,
        "plain": _plain_verdict(record),
        "facts": _facts(record),
        "documents": {norm["dataset"]: sum(norm["relevant"]) + sum(norm["irrelevant"]) for norm in record.norms},
        "colour": figures.series_names(record.similarities),
        "columns": columns,
        "scores": {domain: summary.score_rows(record, columns[domain]) for domain in columns},
        "by_domain": _differences(record, record.domains),
        "by_dataset": _differences(record, _datasets(record)),
        "cross": {domain: summary.cross_rows(record, domain) for domain in record.domains},
        "surprise": summary.surprise(record),
        "collapses": record.events("collapse"),
        "measures": {"headers": headers, "rows": rows},
        "figures": _figures(record, name),
        "effects": _effects(record),
        "usage": usage(record.folder / "model", recommended, gammas[0] if gammas else None),
        "settings": yaml.safe_dump(dict(record.config), sort_keys=False, allow_unicode=True),
        "environment": yaml.safe_dump(dict(record.environment), sort_keys=False, allow_unicode=True),
    }


def _plain_verdict(record: RunRecord) -> str:
    verdict = record.comparison.verdict
    if verdict.beats_cosine:
        return f"Train this encoder with {verdict.similarity}: it is better than cosine by more than chance explains."
    if record.contender:
        return "Keep cosine: no other similarity was better by more than chance explains."
    return "Only cosine was trained: there is nothing to compare it with."


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    config = record.config
    facts = [("Encoder", record.comparison.model), ("Training data", ", ".join(map(str, config.get("train") or [])))]
    if config.get("steps") and config.get("batch_size"):
        steps, batch = config["steps"], config["batch_size"]
        facts.append(("Training", f"{steps:,} steps of {batch:,} pairs: {steps * batch:,} pairs seen by every variant"))
    facts.append(("Similarities", ", ".join(record.similarities)))
    facts.append(("Seeds", ", ".join(map(str, record.seeds))))
    return facts


def _datasets(record: RunRecord) -> list[str]:
    return [dataset for datasets in record.domains.values() for dataset in datasets]


def _differences(record: RunRecord, scopes: Iterable[str]) -> list[tuple[str, list[Difference]]]:
    """Each scope with the differences that were tested on it."""
    tested = [(scope, [record.difference(name, scope) for name in record.similarities]) for scope in scopes]
    found = [(scope, [difference for difference in row if difference]) for scope, row in tested]
    return [(scope, row) for scope, row in found if row]


def _figures(record: RunRecord, name: str) -> list[Figure]:
    measure = record.comparison.measure
    return [
        Figure(
            "How sure: differences to cosine",
            "Lines are 95 % intervals; a filled marker means a corrected p below 0.05. Right of the line is better.",
            figures.forest_plot(record, name),
            "Only cosine was trained, so there are no differences.",
        ),
        Figure(
            "Learning curves",
            f"Validation {measure}. Thin lines are seeds, thick lines their mean. A model whose own score stays while "
            "its score as cosine falls keeps its ranking in the lengths and gives up direction.",
            figures.learning_curves(record, name),
            "No validation was logged during training.",
        ),
        Figure(
            "What the learnable similarity learned",
            "Both exponents start at 0.5. At 1 the length is removed, at 0 it is kept whole.",
            figures.gamma_trajectories(record, name),
            "No exponent was learned in this run.",
        ),
        Figure(
            "Lengths of relevant and irrelevant documents",
            "Shape of the distribution in the first seed, each of area 1. Cohen's d above 0 means that relevant "
            "documents are longer vectors, so that keeping their length can help to find them; 0.2 is small, 0.5 "
            "medium, 0.8 large.",
            figures.norm_histograms(record, name),
            "No lengths were recorded.",
        ),
    ]


def _effects(record: RunRecord) -> list[tuple[str, list[str]]]:
    """Cohen's d for each dataset (row) and trained similarity (cell), mean over seeds."""
    return [
        (dataset, [_effect(record, name, dataset) for name in record.similarities]) for dataset in _datasets(record)
    ]


def _effect(record: RunRecord, similarity: str, dataset: str) -> str:
    found = [n["cohens_d"] for n in record.norms if (n["similarity"], n["dataset"]) == (similarity, dataset)]
    known = [effect for effect in found if effect is not None]
    return f"{sum(known) / len(known):+.2f}".replace("-", "−") if known else summary.MISSING


def usage(model: Path, similarity: str, gamma_d: float | None) -> dict[str, str]:
    """How to load a model, and what a vector database has to store to rank like it.

    Args:
        model: Its folder.
        similarity: What it ranks under.
        gamma_d: How much of the documents' length that removes, where it is known.
    """
    module, opens = opener_of(similarity)
    code = (
        f"from {module} import {opens}\n\n"
        f"model = {opens}({str(model)!r})\n"
        'queries = model.encode_query(["..."])\n'
        'documents = model.encode_document(["...", "..."])\n'
        "print(model.similarity(queries, documents))\n"
    )
    return {"code": code, "database": _database(similarity, gamma_d)}


def _database(similarity: str, gamma_d: float | None) -> str:
    if gamma_d == 1.0:
        return (
            f"Metric: cosine. For one query {similarity} ranks by the angle alone, so a database that normalises "
            "documents loses nothing."
        )
    if gamma_d == 0.0:
        return (
            f"Metric: inner product (dot product) over the vectors as they are. {similarity} ranks by the documents' "
            "length too, so a database or server that normalises vectors changes the ranking."
        )
    return (
        "Metric: inner product over what encode_document gives, documents divided by their length to the power "
        "gamma_d; a database that normalises vectors changes the ranking."
    )
