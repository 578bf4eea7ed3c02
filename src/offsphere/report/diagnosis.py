"""A diagnosis and a tuning for readers: in the terminal, and as figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offsphere.atomic import write_atomically
from offsphere.diagnosis.diagnose import Diagnosis
from offsphere.diagnosis.effect_size import Effect
from offsphere.diagnosis.symmetry import Probe
from offsphere.diagnosis.tune import MEASURE, Tuning
from offsphere.report.figures import GROUPS, INK, SERIES, density, panels_figure, to_svg
from offsphere.report.summary import MISSING, p_value, points, signed
from offsphere.report.tables import new_table, plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """Print the recommendation first, then its reasons, then the numbers behind them and what the audit found."""
    advice = diagnosis.recommendation

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False)

    sample = f"{diagnosis.n_queries:,} queries, {diagnosis.n_documents:,} documents"
    say(f"\n{diagnosis.model} on {diagnosis.dataset} ({diagnosis.split}): {sample}", "bold")
    say(f"{advice.similarity}, confidence {advice.confidence}: {advice.because}")
    for reason in advice.reasons:
        say(f"  - {reason.text}")
    say(f"The rule rests on: {advice.evidence}.", "dim")
    if advice.measure:
        say(f"Measure before you rely on it: offsphere compare --similarities {','.join(advice.measure)} ...")
    for warning in diagnosis.symmetry.warnings.values():
        say(f"warning: {warning}", "yellow")
    console.print(_effect_table(diagnosis))
    say(_correlation(diagnosis.effect.text_length_correlation))
    if diagnosis.fisher.spectra:
        console.print(_fisher_table(diagnosis))
    for finding in diagnosis.audit.findings:
        say(f"note: {finding}")


def print_tuning(console: Console, tuning: Tuning) -> None:
    """Print the choice, then the model's own gamma_d, the choice and the top of the curve beside each other."""
    console.print(f"\n{tuning.sentence}", markup=False, highlight=False)
    table = new_table(f"{MEASURE} × 100, {tuning.n_queries:,} queries, {tuning.n_documents:,} documents", "")
    values = dict(tuning.curve)
    for heading in ("gamma_d", MEASURE):
        table.add_column(heading, justify="right")
    rows = {"the model's own": tuning.own_gamma_d, "chosen": tuning.gamma_d, "top of the curve": tuning.best_gamma_d}
    for name, gamma in rows.items():
        table.add_row(name, f"{gamma:g}", points(values[gamma]))
    console.print(table)
    gain = f"{signed(tuning.gain)} [{signed(tuning.low)}, {signed(tuning.high)}], p {p_value(tuning.p)}"
    console.print(f"gain on held-out queries: {gain}", markup=False, highlight=False)


