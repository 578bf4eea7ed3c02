"""Measures of a ranking, computed by ir-measures (trec_eval's own code), one value per query."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from offsphere.errors import ConfigError, DataError

if TYPE_CHECKING:
    from ir_measures import Measure

MEASURES = ("nDCG@10", "R@100", "RR@10")

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
    ranks = {query: _ranks(scores) for query, scores in run.items() if query in qrels}
    values: dict[str, dict[str, float]] = {str(measure): dict.fromkeys(qrels, 0.0) for measure in parsed}
    names = {measure: str(measure) for measure in parsed}
    for query, measure, value in ir_measures.iter_calc(parsed, qrels, ranks):
        values[names[measure]][query] = float(value)
    return values


def parse_measures(names: Sequence[str]) -> list[Measure]:
    """The measures of ir-measures by these names, such as ``nDCG@10``; check names with it before long work.

    Raises:
        ConfigError: If a name is unknown, lacks its cutoff, or no installed provider computes it; all are named.
    """
    import ir_measures

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
