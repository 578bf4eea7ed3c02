"""``export``, ``verify`` and ``verify-endpoint``: from a model to a search engine with the ranking intact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offsphere.cli.app import Flag, Shown, about, app, by_side, out, print_json, quiet_libraries
from offsphere.errors import UsageError

SIMILARITY = "what the model ranks by, if it does not say so or to override it"
BATCH_SIZE = "texts in one forward pass"
TARGETS = (
    "destinations: pgvector:URL#TABLE, qdrant:URL#COLLECTION, milvus:FILE.db#COLLECTION, chroma:FOLDER#COLLECTION, "
    "lancedb:FOLDER#TABLE, faiss:FILE.faiss, parquet:FILE.parquet"
)


@app.command(
    epilog="Example: offsphere export --model runs/first/model --data datasets/nq_qed "
    "--to lancedb:runs/search#documents parquet:runs/nq_qed.parquet"
)
def export(
    to: Annotated[list[str], Flag(help=TARGETS)],
    model: Annotated[str | None, Flag(help=about("model"))] = None,
    data: Annotated[list[str] | None, Flag(help="collections or files of documents")] = None,
    index: Annotated[Path | None, Flag(help="an index, whose vectors are used as they are; no model is opened")] = None,
    similarity: Annotated[str | None, Flag(help=SIMILARITY)] = None,
    document_prompt: Annotated[str | None, Flag(help="text put before each document")] = None,
    max_length: Annotated[int | None, Flag(help=about("max_length"))] = None,
    batch_size: Annotated[int, Flag(help=BATCH_SIZE)] = 64,
    shard: Annotated[
        str, Flag(metavar="I/N", help="only the documents of shard I of N, for N exports at the same time")
    ] = "1/1",
    device: Annotated[str | None, Flag(help=about("device"))] = None,
    adopt: Annotated[bool, Flag("--adopt", help="write into a collection that somebody else made")] = False,
    explain: Annotated[bool, Flag("--explain", help="say what would be stored and lost, and write nothing")] = False,
    as_json: Annotated[bool, Flag("--json", help="print the result as JSON")] = False,
) -> None:
    """Write the prepared embeddings of documents to vector databases, and read them back.

    The same command again goes on with an unfinished export, and writes only what has changed.
    """
    documents = index is not None or bool(data) or explain
    if (model is None) == (index is None) or (index is not None and data) or not documents:
        raise UsageError("give either --model MODEL with --data COLLECTION, or --index INDEX alone")
    given = {"--max-length": max_length, "--document-prompt": document_prompt}
    fixed = [flag for flag, value in given.items() if value is not None]
    if index is not None and fixed:
        raise UsageError(f"{' and '.join(fixed)} cannot change the vectors of an index; leave out, or make a new index")
    quiet_libraries()
    from offsphere.data.shard import Shard
    from offsphere.diagnosis.subject import open_bare
    from offsphere.evaluation.evaluate import OWN, asked_similarity
    from offsphere.search.destinations import explain as explained
    from offsphere.search.export import export as run_export
    from offsphere.search.index import Index
    from offsphere.search.sources import EncodedDocuments, IndexedDocuments, Source

    part = Shard.parse(shard)
    opened = open_bare(model, max_length, None, device) if model is not None else Index.open(index or Path())
    if explain:
        declared = opened.similarity if isinstance(opened, Index) else opened.declared
        ranks_by = asked_similarity(similarity or OWN, declared, str(model or index))
        explanations = {target: explained(target, ranks_by) for target in to}
        if as_json:
            print_json({target: explanation.to_dict() for target, explanation in explanations.items()})
            return
        for target, explanation in explanations.items():
            out.print(f"{target}\n{explanation}\n", markup=False, highlight=False, soft_wrap=True)
        return
    source: Source
    if isinstance(opened, Index):
        source = IndexedDocuments(opened, similarity, part)
    else:
        source = EncodedDocuments(opened, data or [], similarity, document_prompt, batch_size, part)
    with Shown() as progress:
        rows = run_export(source, to, adopt=adopt, progress=progress)
    if as_json:
        print_json([row.to_dict() for row in rows])
        return
    from offsphere.report.destinations import print_exported

    print_exported(out, rows)


@app.command(
    epilog="Example: offsphere verify lancedb:runs/search#documents --model runs/first/model --data datasets/nq_qed"
)
def verify(
    target: Annotated[str, typer.Argument(help="a destination, as in export")],
    model: Annotated[str, Flag(help=about("model"))],
    data: Annotated[str, Flag(help="the collection that was exported, with queries")],
    split: Annotated[str, Flag(help="split whose queries are used")] = "test",
    queries: Annotated[int, Flag(min=1, help="queries at most, drawn at random")] = 200,
    sample: Annotated[
        int | None, Flag(help="encode so many documents and those that matter to the queries (default: all)")
    ] = None,
    similarity: Annotated[str | None, Flag(help=SIMILARITY)] = None,
    threshold: Annotated[float, Flag(help="what each measured share must reach")] = 0.99,
    query_prompt: Annotated[str | None, Flag(help="text put before each query")] = None,
    document_prompt: Annotated[str | None, Flag(help="text put before each document")] = None,
    max_length: Annotated[int | None, Flag(help=about("max_length"))] = None,
    batch_size: Annotated[int, Flag(help=BATCH_SIZE)] = 64,
    seed: Annotated[int, Flag(help="of the samples")] = 0,
    device: Annotated[str | None, Flag(help=about("device"))] = None,
    as_json: Annotated[bool, Flag("--json", help="print the result as JSON")] = False,
) -> None:
    """Prove that a live collection ranks as the trained model does; exit 1 and name the cause if it does not."""
    quiet_libraries()
    from offsphere.report.destinations import print_verification
    from offsphere.search.verify import verify as run_verification

    with Shown() as progress:
        found = run_verification(
            target,
            model,
            data,
            split=split,
            queries=queries,
            sample=sample,
            similarity=similarity,
            threshold=threshold,
            prompts=by_side(query_prompt, document_prompt),
            max_length=max_length,
            batch_size=batch_size,
            device=device,
            seed=seed,
            progress=progress,
        )
    if as_json:
        print_json(found.to_dict())
    else:
        print_verification(out, found)
    if not found.passed:
        raise typer.Exit(1)


@app.command(epilog="Example: offsphere verify-endpoint http://localhost:8080 --model runs/first/model")
def verify_endpoint(
    url: Annotated[str, typer.Argument(help="of the server; /v1/embeddings is added where there is no path")],
    model: Annotated[str, Flag(help="the encoder that the server should serve")],
    name: Annotated[str | None, Flag(help="what the server calls the model (default: as --model)")] = None,
    key_env: Annotated[str | None, Flag(help="environment variable that holds the key")] = None,
    similarity: Annotated[str | None, Flag(help=SIMILARITY)] = None,
    query_prompt: Annotated[str | None, Flag(help="text that belongs before each query")] = None,
    document_prompt: Annotated[str | None, Flag(help="text that belongs before each document")] = None,
    max_length: Annotated[int | None, Flag(help=about("max_length"))] = None,
    timeout: Annotated[float, Flag(min=0.1, help="seconds that one request may take")] = 60.0,
    device: Annotated[str | None, Flag(help=about("device"))] = None,
    as_json: Annotated[bool, Flag("--json", help="print the result as JSON")] = False,
) -> None:
    """Probe an OpenAI-compatible embeddings server: does it keep direction and length, and which similarities survive.

    Exit 1 if the model's own similarity does not rank through it as it should.
    """
    quiet_libraries()
    from offsphere.report.destinations import print_endpoint
    from offsphere.search.endpoint import verify_endpoint as run_probe

    with Shown() as progress:
        found = run_probe(
            url,
            model,
            name=name,
            key_env=key_env,
            similarity=similarity,
            max_length=max_length,
            prompts=by_side(query_prompt, document_prompt),
            device=device,
            timeout=timeout,
            progress=progress,
        )
    if as_json:
        print_json(found.to_dict())
    else:
        print_endpoint(out, found)
    if not found.passed:
        raise typer.Exit(1)