def write_diagnosis(diagnosis: Diagnosis, folder: Path) -> None:
    """Write ``diagnosis.json``, ``norms.svg``, and ``symmetry-NAME.svg`` for each similarity into the folder."""
    files = {"diagnosis.json": json.dumps(diagnosis.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"}
    files["norms.svg"] = norm_histogram(diagnosis.norms, "norms")
    for name, both in diagnosis.symmetry.probe.items():
        files[f"symmetry-{name}.svg"] = symmetry_probe(name, both, f"symmetry-{name}")
    _write(folder, files)


def write_tuning(tuning: Tuning, folder: Path) -> None:
    """Write ``tuning.json`` and ``tuning.svg`` into the folder."""
    text = json.dumps(tuning.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    _write(folder, {"tuning.json": text, "tuning.svg": gamma_curve(tuning, "tuning")})


def gamma_curve(tuning: Tuning, name: str) -> str:
    """The measure over gamma_d as an SVG panel, with the model's own exponent and the chosen one."""
    gammas, values = zip(*tuning.curve, strict=True)
    marks = {"the model's own": (tuning.own_gamma_d, "o", "none"), "chosen": (tuning.gamma_d, "D", SERIES["dnorm"])}
    title = f"{MEASURE} over the exponent of the document's length"
    with panels_figure(3.5) as (figure, (axes,)):
        axes.plot(gammas, [100 * value for value in values], color=INK, linewidth=1.6)
        for label, (gamma, marker, filling) in marks.items():
            value = 100 * dict(tuning.curve)[gamma]
            axes.plot(
                [gamma], [value], marker, color=SERIES["dnorm"], markerfacecolor=filling, markersize=8, label=label
            )
        axes.set(title=title, xlabel="gamma_d: 0 keeps the length, 1 removes it", ylabel=f"{MEASURE} × 100")
        figure.legend(loc="outside lower center", ncols=2)
        return to_svg(figure, name, title, tuning.sentence)


def symmetry_probe(similarity: str, both: Probe, name: str) -> str:
    """Scores of real pairs in both directions as an SVG panel: on the diagonal where the similarity is symmetric."""
    title = f"{similarity}: s(a, b) against s(b, a)"
    ends = [min(both.forward + both.backward, default=0.0), max(both.forward + both.backward, default=1.0)]
    with panels_figure(4.2) as (figure, (axes,)):
        axes.plot(ends, ends, color=INK, linewidth=0.8)
        axes.plot(both.forward, both.backward, "o", color=SERIES[similarity], markersize=4, alpha=0.7)
        axes.set(title=title, xlabel="s(a, b)", ylabel="s(b, a)")
        shown = "undefined" if both.asymmetry is None else f"{both.asymmetry:.0%} of their size"
        return to_svg(figure, name, title, f"The two directions differ by {shown}, {len(both.forward)} pairs.")


def norm_histogram(norms: Mapping[str, Any], name: str) -> str:
    """Lengths of relevant and irrelevant documents as an SVG panel."""
    title = f"Document lengths, {norms['dataset']}"
    with panels_figure(2.6) as (figure, (axes,)):
        for group, look in GROUPS.items():
            axes.stairs(density(norms[group], norms["edges"]), norms["edges"], label=group, **look)
        axes.set(title=title, yticks=[], xlabel="length of the document's embedding")
        figure.legend(loc="outside lower center", ncols=2)
        counts = " and ".join(f"{sum(norms[group]):,} {group}" for group in GROUPS)
        return to_svg(figure, name, title, f"{counts} documents.")


def _effect_table(diagnosis: Diagnosis) -> Table:
    effect = diagnosis.effect
    table = new_table("Length of relevant against irrelevant documents", "")
    for heading in ("Cohen's d", "95 % interval", "queries"):
        table.add_column(heading, justify="right")
    views = {
        "in the collection": effect.overall,
        "among candidates": effect.within_candidates,
        "text length removed": effect.without_text_length,
    }
    for name, one in views.items():
        table.add_row(name, *_effect_cells(one))
    return table


def _effect_cells(effect: Effect) -> tuple[str, str, str]:
    if effect.value is None:
        return MISSING, effect.note or MISSING, f"{effect.n_queries:,}"
    return f"{effect.value:+.2f}", f"[{effect.low:+.2f}, {effect.high:+.2f}]", f"{effect.n_queries:,}"


def _correlation(value: float | None) -> str:
    known = f"{MISSING}, because one of them does not vary" if value is None else f"{value:+.2f}"
    return f"correlation of a document embedding's length with log(tokens read): {known}"


def _fisher_table(diagnosis: Diagnosis) -> Table:
    fisher = diagnosis.fisher
    table = new_table(f"Condition of the gradients, {fisher.n_pairs:,} pairs: smaller is better", "")
    for heading in ("log10 kappa", "shrunk", "queries", "documents", "rank", "scale"):
        table.add_column(heading, justify="right")
    for name, one in fisher.spectra.items():
        kappas = (one.log10_kappa, one.shrinkage_log10_kappa, one.query_log10_kappa, one.document_log10_kappa)
        shown = (MISSING if kappa is None else f"{kappa:.2f}" for kappa in kappas)
        table.add_row(plain(name), *shown, f"{one.rank} of {fisher.dimension}", f"{one.scale:.3g}")
    return table


def _write(folder: Path, files: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomically(folder / name, text)
