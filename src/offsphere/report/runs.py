"""A comparison of run files for readers: in the terminal, as CSV, LaTeX and HTML, and as figures."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offsphere.atomic import write_atomically
from offsphere.evaluation.compare_runs import RunComparison, RunDifference, RunScore
from offsphere.evaluation.scopes import units_of
from offsphere.report.figures import INK, SERIES, panels_figure, to_svg
from offsphere.report.page import template
from offsphere.report.summary import MISSING, SIGNIFICANT, Cell, p_value, points, signed
from offsphere.report.tables import new_table, plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

LEGEND = "In brackets: difference to the baseline; * corrected p < 0.05."
TESTS = (
    "scope",
    "system",
    "difference",
    "95 % interval",
    "corrected p",
    "p",
    "t-test p",
    "d_z",
    "wins / ties / losses",
)
STACKS = ((0, 1), (2, 3), (4, 5), (6,), (7,), (8,))
TESTS_LEGEND = (
    "p of the paired randomisation test, corrected by Holm over systems, and over data sets; bootstrap interval over "
    "queries; d_z: mean difference over its standard deviation."
)
TIES_LEGEND = "trec_eval breaks ties by the documents' ids; the average is over all orders of the documents that tie."
# What TeX reads as a command, and how to write it as text.
TEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "−": "$-$", "±": r"$\pm$",
    "×": r"$\times$", "–": "--", "<": "$<$", ">": "$>$", **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Rows of words under a title, for any medium.

    Attributes:
        title: What stands above.
        headers: One a column.
        rows: One word for each column.
        legend: What stands below.
        best: Places, as (row, column), to set in bold.
        stacks: Columns that a terminal, which is narrow, shows one below the other; each alone where empty.
    """

    title: str
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    legend: str
    best: frozenset[tuple[int, int]] = frozenset()
    stacks: tuple[tuple[int, ...], ...] = ()


def print_run_comparison(console: Console, comparison: RunComparison) -> None:
    """Print what was read, the scores of every system, the tests against the first, and ties where there are any."""
    for table in tables(comparison):
        console.print(_terminal(table))
        console.print(table.legend, style="dim", markup=False, highlight=False)
    for note in comparison.notes:
        console.print(f"note: {note}", markup=False, highlight=False)


