"""Measures of a ranking, computed by ir-measures (trec_eval's own code), one value per query."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from offsphere.errors import ConfigError, DataError

if TYPE_CHECKING:
    from ir_measures import Measure

MEASURES = ("nDCG@10", "R@100", "RR@10")
ALL_SUPPORTS = "AllSupports"
"""Of a multi-hop question, ``AllSupports@k``: 1 where all its supporting documents are among the first k, else 0."""

Run = Mapping[str, Mapping[str, float]]
Qrels = Mapping[str, Mapping[str, int]]


def per_query(run: Run, qrels: Qrels, measures: Sequence[str] = MEASURES) -> dict[str, dict[str, float]]:
    """Every measure for every judged query, as ``{measure: {query id: value}}``; an unanswered query counts 0.

    All measures see one ranking: score descending in float32, ties by document id descending, as trec_eval does.
    Providers behind ir-measures break ties in different ways, so they are handed ranks instead of scores.

    Args:
        run: Query id to document id to score.
        qrels: Query id to document id to grade.
        measures: Names that ir-measures knows; the result is keyed by the names that it prints.

    Raises:
        ConfigError: If a measure is unknown.
        DataError: If the run answers none of the judged queries.
    """
    import ir_measures

    parsed = parse_measures(measures)
    if run and qrels and run.keys().isdisjoint(qrels):
        raise DataError(
            f"no query of the run is judged: the run has {len(run)}, such as {next(iter(run))!r}, the judgements have "
            f"{len(qrels)}, such as {next(iter(qrels))!r}; check that both come from the same collection"
        )
    # One of the providers, gdeval, takes numbers only for ids of queries, and adds its mean as a query of its own.
    numbers = {query: str(number) for number, query in enumerate(qrels)}
    queries = dict(zip(numbers.values(), numbers, strict=True))
    ranks = {numbers[query]: _ranks(scores) for query, scores in run.items() if query in numbers}
    judged = {numbers[query]: grades for query, grades in qrels.items()}
    values: dict[str, dict[str, float]] = {str(measure): dict.fromkeys(qrels, 0.0) for measure in parsed}
    names = {measure: str(measure) for measure in parsed}
    for number, measure, value in ir_measures.iter_calc(parsed, judged, ranks):
        if number in queries:
            values[names[measure]][queries[number]] = float(value)
    return values


def ceilings(
    qrels: Qrels, missing: Qrels, measures: Sequence[str] = MEASURES, k: int = 100
) -> dict[str, dict[str, float]]:
    """The most that a ranking can reach where judgements name documents that the corpus lacks.

    As ``per_query`` gives it, over every query with a positive judgement of any document: the value of the ranking that
    puts the best of those that exist first. Below 1 the difference is the corpus's fault, not the model's.

    Args:
        qrels: Query id to document id to grade, of documents that exist.
        missing: The same of documents that do not.
        measures: Names that ir-measures knows.
        k: Length of the rankings.
    """
    best = {
        query: {
            document: float(grade)
            for document, grade in sorted(grades.items(), key=lambda judged: judged[1], reverse=True)[:k]
            if grade > 0
        }
        for query, grades in qrels.items()
    }
    return per_query(best, all_judgements(qrels, missing), measures)


def all_judgements(qrels: Qrels, missing: Qrels) -> dict[str, dict[str, int]]:
    """The judgements as their file has them, of documents that exist or do not; only queries with a positive one."""
    both = {query: {**qrels.get(query, {}), **missing.get(query, {})} for query in dict.fromkeys([*qrels, *missing])}
    return {query: grades for query, grades in both.items() if any(grade > 0 for grade in grades.values())}


def parse_measures(names: Sequence[str]) -> list[Measure]:
    """The measures of ir-measures by these names, such as ``nDCG@10``; check names with it before long work.

    Raises:
        ConfigError: If a name is unknown, lacks its cutoff, or no installed provider computes it; all are named.
    """
    import ir_measures

    _register()
    measures, unknown = [], []
    for name in names:
        try:
            measure = ir_measures.parse_measure(name)
            supported = ir_measures.DefaultPipeline.supports(measure)
        except (NameError, ValueError, KeyError, TypeError, AssertionError):  # what ir-measures 0.4 raises
            supported = False
        if supported:
            measures.append(measure)
        else:
            unknown.append(f"{name!r}{_suggestion(name)}")
    if unknown:
        raise ConfigError(
            f"unknown measure {', '.join(unknown)}; expected names such as {', '.join(MEASURES)}, AP, P@5"
        )
    return measures


def _register() -> None:
    """Teach ir-measures the measure of multi-hop questions that it lacks; recall of the supports is its ``R``."""
    import ir_measures

    if ALL_SUPPORTS not in ir_measures.measures.registry:
        measure = ir_measures.define(
            _all_supports, ALL_SUPPORTS, short_desc="Whether every relevant document is among the first k."
        )
        ir_measures.measures.register(measure, name=ALL_SUPPORTS)


def _all_supports(qrels: Any, run: Any) -> Iterable[tuple[str, float]]:
    """By query, 1 where every relevant document is in the run, else 0; both are data frames, the run cut at k."""
    supports = qrels[qrels["relevance"] > 0]
    needed = supports.groupby("query_id").size()
    found = supports.merge(run, on=["query_id", "doc_id"]).groupby("query_id").size()
    return (found.reindex(needed.index, fill_value=0) == needed).astype(float).items()


def _ranks(scores: Mapping[str, float]) -> dict[str, int]:
    """Document id to a score that falls by one from each rank to the next, without ties."""
    ordered = sorted(zip(array("f", scores.values()), scores, strict=True), reverse=True)
    return dict(zip((document for _, document in ordered), range(len(ordered), 0, -1), strict=True))


def _suggestion(name: str) -> str:
    import ir_measures

    known = {known.lower(): known for known in (*ir_measures.measures.registry, *MEASURES)}
    for part in (name.lower(), name.lower().partition("@")[0]):
        for close in get_close_matches(part, known, 1):
            return f" (did you mean {known[close]}?)" if known[close] != name else ""
    return ""
