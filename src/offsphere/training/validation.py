"""What is measured on the dev splits while a model trains: nDCG@10 by its own similarity and as cosine, and lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator

from offsphere.data import Collection
from offsphere.diagnosis.variation import coefficient_of_variation
from offsphere.evaluation.cross_table import score_under
from offsphere.evaluation.embedding import embed
from offsphere.evaluation.ranking import EmbeddedCollection
from offsphere.losses import InfoNCELoss
from offsphere.similarity import Similarity, norms

MEASURE = "nDCG@10"
AS_COSINE = f"{MEASURE}_as_cosine"


class Validation(BaseEvaluator):
    """An evaluator for ``SentenceTransformerTrainer``: the mean over dev splits, by own similarity and as cosine.

    It keeps nothing of the models that it has seen.

    Args:
        collections: Dev splits, small enough to be encoded several times in a training.
        loss: Tells the similarity and the scale in force.
        batch_size: Texts in one forward pass.
        measure: A further measure by own similarity, as ir-measures names it.
    """

    def __init__(self, collections: Sequence[Collection], loss: InfoNCELoss, batch_size: int, measure: str = MEASURE):
        super().__init__()
        self.collections = collections
        self.loss = loss
        self.batch_size = batch_size
        self.measures = tuple(dict.fromkeys((MEASURE, measure)))
        self.primary_metric = measure
        self.greater_is_better = True

    def __call__(
        self, model: SentenceTransformer, output_path: str | None = None, epoch: float = -1, steps: int = -1
    ) -> dict[str, Any]:
        """nDCG@10 by own similarity and as cosine, lengths (mean, CV), temperatures of queries, gammas and scale."""
        scored_as = {"own": self.loss.similarity.detached(), "cosine": Similarity.parse("cosine")}
        embedded = [embed(model, collection, self.batch_size) for collection in self.collections]
        tables = [score_under(one, scored_as, self.measures) for one in embedded]

        def mean(name: str, measure: str = MEASURE) -> float:
            return fmean(fmean(table.values[name][measure].values()) for table in tables)

        own = {measure: mean("own", measure) for measure in self.measures}
        in_force = self.loss.telemetry()
        temperatures = describe_temperatures(embedded, scored_as["own"], in_force["scale"])
        return own | {AS_COSINE: mean("cosine")} | describe_lengths(embedded) | temperatures | in_force


def describe_lengths(embedded: Sequence[EmbeddedCollection]) -> dict[str, float | None]:
    """Mean and coefficient of variation of the lengths of all queries and of all documents that have one.

    Empty texts have none: their zero vectors are left out. NaN where a side has no length at all.
    """
    described: dict[str, float | None] = {}
    for side, matrices in (("query", [e.queries for e in embedded]), ("document", [e.documents for e in embedded])):
        lengths = norms(np.concatenate(matrices))
        lengths = lengths[lengths > 0]
        described[f"{side}_norm_mean"] = float(lengths.mean()) if len(lengths) else math.nan
        described[f"{side}_norm_cv"] = coefficient_of_variation(lengths)
    return described


def describe_temperatures(
    embedded: Sequence[EmbeddedCollection], similarity: Similarity, scale: float | None
) -> dict[str, float | None]:
    """The temperature that a query gets from its length, |q|^(gamma_q - 1) / scale: its 10th, 50th, 90th percentile.

    Where gamma_q is 1, all queries have the same one; elsewhere short queries are compared softly and long ones sharply
    (paper: tau / |q| under dnorm). None where there is no scale yet, or no query has a length.
    """
    lengths = norms(np.concatenate([one.queries for one in embedded]))
    lengths = lengths[lengths > 0]
    shares = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
    if scale is None or len(lengths) == 0:
        return dict.fromkeys((f"temperature_{name}" for name in shares), None)
    found = lengths ** (similarity.gammas[0] - 1) / scale
    return {f"temperature_{name}": float(np.quantile(found, share)) for name, share in shares.items()}
