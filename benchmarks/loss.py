"""The loss alone, forward and backward: ours (tiled) against matmul and cross_entropy, in turn, one process each.

Prints seconds, extra memory (gradients included) and their ratios for batches that grow; at 16k the plain loss needs
over 3 GB. Batches that only the tiled loss can hold are measured with ``--tiled-batches``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


def measure(impl: str, batch: int, dimension: int, threads: int, cpu_time: bool) -> dict[str, float]:
    import torch

    from offsphere import Similarity, info_nce

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    cosine = Similarity.parse("cosine")

    def embeddings(size: int) -> list[torch.Tensor]:
        return [torch.randn(size, dimension, requires_grad=True) for _ in range(2)]

    def loss(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        if impl == "tiled":
            return info_nce(queries, documents, cosine, 20.0, impl="tiled")
        logits = 20.0 * torch.nn.functional.normalize(queries) @ torch.nn.functional.normalize(documents).T
        return torch.nn.functional.cross_entropy(logits, torch.arange(len(queries)))

    loss(*embeddings(256)).backward()  # thread pools and allocator are warm, and not part of the memory below
    queries, documents = embeddings(batch)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clock = time.process_time if cpu_time else time.perf_counter
    began = clock()
    value = loss(queries, documents)
    value.backward()
    seconds = clock() - began
    extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    norm = queries.grad.norm().item() if queries.grad is not None else 0.0
    return {"seconds": seconds, "megabytes": extra, "loss": value.item(), "gradient": norm}


def in_own_process(*arguments: object) -> dict[str, float]:
    """What ``measure`` gives in a process of its own; spawned, as the threads of a forked one wait for each other."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=[1024, 4096, 16384])
    parser.add_argument("--tiled-batches", type=int, nargs="*", default=[], help="measured without the plain loss")
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="of the process, for a machine that does other things")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()

    figures: dict[str, float] = {"dimension": options.dimension, "threads": options.threads}
    for batch in sorted({*options.batches, *options.tiled_batches}):
        runs: dict[str, list[dict[str, float]]] = {"plain": [], "tiled": []}
        if batch not in options.batches:
            del runs["plain"]
        for _ in range(options.rounds):
            for impl, measured in runs.items():
                measured.append(in_own_process(impl, batch, options.dimension, options.threads, options.cpu_time))
        name = f"{batch // 1024}k"
        median = {
            impl: {key: statistics.median(run[key] for run in measured) for key in measured[0]}
            for impl, measured in runs.items()
        }
        figures |= {f"megabytes_{name}": median["tiled"]["megabytes"], f"seconds_{name}": median["tiled"]["seconds"]}
        print(f"{batch} x {options.dimension}")
        for impl, one in median.items():
            print(f"  {impl:6} {one['seconds']:8.3f} s {one['megabytes']:8.0f} MB")
        if "plain" in runs:
            seconds = ([run["seconds"] for run in measured] for measured in runs.values())
            ratio = statistics.median(one / other for one, other in zip(*seconds, strict=True))
            apart = {key: abs(median["plain"][key] - median["tiled"][key]) for key in ("loss", "gradient")}
            memory = median["tiled"]["megabytes"] / median["plain"]["megabytes"]
            figures |= {
                f"ratio_{name}": ratio,
                f"memory_ratio_{name}": memory,
                f"loss_difference_{name}": apart["loss"],
                f"gradient_difference_{name}": apart["gradient"] / median["plain"]["gradient"],
            }
            print(f"  {ratio:.2f} times as fast, {memory:.3f} of the memory, loss apart {apart['loss']:.1e}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
