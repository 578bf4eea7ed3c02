"""A retrieval collection: documents, the queries of one split, judgements and exclusions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from offsphere.data.fingerprint import digest
from offsphere.errors import ConfigError, DataError


@dataclass(frozen=True)
class Collection:
    """Documents, the judged queries of one split, and what is relevant to each; every id is a string.

    Attributes:
        name: What results call it.
        split: Which queries these are: train, dev, test.
        documents: Document id to "title text".
        queries: Query id to text, only the queries that the split judges.
        qrels: Query id to {document id: grade}; every query has at least one positive grade, every document exists.
        excluded: Per query, documents that are never ranked for it.
        exclude_self: Whether a document with the id of the query is never ranked for it (as in ArguAna).
        prompts: What to put before a ``query`` or a ``document``.
        licence: The licence of the data, if the collection states it.
        path: The folder it came from.
        notes: One sentence for each thing that a reader of the results must know about the data.
        missing: Judgements of documents that the corpus lacks, by query, also by queries that have no others.

    Raises:
        DataError: If queries and judgements do not belong together.
    """

    name: str
    split: str
    documents: dict[str, str]
    queries: dict[str, str]
    qrels: dict[str, dict[str, int]]
    excluded: dict[str, frozenset[str]] = field(default_factory=dict)
    exclude_self: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    licence: str | None = None
    path: Path | None = None
    notes: tuple[str, ...] = ()
    missing: dict[str, dict[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unpaired = sorted(self.queries.keys() ^ self.qrels.keys())
        if unpaired:
            raise DataError(f"{self.name}: query {unpaired[0]!r} needs both a text in queries and judgements in qrels")
        for query, grades in self.qrels.items():
            if not any(grade > 0 for grade in grades.values()):
                raise DataError(f"{self.name}: query {query!r} has no positive judgement; leave it out")
            if not grades.keys() <= self.documents.keys():
                missing = min(grades.keys() - self.documents.keys())
                raise DataError(f"{self.name}: query {query!r} judges document {missing!r}, which is not there")

    def sample(self, max_queries: int | None, max_documents: int | None, seed: int = 0) -> Collection:
        """A smaller collection: queries drawn at random, their relevant documents, and others drawn at random.

        The draw depends on the ids and the seed, not on the order of the files. A larger sample of queries with the
        same seed holds the smaller one. Every relevant document of a kept query stays, even beyond ``max_documents``.

        Args:
            max_queries: How many queries to keep at most; None keeps all.
            max_documents: How many documents to keep at most; None keeps all.
            seed: Of the draw.

        Raises:
            ConfigError: If no query is asked for.
        """
        if max_queries is not None and max_queries < 1:
            raise ConfigError(f"a sample needs at least one query, found max_queries {max_queries}")
        random = np.random.default_rng(seed)
        drawn_queries = set(_shuffled(self.queries, random)[:max_queries])
        queries = {query: text for query, text in self.queries.items() if query in drawn_queries}
        kept = {document for query in queries for document, grade in self.qrels[query].items() if grade > 0}
        others = [document for document in _shuffled(self.documents, random) if document not in kept]
        kept.update(others if max_documents is None else others[: max(0, max_documents - len(kept))])
        if len(queries) == len(self.queries) and len(kept) == len(self.documents):
            return self
        note = (
            f"a sample of {len(queries)} of {len(self.queries)} queries and {len(kept)} of {len(self.documents)} "
            f"documents (seed {seed})"
        )
        return replace(
            self,
            documents={document: text for document, text in self.documents.items() if document in kept},
            queries=queries,
            qrels={query: {d: grade for d, grade in self.qrels[query].items() if d in kept} for query in queries},
            excluded={query: ids for query, ids in self.excluded.items() if query in queries},
            notes=(*self.notes, note),
            missing={query: grades for query, grades in self.missing.items() if query in queries},
        )

    def without_prompts(self, sides: Iterable[str]) -> Collection:
        """The collection without its prompts of these sides, because the user gave others."""
        return replace(self, prompts={side: prompt for side, prompt in self.prompts.items() if side not in set(sides)})

    def never_ranked(self) -> str:
        """What is never ranked, in words; empty where everything is."""
        pairs = sum(map(len, self.excluded.values()))
        rules = [
            *(["a document with the id of the query"] if self.exclude_self else []),
            *([f"{pairs:,} documents that it excludes for single queries"] if pairs else []),
        ]
        return f"never ranked: {'; '.join(rules)}" if rules else ""

    def describe(self) -> dict[str, Any]:
        """Its size, what it excludes, its prompts and notes, as environment.json keeps them."""
        return {
            "split": self.split,
            "queries": len(self.queries),
            "documents": len(self.documents),
            "judgements": sum(map(len, self.qrels.values())),
            "exclude_self": self.exclude_self,
            "excluded": sum(map(len, self.excluded.values())),
            "prompts": self.prompts,
            "notes": list(self.notes),
        }

    def fingerprint(self) -> str:
        """A SHA-256 of ids, texts, judgements and exclusions; files, compression and order do not matter."""
        return digest(self._content())

    def _content(self) -> Iterator[object]:
        yield from sorted(self.documents.items())
        yield "queries"
        yield from sorted(self.queries.items())
        yield "qrels"
        yield from ((query, sorted(grades.items())) for query, grades in sorted(self.qrels.items()))
        yield "excluded", self.exclude_self
        yield from ((query, sorted(ids)) for query, ids in sorted(self.excluded.items()))


def _shuffled(ids: dict[str, str], random: np.random.Generator) -> list[str]:
    ordered = sorted(ids)
    return [ordered[place] for place in random.permutation(len(ordered))]
