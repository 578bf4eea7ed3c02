"""``compare-runs``: which of several run files is better, and how sure that is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offsphere.cli.app import Flag, Shown, about, app, out, print_json
from offsphere.errors import UsageError


@app.command(
    "compare-runs",
    epilog="Example: offsphere compare-runs bm25.trec dense.trec --data datasets/xquad_en --out runs/compared",
)
def compare_runs(
    runs: Annotated[list[Path], typer.Argument(help="run files and folders of them; the first is the baseline")],
    data: Annotated[list[str], Flag(help="collections that the runs answer, or benchmarks by name")],
    split: Annotated[str, Flag(help="split of the judgements")] = "test",
    measure: Annotated[str, Flag(help="measure, as ir-measures names it")] = "nDCG@10",
    category: Annotated[list[str] | None, Flag(help="NAME=COLLECTION,COLLECTION: show their mean as well")] = None,
    unanswered_as_zero: Annotated[
        bool, Flag("--unanswered-as-zero", help="compare runs that answer different queries; missing ones count 0")
    ] = False,
    seed: Annotated[int, Flag(help="of the resampling")] = 0,
    strict: Annotated[bool, Flag("--strict", help=about("strict"))] = False,
    out_folder: Annotated[Path | None, Flag("--out", help="folder for CSV, LaTeX, HTML and figures")] = None,
    as_json: Annotated[bool, Flag("--json", help="print the comparison as JSON")] = False,
) -> None:
    """Compare run files on the same queries: tests, intervals, effect sizes, and wins query by query.

    A file is named SYSTEM-COLLECTION.trec, as `evaluate --out` and `compare` name theirs; with one collection any name
    will do. A folder stands for all its run files of these collections. Give --data after the runs.
    """
    from offsphere.evaluation.compare_runs import compare_runs as run_comparison
    from offsphere.report.runs import print_run_comparison, write_run_comparison

    with Shown() as progress:
        comparison = run_comparison(
            runs,
            data,
            split=split,
            measure=measure,
            categories=dict(map(_category, category or [])),
            unanswered_as_zero=unanswered_as_zero,
            strict=strict,
            seed=seed,
            progress=progress,
        )
    if out_folder is not None:
        write_run_comparison(comparison, out_folder)
    if as_json:
        print_json(comparison.to_dict())
        return
    print_run_comparison(out, comparison)


def _category(text: str) -> tuple[str, list[str]]:
    name, equals, members = text.partition("=")
    if not (name and equals and members):
        raise UsageError(f"--category {text!r} names no collections; expected NAME=COLLECTION,COLLECTION")
    return name, members.split(",")
