"""Diagnose every encoder on every training set before training, then train it with every similarity; resumable.

    python studies/predictor/run.py --data DATA --models MODELS --out runs/predictor [--encoders wordllama bert-tiny]

The same command goes on with what is missing. ``analyse.py`` makes the tables and figures of what is there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from offsphere.cli.app import Shown, quiet_libraries
from offsphere.config import CompareConfig, read_config
from offsphere.diagnosis.diagnose import diagnose
from offsphere.encoders import open_encoder, randomise, save_encoder
from offsphere.similarity import Similarity
from offsphere.training.compare import compare

HERE = Path(__file__).parent
PAIRS_A_DIMENSION = 10
"""Below that many pairs the condition number still falls with the sample (spec of the Fisher estimate)."""


class Study:
    """The matrix of encoders and training sets, in one folder."""

    def __init__(self, plan: dict[str, Any], data: Path, models: Path, out: Path):
        self.plan, self.data, self.models, self.out = plan, data, models, out

    def run(self, name: str) -> None:
        """Everything of one encoder."""
        rate = self.rate(name)
        for training in self.plan["encoders"][name].get("training", self.plan["training"]):
            self.diagnose(name, training)
            with Shown() as progress:
                compare(
                    read_config(CompareConfig, None, self.settings(name, training) | {"learning_rate": rate}), progress
                )

    def settings(self, name: str, training: str) -> dict[str, Any]:
        """What ``offsphere compare`` is asked for."""
        encoder = self.plan["encoders"][name]
        return {
            **self.plan["settings"],
            **encoder["settings"],
            **encoder.get("where", {}).get(training, {}),
            "model": self.source(encoder["model"]),
            "seeds": encoder["seeds"],
            "train": [str(self.data / training)],
            "eval": [str(self.data / one) for one in (training, *self.plan["evaluation"])],
            "out": self.out / name / training,
        }

    def source(self, model: str) -> str:
        """A package's model by its name, any other as a folder of --models."""
        return model if model.startswith("package:") else str(self.models / model)

    def rate(self, name: str) -> float:
        """The learning rate that trains cosine best, by validation on the first training set."""
        kept = self.out / name / "rate.json"
        if kept.exists():
            return json.loads(kept.read_text())["best"]
        encoder, first = self.plan["encoders"][name], self.plan["training"][0]
        scores = {}
        for rate in encoder["rates"]:
            folder = self.out / name / "rates" / f"{rate:g}"
            grid = {"similarities": ["cosine"], "seeds": [encoder["seeds"][0]], "learning_rate": rate, "out": folder}
            only = {"eval": [str(self.data / first)]}
            with Shown() as progress:
                compare(read_config(CompareConfig, None, self.settings(name, first) | grid | only), progress)
            variant = next(folder.glob("variants/cosine-*/variant.json"))
            scores[rate] = json.loads(variant.read_text())["validation"]
        best = max(scores, key=lambda rate: scores[rate])
        kept.write_text(json.dumps({"best": best, "validation": {f"{rate:g}": v for rate, v in scores.items()}}))
        return best

    def diagnose(self, name: str, training: str) -> None:
        """What ``offsphere diagnose`` says of the encoder as training meets it."""
        written = self.out / name / f"{training}.diagnosis.json"
        if written.exists():
            return
        settings = self.settings(name, training)
        source = settings["model"]
        model = open_encoder(source, max_length=settings["max_length"])
        if settings.get("init") == "random":
            randomise(model, settings["seeds"][0])
            source = str(self.out / name / "random")
            save_encoder(model, Path(source), Similarity.parse("cosine"), "random weights")
        pairs = PAIRS_A_DIMENSION * model.get_embedding_dimension()
        with Shown() as progress:
            found = diagnose(
                source,
                settings["train"][0],
                split="train",
                max_queries=pairs + pairs // 8,  # a reserve for queries whose passages coincide
                max_length=settings["max_length"],
                batch_size=settings["batch_size"],
                progress=progress,
            )
        partial = written.with_suffix(".partial")
        partial.write_text(json.dumps(found.to_dict(), indent=1))
        partial.replace(written)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the collections in BEIR layout")
    parser.add_argument("--models", type=Path, required=True, help="folder with the encoders that no package carries")
    parser.add_argument("--out", type=Path, default=Path("runs/predictor"))
    parser.add_argument("--plan", type=Path, default=HERE / "study.yaml")
    parser.add_argument("--encoders", nargs="+", help="only these; all by default")
    given = parser.parse_args()
    quiet_libraries()
    study = Study(yaml.safe_load(given.plan.read_text()), given.data, given.models, given.out)
    for name in given.encoders or study.plan["encoders"]:
        Console(stderr=True).rule(name)
        (given.out / name).mkdir(parents=True, exist_ok=True)
        study.run(name)


if __name__ == "__main__":
    main()
