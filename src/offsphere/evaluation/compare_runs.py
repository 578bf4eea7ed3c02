"""Run files of several systems against the first one: tests, intervals, effect sizes, and wins query by query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from offsphere.data.beir import load_collection
from offsphere.data.benchmarks import expand
from offsphere.data.collection import Collection
from offsphere.errors import DataError
from offsphere.evaluation.measures import parse_measures, per_query
from offsphere.evaluation.ranking import read_trec
from offsphere.evaluation.run_files import System, find_systems
from offsphere.evaluation.scopes import arrays_of, collection_name, scopes_of
from offsphere.evaluation.significance import (
    bootstrap_difference,
    holm,
    macro_weighted,
    paired_randomisation,
    paired_t,
)
from offsphere.evaluation.ties import average_ties
from offsphere.progress import Progress, Silent

EQUAL = 1e-9
"""Two values of one query that differ by less are a tie: sums in another order, not another ranking."""

Values = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Dataset to system to query to value; every system of a dataset has the same queries."""


@dataclass(frozen=True)
class RunScore:
    """One run file measured; values are fractions from 0 to 1.

    Attributes:
        system: Whose run it is.
        dataset: The name of the collection.
        value: The mean over the judged queries, ties by document id as in trec_eval; an unanswered query counts 0.
        tie_averaged: The same averaged over all orders of tied documents; None where the measure has no such form.
        n_queries: How many judged queries the mean covers.
        answered: How many of them the run has a document for.
        tied: How many have a tie among the documents that the measure sees.
        unjudged: Queries of the run that the judgements do not know; left out.
        unknown: Lines of the run whose document the collection does not have; they keep their rank.
        excluded: Lines of the run that the collection's own rules forbid; left out.
    """

    system: str
    dataset: str
    value: float
    tie_averaged: float | None
    n_queries: int
    answered: int
    tied: int
    unjudged: int
    unknown: int
    excluded: int


@dataclass(frozen=True)
class RunDifference:
    """One system against the first one, on one scope.

    Attributes:
        system: The system.
        scope: A dataset, a category, or ``all`` where there are several datasets. A scope of several is the mean of
            their means.
        n_queries: How many queries were compared.
        value: The mean of the system.
        baseline: The mean of the first one.
        difference: value minus baseline.
        low: The lower end of the 95 % bootstrap interval of the difference, over queries.
        high: Its upper end.
        p: Two-sided p-value of the paired randomisation test.
        p_t: Of the paired t-test.
        p_holm: ``p`` after Holm's correction, over the systems of a scope, or for datasets over datasets and systems
            together.
        effect: Cohen's d_z, the mean of the differences over their standard deviation; of several datasets the mean.
            None where the differences do not vary but are not 0 either, or where there is one query.
        wins: Queries where the system is better.
        ties: Queries where both are equal.
        losses: Queries where the first one is better.
    """

    system: str
    scope: str
    n_queries: int
    value: float
    baseline: float
    difference: float
    low: float
    high: float
    p: float
    p_t: float
    p_holm: float
    effect: float | None
    wins: int
    ties: int
    losses: int


@dataclass(frozen=True)
class RunComparison:
    """Several systems on one measure.

    Attributes:
        measure: As ir-measures prints it.
        split: Of the judgements.
        baseline: The first system.
        systems: All of them, the baseline first.
        scopes: Scope to its datasets: ``all``, the categories, then each dataset.
        means: ``means[scope][system]``, of several datasets the mean of their means.
        scores: One for each run file.
        differences: Every other system on every scope.
        notes: One sentence for each thing that a reader must know about the runs.
        values: ``values[dataset][system][query]``, not part of ``to_dict``.
    """

    measure: str
    split: str
    baseline: str
    systems: tuple[str, ...]
    scopes: Mapping[str, tuple[str, ...]]
    means: Mapping[str, Mapping[str, float]]
    scores: tuple[RunScore, ...]
    differences: tuple[RunDifference, ...]
    notes: tuple[str, ...]
    values: Values

    def to_dict(self) -> dict[str, Any]:
        """The comparison without its values per query, as plain dicts, lists and numbers, for JSON."""
        found = asdict(replace(self, values={}))
        del found["values"]
        return found


