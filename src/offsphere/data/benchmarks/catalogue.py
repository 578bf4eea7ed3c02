"""Which benchmarks there are: their names, published sizes, self-match rules and task prompts.

``catalogue.csv`` has a row for each. Sizes are those of the paper's table of datasets (arXiv 2602.09229) and, for what
it does not list, of ir_datasets' metadata; the two agree where both have one. A document with the id of the query is
left out only where the set itself is made that way (``exclude_self``): ArguAna and Quora, whose queries are documents
(https://github.com/beir-cellar/beir/issues/72). The prompts are those of BRIGHT's own configurations, as mteb's BRIGHT
v1.1 tasks have them.
"""

from __future__ import annotations

import csv
import difflib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

STS = "STS"
"""The category of scored sentence pairs; all others are retrieval collections."""


@dataclass(frozen=True)
class Benchmark:
    """One public data set.

    Attributes:
        name: What to type, such as ``beir/scifact``.
        category: What its mean belongs to: in-domain, BEIR, BRIGHT, BRIGHT long, multi-hop, NanoBEIR or STS.
        source: Where it is published: ``ir_datasets:ID`` or ``hub:OWNER/NAME``.
        queries: How many queries, or sentence pairs, are published.
        documents: How many documents; None for sentence pairs.
        exclude_self: Whether a document with the id of the query is never ranked for it.
        query_prompt: The prompt that the task comes with; empty where it has none.
    """

    name: str
    category: str
    source: str
    queries: int
    documents: int | None
    exclude_self: bool
    query_prompt: str

    @property
    def slug(self) -> str:
        """The name that results and run files use."""
        return self.name.replace("/", "-")

    @property
    def split(self) -> str:
        """The split that results are published on."""
        return "dev" if "/dev" in f"{self.name}{self.source}" else "test"


def _read() -> dict[str, Benchmark]:
    lines = files(__package__).joinpath("catalogue.csv").read_text(encoding="utf-8").splitlines()
    return {
        row["name"]: Benchmark(
            name=row["name"],
            category=row["category"],
            source=row["source"],
            queries=int(row["queries"]),
            documents=int(row["documents"]) if row["documents"] else None,
            exclude_self=row["exclude_self"] == "yes",
            query_prompt=row["query_prompt"],
        )
        for row in csv.DictReader(lines)
    }


CATALOGUE: dict[str, Benchmark] = _read()
"""Every benchmark by its name."""

_OF_SLUG = {benchmark.slug: benchmark for benchmark in CATALOGUE.values()}


def find_benchmark(source: str | Path) -> Benchmark | None:
    """The benchmark of this name; None where there is none, or a file or folder here is called so."""
    found = CATALOGUE.get(str(source))
    return found if found and not Path(source).exists() else None


def expand(source: str) -> list[str]:
    """The benchmarks that a name stands for: ``bright`` for twelve, ``beir/cqadupstack`` too; others are themselves.

    What is published in two families, as HotpotQA is, belongs to both.
    """
    if Path(source).exists() or source in CATALOGUE:
        return [source]
    return [name for name in CATALOGUE if name.startswith(f"{source}/")] or [source]


def category_of(dataset: str) -> str | None:
    """The category of a collection by the name that results give it; None where it is no benchmark."""
    return _OF_SLUG[dataset].category if dataset in _OF_SLUG else None


def suggestion(source: str | Path) -> str:
    """What to type in place of something that looks like a benchmark; empty where it does not."""
    name = str(source)
    alike = [one for one in CATALOGUE if name.rpartition("/")[2] in one.split("/")]  # such as scifact
    if close := [*alike, *(one for one in difflib.get_close_matches(name, CATALOGUE, 3, 0.75) if one not in alike)]:
        return f"did you mean {', '.join(close[:4])}? `offsphere evaluate --list-benchmarks` shows all"
    family = name.partition("/")[0]
    if members := [one for one in CATALOGUE if one.startswith(f"{family}/")]:
        return f"{family} has {', '.join(one.removeprefix(f'{family}/') for one in members)}"
    return ""
