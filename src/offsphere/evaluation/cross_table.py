"""One model scored under every similarity: trained with X, ranked as Y, from one set of embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offsphere.evaluation.measures import MEASURES, parse_measures, per_query
from offsphere.evaluation.ranking import EmbeddedCollection, Ranking, rank
from offsphere.similarity import Similarity


@dataclass(frozen=True)
class CrossTable:
    """A model's values and rankings under every similarity.

    Attributes:
        values: ``values[scored_as][measure][query id]``.
        rankings: The ranking behind each name. Its scores have the query's length removed, which no ranking
            depends on: names with the same gamma_d share one ranking, and agree exactly.
    """

    values: dict[str, dict[str, dict[str, float]]]
    rankings: dict[str, Ranking]


def score_under(
    embedded: EmbeddedCollection,
    similarities: Mapping[str, Similarity],
    measures: Sequence[str] = MEASURES,
    k: int = 100,
) -> CrossTable:
    """The values of every measure on every query, under each similarity by its name.

    Args:
        embedded: Raw embeddings of one collection.
        similarities: What to score as, by the name it gets in the table.
        measures: Names that ir-measures knows.
        k: Length of the rankings; a measure sees nothing below it.

    Raises:
        ConfigError: If a measure is unknown; found before any ranking.
    """
    parse_measures(measures)
    gammas = {name: similarity.gammas[1] for name, similarity in similarities.items()}
    rankings = {gamma_d: rank(embedded, Similarity(1.0, gamma_d), k) for gamma_d in dict.fromkeys(gammas.values())}
    values = {
        gamma_d: per_query(ranking.run(), embedded.collection.qrels, measures) for gamma_d, ranking in rankings.items()
    }
    return CrossTable(
        {name: values[gamma_d] for name, gamma_d in gammas.items()},
        {name: rankings[gamma_d] for name, gamma_d in gammas.items()},
    )
