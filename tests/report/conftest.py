from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml

from offsphere.evaluation.comparison import compare_similarities
from offsphere.evaluation.results import QueryValue, Result, write_query_values, write_results
from offsphere.report.run import RunRecord, read_run
from offsphere.similarity import NAMES, Similarity

MEASURES = ("nDCG@10", "R@100", "RR@10")
N_QUERIES = 60


def write_run(
    folder: Path,
    *,
    model: str = "package:wordllama",
    similarities: Sequence[str] = NAMES,
    seeds: Sequence[int] = (0, 1, 2),
    in_domain: Sequence[str] = ("nq_qed", "medquad"),
    out_of_domain: Sequence[str] = ("hotpotqa", "musique"),
    lift: float = 0.0,
    pretrained: bool = True,
    log: bool = True,
) -> Path:
    """A run folder whose numbers a seeded generator draws; ``lift`` is added to every query of dnorm."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(7)
    datasets = [*in_domain, *out_of_domain]
    results, query_values = _measurements(random, model, similarities, seeds, datasets, lift, pretrained)
    write_results(folder / "results.csv", results)
    write_query_values(folder / "per_query.parquet", query_values)
    comparison = compare_similarities(model, query_values, in_domain)
    norms = [
        {"similarity": name, "seed": seed, **_norms(random, dataset)}
        for name in similarities
        for seed in seeds
        for dataset in datasets
    ]
    events = _events(random, similarities, seeds) if log else []
    config = {
        "command": f"offsphere compare --model {model} --out {folder.name}",
        "model": model,
        "train": list(in_domain) or ["elsewhere"],
        "eval": datasets,
        "seeds": list(seeds),
        "similarities": list(similarities),
        "steps": 200,
        "batch_size": 64,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (folder / "environment.json").write_text(json.dumps({"python": "3.11", "cores": 2}), encoding="utf-8")
    (folder / "comparison.json").write_text(json.dumps(comparison.to_dict()), encoding="utf-8")
    (folder / "norms.json").write_text(json.dumps(norms), encoding="utf-8")
    (folder / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str = "run", **settings: object) -> Path:
        return write_run(tmp_path / name, **settings)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def record(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """The default run, read once; tests that change it make their own."""
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "default"))


def _measurements(random, model, similarities, seeds, datasets, lift, pretrained):
    """Rows where each query has its own difficulty, shared by all models, and rankings depend on gamma_d alone."""
    difficulty = {(dataset, measure): random.beta(1, 2, N_QUERIES) for dataset in datasets for measure in MEASURES}
    trainings = [(name, seed) for name in similarities for seed in seeds] + [("pretrained", None)] * pretrained
    results, query_values = [], []
    for trained, seed in trainings:
        for dataset, measure in difficulty:
            ranked: dict[float, np.ndarray] = {}
            for name in similarities:
                gamma_d = _gammas(name)[1]
                if gamma_d not in ranked:
                    noise = random.normal(lift * (trained == "dnorm"), 0.05, N_QUERIES)
                    ranked[gamma_d] = np.clip(difficulty[dataset, measure] + noise, 0, 1)
                mean, gammas = float(ranked[gamma_d].mean()), (None, None) if seed is None else _gammas(trained)
                row = (model, "nq_qed", trained, *gammas, name, seed, dataset, "test", measure, mean, N_QUERIES)
                results.append(Result(*row))
                if name == trained:
                    query_values += [
                        QueryValue(model, trained, seed, dataset, measure, f"q{i}", float(value))
                        for i, value in enumerate(ranked[gamma_d])
                    ]
    return results, query_values


def _gammas(name: str) -> tuple[float, float]:
    found = re.fullmatch(r"gamma_q=(.+),gamma_d=(.+)", name)
    return (float(found[1]), float(found[2])) if found else Similarity.parse(name).gammas


def _norms(random: np.random.Generator, dataset: str) -> dict[str, object]:
    relevant, irrelevant = random.gamma(9, 0.6, 80), random.gamma(9, 0.5, 500)
    edges = np.histogram_bin_edges(np.concatenate([relevant, irrelevant]), 40)
    return {
        "dataset": dataset,
        "edges": edges.tolist(),
        "relevant": np.histogram(relevant, edges)[0].tolist(),
        "irrelevant": np.histogram(irrelevant, edges)[0].tolist(),
        "cohens_d": float(random.normal(0.3, 0.1)),
    }


def _events(random: np.random.Generator, similarities: Sequence[str], seeds: Sequence[int]) -> list[dict[str, object]]:
    events: list[dict[str, object]] = []
    for name in similarities:
        for seed in seeds:
            gammas = np.clip(0.5 + random.normal(0, 0.01, (11, 2)).cumsum(0), 0, 1)
            learned = name == "learnable"
            for i, step in enumerate(range(0, 220, 20)):
                own = 0.2 + 0.15 * (1 - np.exp(-step / 80)) + random.normal(0, 0.004)
                event = {"similarity": name, "seed": seed, "step": step}
                pair = {"gamma_q": gammas[i, 0], "gamma_d": gammas[i, 1]} if learned else {}
                events.append({"event": "train", **event, "loss": float(np.exp(-step / 100)), **pair})
                as_cosine = own - 0.0002 * step * (name == "dot")
                events.append({"event": "validation", **event, "nDCG@10": own, "nDCG@10_as_cosine": as_cosine, **pair})
    return events
