"""A model on one collection: rows for ``results.csv``, values per query, and its lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from offsphere.errors import UsageError
from offsphere.evaluation.cross_table import CrossTable, score_under
from offsphere.evaluation.measures import MEASURES
from offsphere.evaluation.norms import norm_record
from offsphere.evaluation.ranking import EmbeddedCollection
from offsphere.evaluation.results import QueryValue, Result
from offsphere.similarity import LEARNABLE, Similarity


@dataclass(frozen=True)
class Subject:
    """What is evaluated, as the rows of ``results.csv`` name it.

    Attributes:
        model: The encoder, as the user named it.
        training_data: What it was trained on here; empty for an encoder as it came.
        trained_as: The similarity of the training, or ``pretrained``.
        similarity: Its own similarity, learned gammas included.
        seed: Of the training, if there was one.
    """

    model: str
    training_data: str
    trained_as: str
    similarity: Similarity
    seed: int | None

    def result(self, scored_as: str, dataset: str, split: str, measure: str, value: float, number: int) -> Result:
        """A row of ``results.csv`` on this subject; the arguments are the columns of these names.

        Args:
            scored_as: The similarity that ranked.
            dataset: What was evaluated on.
            split: The part of it.
            measure: What was measured.
            value: The outcome.
            number: How many queries, or sentence pairs, it covers.
        """
        return Result(
            model=self.model,
            training_data=self.training_data,
            similarity=self.trained_as,
            gamma_q=self.similarity.gammas[0],
            gamma_d=self.similarity.gammas[1],
            scored_as=scored_as,
            seed=self.seed,
            dataset=dataset,
            split=split,
            measure=measure,
            value=value,
            n_queries=number,
        )


@dataclass(frozen=True)
class Evaluation:
    """Everything that one pass over one collection measured.

    Attributes:
        results: One row a measure and ranking.
        query_values: One value a measure and query, ranked by the model's own similarity.
        norms: See ``evaluation.norms``.
        table: The values and rankings behind them, by the name in ``results.csv``.
    """

    results: list[Result]
    query_values: list[QueryValue]
    norms: dict[str, Any]
    table: CrossTable


def evaluate(
    embedded: EmbeddedCollection,
    subject: Subject,
    scored_as: Mapping[str, Similarity],
    measures: tuple[str, ...] = MEASURES,
) -> Evaluation:
    """The measures of one model on one collection, ranked under several similarities from one set of embeddings.

    Args:
        embedded: Raw embeddings of the collection.
        subject: Whose they are.
        scored_as: What to rank under, by the name in ``results.csv``. The model's own similarity is ranked as well.
        measures: Names that ir-measures knows.
    """
    collection = embedded.collection
    own = subject.similarity.name
    table = score_under(embedded, {**scored_as, own: subject.similarity}, measures)
    results = [
        subject.result(name, collection.name, collection.split, measure, fmean(per_query.values()), len(per_query))
        for name, by_measure in table.values.items()
        for measure, per_query in by_measure.items()
    ]
    query_values = [
        QueryValue(subject.model, subject.trained_as, subject.seed, collection.name, measure, query, value)
        for measure, per_query in table.values[own].items()
        for query, value in per_query.items()
    ]
    return Evaluation(results, query_values, norm_record(embedded), table)


OWN = "own"


def asked_similarity(name: str, declared: Similarity | None, source: str) -> Similarity:
    """The similarity by this name, where ``own`` and ``learnable`` are the model's."""
    if name == OWN and declared is None:
        raise UsageError(
            f"{source} does not say which similarity it was trained with, and a guess would be a wrong result for some "
            "models; give one, such as --similarity cosine or --similarity dot"
        )
    if name == LEARNABLE and not (declared and declared.learned):
        raise UsageError(
            f"{source} carries no learned gammas; give exponents, such as --similarity gamma_q=0.5,gamma_d=0.5"
        )
    return declared if declared and name in (OWN, LEARNABLE) else Similarity.parse(name)
