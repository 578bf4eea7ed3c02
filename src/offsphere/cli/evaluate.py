"""``evaluate``: rank collections with models as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from offsphere.cli.app import Flag, Shown, about, app, by_side, out, print_json, quiet_libraries


def _list_benchmarks(asked: bool) -> None:
    if not asked:
        return
    from offsphere.data.benchmarks import CATALOGUE
    from offsphere.report.tables import new_table

    table = new_table("Benchmarks by name; a family such as bright stands for all of it", "name")
    for header in ("category", "queries", "documents", "published at"):
        table.add_column(header, justify="right" if header in ("queries", "documents") else "left")
    for one in CATALOGUE.values():
        table.add_row(one.name, one.category, f"{one.queries:,}", f"{one.documents or 0:,}", one.source)
    out.print(table)
    raise typer.Exit


@app.command(
    epilog="Example: offsphere evaluate --model runs/first/model --data beir/scifact datasets/xquad_en "
    "--similarity own,cosine --out runs/evaluated"
)
def evaluate(
    model: Annotated[list[str], Flag(help=f"{about('model')}; one or several")],
    data: Annotated[
        list[str],
        Flag(help="collections, benchmarks by name such as beir/scifact, or scored sentence pairs such as stsb"),
    ],
    similarity: Annotated[
        list[str] | None, Flag(help="what to rank under: own, or any similarity; the first is the baseline of tests")
    ] = None,
    split: Annotated[str, Flag(help="split of the judgements; test is the published one of a benchmark")] = "test",
    measures: Annotated[
        str, Flag(help="measures, as ir-measures names them, or AllSupports@k; the first decides the tests")
    ] = "nDCG@10,R@100,RR@10",
    max_length: Annotated[int | None, Flag(help=about("max_length"))] = None,
    query_prompt: Annotated[str | None, Flag(help="text put before each query")] = None,
    document_prompt: Annotated[str | None, Flag(help="text put before each document")] = None,
    task_prompts: Annotated[
        bool, Flag("--task-prompts", help="put a benchmark's own prompt before its queries (BRIGHT has them)")
    ] = False,
    device: Annotated[str | None, Flag(help=about("device"))] = None,
    strict: Annotated[bool, Flag("--strict", help=f"{about('strict')}, and benchmarks of another size")] = False,
    seed: Annotated[int, Flag(help="of the resampling in tests")] = 0,
    out_folder: Annotated[
        Path | None, Flag("--out", help="folder for results, run files and tests; finished data sets are kept there")
    ] = None,
    as_json: Annotated[bool, Flag("--json", help="print the results as JSON")] = False,
    list_benchmarks: Annotated[
        bool, Flag("--list-benchmarks", help="show the names", is_eager=True, callback=_list_benchmarks)
    ] = False,
) -> None:
    """Rank collections with models as they are, under their own similarity or any other.

    Several similarities cost one encoding pass; each is tested against the first. With --out, the same command goes on
    where it stopped, and more models or data sets can be added. Without a network, put benchmarks under the folder that
    OFFSPHERE_BENCHMARKS names.

    Scored sentence pairs (sentence1, sentence2, score) give the correlation of the model's scores with them, for the
    sentences in this order and, as Spearman(b,a) and Pearson(b,a), in the other one.
    """
    quiet_libraries()
    from offsphere.evaluation.models import evaluate_models
    from offsphere.evaluation.parts import slug
    from offsphere.report.correlation import print_correlations, write_correlations
    from offsphere.report.runs import print_run_comparison, write_run_comparison
    from offsphere.report.tables import print_results

    with Shown() as progress:
        evaluated = evaluate_models(
            model,
            data,
            similarity or ["own"],
            split=split,
            measures=_separated(measures),
            max_length=max_length,
            prompts=by_side(query_prompt, document_prompt),
            task_prompts=task_prompts,
            device=device,
            strict=strict,
            seed=seed,
            out=out_folder,
            progress=progress,
        )
    if out_folder is not None:
        for source, comparison in evaluated.comparisons.items():
            write_run_comparison(comparison, out_folder / "compared" / slug(source))
        write_correlations(evaluated.points, out_folder, evaluated.measure)
    if as_json:
        print_json([vars(row) for row in evaluated.results])
        return
    for source in model:
        print_results(out, [row for row in evaluated.results if row.model == source])
        if source in evaluated.comparisons:
            print_run_comparison(out, evaluated.comparisons[source])
    print_correlations(out, evaluated.points)


def _separated(measures: str) -> tuple[str, ...]:
    """The names between commas, of which those inside brackets, as in ``AP(rel=2,judged_only=True)``, part nothing."""
    return tuple(re.split(r",(?![^(]*\))", measures))