def compare_runs(
    runs: Sequence[Path | str],
    data: Sequence[str],
    *,
    split: str = "test",
    measure: str = "nDCG@10",
    categories: Mapping[str, Sequence[str]] | None = None,
    unanswered_as_zero: bool = False,
    strict: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> RunComparison:
    """Every system against the first one, from TREC run files of one or several collections.

    Args:
        runs: Run files and folders of them (see ``find_systems``); the first system is the baseline.
        data: Folders of collections, and names of benchmarks.
        split: Of the judgements.
        measure: A name that ir-measures knows.
        categories: See ``scopes_of``.
        unanswered_as_zero: Compare runs that answer different queries: where a run has no document for a query that
            another one answers, it counts 0.
        strict: Refuse judgements of documents that the corpus lacks.
        seed: Of the resampling.
        progress: Told what happens.

    Raises:
        ConfigError: If the measure or a collection of a category is unknown, or two scopes share a name.
        DataError: If a run file is malformed or belongs to another collection, or runs answer different queries.
        UsageError: If there are less than two systems.
    """
    progress = progress or Silent()
    measure = str(parse_measures([measure])[0])
    data = list(chain.from_iterable(map(expand, data)))
    names = [collection_name(one) for one in data]
    scopes = scopes_of(names, categories)
    systems = find_systems(runs, names)
    values: dict[str, dict[str, dict[str, float]]] = {}
    scores: list[RunScore] = []
    notes: list[str] = []
    done = progress.start("read runs", len(data))
    for number, source in enumerate(data, 1):
        collection = load_collection(source, split, strict=strict)
        notes += [f"{collection.name}: {note}" for note in collection.notes]
        answered = {system.name: _answered(system, collection) for system in systems}
        notes += _same_queries(answered, collection, unanswered_as_zero)
        values[collection.name] = {}
        for system in systems:
            score, by_query = _score(system, answered[system.name], collection, measure)
            scores.append(score)
            notes += _notes(score)
            values[collection.name][system.name] = by_query
        done(number)
    order = tuple(system.name for system in systems)
    return compare_values(values, order, scopes, measure=measure, split=split, scores=scores, notes=notes, seed=seed)


def compare_values(
    values: Values,
    systems: Sequence[str],
    scopes: Mapping[str, Sequence[str]],
    *,
    measure: str,
    split: str,
    scores: Sequence[RunScore] = (),
    notes: Sequence[str] = (),
    seed: int = 0,
) -> RunComparison:
    """Every system against the first one, from one value a query; all systems see the same resamples.

    Args:
        values: Dataset to system to query to value, the same queries for every system of a dataset.
        systems: Their names, the baseline first.
        scopes: Name to datasets; those that are a dataset of this name are corrected together.
        measure: What the values are.
        split: Of the judgements.
        scores: What else is known of the runs.
        notes: The same in sentences.
        seed: Of the resampling.
    """
    arrays = {dataset: _array(of_systems, systems) for dataset, of_systems in values.items()}
    of_scopes = {scope: arrays_of(names, arrays) for scope, names in scopes.items()}
    means = {
        scope: dict(zip(systems, np.mean([array.mean(1) for array in of], axis=0).tolist(), strict=True))
        for scope, of in of_scopes.items()
    }
    found = {scope: _against_baseline(of, means[scope], systems, scope, seed) for scope, of in of_scopes.items()}
    of_datasets = _corrected(list(chain.from_iterable(found[scope] for scope in found if scope in arrays)))
    of_groups = chain.from_iterable(_corrected(found[scope]) for scope in found if scope not in arrays)
    return RunComparison(
        measure=measure,
        split=split,
        baseline=systems[0],
        systems=tuple(systems),
        scopes={scope: tuple(names) for scope, names in scopes.items()},
        means=means,
        scores=tuple(scores),
        differences=(*of_groups, *of_datasets),
        notes=tuple(notes),
        values=values,
    )


@dataclass(frozen=True)
class _Run:
    """A run without what the collection forbids, and how much that was."""

    documents: dict[str, dict[str, float]]
    excluded: int


def _answered(system: System, collection: Collection) -> _Run:
    path = system.files[collection.name]
    run = read_trec(path)
    if not run:
        raise DataError("the run file is empty", path)
    found = chain.from_iterable(run.values())
    if collection.documents.keys().isdisjoint(found):
        raise DataError(
            f"no document of the run is in {collection.name}: the run has ids such as {_first_document(run)!r}, the "
            f"collection such as {next(iter(collection.documents))!r}; check that both come from the same collection",
            path,
        )
    allowed = {query: _allowed(query, documents, collection) for query, documents in run.items()}
    before, after = (sum(map(len, each.values())) for each in (run, allowed))
    return _Run({query: documents for query, documents in allowed.items() if documents}, before - after)


def _first_document(run: Mapping[str, Mapping[str, float]]) -> str:
    return next(document for documents in run.values() for document in documents)


def _allowed(query: str, documents: dict[str, float], collection: Collection) -> dict[str, float]:
    forbidden = collection.excluded.get(query, frozenset()) | ({query} if collection.exclude_self else set())
    return {document: score for document, score in documents.items() if document not in forbidden}


def _same_queries(runs: Mapping[str, _Run], collection: Collection, unanswered_as_zero: bool) -> list[str]:
    """A note where queries are answered by no run; an error where by some only, unless that counts 0."""
    judged = collection.qrels.keys()
    answered = {name: run.documents.keys() & judged for name, run in runs.items()}
    by_any = set().union(*answered.values())
    by_all = set(judged).intersection(*answered.values())
    if by_any != by_all and not unanswered_as_zero:
        counts = ", ".join(f"{name} {len(queries):,}" for name, queries in answered.items())
        raise DataError(
            f"{collection.name}: the runs answer different queries, of {len(judged):,} judged ones {counts}; only "
            f"some answer {min(by_any - by_all)!r}. Complete the runs, or give --unanswered-as-zero to count a query "
            "that a run does not answer as 0, as trec_eval -c does"
        )
    if missing := len(judged) - len(by_any):
        return [f"{collection.name}: judged queries that no run answers: {missing:,} of {len(judged):,}"]
    return []


def _score(system: System, run: _Run, collection: Collection, measure: str) -> tuple[RunScore, dict[str, float]]:
    try:
        values = per_query(run.documents, collection.qrels, [measure])[measure]
    except DataError as error:
        raise DataError(str(error), system.files[collection.name]) from error
    ties = average_ties(run.documents, collection.qrels, measure, values)
    score = RunScore(
        system=system.name,
        dataset=collection.name,
        value=fmean(values.values()),
        tie_averaged=None if ties.values is None else fmean(ties.values.values()),
        n_queries=len(values),
        answered=len(run.documents.keys() & values.keys()),
        tied=len(ties.queries),
        unjudged=len(run.documents.keys() - values.keys()),
        unknown=sum(len(documents.keys() - collection.documents.keys()) for documents in run.documents.values()),
        excluded=run.excluded,
    )
    return score, values


def _notes(score: RunScore) -> list[str]:
    counts = {
        "judged queries without an answer, which count 0": score.n_queries - score.answered,
        "queries without judgements, left out": score.unjudged,
        "documents that the collection does not have, which keep their rank": score.unknown,
        "documents that the collection excludes for their query, left out": score.excluded,
    }
    return [f"{score.dataset}, {score.system}: {what}: {number:,}" for what, number in counts.items() if number]


def _array(of_systems: Mapping[str, Mapping[str, float]], systems: Sequence[str]) -> np.ndarray:
    queries = of_systems[systems[0]]
    return np.array([[of_systems[name][query] for query in queries] for name in systems])


def _against_baseline(
    arrays: list[np.ndarray], means: Mapping[str, float], systems: Sequence[str], scope: str, seed: int
) -> list[RunDifference]:
    """Every other system against the first, not yet corrected; arrays are (systems, queries), one a dataset."""
    baseline, others = [array[:1] for array in arrays], [array[1:] for array in arrays]
    one_seed = [array[:, None] for array in others], [array[:, None] for array in baseline]
    low, high = bootstrap_difference(*one_seed, seed=seed)
    p = paired_randomisation(macro_weighted(others), macro_weighted(baseline), seed=seed)
    p_t = paired_t(*one_seed)
    differences = [other - first for other, first in zip(others, baseline, strict=True)]
    return [
        RunDifference(
            system=name,
            scope=scope,
            n_queries=sum(array.shape[1] for array in arrays),
            value=means[name],
            baseline=means[systems[0]],
            difference=means[name] - means[systems[0]],
            low=float(low[i]),
            high=float(high[i]),
            p=float(p[i]),
            p_t=float(p_t[i]),
            p_holm=float(p[i]),
            effect=_mean_effect([array[i] for array in differences]),
            wins=sum(int((array[i] > EQUAL).sum()) for array in differences),
            ties=sum(int((np.abs(array[i]) <= EQUAL).sum()) for array in differences),
            losses=sum(int((array[i] < -EQUAL).sum()) for array in differences),
        )
        for i, name in enumerate(systems[1:])
    ]


def _mean_effect(differences: list[np.ndarray]) -> float | None:
    effects = [paired_effect(one) for one in differences]
    known = [effect for effect in effects if effect is not None]
    return fmean(known) if len(known) == len(effects) else None


def paired_effect(differences: np.ndarray) -> float | None:
    """Cohen's d_z of paired differences: their mean over their standard deviation (Cohen 1988, section 2.3.5).

    Args:
        differences: (n,) one a query.

    Returns:
        0 where no pair differs; None where it is not defined, because there is one pair or all differ by the same.
    """
    if not np.abs(differences).max() > EQUAL:
        return 0.0
    spread = differences.std(ddof=1) if len(differences) > 1 else 0.0
    return float(differences.mean() / spread) if spread > EQUAL else None


def _corrected(differences: list[RunDifference]) -> list[RunDifference]:
    adjusted = holm([difference.p for difference in differences])
    return [replace(difference, p_holm=p) for difference, p in zip(differences, adjusted, strict=True)]
