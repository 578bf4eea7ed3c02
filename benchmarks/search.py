"""Exact search: ours against FAISS IndexFlatIP, sentence-transformers' semantic_search and torch, in turn.

All search the same float32 vectors in one process with the same number of threads. Prints seconds and queries per
second, how many times as fast ours is (median of the rounds, and their range), the share of the speed that the bare
inner products reach, and whether the answers are the same: ours is held against a ranking in float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import torch
from sentence_transformers.util import dot_score, semantic_search
from threadpoolctl import threadpool_limits

from offsphere.search.exact import ExactSearch

OURS, FAISS, SEMANTIC, TORCH, LIMIT = "ours", "faiss_flat", "semantic_search", "torch", "products"
BLOCK = 2**14
Answers = Callable[[np.ndarray, int], np.ndarray]


def searches(documents: np.ndarray, threads: int) -> dict[str, Answers]:
    """By name: rows of the k best of some queries."""
    exact = ExactSearch(documents, threads=threads)
    flat = faiss.IndexFlatIP(documents.shape[1])
    flat.add(documents)
    tensor = torch.from_numpy(documents)
    buffer = np.empty(0, np.float32)

    def semantic(queries: np.ndarray, k: int) -> np.ndarray:
        hits = semantic_search(torch.from_numpy(queries), tensor, top_k=k, score_function=dot_score)
        return np.array([[hit["corpus_id"] for hit in one] for one in hits])

    def products(queries: np.ndarray, k: int) -> np.ndarray:
        nonlocal buffer
        if len(buffer) < BLOCK * len(queries):
            buffer = np.empty(BLOCK * len(queries), np.float32)
        for start in range(0, len(documents), BLOCK):
            block = documents[start : start + BLOCK]
            scores = buffer[: len(block) * len(queries)].reshape(len(block), -1)
            if len(queries) == 1:  # for one query, dot products read the documents faster than a matrix product does
                np.vecdot(block, queries[0], out=scores[:, 0])
            else:
                np.matmul(block, queries.T, out=scores)
        return np.empty((0, k))

    return {
        OURS: lambda queries, k: exact.search(queries, k)[0],
        FAISS: lambda queries, k: flat.search(queries, k)[1],
        SEMANTIC: semantic,
        TORCH: lambda queries, k: torch.mm(torch.from_numpy(queries), tensor.T).topk(k).indices.numpy(),
        LIMIT: products,
    }


def in_float64(queries: np.ndarray, documents: np.ndarray, k: int) -> np.ndarray:
    scores = np.concatenate(
        [queries.astype(float) @ documents[s : s + BLOCK].astype(float).T for s in range(0, len(documents), BLOCK)],
        axis=1,
    )
    return np.argsort(-scores.astype(np.float32), axis=1, kind="stable")[:, :k]


def same(one: np.ndarray, other: np.ndarray) -> float:
    """Share of the places with the same document."""
    return float((one == other).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 32, 1000], help="searched at a time")
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=100, help="queries of a round at least, where few are searched")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    faiss.omp_set_num_threads(options.threads)
    threadpool_limits(options.threads)

    rng = np.random.default_rng(options.seed)
    documents = rng.standard_normal((options.documents, options.dimension), np.float32)
    queries = rng.standard_normal((max(options.queries), options.dimension), np.float32)
    began = time.perf_counter()
    ExactSearch(documents)
    opened = time.perf_counter() - began
    contenders = searches(documents, options.threads)
    few = queries[:32]
    right = same(contenders[OURS](few, options.k), in_float64(few, documents, options.k))
    print(f"{options.documents} x {options.dimension}, top {options.k}, {options.threads} threads")
    print(f"opened in {opened:.3f} s; {right:.1%} of ours as in float64")
    figures: dict[str, float] = {
        "documents": options.documents,
        "dimension": options.dimension,
        "k": options.k,
        "threads": options.threads,
        "seconds_to_open": opened,
        "same_as_float64": right,
    }
    for count in sorted(options.queries):
        some = queries[:count]
        answers = {name: search(some, options.k) for name, search in contenders.items()}  # everything is warm
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(options.rounds):
            # Whoever comes first in a round comes last in the next, so that no one always follows the same.
            for name in list(contenders)[:: 1 if number % 2 else -1]:
                repeats = max(1, options.repeats // count)
                began = time.perf_counter()
                for _ in range(repeats):
                    contenders[name](some, options.k)
                seconds[name].append((time.perf_counter() - began) / repeats)
        print(f"{count} queries:")
        for name, taken in seconds.items():
            median = statistics.median(taken)
            ratios = [other / ours for other, ours in zip(taken, seconds[OURS], strict=True)]
            figures[f"seconds_{name}_{count}_queries"] = median
            figures[f"queries_per_second_{name}_{count}_queries"] = count / median
            line = f"  {name:16} {median:9.4f} s {count / median:9.1f} queries/s"
            if name == LIMIT:
                figures[f"share_of_products_{count}_queries"] = statistics.median(ratios)
                line += f"  ours reaches {statistics.median(ratios):.0%} of their speed"
            elif name != OURS:
                figures[f"ratio_vs_{name}_{count}_queries"] = statistics.median(ratios)
                figures[f"same_as_{name}_{count}_queries"] = same(answers[OURS], answers[name])
                line += f"  ours {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}] times as fast"
                line += f", {figures[f'same_as_{name}_{count}_queries']:.2%} the same"
            print(line, flush=True)
    figures["ratio_vs_semantic_search"] = figures[f"ratio_vs_{SEMANTIC}_{max(options.queries)}_queries"]
    if 1 in options.queries:
        figures["ratio_vs_faiss_flat_1_query"] = figures[f"ratio_vs_{FAISS}_1_queries"]
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
