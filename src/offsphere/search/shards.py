"""Exact search over several indexes as if they were one: same documents, same scores, same order, same ties."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offsphere.errors import ConfigError, IndexFolderError
from offsphere.search.hits import Hit
from offsphere.search.index import Index
from offsphere.search.searcher import Searcher
from offsphere.search.snapshot import Snapshot
from offsphere.search.vectors import first, spare_memory
from offsphere.similarity import Similarity

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from offsphere.data import Collection

MADE_ALIKE = ("fingerprint", "similarity", "prompts", "max_length", "dimension")
"""What the manifests of shards must agree on. Where the model lies may differ."""


class Shards(Searcher):
    """Indexes whose documents were embedded alike, and which share none.

    The model is opened once, by the first of them. What ``index --approximate`` made is not used: the k best of each
    index are found exactly, and merged.

    Args:
        indexes: One or more. See ``open`` for the memory that they may take together.

    Raises:
        ConfigError: If there is none, or one is given twice.
        IndexFolderError: If two differ in model, similarity, prompts or length limit; names the difference.
    """

    def __init__(self, indexes: Sequence[Index]):
        folders = [index.folder.resolve() for index in indexes]
        if not folders or len(set(folders)) < len(folders):
            raise ConfigError(f"give each index once, found {[str(index.folder) for index in indexes]}")
        self.indexes = list(indexes)
        for index in self.indexes[1:]:
            _refuse_differences(self.indexes[0], index)
        self._merged: _Merged | None = None

    @classmethod
    def open(
        cls,
        folders: Sequence[str | Path],
        model: str | Path | None = None,
        *,
        device: str | None = None,
        memory: int | None = None,
    ) -> Shards:
        """The indexes in these folders; see ``Index.open``.

        Args:
            folders: What ``Index.create`` made.
            model: Where their model is now, if it has moved.
            device: Where to encode.
            memory: Bytes that all embeddings may take together, each index an equal part; half of what is available
                if None.
        """
        if not folders:
            raise ConfigError("give each index once, found none")
        each = (spare_memory() if memory is None else memory) // len(folders)
        opened = [
            Index.open(folder, None if number else model, device=device, memory=each)
            for number, folder in enumerate(folders)
        ]
        return cls(opened)

    @property
    def encoder(self) -> SentenceTransformer:
        """The model of the first index, and so of all."""
        return self.indexes[0].encoder

    @property
    def similarity(self) -> Similarity:
        """What search ranks under unless it is asked for something else."""
        return self.indexes[0].similarity

    @property
    def model(self) -> str:
        """What the encoder of the first index was opened with when it was made."""
        return self.indexes[0].model

    @property
    def prompts(self) -> dict[str, str]:
        """What stands before each ``query`` and each ``document``."""
        return self.indexes[0].prompts

    @property
    def ids(self) -> list[str]:
        """Every id of all indexes, descending: the order in which ties are broken.

        Raises:
            IndexFolderError: If a document is in two of them.
        """
        return self._filled().ids

    def count(self) -> int:
        """Documents stored in all of them."""
        return sum(index.count() for index in self.indexes)

    def _filled(self) -> _Merged:
        snapshots = [index.snapshot() for index in self.indexes]
        if self._merged is None or not self._merged.is_of(snapshots):
            self._merged = _Merged(snapshots)
        if not self._merged.ids:
            raise IndexFolderError(
                f"{', '.join(str(index.folder) for index in self.indexes)} hold no documents; add some with: offsphere "
                f"index {self.model} COLLECTION --out {self.indexes[0].folder}"
            )
        return self._merged


class _Merged:
    """The documents of several snapshots. A position is one in ``ids``, which are those of all, descending."""

    def __init__(self, snapshots: Sequence[Snapshot]):
        self._snapshots = snapshots
        every = list(chain.from_iterable(snapshot.ids for snapshot in snapshots))
        order = np.array(sorted(range(len(every)), key=every.__getitem__, reverse=True), np.int64)
        self.ids = [every[place] for place in order]
        counts = [len(snapshot.ids) for snapshot in snapshots]
        self._owner = np.repeat(np.arange(len(snapshots)), counts)[order]
        self._local = np.concatenate([np.arange(count) for count in counts])[order]
        for place, (one, other) in enumerate(pairwise(self.ids)):
            if one == other:
                found = " and ".join(str(snapshots[self._owner[at]].folder) for at in (place, place + 1))
                raise IndexFolderError(
                    f"document {one!r} is in {found}; every document must be in one index only. Delete it from the "
                    f"other with: offsphere index MODEL --out INDEX --delete {one!r}"
                )
        # Ids descend in every index as they do here, so these ascend, and ties keep their order.
        self._positions = [np.flatnonzero(self._owner == number) for number in range(len(snapshots))]

    def is_of(self, snapshots: Sequence[Snapshot]) -> bool:
        """Whether it still shows these."""
        return all(mine is now for mine, now in zip(self._snapshots, snapshots, strict=True))

    def best(
        self, queries: np.ndarray, similarity: Similarity, k: int, where: str | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k best documents with text of all snapshots; see ``Snapshot.exact``."""
        if where is not None:
            _refuse_unlike_fields(self._snapshots, where)
        return self._best(len(queries), k, lambda snapshot, most: snapshot.exact(queries, similarity, most, where))

    def ranked(
        self, queries: np.ndarray, similarity: Similarity, k: int, collection: Collection
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k best documents of all snapshots but those that the collection excludes; see ``Snapshot.ranked``."""
        return self._best(
            len(queries), k, lambda snapshot, most: snapshot.ranked(queries, similarity, most, collection)
        )

    def hits(self, queries: np.ndarray, positions: np.ndarray, scores: np.ndarray) -> list[list[Hit]]:
        """The documents at these positions (Q, k), -1 for none, each read from its own index."""
        owners = np.where(positions >= 0, self._owner[positions], -1)
        read = [
            snapshot.hits(queries, np.where(owners == number, self._local[positions], -1), scores)
            for number, snapshot in enumerate(self._snapshots)
        ]
        answers = []
        for row, owner in enumerate(owners):
            following = [iter(hits[row]) for hits in read]
            answers.append([next(following[number]) for number in owner[owner >= 0]])
        return answers

    def explain(self, similarity: Similarity, where: str | None) -> str:
        """How a search is answered, in words."""
        on_disk = sum(not snapshot.vectors.fits for snapshot in self._snapshots)
        unused = sum(snapshot.manifest.approximate is not None for snapshot in self._snapshots)
        notes = (f", {on_disk} of them read block by block, as they do not fit into memory" if on_disk else "") + (
            f" (shards are searched exactly; the approximate search of {unused} is not used)" if unused else ""
        )
        return f"exact search over {len(self.ids)} documents in {len(self._snapshots)} indexes{notes}"

    def _best(
        self, queries: int, k: int, ask: Callable[[Snapshot, int], tuple[np.ndarray, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray]:
        positions = np.full((queries, k), -1, np.int64)
        scores = np.full((queries, k), -np.inf, np.float32)
        for snapshot, places in zip(self._snapshots, self._positions, strict=True):
            if not len(places):
                continue
            local, found = ask(snapshot, min(k, len(places)))
            mine = np.where(local >= 0, places[local], -1)
            positions, scores = first(np.hstack([positions, mine]), np.hstack([scores, found]), k)
        return positions, scores


def _refuse_differences(one: Index, other: Index) -> None:
    differences = [
        f"{name} {getattr(one.manifest, name)} and {getattr(other.manifest, name)}"
        for name in MADE_ALIKE
        if getattr(one.manifest, name) != getattr(other.manifest, name)
    ]
    if differences:
        raise IndexFolderError(
            f"{one.folder} and {other.folder} cannot be searched as one, as they differ: {'; '.join(differences)}.\n"
            "Scores of different models or similarities cannot be compared; index the documents of one of them again, "
            "with the settings of the other"
        )


def _refuse_unlike_fields(snapshots: Sequence[Snapshot], where: str) -> None:
    """A condition on a field must mean the same in every index; one index of all documents would treat it otherwise."""
    fields = [snapshot.manifest.fields for snapshot in snapshots]
    for name in sorted(set().union(*fields)):
        kinds = [one.get(name, "no such field") for one in fields]
        if len(set(kinds)) > 1 and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", where, re.IGNORECASE):
            said = "; ".join(
                f"{snapshot.folder}: {kind or 'not to filter by'}"
                for snapshot, kind in zip(snapshots, kinds, strict=True)
            )
            raise IndexFolderError(
                f"cannot filter by {name!r}, which is not the same field in every index ({said}). Indexes made of the "
                "same data with index --shard I/N have the same fields"
            )
