"""Which similarity wins against cosine, by how much, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from offsphere.errors import RunError
from offsphere.evaluation.results import PRETRAINED, QueryValue
from offsphere.evaluation.significance import (
    bootstrap_difference,
    holm,
    macro_weighted,
    paired_randomisation,
    paired_t,
)

COSINE = "cosine"
SIGNIFICANT = 0.05
IN_DOMAIN, OUT_OF_DOMAIN, ALL = "in domain", "out of domain", "all"


@dataclass(frozen=True)
class Difference:
    """One similarity against cosine on one scope; values are fractions from 0 to 1.

    Attributes:
        similarity: The similarity trained and scored with.
        scope: ``in domain``, ``out of domain``, ``all`` (only where both of these exist), or the name of a dataset.
            A scope of several datasets is the mean of their means.
        n_queries: How many queries were compared, the same for both.
        n_seeds: How many trainings of each; with one, the interval and p cover the choice of queries only.
        value: The mean of the similarity.
        baseline: The mean of cosine.
        difference: value minus baseline.
        low: The lower end of the 95 % interval of the difference.
        high: Its upper end.
        p: Two-sided p-value of no difference.
        p_holm: The same after Holm's correction, over the similarities of a scope, or for datasets over datasets and
            similarities together.
    """

    similarity: str
    scope: str
    n_queries: int
    n_seeds: int
    value: float
    baseline: float
    difference: float
    low: float
    high: float
    p: float
    p_holm: float


@dataclass(frozen=True)
class Verdict:
    """The answer. Where nothing beats cosine, the numbers are those of the closest other similarity.

    Attributes:
        similarity: The similarity to train with.
        beats_cosine: Whether it is another one than cosine.
        scope: Where it was decided: out of domain where there is such a dataset, else in domain.
        difference: Fraction from 0 to 1, against cosine on that scope.
        low: The lower end of its 95 % interval.
        high: Its upper end.
        p_holm: Its corrected p-value.
        sentence: The verdict in words, in points (hundredths).
    """

    similarity: str
    beats_cosine: bool
    scope: str
    difference: float
    low: float
    high: float
    p_holm: float
    sentence: str


@dataclass(frozen=True)
class Comparison:
    """All similarities of one encoder against cosine, on one measure.

    Attributes:
        model: The encoder.
        measure: The measure, such as ``nDCG@10``.
        in_domain: Names of the datasets that belong to the training data.
        out_of_domain: Names of the others.
        means: ``means[similarity][scope or dataset]`` is the mean over seeds, and the standard deviation over seeds
            (None with one seed).
        differences: Every similarity but cosine, on every scope and dataset.
        verdict: The answer.
    """

    model: str
    measure: str
    in_domain: tuple[str, ...]
    out_of_domain: tuple[str, ...]
    means: Mapping[str, Mapping[str, tuple[float, float | None]]]
    differences: tuple[Difference, ...]
    verdict: Verdict

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain dicts, lists and numbers, for JSON."""
        return asdict(self)


Values = dict[str, dict[str, np.ndarray]]
"""Similarity to dataset to (seeds, queries); seeds and queries in the same order for every similarity."""