def write_run_comparison(comparison: RunComparison, folder: Path) -> None:
    """Write the comparison into the folder.

    ``scores.csv`` has a row a run file, where such were read, ``differences.csv`` one a system and scope,
    ``per_query.csv`` one a query and system, all with full precision; ``runs.tex`` and ``runs.html`` have the tables
    as printed, and ``per-query-COLLECTION.svg`` the differences query by query.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shown = tables(comparison)
    figures = {name: win_loss_plot(comparison, name, f"per-query-{i}") for i, name in enumerate(comparison.values)}
    files = {
        **({"scores.csv": _csv(RunScore, comparison.scores)} if comparison.scores else {}),
        "differences.csv": _csv(RunDifference, comparison.differences),
        "per_query.csv": _per_query(comparison),
        "runs.tex": latex(shown),
        "runs.html": template("runs.html.jinja").render(comparison=comparison, tables=shown, figures=figures),
    }
    files |= {f"per-query-{name}.svg": svg for name, svg in figures.items()}
    for name, text in files.items():
        write_atomically(folder / name, text)


def tables(comparison: RunComparison) -> list[Table]:
    """Scores with a row a scope and a column a system; the tests; and, where documents tie, both ways to count."""
    found = [_scores(comparison), _tests(comparison)]
    return [*found, _ties(comparison)] if any(score.tied for score in comparison.scores) else found


def latex(shown: Sequence[Table]) -> str:
    r"""The tables as LaTeX, each a ``table`` for the package booktabs.

    Args:
        shown: What ``tables`` gives.
    """
    return "% needs \\usepackage{booktabs}\n" + "\n".join(map(_latex, shown))


def win_loss_plot(comparison: RunComparison, dataset: str, name: str) -> str:
    """The differences of every query on one dataset, the largest gain first, one SVG panel a system.

    Args:
        comparison: With its values per query.
        dataset: One of its collections.
        name: Makes the ids of the SVG unique.
    """
    of_systems = comparison.values[dataset]
    baseline, others = of_systems[comparison.baseline], comparison.systems[1:]
    title = f"{comparison.measure} × 100 of each query minus {comparison.baseline}, {dataset}"
    every = {
        system: sorted((100 * (of_systems[system][query] - baseline[query]) for query in baseline), reverse=True)
        for system in others
    }
    largest = max(abs(end) for each in every.values() for end in (each[0], each[-1])) or 100.0
    described = []
    with panels_figure(1.0 + 1.5 * len(others), rows=len(others)) as (figure, panels):
        for axes, system in zip(panels, others, strict=True):
            found = _difference(comparison, system, dataset)
            differences = every[system]
            edges = range(len(differences) + 1)
            for colour, side in ((SERIES["dnorm"], max), (SERIES["dot"], min)):
                axes.stairs([side(0.0, one) for one in differences], edges, fill=True, color=colour)
            axes.axhline(0, color=INK, linewidth=0.8)
            axes.set(xlim=(0, len(differences)), ylim=(-1.05 * largest, 1.05 * largest))
            words = f"{found.wins:,} wins, {found.ties:,} ties, {found.losses:,} losses"
            axes.set_title(f"{system}: {words}", size=11)
            described.append(f"{system}: {words}")
        panels[-1].set_xlabel("queries, the largest gain first")
        figure.supylabel(f"{comparison.measure} × 100 minus {comparison.baseline}", size=10)
        return to_svg(figure, name, title, f"{'; '.join(described)}.")


def _terminal(table: Table) -> RichTable:
    stacks = table.stacks or tuple((column,) for column in range(len(table.headers)))
    shown = new_table(table.title, plain("\n".join(table.headers[column] for column in stacks[0])))
    shown.columns[0].overflow = "fold"
    for stack in stacks[1:]:
        header = plain("\n".join(table.headers[column] for column in stack))
        shown.add_column(header, justify="right", overflow="fold")
    for i, row in enumerate(table.rows):
        cells = [plain("\n".join(row[column] for column in stack)) for stack in stacks]
        for cell, stack in zip(cells, stacks, strict=True):
            if (i, stack[0]) in table.best:
                cell.stylize("bold")
        shown.add_row(*cells)
    return shown


def _difference(comparison: RunComparison, system: str, scope: str) -> RunDifference:
    return next(found for found in comparison.differences if (found.system, found.scope) == (system, scope))


def _scores(comparison: RunComparison) -> Table:
    rows, best = [], set()
    counts = {dataset: len(of_systems[comparison.baseline]) for dataset, of_systems in comparison.values.items()}
    for i, (scope, datasets) in enumerate(comparison.scopes.items()):
        cells = [_cell(comparison, system, scope) for system in comparison.systems]
        best |= {(i, j) for j, cell in enumerate(cells, 2) if cell.best}
        name = scope if len(datasets) == 1 else f"{scope} (mean of {units_of(datasets)})"
        rows.append((name, f"{sum(counts[one] for one in datasets):,}", *map(_words, cells)))
    title = f"{comparison.measure} × 100, {comparison.split}, baseline {comparison.baseline}"
    return Table(title, ("", "queries", *comparison.systems), rows, LEGEND, frozenset(best))


def _cell(comparison: RunComparison, system: str, scope: str) -> Cell:
    of_systems = comparison.means[scope]
    value, best = points(of_systems[system]), of_systems[system] == max(of_systems.values())
    if system == comparison.baseline:
        return Cell(value, best=best)
    found = _difference(comparison, system, scope)
    return Cell(value, difference=signed(found.difference), significant=found.p_holm < SIGNIFICANT, best=best)


def _words(cell: Cell) -> str:
    return f"{cell.value} ({cell.difference}{'*' if cell.significant else ''})" if cell.difference else cell.value


def _tests(comparison: RunComparison) -> Table:
    rows = [
        (
            found.scope,
            found.system,
            signed(found.difference),
            f"[{signed(found.low)}, {signed(found.high)}]",
            p_value(found.p_holm),
            p_value(found.p),
            p_value(found.p_t),
            MISSING if found.effect is None else f"{found.effect + 0.0:+.2f}".replace("-", "−"),
            f"{found.wins:,}/{found.ties:,}/{found.losses:,}",
        )
        for found in comparison.differences
    ]
    return Table(
        f"Against {comparison.baseline}, in points of {comparison.measure}", TESTS, rows, TESTS_LEGEND, stacks=STACKS
    )


def _ties(comparison: RunComparison) -> Table:
    rows = [
        (
            score.dataset,
            score.system,
            f"{score.tied:,} of {score.n_queries:,}",
            f"{100 * score.value:.2f}",
            MISSING if score.tie_averaged is None else f"{100 * score.tie_averaged:.2f}",
        )
        for score in comparison.scores
        if score.tied
    ]
    headers = ("dataset", "system", "queries with ties", "as trec_eval", "average")
    return Table(f"Documents with equal scores, {comparison.measure} × 100", headers, rows, TIES_LEGEND)


def _latex(table: Table) -> str:
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_tex(table.title)}. {_tex(table.legend)}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(table.headers) - 1)}}}",
        r"\toprule",
        _latex_row(map(_tex, table.headers)),
        r"\midrule",
    ]
    for i, row in enumerate(table.rows):
        cells = [rf"\textbf{{{_tex(text)}}}" if (i, j) in table.best else _tex(text) for j, text in enumerate(row)]
        lines.append(_latex_row(cells))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _tex(text: str) -> str:
    return re.sub("|".join(map(re.escape, TEX)), lambda sign: TEX[sign[0]], text)


def _csv(kind: type[Any], rows: Iterable[Any]) -> str:
    return _lines([field.name for field in fields(kind)], map(astuple, rows))


def _per_query(comparison: RunComparison) -> str:
    rows = (
        (dataset, query, system, value)
        for dataset, of_systems in comparison.values.items()
        for system, by_query in of_systems.items()
        for query, value in by_query.items()
    )
    return _lines(["dataset", "query_id", "system", comparison.measure], rows)


def _lines(header: list[str], rows: Iterable[Sequence[object]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return file.getvalue()
