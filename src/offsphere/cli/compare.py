"""``compare`` and ``report``: train with every similarity, and show what came out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from offsphere.cli.app import Flag, Shown, app, out, print_json, quiet_libraries
from offsphere.cli.settings import with_flags_of
from offsphere.config import CompareConfig
from offsphere.errors import UsageError


@app.command(
    epilog="Example: offsphere compare --model package:wordllama --train datasets/nq_qed datasets/medquad "
    "--eval datasets/nq_qed datasets/hotpotqa --out runs/first"
)
@with_flags_of(CompareConfig)
def compare(settings: CompareConfig, as_json: bool) -> None:
    """Train the same encoder with each similarity, evaluate all, and say which one to use.

    The same command again goes on with an unfinished run and repeats nothing that is done.
    """
    quiet_libraries()
    from offsphere.processes import is_first
    from offsphere.report.page import write_report
    from offsphere.report.run import read_run
    from offsphere.report.tables import print_comparison
    from offsphere.training.compare import compare as run_comparison

    with Shown() as progress:
        comparison = run_comparison(settings, progress)
    if not is_first():
        return
    report = write_report([settings.out], settings.out / "report.html")
    if as_json:
        print_json(comparison.to_dict())
        return
    record = read_run(settings.out)
    print_comparison(out, record)
    print_places(record.folder / "model", record.opener, report)


@app.command(epilog="Example: offsphere report runs/wordllama runs/minilm --out runs/report.html")
def report(
    runs: Annotated[list[Path], typer.Argument(help="run folders")],
    out_file: Annotated[Path | None, Flag("--out", help="the page; report.html in the first run by default")] = None,
) -> None:
    """Write the page of one or several finished comparisons, and print their tables; or that of one training."""
    from offsphere.report.page import write_report
    from offsphere.report.run import opener_of, read_run
    from offsphere.report.tables import print_comparison
    from offsphere.report.training import is_training, read_training, write_training_report

    trainings = [run for run in runs if is_training(run)]
    if trainings and len(runs) > 1:
        raise UsageError(f"{trainings[0]} is of offsphere train; give it alone, or only runs of offsphere compare")
    if trainings:
        training = read_training(runs[0])
        print_places(
            training.folder / "model", opener_of(training.best.trained_as), write_training_report(training, out_file)
        )
        return
    page = write_report(runs, out_file or runs[0] / "report.html")
    records = [read_run(run) for run in runs]
    print_comparison(out, *records)
    recommended = max(records, key=lambda record: record.recommended_value)
    print_places(recommended.folder / "model", recommended.opener, page)


def print_places(model: Path, opener: tuple[str, str], page: Path | None = None) -> None:
    """Tell where the report and the model are, and the command that opens the model.

    Args:
        model: Its folder.
        opener: The module and the function that open it.
        page: The report, if there is one.
    """
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    module, opens = opener
    code = f"from {module} import {opens}; print({opens}('{model}'))"
    report = "" if page is None else f"report   {page}\n"
    lines = f'\n{report}model    {model}\nopen it  {python} -c "{code}"'
    out.print(lines, highlight=False, markup=False, soft_wrap=True)