def compare_similarities(
    model: str,
    values: Iterable[QueryValue],
    in_domain: Iterable[str],
    *,
    measure: str = "nDCG@10",
    seed: int = 0,
) -> Comparison:
    """Every similarity of one encoder against cosine, and a verdict.

    The verdict is the similarity with the highest mean on the deciding scope (out of domain where there is such a
    dataset) among those whose 95 % interval lies above 0 and whose corrected p-value is below 0.05; without one it
    is cosine. With one seed p comes from paired randomisation over queries; with several from a t-test that takes
    queries and seeds as random (``paired_t``), because queries alone would take a lucky training for a better
    similarity.

    Args:
        model: The encoder; rows of other encoders and of ``pretrained`` are left out.
        values: One value per similarity, seed, dataset, measure and query.
        in_domain: Names of the datasets that belong to the training data; those without values are left out.
        measure: The measure to compare by.
        seed: Of the resampling.

    Raises:
        RunError: If there are no values, none for cosine, or the seeds, datasets or queries of two similarities differ.
    """
    arrays = _arrays(model, values, measure)
    datasets, inside = list(arrays[COSINE]), set(in_domain)
    members = {
        IN_DOMAIN: [name for name in datasets if name in inside],
        OUT_OF_DOMAIN: [name for name in datasets if name not in inside],
    }
    scopes = {scope: names for scope, names in members.items() if names}
    if len(scopes) == 2:
        scopes[ALL] = datasets
    means = {name: _means(per_dataset, scopes) for name, per_dataset in arrays.items()}
    of_scopes = [_corrected(_against_cosine(arrays, means, scope, names, seed)) for scope, names in scopes.items()]
    of_datasets = _corrected(
        list(chain.from_iterable(_against_cosine(arrays, means, name, [name], seed) for name in datasets))
    )
    differences = (*chain.from_iterable(of_scopes), *of_datasets)
    return Comparison(
        model=model,
        measure=measure,
        in_domain=tuple(members[IN_DOMAIN]),
        out_of_domain=tuple(members[OUT_OF_DOMAIN]),
        means=means,
        differences=differences,
        verdict=_verdict(differences, measure, OUT_OF_DOMAIN if members[OUT_OF_DOMAIN] else IN_DOMAIN),
    )


def _arrays(model: str, values: Iterable[QueryValue], measure: str) -> Values:
    """The values as arrays with matched seeds and queries, or an error that names what does not match."""
    cells: dict[str, dict[str, dict[int | None, dict[str, float]]]] = {}
    for row in values:
        if row.model == model and row.measure == measure and row.similarity != PRETRAINED:
            seeds = cells.setdefault(row.similarity, {}).setdefault(row.dataset, {})
            seeds.setdefault(row.seed, {})[row.query_id] = row.value
    if COSINE not in cells:
        found = f"only {', '.join(cells)}" if cells else "none"
        raise RunError(
            f"no {measure} values of {model} for cosine, which the others are compared with (found {found}); "
            "run `offsphere compare` with cosine among its similarities"
        )
    cosine = cells[COSINE]
    clash = {IN_DOMAIN, OUT_OF_DOMAIN, ALL} & cosine.keys()
    if clash:
        raise RunError(f"a dataset is named {clash.pop()!r}, which names a group of datasets here; rename it")
    for similarity, per_dataset in cells.items():
        if per_dataset.keys() != cosine.keys():
            raise RunError(f"cosine was evaluated on {_listed(cosine)}, {similarity} on {_listed(per_dataset)}")
    return {name: {data: _matched(name, data, cells) for data in cosine} for name in cells}


def _matched(
    similarity: str, dataset: str, cells: dict[str, dict[str, dict[int | None, dict[str, float]]]]
) -> np.ndarray:
    own = cells[similarity][dataset]
    expected = next(iter(cells[COSINE].values()))
    if own.keys() != expected.keys():
        raise RunError(
            f"{dataset}: {similarity} has the seeds {_listed(own)}, cosine has {_listed(expected)}; "
            "finish the run before comparing"
        )
    queries = next(iter(cells[COSINE][dataset].values()))
    for per_query in own.values():
        if per_query.keys() != queries.keys():
            example = next(iter(per_query.keys() ^ queries.keys()))
            raise RunError(
                f"{dataset}: {similarity} was evaluated on {len(per_query)} queries and cosine on {len(queries)}, and "
                f"only one of them on {example!r}; evaluate both on the same queries"
            )
    return np.array([[own[seed][query] for query in sorted(queries)] for seed in expected])


def _means(per_dataset: dict[str, np.ndarray], scopes: dict[str, list[str]]) -> dict[str, tuple[float, float | None]]:
    of_seeds = {name: array.mean(1) for name, array in per_dataset.items()}
    of_seeds = {
        scope: np.mean([of_seeds[name] for name in names], axis=0) for scope, names in scopes.items()
    } | of_seeds
    return {
        name: (float(seeds.mean()), float(seeds.std(ddof=1)) if len(seeds) > 1 else None)
        for name, seeds in of_seeds.items()
    }


