"""``evaluate``: rank collections with a model as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from offsphere.cli.app import Flag, Shown, about, app, by_side, out, print_json, quiet_libraries


@app.command(
    epilog="Example: offsphere evaluate --model runs/first/model --data datasets/xquad_en --similarity own,dot"
)
def evaluate(
    model: Annotated[str, Flag(help=about("model"))],
    data: Annotated[list[str], Flag(help="collections to evaluate on, or scored sentence pairs such as datasets/stsb")],
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
    """Rank collections with a model as it is, under its own similarity or any other.

    Scored sentence pairs (sentence1, sentence2, score) give the correlation of the model's scores with them, for the
    sentences in this order and, as Spearman(b,a) and Pearson(b,a), in the other one.
    """
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
