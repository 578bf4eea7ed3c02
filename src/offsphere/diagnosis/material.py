"""What a diagnosis looks at: a collection, training pairs, or scored sentence pairs, and the task they stand for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from offsphere.data import Collection, available_splits, load_collection, load_pairs
from offsphere.data.beir import is_collection
from offsphere.data.fingerprint import text_id
from offsphere.data.scored_pairs import SPLITS, ScoredPairs, load_scored_pairs
from offsphere.diagnosis.symmetry import detect_task, is_symmetric

SAME = 0.8
"""Scored pairs at or above this share of the highest score count as saying the same (STS-B: 4 of 5)."""


@dataclass(frozen=True)
class Material:
    """Data as a collection, with its task.

    Attributes:
        collection: Scored sentence pairs have the first sentences as queries and the second ones as documents.
        task: Declared or detected.
        evidence: How it is known.
    """

    collection: Collection
    task: str
    evidence: str

    def sample(self, max_queries: int | None, max_documents: int | None, seed: int) -> Material:
        """The same with a smaller collection (see ``Collection.sample``)."""
        return replace(self, collection=self.collection.sample(max_queries, max_documents, seed))


def load_material(
    source: str,
    split: str | None = None,
    task: str | None = None,
    *,
    prompts: Iterable[str] = (),
    strict: bool = False,
) -> Material:
    """A collection, pairs or scored sentence pairs, with the task that was declared or else detected.

    Args:
        source: A collection, a file or dataset of pairs (see ``load_pairs``), or a file with the columns sentence1,
            sentence2 and score; for these also the folder of a ``SPLIT.jsonl``.
        split: The first of train, dev, test that there is, if None.
        task: One of ``symmetry.SYMMETRIC``.
        prompts: Sides whose prompt the user gave, which then comes before the collection's.
        strict: Refuse judgements of texts that do not exist.

    Raises:
        ConfigError: If there is no such task.
        DataError: If the data is malformed, with file and line.
    """
    if task is not None:
        is_symmetric(task)
    path = Path(source).expanduser()
    if path.is_dir() and is_collection(path):
        collection = load_collection(source, split or _first_split(available_splits(source)), strict=strict)
        collection = collection.without_prompts(prompts)
    elif scored := load_scored_pairs(path, split):
        return Material(_collection_of(scored), task or "sts", "declared" if task else "it has sentence1 and sentence2")
    else:
        collection = load_pairs(source, split or "train").as_collection(split or "train")
    if task is not None:
        return Material(collection, task, "declared")
    return Material(collection, *detect_task([*collection.queries.values()], [*collection.documents.values()]))


def _first_split(available: list[str]) -> str:
    return next((split for split in (*SPLITS, *available) if split in available), "test")


def _collection_of(pairs: ScoredPairs) -> Collection:
    scores = pairs.scores or [1.0] * len(pairs)
    highest = max(scores)
    queries: dict[str, str] = {}
    documents: dict[str, str] = {}
    qrels: dict[str, dict[str, int]] = {}
    for first, second, score in zip(pairs.first, pairs.second, scores, strict=True):
        documents[text_id(second)] = second
        if score >= SAME * highest:
            queries[text_id(first)] = first
            qrels.setdefault(text_id(first), {})[text_id(second)] = 1
    return Collection(pairs.name, pairs.split, documents, queries, qrels, path=pairs.path)
