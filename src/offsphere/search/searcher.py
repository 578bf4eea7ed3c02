"""What can be searched: one index, or several as if they were one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol, overload

import numpy as np

from offsphere.encoders import encode
from offsphere.errors import ConfigError, UsageError
from offsphere.evaluation.ranking import Ranking
from offsphere.search.begin import Asked, resolve
from offsphere.search.hits import Hit
from offsphere.similarity import Similarity

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from offsphere.data import Collection


class View(Protocol):
    """Documents as they are at one moment. A position is one in ``ids``, -1 where there are fewer documents."""

    @property
    def ids(self) -> list[str]:
        """Every id, descending: the order in which ties are broken."""

    def best(
        self, queries: np.ndarray, similarity: Similarity, k: int, where: str | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Positions (Q, k) and float32 scores of the k best documents with text for raw queries (Q, n)."""

    def ranked(
        self, queries: np.ndarray, similarity: Similarity, k: int, collection: Collection
    ) -> tuple[np.ndarray, np.ndarray]:
        """As ``best``, exactly, with the documents without text and without those that the collection excludes."""

    def hits(self, queries: np.ndarray, positions: np.ndarray, scores: np.ndarray) -> list[list[Hit]]:
        """The documents at these positions (Q, k), for each query."""

    def explain(self, similarity: Similarity, where: str | None) -> str:
        """How a search would be answered, in words."""


class Searcher(ABC):
    """Documents with the encoder that embedded them."""

    @property
    @abstractmethod
    def encoder(self) -> SentenceTransformer:
        """The model, with the prompts and the length limit that the documents were embedded with."""

    @property
    @abstractmethod
    def similarity(self) -> Similarity:
        """What search ranks under unless it is asked for something else."""

    @property
    @abstractmethod
    def model(self) -> str:
        """What the encoder was opened with when the documents were embedded."""

    @property
    @abstractmethod
    def prompts(self) -> dict[str, str]:
        """What stands before each ``query`` and each ``document``."""

    @property
    @abstractmethod
    def ids(self) -> list[str]:
        """Every id, descending: the order in which ties are broken."""

    @abstractmethod
    def count(self) -> int:
        """Documents stored."""

    @abstractmethod
    def _filled(self) -> View:
        """The documents as they are now; at least one."""

    @overload
    def search(self, text: str, k: int = ..., similarity: Asked = ..., where: str | None = ...) -> list[Hit]: ...

    @overload
    def search(
        self, text: list[str], k: int = ..., similarity: Asked = ..., where: str | None = ...
    ) -> list[list[Hit]]: ...

    def search(
        self, text: str | list[str], k: int = 10, similarity: Asked = None, where: str | None = None
    ) -> list[Hit] | list[list[Hit]]:
        """The k best documents, best first: score descending, ties by id descending. Documents without text are none.

        Args:
            text: A query, or several, which then have a list of hits each.
            k: At most so many hits.
            similarity: What to rank under; the index's own if None.
            where: SQL over id, title, text, norm and metadata fields, such as ``lang = 'en' AND year > 1990``. Fields
                hold texts, numbers (compared in float64) or flags; lists, objects and fields of mixed kinds cannot be
                filtered by. A document without the field meets no condition on it but ``field IS NULL``.

        Raises:
            UsageError: If a query is empty.
            ConfigError: If k is below 1, or ``where`` is no condition on the columns.
            IndexFolderError: If the index is empty, or its model has changed.
        """
        texts = [text] if isinstance(text, str) else text
        if not all(one.strip() for one in texts):
            raise UsageError("a query without text has no direction, so every document scores 0; type some words")
        answers = self.search_embeddings(encode(self.encoder, texts, "query"), k, similarity, where)
        return answers[0] if isinstance(text, str) else answers

    def search_embeddings(
        self, queries: np.ndarray, k: int = 10, similarity: Asked = None, where: str | None = None
    ) -> list[list[Hit]]:
        """As ``search``, from the raw embeddings of queries (Q, n), as ``encode(index.encoder, ...)`` makes them."""
        if k < 1:
            raise ConfigError(f"k must be at least 1, found {k}")
        view = self._filled()
        found, scores = view.best(queries, self.resolve(similarity), min(k, len(view.ids)), where)
        return view.hits(queries, found, scores)

    def explain(self, similarity: Asked = None, where: str | None = None) -> str:
        """How ``search`` with these arguments is answered: exactly or approximately, and why; one sentence."""
        asked = self.resolve(similarity)
        other = "" if asked == self.similarity else f", not {self.similarity} as the index is meant"
        return f"ranked under {asked}{other}: {self._filled().explain(asked, where)}"

    def rank(self, collection: Collection, similarity: Asked = None, k: int = 100) -> Ranking:
        """The k best documents of the index for every query of a collection, as ``evaluation.ranking.rank`` has them.

        Documents without text take part with their score of 0, and the collection's exclusions are kept. If the index
        holds the documents of the collection, the run file is the one that evaluation writes.

        Args:
            collection: Its queries are encoded with the prompt of the index.
            similarity: What to rank under; the index's own if None.
            k: Length of the lists.

        Raises:
            ConfigError: If k is below 1.
            IndexFolderError: If the index is empty, or its model has changed.
        """
        if k < 1:
            raise ConfigError(f"k must be at least 1, found {k}")
        view = self._filled()
        queries = encode(self.encoder, [*collection.queries.values()], "query")
        found, scores = view.ranked(queries, self.resolve(similarity), k, collection)
        return Ranking([*collection.queries], view.ids, found, scores)

    def resolve(self, similarity: Asked) -> Similarity:
        """The similarity that is meant: the index's own for None and ``own``."""
        return resolve(similarity, self.similarity, self.model)