def _against_cosine(
    arrays: Values,
    means: Mapping[str, Mapping[str, tuple[float, float | None]]],
    scope: str,
    datasets: list[str],
    seed: int,
) -> list[Difference]:
    """Every other similarity against cosine on one scope, not yet corrected; all see the same resamples."""
    candidates = [name for name in arrays if name != COSINE]
    if not candidates:
        return []
    cosine = [arrays[COSINE][name] for name in datasets]
    others = [np.stack([arrays[candidate][name] for candidate in candidates]) for name in datasets]
    low, high = bootstrap_difference(others, cosine, seed=seed)
    n_seeds = len(cosine[0])
    if n_seeds > 1:
        p = paired_t(others, cosine)
    else:
        only = [macro_weighted([array[..., 0, :] for array in side]) for side in (others, cosine)]
        p = paired_randomisation(*only, seed=seed)
    return [
        Difference(
            similarity=candidate,
            scope=scope,
            n_queries=sum(array.shape[1] for array in cosine),
            n_seeds=n_seeds,
            value=means[candidate][scope][0],
            baseline=means[COSINE][scope][0],
            difference=means[candidate][scope][0] - means[COSINE][scope][0],
            low=float(low[i]),
            high=float(high[i]),
            p=float(p[i]),
            p_holm=float(p[i]),
        )
        for i, candidate in enumerate(candidates)
    ]


def _corrected(differences: list[Difference]) -> list[Difference]:
    adjusted = holm([difference.p for difference in differences])
    return [replace(difference, p_holm=p) for difference, p in zip(differences, adjusted, strict=True)]


def _verdict(differences: tuple[Difference, ...], measure: str, scope: str) -> Verdict:
    deciding = [difference for difference in differences if difference.scope == scope]
    if not deciding:
        sentence = "cosine; no other similarity was trained, so there is nothing to compare it with"
        return Verdict(COSINE, False, scope, 0.0, 0.0, 0.0, 1.0, sentence)
    winners = [difference for difference in deciding if _beyond_noise(difference) and difference.low > 0]
    best = max(winners or deciding, key=lambda difference: difference.value)
    effect = f"{_points(best.difference)} {measure} {scope} {_interval(best)}, {_p(best.p_holm)}"
    if winners:
        at_home = [d for d in differences if (d.similarity, d.scope) == (best.similarity, IN_DOMAIN) and d is not best]
        parts = [best.similarity, effect, *(_in_domain(difference) for difference in at_home), _evidence(best)]
    else:
        parts = [COSINE, f"nothing beats it beyond noise: the closest is {best.similarity}, {effect}", _evidence(best)]
    return Verdict(
        similarity=parts[0],
        beats_cosine=bool(winners),
        scope=scope,
        difference=best.difference,
        low=best.low,
        high=best.high,
        p_holm=best.p_holm,
        sentence="; ".join(parts),
    )


def _beyond_noise(difference: Difference) -> bool:
    return difference.p_holm < SIGNIFICANT and not difference.low <= 0 <= difference.high


def _in_domain(difference: Difference) -> str:
    shown = f"({_points(difference.difference)} {_interval(difference)})"
    if not _beyond_noise(difference):
        return f"in domain cosine is within noise {shown}"
    return f"in domain it {'also beats' if difference.difference > 0 else 'loses to'} cosine {shown}"


def _evidence(difference: Difference) -> str:
    if difference.n_seeds == 1:
        return f"{difference.n_queries:,} queries, one seed: the interval covers the choice of queries only"
    return f"{difference.n_queries:,} queries, {difference.n_seeds} seeds"


def _interval(difference: Difference) -> str:
    return f"[{_points(difference.low, '')}, {_points(difference.high, '')}]"


def _points(fraction: float, sign: str = "+") -> str:
    return f"{round(100 * fraction, 1) + 0.0:{sign}.1f}"  # adding zero turns -0.0 into 0.0


def _p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(str, names))
