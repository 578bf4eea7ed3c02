"""Evaluation: rank a collection exactly, measure it, score a model under every similarity, and judge differences."""

from __future__ import annotations

from offsphere.evaluation.comparison import Comparison, Difference, Verdict, compare_similarities
from offsphere.evaluation.cross_table import CrossTable, score_under
from offsphere.evaluation.measures import MEASURES, parse_measures, per_query
from offsphere.evaluation.norms import norm_record
from offsphere.evaluation.ranking import EmbeddedCollection, Ranking, rank, read_trec, write_trec
from offsphere.evaluation.results import (
    PRETRAINED,
    QueryValue,
    Result,
    read_query_values,
    read_results,
    write_query_values,
    write_results,
)
from offsphere.evaluation.significance import bootstrap_difference, holm, paired_randomisation, paired_t

__all__ = [
    "MEASURES",
    "PRETRAINED",
    "Comparison",
    "CrossTable",
    "Difference",
    "EmbeddedCollection",
    "QueryValue",
    "Ranking",
    "Result",
    "Verdict",
    "bootstrap_difference",
    "compare_similarities",
    "holm",
    "norm_record",
    "paired_randomisation",
    "paired_t",
    "parse_measures",
    "per_query",
    "rank",
    "read_query_values",
    "read_results",
    "read_trec",
    "score_under",
    "write_query_values",
    "write_results",
    "write_trec",
]
