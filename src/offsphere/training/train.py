"""One similarity, trained with one seed or several: the model of the best validation, and how it ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offsphere import processes
from offsphere.config import TrainConfig
from offsphere.evaluation.results import Result
from offsphere.progress import Progress
from offsphere.training.run import Run
from offsphere.training.run_folder import Finished


@dataclass(frozen=True)
class TrainedModel:
    """What ``train`` leaves.

    Attributes:
        model: The folder of the saved model.
        finished: The training that it comes from: of several seeds, the one with the best validation.
        learning_rate: That it was trained with.
        results: The rows of results.csv, the untrained encoder first; empty without evaluation collections.
    """

    model: Path
    finished: Finished
    learning_rate: float
    results: list[Result]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        training = asdict(self.finished) | {"similarity": self.finished.trained_as}
        gammas = dict(zip(("gamma_q", "gamma_d"), self.finished.similarity.gammas, strict=True))
        return {
            "model": str(self.model),
            "training": training | gammas | {"learning_rate": self.learning_rate},
            "results": [vars(row) for row in self.results],
        }


def train(config: TrainConfig, progress: Progress | None = None) -> TrainedModel:
    """Train the encoder with one similarity; goes on with an unfinished run.

    The run folder then holds ``model/``, ``log.jsonl``, ``config.yaml`` and ``environment.json``, of which
    ``report.training`` makes a page; with evaluation collections also ``results.csv``, ``per_query.parquet``,
    ``norms.json`` and ``runs/``.

    Args:
        config: The settings.
        progress: Told what happens.

    Raises:
        OffsphereError: If encoder, data, settings or folder do not allow it; found before any training where possible.
    """
    run = Run(config, progress)
    run.finish()
    return processes.first(lambda: _conclude(run))


def _conclude(run: Run) -> TrainedModel:
    results, _ = run.folder.gather(run.order)
    best = run.folder.best(run.variants[0].similarity.name)
    run.folder.recommend(best.name)
    return TrainedModel(run.folder.path / "model", best, run.plan.learning_rate, results)
