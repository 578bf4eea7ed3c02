"""The comparison: one encoder, trained once a similarity and seed under matched conditions, and a verdict."""

from __future__ import annotations

import json

from offsphere import processes
from offsphere.atomic import write_atomically
from offsphere.config import CompareConfig
from offsphere.evaluation.comparison import Comparison, compare_similarities
from offsphere.progress import Progress
from offsphere.training.run import Run


def compare(config: CompareConfig, progress: Progress | None = None) -> Comparison:
    """Train every similarity with every seed, evaluate all, and say which one to use; goes on with an unfinished run.

    The run folder then holds ``results.csv``, ``per_query.parquet``, ``norms.json``, ``log.jsonl``,
    ``comparison.json``, ``runs/``, one model a similarity under ``variants/``, and the recommended one in ``model/``.

    Args:
        config: The settings.
        progress: Told what happens.

    Raises:
        OffsphereError: If encoder, data, settings or folder do not allow it; found before any training where possible.
    """
    run = Run(config, progress)
    run.finish()
    return processes.first(lambda: _conclude(run))


def _conclude(run: Run) -> Comparison:
    _, values = run.folder.gather(run.order)
    comparison = compare_similarities(run.config.model, values, run.materials.in_domain)
    write_atomically(run.folder.path / "comparison.json", json.dumps(comparison.to_dict(), indent=2) + "\n")
    run.folder.recommend(run.folder.best(comparison.verdict.similarity).name)
    return comparison
