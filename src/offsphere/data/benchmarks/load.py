"""A benchmark's texts and judgements, from a local folder first and then from where it is published."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from offsphere.data.beir import assemble, available_splits, is_collection, load_collection
from offsphere.data.benchmarks.catalogue import STS, Benchmark
from offsphere.data.benchmarks.published import Raw, read_hub, read_hub_pairs, read_ir_datasets
from offsphere.data.collection import Collection
from offsphere.data.scored_pairs import ScoredPairs, load_scored_pairs
from offsphere.data.settings import Settings
from offsphere.errors import DataError, OffsphereError

FOLDER_VARIABLE = "OFFSPHERE_BENCHMARKS"
"""The environment variable that names a folder of benchmarks, each under its name: ``beir/scifact/corpus.jsonl``."""


def load_benchmark(benchmark: Benchmark, split: str = "test", *, strict: bool = False) -> Collection:
    """The collection of a benchmark, with its own rules for what is never ranked, its size checked.

    Looks in the folder that OFFSPHERE_BENCHMARKS names (BEIR layout, or a copy of the hub's repository), then
    downloads from ir_datasets or the Hugging Face hub, both of which keep what they fetched. A size that differs from
    the published one is a note, or an error where strict.

    Args:
        benchmark: Which one.
        split: ``test`` for what results are published on, whatever it is called there.
        strict: Refuse another size than the published one, and judgements of something that does not exist.

    Raises:
        DataError: If it cannot be read or reached, with what to type; if it has no such split.
    """
    if benchmark.category == STS:
        raise DataError(f"{benchmark.name} has scored sentence pairs, and no corpus; `offsphere evaluate` takes it")
    wanted = benchmark.split if split == "test" else split
    folder = local_folder(benchmark)
    if folder is not None and is_collection(folder):
        splits = available_splits(folder)
        collection = load_collection(folder, splits[0] if len(splits) == 1 else wanted, strict=strict)
    else:
        with _reached(benchmark, folder):
            raw = _read(benchmark, folder, wanted)
        settings = Settings(excluded=raw.excluded)
        collection = assemble(
            benchmark.slug,
            wanted,
            settings,
            raw.documents,
            raw.queries,
            raw.judgements,
            benchmark.name if folder is None else folder,
            strict=strict,
        )
    found = len(collection.queries), len(collection.documents)
    notes = _size(benchmark, found, split, strict)
    return replace(
        collection,
        name=benchmark.slug,
        exclude_self=collection.exclude_self or benchmark.exclude_self,
        notes=(*collection.notes, *notes),
    )


def load_benchmark_pairs(benchmark: Benchmark, split: str | None = None) -> ScoredPairs | None:
    """The scored sentence pairs of a benchmark; None for one that is a collection.

    Raises:
        DataError: If they cannot be read or reached, with what to type.
    """
    if benchmark.category != STS:
        return None
    wanted, folder = split or benchmark.split, local_folder(benchmark)
    pairs = load_scored_pairs(folder, wanted) if folder is not None else None
    if pairs is None:
        with _reached(benchmark, folder):
            pairs = read_hub_pairs(benchmark.source.removeprefix("hub:") if folder is None else str(folder), wanted)
    return replace(pairs, name=benchmark.slug)


def local_folder(benchmark: Benchmark) -> Path | None:
    """The folder of a benchmark under OFFSPHERE_BENCHMARKS; for BRIGHT also ``bright``, a copy of its repository."""
    if not (root := os.environ.get(FOLDER_VARIABLE)):
        return None
    folder = Path(root).expanduser() / benchmark.name
    if folder.is_dir():
        return folder
    family = Path(root).expanduser() / "bright"
    return family if benchmark.name.startswith("bright") and (family / "README.md").is_file() else None


def _read(benchmark: Benchmark, folder: Path | None, split: str) -> Raw:
    task = benchmark.name.rpartition("/")[2]
    if folder is not None:
        return read_hub(str(folder), split, task, long=benchmark.name.startswith("bright-long/"))
    kind, _, source = benchmark.source.partition(":")
    if kind == "hub":
        return read_hub(source, split, task)
    return read_ir_datasets(source, split, own=benchmark.split)


@contextmanager
def _reached(benchmark: Benchmark, folder: Path | None) -> Iterator[None]:
    """A context in which whatever a library raises becomes a DataError that says what to type."""
    try:
        yield
    except OffsphereError:
        raise
    except Exception as error:  # no network, a damaged file, no such split: the libraries have no common base
        url = getattr(getattr(error, "request", None), "url", None)  # says more than the text of a failed connection
        reason = f"{type(error).__name__}: {url or next(iter(str(error).splitlines()), 'no more is known')}"
        if folder is not None:
            raise DataError(f"cannot be read as a copy of a repository of the hub ({reason})", folder) from error
        root = os.environ.get(FOLDER_VARIABLE)
        setting = "" if root else f" and set {FOLDER_VARIABLE}=FOLDER"
        cache = "the cache of Hugging Face" if benchmark.source.startswith("hub:") else "~/.ir_datasets"
        raise DataError(
            f"{benchmark.name} cannot be reached at {benchmark.source} ({reason}).\n"
            f"Without a network: put it into {Path(root or 'FOLDER') / benchmark.name} (corpus.jsonl, queries.jsonl, "
            f"qrels/{benchmark.split}.tsv, or a copy of the hub's repository){setting}; or give the same command once "
            f"where there is a network, and copy {cache}"
        ) from error


def _size(benchmark: Benchmark, found: tuple[int, int], split: str, strict: bool) -> list[str]:
    """A note where the size is not the published one; an error where strict."""
    published = benchmark.queries, benchmark.documents
    what = ("queries", "documents") if split == "test" else ("", "documents")
    differing = [
        f"{number:,} {kind}, published {right:,}"
        for kind, number, right in zip(what, found, published, strict=True)
        if kind and right is not None and number != right
    ]
    if not differing:
        return []
    note = f"not the published size: {'; '.join(differing)}"
    if strict:
        raise DataError(f"{benchmark.name}: {note}; get it again, or leave --strict out")
    return [note]
