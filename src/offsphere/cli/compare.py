"""``compare`` and ``report``: train with every similarity, and show what came out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offsphere.cli.app import Flag, Shown, about, app, out, print_json, quiet_libraries
from offsphere.config import CompareConfig, read_config

if TYPE_CHECKING:
    from offsphere.report.run import RunRecord


@app.command(
    epilog="Example: offsphere compare --model package:wordllama --train datasets/nq_qed datasets/medquad "
    "--eval datasets/nq_qed datasets/hotpotqa --out runs/first"
)
def compare(
    model: Annotated[str | None, Flag(help=about("model"))] = None,
    train: Annotated[list[str] | None, Flag(help=about("train"))] = None,
    eval: Annotated[list[str] | None, Flag(help=about("eval"))] = None,
    out_folder: Annotated[Path | None, Flag("--out", help=about("out"))] = None,
    config: Annotated[Path | None, Flag(help="settings in YAML; flags come before them")] = None,
    similarities: Annotated[list[str] | None, Flag(help=about("similarities"))] = None,
    seeds: Annotated[list[str] | None, Flag(help=about("seeds"))] = None,
    init: Annotated[str | None, Flag(help=about("init"))] = None,
    split: Annotated[str | None, Flag(help=about("split"))] = None,
    max_pairs: Annotated[int | None, Flag(help=about("max_pairs"))] = None,
    max_queries: Annotated[int | None, Flag(help=about("max_queries"))] = None,
    max_documents: Annotated[int | None, Flag(help=about("max_documents"))] = None,
    steps: Annotated[int | None, Flag(help=about("steps"))] = None,
    epochs: Annotated[float | None, Flag(help=about("epochs"))] = None,
    batch_size: Annotated[int | None, Flag(help=about("batch_size"))] = None,
    max_length: Annotated[int | None, Flag(help=about("max_length"))] = None,
    learning_rate: Annotated[float | None, Flag(help=about("learning_rate"))] = None,
    scale: Annotated[str | None, Flag(help=about("scale"))] = None,
    learn_scale: Annotated[bool | None, Flag("--learn-scale", help=about("learn_scale"))] = None,
    freeze_layers: Annotated[int | None, Flag(help=about("freeze_layers"))] = None,
    dropout: Annotated[float | None, Flag(help=about("dropout"))] = None,
    query_prompt: Annotated[str | None, Flag(help=about("query_prompt"))] = None,
    document_prompt: Annotated[str | None, Flag(help=about("document_prompt"))] = None,
    evaluations: Annotated[int | None, Flag(help=about("evaluations"))] = None,
    on_collapse: Annotated[str | None, Flag(help=about("on_collapse"))] = None,
    validation_queries: Annotated[int | None, Flag(help=about("validation_queries"))] = None,
    validation_documents: Annotated[int | None, Flag(help=about("validation_documents"))] = None,
    run_files: Annotated[str | None, Flag(help=about("run_files"))] = None,
    device: Annotated[str | None, Flag(help=about("device"))] = None,
    strict: Annotated[bool | None, Flag("--strict", help=about("strict"))] = None,
    as_json: Annotated[bool, Flag("--json", help="print the comparison as JSON")] = False,
) -> None:
    """Train the same encoder with each similarity, evaluate all, and say which one to use.

    The same command again goes on with an unfinished run and repeats nothing that is done.
    """
    flags = {
        name: value for name, value in locals().items() if name in CompareConfig.model_fields and value is not None
    }
    settings = read_config(config, flags | ({"out": out_folder} if out_folder is not None else {}))
    quiet_libraries()
    from offsphere.report.page import write_report
    from offsphere.report.run import read_run
    from offsphere.report.tables import print_comparison
    from offsphere.training.compare import compare as run_comparison

    with Shown() as progress:
        comparison = run_comparison(settings, progress)
    report = write_report([settings.out], settings.out / "report.html")
    if as_json:
        print_json(comparison.to_dict())
        return
    record = read_run(settings.out)
    print_comparison(out, record)
    print_places(report, record)


@app.command(epilog="Example: offsphere report runs/wordllama runs/minilm --out runs/report.html")
def report(
    runs: Annotated[list[Path], typer.Argument(help="run folders")],
    out_file: Annotated[Path | None, Flag("--out", help="the page; report.html in the first run by default")] = None,
) -> None:
    """Write the page of one or several finished runs, and print their tables."""
    from offsphere.report.page import write_report
    from offsphere.report.run import read_run
    from offsphere.report.tables import print_comparison

    page = write_report(runs, out_file or runs[0] / "report.html")
    records = [read_run(run) for run in runs]
    print_comparison(out, *records)
    print_places(page, max(records, key=lambda record: record.recommended_value))


def print_places(page: Path, record: RunRecord) -> None:
    """Tell where the report and the recommended model are, and the command that opens the model."""
    model = record.folder / "model"
    module, opens = record.opener
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    code = f"from {module} import {opens}; print({opens}('{model}'))"
    lines = f'\nreport   {page}\nmodel    {model}\nopen it  {python} -c "{code}"'
    out.print(lines, highlight=False, markup=False, soft_wrap=True)
