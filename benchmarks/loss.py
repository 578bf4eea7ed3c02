"""The loss alone, forward and backward: ours (tiled) against matmul and cross_entropy, in turn, one process each.

Prints seconds, extra memory and their ratios for batches that grow; at 16k by default the plain loss needs over 4 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path


def measure(impl: str, batch: int, dimension: int, threads: int) -> dict[str, float]:
    import torch

    from offsphere import Similarity, info_nce

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    queries, documents = (torch.randn(batch, dimension, requires_grad=True) for _ in range(2))
    cosine = Similarity.parse("cosine")

    def loss(size: int) -> torch.Tensor:
        if impl == "tiled":
            return info_nce(queries[:size], documents[:size], cosine, 20.0, impl="tiled")
        logits = (
            20.0 * torch.nn.functional.normalize(queries[:size]) @ torch.nn.functional.normalize(documents[:size]).T
        )
        return torch.nn.functional.cross_entropy(logits, torch.arange(size))

    loss(256).backward()  # thread pools and allocator are warm, and not part of the memory below
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    value = loss(batch)
    value.backward()
    seconds = time.perf_counter() - began
    extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    norm = queries.grad.norm().item() if queries.grad is not None else 0.0
    return {"seconds": seconds, "megabytes": extra, "loss": value.item(), "gradient": norm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--measure", nargs=2, metavar=("IMPL", "BATCH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        impl, batch = options.measure
        print(json.dumps(measure(impl, int(batch), options.dimension, options.threads)))
        return

    figures: dict[str, float] = {"dimension": options.dimension, "threads": options.threads}
    for batch in options.batches:
        runs: dict[str, list[dict[str, float]]] = {"plain": [], "tiled": []}
        for _ in range(options.rounds):
            for impl, measured in runs.items():
                command = [sys.executable, __file__, "--measure", impl, str(batch)]
                command += ["--dimension", str(options.dimension), "--threads", str(options.threads)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                measured.append(json.loads(done.stdout))
        plain, tiled = ([run["seconds"] for run in measured] for measured in runs.values())
        ratio = statistics.median(one / other for one, other in zip(plain, tiled, strict=True))
        memory = {impl: statistics.median(run["megabytes"] for run in measured) for impl, measured in runs.items()}
        apart = abs(runs["plain"][0]["loss"] - runs["tiled"][0]["loss"])
        name = f"{batch // 1024}k"
        figures |= {
            f"ratio_{name}": ratio,
            f"memory_ratio_{name}": memory["tiled"] / memory["plain"],
            f"megabytes_{name}": memory["tiled"],
            f"seconds_{name}": statistics.median(tiled),
            f"loss_difference_{name}": apart,
        }
        print(f"{batch} x {options.dimension}: {ratio:.2f} times as fast, loss apart {apart:.1e}")
        print(f"  plain  {statistics.median(plain):8.3f} s {memory['plain']:8.0f} MB")
        print(f"  tiled  {statistics.median(tiled):8.3f} s {memory['tiled']:8.0f} MB")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
