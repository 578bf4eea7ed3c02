"""The comparison in the terminal: the verdict first, then the scores of each domain, then the cross table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from offsphere.evaluation.results import Result
from offsphere.evaluation.sts import SWAPPED
from offsphere.report.run import RunRecord
from offsphere.report.summary import Cell, Column, cross_rows, domain_columns, score_rows, surprise

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

NAME_WIDTH, CELL_WIDTH = 13, 12


def print_comparison(console: Console, *records: RunRecord) -> None:
    """Print each record: verdict, scores with their difference to cosine, cross table, and a surprise if there is one.

    A domain with more datasets than the terminal is wide for takes several tables.
    """
    for record in records:
        console.print(f"\n{record.comparison.model}", style="bold", markup=False, highlight=False)
        console.print(record.comparison.verdict.sentence, markup=False, highlight=False)
        for domain in record.domains:
            for columns in _that_fit(domain_columns(record, domain), console.width):
                console.print(_score_table(record, domain, columns))
        console.print(
            "Below each score: difference to cosine; * corrected p < 0.05. Bold: the column's best.", style="dim"
        )
        for domain in record.domains:
            console.print(_cross_table(record, domain))
        console.print(
            "Bold: the row's best. For one query cosine and dnorm rank alike, and so do dot and qnorm.", style="dim"
        )
        for event in record.events("collapse"):
            told = f"Collapse: {event['similarity']}, seed {event['seed']}: {event['sentence']}"
            console.print(told, markup=False, highlight=False)
        if sentence := surprise(record):
            console.print(sentence, markup=False, highlight=False)


def print_results(console: Console, rows: Sequence[Result]) -> None:
    """Print one model's measures in points: a row a dataset and ranking, a column a measure.

    Datasets with other measures, such as scored sentence pairs, get a table of their own.
    """
    found: dict[tuple[str, str, str], list[Result]] = {}
    for row in rows:
        found.setdefault((row.dataset, row.split, row.scored_as), []).append(row)
    for measures in dict.fromkeys(tuple(row.measure for row in group) for group in found.values()):
        table = new_table(f"{rows[0].model}, × 100", "dataset")
        number = "queries" if SWAPPED not in measures[-1] else "pairs"
        for name in (number, "scored as", *measures):
            header = plain(name.replace("(", "\n(", 1))
            table.add_column(header, justify="left" if name == "scored as" else "right")
        for (dataset, _, scored_as), group in found.items():
            if tuple(row.measure for row in group) == measures:
                points = (f"{100 * row.value:.1f}" for row in group)
                table.add_row(plain(dataset), f"{group[0].n_queries:,}", plain(scored_as), *points)
        console.print(table)


def _that_fit(columns: list[Column], width: int) -> list[list[Column]]:
    size = max(1, (width - NAME_WIDTH) // CELL_WIDTH)
    return [columns[start : start + size] for start in range(0, len(columns), size)]


def _score_table(record: RunRecord, domain: str, columns: Sequence[Column]) -> Table:
    table = new_table(f"{record.comparison.measure} × 100, {domain}", "trained with")
    for column in columns:
        name = "mean" if column.name == domain else column.name
        table.add_column(plain(f"{name}\nn = {column.n_queries:,}"), justify="right", max_width=CELL_WIDTH - 2)
    for name, cells in score_rows(record, columns):
        table.add_row(plain(name), *(_score(cell) for cell in cells))
    return table


def _cross_table(record: RunRecord, domain: str) -> Table:
    table = new_table(f"{record.comparison.measure} × 100, {domain}: trained with (row), scored as (column)", "")
    for name in record.scored_as:
        table.add_column(plain(name), justify="right")
    for name, cells in cross_rows(record, domain):
        table.add_row(plain(name), *(f"[bold]{cell.value}[/bold]" if cell.best else cell.value for cell in cells))
    return table


def new_table(title: str, corner: str | Text) -> Table:
    """An empty table in the style of all others, with its first column."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(corner)
    return table


def _score(cell: Cell) -> str:
    value = f"[bold]{cell.value}[/bold]" if cell.best else cell.value
    return f"{value}\n{cell.difference}{'*' if cell.significant else ''}" if cell.difference else value


def plain(text: str) -> Text:
    """Text that rich does not read as markup, whatever a dataset is called."""
    from rich.text import Text

    return Text(text)
