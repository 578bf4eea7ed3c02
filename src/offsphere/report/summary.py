"""The numbers that the terminal and the page both show, as rows of cells: computed once, formatted alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offsphere.evaluation.results import PRETRAINED
from offsphere.report.run import RunRecord, Score

SIGNIFICANT = 0.05
SEEN = 0.0005  # half of the last printed digit, 0.1 points: what is smaller does not show
MISSING = "–"


@dataclass(frozen=True)
class Cell:
    """One score in words.

    Attributes:
        value: The mean in points, such as "32.9".
        deviation: Its standard deviation over seeds, such as "0.4"; empty with one seed.
        difference: The signed difference to cosine, such as "+2.1"; empty for cosine and for the untrained encoder.
        significant: Whether Holm's corrected p-value of the difference is below 0.05.
        best: Whether no other trained similarity in the column is higher.
        own: Whether the model was ranked with the similarity of its training.
    """

    value: str
    deviation: str = ""
    difference: str = ""
    significant: bool = False
    best: bool = False
    own: bool = False


@dataclass(frozen=True)
class Column:
    """A dataset, or the mean over a domain's datasets; ``n_queries`` sums over them."""

    name: str
    datasets: tuple[str, ...]
    n_queries: int


def points(value: float) -> str:
    """A fraction as points (hundredths) with one decimal: 0.3291 as "32.9"."""
    return f"{100 * value:.1f}"


def signed(value: float) -> str:
    """A difference as signed points with a true minus sign: -0.0312 as "−3.1", and "±0.0" where nothing shows."""
    text = f"{100 * value:+.1f}"
    return "±0.0" if text in ("+0.0", "-0.0") else text.replace("-", "−")


def p_value(value: float) -> str:
    """A p-value with three decimals, "< 0.001" below them."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def domain_columns(record: RunRecord, domain: str) -> list[Column]:
    """The domain's mean first, then each of its datasets."""
    counts = {row.dataset: row.n_queries for row in record.results if row.measure == record.comparison.measure}
    datasets = record.domains[domain]
    total = Column(domain, datasets, sum(counts[dataset] for dataset in datasets))
    return [total, *(Column(dataset, (dataset,), counts[dataset]) for dataset in datasets)]


def score_rows(record: RunRecord, columns: Sequence[Column]) -> list[tuple[str, list[Cell]]]:
    """One row for each trained similarity, scored as it was trained; the untrained encoder, as cosine, comes last."""
    scores = {name: [record.score(name, name, column.datasets) for column in columns] for name in record.similarities}
    highest = [
        max((score.mean for score in column if score), default=None) for column in zip(*scores.values(), strict=True)
    ]
    rows = [
        (name, [_cell(record, name, *each) for each in zip(columns, row, highest, strict=True)])
        for name, row in scores.items()
    ]
    if record.has_pretrained:
        reference = [record.score(PRETRAINED, "cosine", column.datasets) for column in columns]
        rows.append((PRETRAINED, [Cell(points(score.mean) if score else MISSING) for score in reference]))
    return rows


def _cell(record: RunRecord, name: str, column: Column, score: Score | None, highest: float | None) -> Cell:
    if score is None:
        return Cell(MISSING)
    found = record.difference(name, column.name)
    return Cell(
        value=points(score.mean),
        deviation="" if score.deviation is None else points(score.deviation),
        difference=signed(found.difference) if found else "",
        significant=bool(found and found.p_holm < SIGNIFICANT),
        best=score.mean == highest,
    )


def cross_rows(record: RunRecord, domain: str) -> list[tuple[str, list[Cell]]]:
    """One row for each trained similarity (and the untrained encoder), one cell for each similarity that ranked."""
    names = [*record.similarities, *([PRETRAINED] if record.has_pretrained else [])]
    return [(name, _cross_cells(record, name, domain)) for name in names]


def _cross_cells(record: RunRecord, trained: str, domain: str) -> list[Cell]:
    scores = [record.score(trained, name, record.domains[domain]) for name in record.scored_as]
    highest = max((score.mean for score in scores if score), default=None)
    return [
        Cell(points(score.mean), best=score.mean == highest, own=name == trained) if score else Cell(MISSING)
        for name, score in zip(record.scored_as, scores, strict=True)
    ]


def measure_rows(record: RunRecord) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Every other measure, as (headers, rows): the mean of each domain, each model scored as it was trained."""
    others = [
        name for name in dict.fromkeys(row.measure for row in record.results) if name != record.comparison.measure
    ]
    pairs = [(measure, domain) for measure in others for domain in record.domains]
    rows = []
    for name in record.similarities:
        scores = [record.score(name, name, record.domains[domain], measure) for measure, domain in pairs]
        rows.append((name, [points(score.mean) if score else MISSING for score in scores]))
    return [f"{measure} {domain}" for measure, domain in pairs], rows


def surprise(record: RunRecord) -> str | None:
    """A sentence on the model that gains most by being ranked with another similarity than its own, if one does."""
    found = [
        (domain, trained, name, own, other)
        for domain, datasets in record.domains.items()
        for trained in record.similarities
        for name in record.scored_as
        if (own := record.score(trained, trained, datasets)) and (other := record.score(trained, name, datasets))
    ]
    domain, trained, name, own, other = max(found, key=lambda each: each[4].mean - each[3].mean)
    if other.mean - own.mean < SEEN:
        return None
    seeds = own.by_seed.keys() & other.by_seed.keys()
    higher = sum(other.by_seed[seed] > own.by_seed[seed] for seed in seeds)
    sentence = (
        f"The model trained with {trained} ranks better as {name} ({points(other.mean)}) than as {trained} "
        f"({points(own.mean)}) {domain}, in {higher} of {count(len(seeds), 'seed')}"
    )
    cosine = record.score("cosine", "cosine", record.domains[domain])
    if cosine and trained != "cosine":
        against = "above" if other.mean > cosine.mean else "not above"
        sentence += f", {against} the model trained with cosine ({points(cosine.mean)})"
    return f"{sentence}. This was not tested: take it as a pointer."


def count(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: "1 seed", "1,355 queries"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
