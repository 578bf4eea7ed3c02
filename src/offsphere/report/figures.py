"""The figures of the page: SVG panels that follow the page's colours in light and dark.

Every function returns a list of panels, each a complete ``<svg>`` element with a title and a description, 360 units
wide so that its text stays readable on a phone. Colours are CSS variables with a fallback, so that one SVG serves both
colour schemes; ids carry the name of the panel, so that many panels can share a page. The output depends on the record
alone, not on the user's matplotlib settings.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from offsphere.evaluation.comparison import Difference
from offsphere.report.run import RunRecord
from offsphere.report.summary import SIGNIFICANT, count, signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which stay apart for colour-blind readers; cosine, the baseline, is grey. page.css holds the
# lighter versions for dark pages. Each similarity also has its own marker and dashes.
SERIES = {"cosine": "#59636e", "dot": "#d55e00", "qnorm": "#009e73", "dnorm": "#0072b2", "learnable": "#b0468f"}
OTHERS = {"other-1": "#8a6d00", "other-2": "#5b53b5", "other-3": "#a1343c"}
INK, FAINT = "#1b1f24", "#d0d7de"
THEME = {**SERIES, **OTHERS, "ink": INK, "faint": FAINT}
MARKERS = "osD^vPX*"
DASHES = ("solid", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (7, 2)))
GROUPS: dict[str, dict[str, Any]] = {
    "relevant": {"color": OTHERS["other-2"], "fill": True, "alpha": 0.45},
    "irrelevant": {"color": INK, "linewidth": 1.2},
}
WIDTH = 5.0  # inches of 72 units

STYLE = {
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "font.size": 11,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "offsphere",
    "text.color": INK,
    "text.parse_math": False,  # a dataset may be called a$b$
    "xtick.color": INK,
    "ytick.color": INK,
}


def series_names(similarities: Iterable[str]) -> dict[str, str]:
    """Each similarity to the name of its colour, a key of THEME: the five always have their own."""
    others = [name for name in similarities if name not in SERIES]
    names = {name: name for name in SERIES}
    return names | {name: list(OTHERS)[index % len(OTHERS)] for index, name in enumerate(others)}


class Logged(Protocol):
    """What was trained, as far as its log tells it."""

    @property
    def similarities(self) -> tuple[str, ...]:
        """Trained with."""

    @property
    def measure(self) -> str:
        """Of validation."""

    @property
    def log(self) -> Sequence[Mapping[str, Any]]:
        """All events."""

    def events(self, kind: str) -> list[Mapping[str, Any]]:
        """The events of a kind."""


def learning_curves(record: Logged, name: str) -> list[str]:
    """Validation during training, one panel scored with each model's own similarity and one scored as cosine.

    Thin lines are seeds, thick lines their mean. Empty where no validation was logged.
    """
    measure = record.measure
    panels = {"own": (measure, "scored as trained"), "as-cosine": (f"{measure}_as_cosine", "scored as cosine")}
    events = record.events("validation")
    return [
        _lines(
            {s: _by_seed(events, s, key, factor=100) for s in record.similarities},
            f"{name}-{panel}",
            f"Validation {measure}, {words}",
            f"{measure} × 100",
            series_names(record.similarities),
        )
        for panel, (key, words) in panels.items()
        if any(key in event for event in events)
    ]


def loss_curves(record: Logged, name: str) -> list[str]:
    """The loss of the training batches, in one panel; empty where none was logged."""
    curves = {s: _by_seed(record.events("train"), s, "loss") for s in record.similarities}
    if not any(curves.values()):
        return []
    return [_lines(curves, f"{name}-loss", "Training loss", "InfoNCE", series_names(record.similarities))]


def length_curves(record: Logged, name: str) -> list[str]:
    """Mean lengths of queries and documents in validation, and the temperatures of queries where they differ.

    Of the first similarity; empty where no validation was logged.
    """
    events, first = record.events("validation"), record.similarities[0]
    lengths = {side: _by_seed(events, first, f"{side}_norm_mean") for side in ("query", "document")}
    panels = []
    if any(lengths.values()):
        colours = {"query": "other-2", "document": "other-1"}
        panels.append(_lines(lengths, f"{name}-lengths", "Mean length of embeddings", "length", colours))
    shares = {"10th percentile": "p10", "median": "p50", "90th percentile": "p90"}
    if any(event.get("temperature_p10") != event.get("temperature_p90") for event in events):
        curves = {words: _by_seed(events, first, f"temperature_{share}") for words, share in shares.items()}
        colours = dict(zip(shares, OTHERS, strict=True))
        panels.append(_lines(curves, f"{name}-temperatures", "Temperature of a query", "temperature", colours))
    return panels


def gamma_trajectories(record: Logged, name: str) -> list[str]:
    """The two learned exponents during training, in one panel; empty where none was learned."""
    events = [event for event in record.log if event.get("similarity") == "learnable"]
    curves = {key: _by_seed(events, "learnable", key) for key in ("gamma_q", "gamma_d")}
    if not any(curves.values()):
        return []
    colours = {"gamma_q": "other-2", "gamma_d": "other-1"}
    return [_lines(curves, f"{name}-gammas", "Learned exponents", "exponent", colours, limits=(0, 1))]


def forest_plot(record: RunRecord, name: str) -> list[str]:
    """Differences to cosine with 95 % intervals, one panel for each domain; empty where only cosine was trained."""
    differences = [100 * end for found in record.comparison.differences for end in (found.low, found.high)]
    if not differences:
        return []
    margin = 0.06 * (max(differences) - min(differences)) + 0.1
    limits = (min(0.0, *differences) - margin, max(0.0, *differences) + margin)
    return [
        _forest(record, [domain, *datasets], f"{name}-{domain.replace(' ', '-')}", limits)
        for domain, datasets in record.domains.items()
    ]


def norm_histograms(record: RunRecord, name: str) -> list[str]:
    """Lengths of relevant and irrelevant documents, one panel for each dataset: the contender above cosine.

    Shows the first seed. Empty where norms were not recorded.
    """
    similarities = [s for s in dict.fromkeys((record.contender, "cosine")) if s]
    panels = []
    for index, dataset in enumerate(dataset for datasets in record.domains.values() for dataset in datasets):
        found = [_first_seed(record, similarity, dataset) for similarity in similarities]
        shown = [(s, norm) for s, norm in zip(similarities, found, strict=True) if norm]
        if shown:
            panels.append(_histograms(shown, dataset, f"{name}-norms-{index}"))
    return panels


def _lines(
    curves: Mapping[str, Mapping[Any, Mapping[int, float]]],
    name: str,
    title: str,
    label: str,
    colours: Mapping[str, str],
    limits: tuple[float, float] | None = None,
) -> str:
    """One panel: for each series a thin line for every seed and a thick one for their mean."""
    ends = []
    with panels_figure(3.5) as (figure, (axes,)):
        for index, (series, seeds) in enumerate(curves.items()):
            look: dict[str, Any] = {"color": THEME[colours[series]], "linestyle": DASHES[index % len(DASHES)]}
            for curve in seeds.values():
                axes.plot(list(curve), list(curve.values()), **look, linewidth=0.8, alpha=0.55)
            if seeds:
                mean = _mean(seeds.values())
                axes.plot(list(mean), list(mean.values()), **look, linewidth=2, label=series)
                ends += [f"{series} {value:.2f}" for value in list(mean.values())[-1:]]
        axes.set(title=title, xlabel="step", ylabel=label, ylim=limits)
        figure.legend(loc="outside lower center", ncols=3)
        return to_svg(figure, name, title, f"At the last step, mean over seeds: {', '.join(ends)}.")


def _forest(record: RunRecord, scopes: Sequence[str], name: str, limits: tuple[float, float]) -> str:
    others = [similarity for similarity in record.similarities if similarity != "cosine"]
    colours = series_names(record.similarities)
    rows, described = 0.0, []
    with panels_figure(0.9 + len(scopes) * (0.3 + 0.17 * len(others))) as (figure, (axes,)):
        for scope in scopes:
            axes.text(limits[0], rows, f"mean {scope}" if scope in record.domains else scope, va="center", size=10.5)
            for index, similarity in enumerate(others):
                rows += 1
                if found := record.difference(similarity, scope):
                    _interval(axes, rows, found, THEME[colours[similarity]], MARKERS[index % len(MARKERS)])
                    described.append(f"{scope}, {similarity} {signed(found.difference)}")
            rows += 1.8
        axes.axvline(0, color=INK, linewidth=1)
        axes.set(xlim=limits, ylim=(rows - 1, -1), yticks=[], xlabel=f"{record.comparison.measure} × 100 minus cosine")
        for index, similarity in enumerate(others):
            axes.plot([], [], MARKERS[index % len(MARKERS)], color=THEME[colours[similarity]], label=similarity)
        figure.legend(loc="outside lower center", ncols=4, handletextpad=0.2, columnspacing=1)
        title = f"Difference to cosine, {scopes[0]}"
        axes.set_title(title)
        return to_svg(figure, name, title, "; ".join(described) + ".")


def _interval(axes: Axes, row: float, found: Difference, colour: str, marker: str) -> None:
    """A line for the interval; the marker is filled where the corrected p-value is significant."""
    filled = colour if found.p_holm < SIGNIFICANT else "none"
    axes.plot([100 * found.low, 100 * found.high], [row, row], color=colour, linewidth=1.6)
    axes.plot([100 * found.difference], [row], marker, color=colour, markerfacecolor=filled, markersize=6)


def _histograms(shown: Sequence[tuple[str, Mapping[str, Any]]], dataset: str, name: str) -> str:
    described = []
    with panels_figure(0.9 + 1.3 * len(shown), rows=len(shown)) as (figure, panels):
        for axes, (similarity, norm) in zip(panels, shown, strict=True):
            effect = "undefined" if norm["cohens_d"] is None else f"{norm['cohens_d']:+.2f}".replace("-", "−")
            axes.set_title(f"trained with {similarity}: Cohen's d {effect}", size=11)
            described.append(f"{similarity}: Cohen's d {effect}")
            for group, look in GROUPS.items():
                axes.stairs(density(norm[group], norm["edges"]), norm["edges"], label=group, **look)
            axes.set(yticks=[])
        panels[-1].set_xlabel("length of the document's embedding")
        figure.suptitle(dataset, x=0.01, ha="left", size=12)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        counts = [count(sum(shown[0][1][group]), f"{group} document") for group in GROUPS]
        return to_svg(figure, name, f"Document lengths, {dataset}", f"{'; '.join(described)}. {' and '.join(counts)}.")


def density(counts: Sequence[int], edges: Sequence[float]) -> list[float]:
    """Counts as a density of area 1, so that few relevant documents compare with many others."""
    total = sum(counts)
    widths = [right - left for left, right in pairwise(edges)]
    return [number / (total * width) if total else 0.0 for number, width in zip(counts, widths, strict=True)]


def _first_seed(record: RunRecord, similarity: str, dataset: str) -> Mapping[str, Any] | None:
    found = [norm for norm in record.norms if (norm["similarity"], norm["dataset"]) == (similarity, dataset)]
    return min(found, key=lambda norm: norm["seed"] or 0, default=None)


def _by_seed(
    events: Iterable[Mapping[str, Any]], similarity: str, key: str, factor: float = 1.0
) -> dict[Any, dict[int, float]]:
    """The curve of every seed, as step to value, in the order of the steps."""
    curves: dict[Any, dict[int, float]] = {}
    for event in events:
        if event.get("similarity") == similarity and event.get(key) is not None:
            curves.setdefault(event.get("seed"), {})[event["step"]] = factor * event[key]
    return {seed: dict(sorted(curve.items())) for seed, curve in curves.items()}


def _mean(curves: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """The mean at the steps that every curve has."""
    curves = list(curves)
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    return {step: fmean(curve[step] for curve in curves) for step in steps}


@contextmanager
def panels_figure(height: float, rows: int = 1) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure in the style of the page, ``height`` inches high, and its axes from top to bottom."""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure, list(figure.subplots(rows, squeeze=False)[:, 0])


def to_svg(figure: Figure, name: str, title: str, description: str) -> str:
    """The figure as one ``<svg>`` element: themed, titled, its ids made unique by ``name``."""
    buffer = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the browser has its own fonts
        figure.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    svg = buffer.getvalue()
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, count=1, flags=re.DOTALL)
    body = re.sub(r"<[^>]+>", lambda tag: _themed(tag[0], name), body)
    width, height = 72 * figure.get_size_inches()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'viewBox="0 0 {width:g} {height:g}" aria-labelledby="{name}-title {name}-description">'
        f'<title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-description">{escape(description)}</desc>{body}'
    )


def _themed(tag: str, name: str) -> str:
    """One tag with its ids made unique, the page's font, and variables for colours."""
    tag = re.sub(r'(?<= )(id="|xlink:href="#|clip-path="url\(#)', rf"\g<1>{name}-", tag)
    tag = re.sub(r'font-family: [^;"]*', "font-family: inherit", tag)
    for variable, colour in THEME.items():
        tag = tag.replace(f": {colour}", f": var(--{variable}, {colour})")
    return tag
