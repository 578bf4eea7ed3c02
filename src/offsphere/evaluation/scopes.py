"""What a comparison of several collections gives a mean of: all of them, categories as in the paper, and each one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from offsphere.data.benchmarks import category_of, find_benchmark
from offsphere.data.settings import read_settings
from offsphere.errors import ConfigError
from offsphere.evaluation.comparison import ALL
from offsphere.evaluation.significance import macro_weighted

PARTS = "beir-cqadupstack"
"""The benchmark whose twelve parts are collections of their own; BEIR's mean has their mean as one value."""


def collection_name(source: str | Path) -> str:
    """What results call the collection of this folder, or this benchmark."""
    if benchmark := find_benchmark(source):
        return benchmark.slug
    folder = Path(source).expanduser()
    return read_settings(folder).name or folder.resolve().name


def scopes_of(
    names: Sequence[str], categories: Mapping[str, Sequence[str]] | None = None
) -> dict[str, tuple[str, ...]]:
    """What gets a mean, with the collections that it is over: ``all``, the categories, then each collection.

    Args:
        names: The collections.
        categories: Name to collections. Benchmarks also have their own, as in the paper: in-domain, BEIR, BRIGHT,
            multi-hop and NanoBEIR, where two or more of one are given beside others.

    Raises:
        ConfigError: If two of all these have one name, or a category names a collection that is not there, or twice.
    """
    given = categories or {}
    own = dict.fromkeys(filter(None, map(category_of, names)))
    members = {category: tuple(name for name in names if category_of(name) == category) for category in own}
    published = {name: of for name, of in members.items() if 1 < units_of(of) < units_of(names) and name not in given}
    taken = [*([ALL] if len(names) > 1 else []), *given, *names]
    if twice := sorted({name for name in taken if taken.count(name) > 1}):
        raise ConfigError(f"{twice[0]!r} names two of: the mean over all, categories, collections; rename one")
    for category, chosen in given.items():
        if unknown := [name for name in chosen if name not in names]:
            raise ConfigError(
                f"category {category!r} names {unknown[0]!r}, which is not in --data; expected {', '.join(names)}"
            )
        if not chosen or len(set(chosen)) < len(chosen):
            raise ConfigError(f"category {category!r} must name each of its collections once, found {chosen!r}")
    everything = {ALL: tuple(names)} if len(names) > 1 else {}
    chosen_means = {name: tuple(of) for name, of in given.items()}
    return everything | published | chosen_means | {name: (name,) for name in names}


def units_of(names: Sequence[str]) -> int:
    """How many values a mean over these collections is over: the parts of CQADupStack count as one."""
    return len({_unit(name) for name in names})


def _unit(name: str) -> str:
    return PARTS if name.startswith(f"{PARTS}-") else name


def arrays_of(names: Sequence[str], arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """(..., queries) for each value of a mean; parts of one are weighted to give the mean of their means."""
    parts: dict[str, list[np.ndarray]] = {}
    for name in names:
        parts.setdefault(_unit(name), []).append(arrays[name])
    return [
        macro_weighted(of) * sum(array.shape[-1] for array in of) / len(of) if len(of) > 1 else of[0]
        for of in parts.values()
    ]
