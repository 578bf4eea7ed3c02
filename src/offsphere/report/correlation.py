"""Cohen's d against the relative gain on cosine, over data sets: the paper's figure, its CSV, and its words."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offsphere.atomic import write_atomically
from offsphere.evaluation.correlation import Correlation, Point, correlate
from offsphere.report.figures import DASHES, INK, MARKERS, THEME, panels_figure, series_names, to_svg
from offsphere.report.tables import new_table, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

TITLE = "Do longer relevant documents go with a gain on cosine?"
LEGEND = (
    "r: correlation, over data sets, of Cohen's d (length of relevant minus irrelevant documents, in standard "
    "deviations) with the relative gain on cosine; 95 % interval by Fisher's z."
)


def print_correlations(console: Console, points: Sequence[Point]) -> None:
    """Print r and its interval for each model and similarity; nothing where there are too few data sets for any."""
    found = [one for one in correlate(points) if one.r is not None]
    if not found:
        return
    table = new_table(TITLE, "model")
    for header in ("scored as", "data sets", "r", "95 % interval"):
        table.add_column(header, justify="left" if header == "scored as" else "right")
    for one in found:
        table.add_row(plain(one.model), plain(one.similarity), str(one.n), _signed(one.r), _interval(one))
    console.print(table)
    console.print(LEGEND, style="dim", markup=False, highlight=False)


def write_correlations(points: Sequence[Point], folder: Path, measure: str) -> None:
    """Write ``correlation.csv``, a row a model, similarity and data set, and ``correlation.svg``.

    Args:
        points: Of one measure; nothing is written without any.
        folder: Of the evaluation.
        measure: What was gained.
    """
    if not points:
        return
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*(field.name for field in fields(Point)), "relative_gain"])
    writer.writerows([*astuple(point), point.gain] for point in points)
    write_atomically(folder / "correlation.csv", file.getvalue())
    write_atomically(folder / "correlation.svg", correlation_plot(points, measure, "correlation"))


def correlation_plot(points: Sequence[Point], measure: str, name: str) -> str:
    """Each data set as a mark, one SVG panel a model, with a least-squares line where r is defined.

    Args:
        points: Of one measure.
        measure: What was gained.
        name: Makes the ids of the SVG unique.
    """
    models = list(dict.fromkeys(point.model for point in points))
    similarities = list(dict.fromkeys(point.similarity for point in points))
    colours, found = series_names(similarities), {(one.model, one.similarity): one for one in correlate(points)}
    described = []
    with panels_figure(1.0 + 2.6 * len(models), rows=len(models)) as (figure, panels):
        for axes, model in zip(panels, models, strict=True):
            for index, similarity in enumerate(similarities):
                some = [point for point in points if (point.model, point.similarity) == (model, similarity)]
                if not some:
                    continue
                effects, gains = [one.cohens_d for one in some], [100 * one.gain for one in some]
                colour, correlation = THEME[colours[similarity]], found[model, similarity]
                words = similarity if correlation.r is None else f"{similarity}, r = {_signed(correlation.r)}"
                axes.plot(effects, gains, MARKERS[index % len(MARKERS)], color=colour, markersize=5, label=words)
                if correlation.r is not None:
                    _line(axes, effects, gains, colour, index)
                shown = " ".join(filter(None, (words, _interval(correlation))))
                described.append(f"{model}, {shown} over {len(some)} data sets")
            axes.axhline(0, color=INK, linewidth=0.8)
            axes.axvline(0, color=INK, linewidth=0.8)
            axes.set_title(model, size=11)
            axes.legend(fontsize=9)
        panels[-1].set_xlabel("Cohen's d of document lengths, relevant minus irrelevant")
        figure.supylabel(f"gain in {measure} over cosine, %", size=10)
        return to_svg(figure, name, TITLE, "; ".join(described) + ".")


def _line(axes: Axes, effects: Sequence[float], gains: Sequence[float], colour: str, index: int) -> None:
    ends = [min(effects), max(effects)]
    slope, start = np.polyfit(effects, gains, 1)
    axes.plot(
        ends, [start + slope * end for end in ends], color=colour, linewidth=1.2, linestyle=DASHES[index % len(DASHES)]
    )


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value + 0.0:+.2f}".replace("-", "−")


def _interval(one: Correlation) -> str:
    return "" if one.low is None else f"[{_signed(one.low)}, {_signed(one.high)}]"
