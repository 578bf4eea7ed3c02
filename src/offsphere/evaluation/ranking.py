"""Exact ranking of a collection under a similarity, in the order of trec_eval, and TREC run files."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offsphere.errors import DataError, EncoderError
from offsphere.search.exact import BLOCK_SIZE, ExactSearch
from offsphere.similarity import Similarity

if TYPE_CHECKING:
    from offsphere.data import Collection


@dataclass(frozen=True)
class EmbeddedCollection:
    """A collection with the raw embeddings of its texts.

    Attributes:
        collection: The texts, judgements and exclusions.
        queries: (Q, n) float32, rows in the order of ``collection.queries``.
        documents: (D, n) float32, rows in the order of ``collection.documents``.

    Raises:
        EncoderError: If the shapes do not fit the collection, or a value is NaN or infinite.
    """

    collection: Collection
    queries: np.ndarray
    documents: np.ndarray

    def __post_init__(self) -> None:
        _check(self.queries, list(self.collection.queries), f"query embeddings of {self.collection.name}")
        _check(self.documents, list(self.collection.documents), f"document embeddings of {self.collection.name}")
        if self.queries.shape[1] != self.documents.shape[1]:
            raise EncoderError(
                f"queries of {self.collection.name} have {self.queries.shape[1]} dimensions and documents "
                f"{self.documents.shape[1]}; encode both with the same model"
            )


@dataclass(frozen=True)
class Ranking:
    """The best documents of every query, best first.

    Attributes:
        query_ids: Q ids, one per row.
        document_ids: All D ids; ``indices`` points into them.
        indices: (Q, k) int64, -1 where a query has fewer than k candidates.
        scores: (Q, k) float32, -inf where ``indices`` is -1.
    """

    query_ids: list[str]
    document_ids: list[str]
    indices: np.ndarray
    scores: np.ndarray

    def run(self) -> dict[str, dict[str, float]]:
        """The scores as ``{query id: {document id: score}}``, best first."""
        return {
            query: {self.document_ids[i]: score for i, score in zip(row, scores, strict=True) if i >= 0}
            for query, row, scores in zip(self.query_ids, self.indices.tolist(), self.scores.tolist(), strict=True)
        }


def rank(
    embedded: EmbeddedCollection, similarity: Similarity, k: int = 100, *, block_size: int = BLOCK_SIZE
) -> Ranking:
    """The k best documents of every query: score descending, ties by document id descending, as trec_eval orders.

    The collection's exclusions and the documents without text are taken out before the choice of the k best, so that
    the list is refilled. A zero vector scores 0. Scores are summed in float64 and
    rounded to float32 once, which hides the rounding of the sums: the ranking is the same for every block size and
    every order of the corpus.

    Args:
        embedded: Raw embeddings.
        similarity: What to rank under.
        k: Length of the list.
        block_size: Most documents scored at a time; changes memory and speed only.

    Raises:
        ConfigError: If k or block_size is below 1.
        EncoderError: If scores may not fit float32.
    """
    document_ids = list(embedded.collection.documents)
    order = _by_id(document_ids)
    search = ExactSearch(embedded.documents, gamma_d=similarity.gammas[1], order=order, block_size=block_size)
    queries = similarity.prepare_query(embedded.queries.astype(np.float64))
    indices, scores = search.search(queries, k, excluded_pairs(embedded.collection, document_ids))
    return Ranking(list(embedded.collection.queries), document_ids, indices, scores)


def rescored(ranking: Ranking, embedded: EmbeddedCollection, similarity: Similarity) -> Ranking:
    """The same documents with the scores of another similarity of the same gamma_d, bit for bit as ``rank`` gives them.

    For one query the ranking depends on gamma_d alone, so one search serves all similarities that share it.

    Args:
        ranking: Of ``rank``, under a similarity of this gamma_d.
        embedded: What was ranked.
        similarity: Whose scores to give.
    """
    kept = np.unique(ranking.indices[ranking.indices >= 0])
    order = _by_id([ranking.document_ids[row] for row in kept])
    search = ExactSearch(embedded.documents[kept], gamma_d=similarity.gammas[1], order=order)
    rows = np.where(ranking.indices >= 0, np.searchsorted(kept, ranking.indices), -1)
    queries = similarity.prepare_query(embedded.queries.astype(np.float64))
    found, scores = search.rescore(queries, rows, ranking.indices.shape[1])
    return replace(ranking, indices=np.where(found >= 0, kept[found], -1), scores=scores)


def write_trec(ranking: Ranking, path: Path, tag: str) -> None:
    """Write a TREC run file, ``query Q0 document rank score tag``; scores read back as exactly the same float32.

    White space in the tag becomes ``_``.

    Raises:
        DataError: If an id holds white space, which separates the columns of the format.
    """
    tag = "_".join(tag.split()) or "run"
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        for query, documents in ranking.run().items():
            _refuse_space(query, path)
            for place, (document, score) in enumerate(documents.items(), start=1):
                _refuse_space(document, path)
                file.write(f"{query} Q0 {document} {place} {score!r} {tag}\n")
    temporary.replace(path)


def read_trec(path: Path) -> dict[str, dict[str, float]]:
    """A TREC run file as ``{query id: {document id: score}}``; the column of ranks is ignored, as trec_eval does.

    Raises:
        DataError: If there is no such file, a line has not six columns, a score is no finite number, or a document
            comes twice for a query.
    """
    run: dict[str, dict[str, float]] = {}
    if not path.is_file():
        raise DataError("no such run file; expected lines of `query Q0 document rank score tag`", path)
    with path.open(encoding="utf-8-sig") as file:
        for line, text in enumerate(file, start=1):
            columns = text.split()
            if len(columns) != 6:
                raise DataError(f"expected `query Q0 document rank score tag`, found {text.strip()!r}", path, line)
            query, _, document, _, score, _ = columns
            documents = run.setdefault(query, {})
            if document in documents:
                raise DataError(f"document {document!r} comes twice for query {query!r}; keep one", path, line)
            documents[document] = _finite(score, path, line)
    return run


def _check(embeddings: np.ndarray, ids: list[str], what: str) -> None:
    if embeddings.ndim != 2 or len(embeddings) != len(ids):
        raise EncoderError(f"{what} have shape {embeddings.shape}; expected ({len(ids)}, dimension), one row per text")
    broken = np.flatnonzero(~np.isfinite(embeddings).all(axis=1))
    if len(broken):
        raise EncoderError(
            f"{len(broken)} of {len(ids)} {what} are NaN or infinite, such as {ids[broken[0]]!r}; "
            "encode in float32, and look for a diverged training or an empty text"
        )


def excluded_pairs(collection: Collection, ordered_ids: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Rows and positions of the documents that a query must not get, sorted by row.

    A document without text is never an answer: its score says nothing, and 0 is the best one where all are negative.
    """
    without_text = {document for document, text in collection.documents.items() if not text.strip()}
    if not (collection.excluded or collection.exclude_self or without_text):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    position = {document: i for i, document in enumerate(ordered_ids)}
    pairs = [
        (row, position[document])
        for row, query in enumerate(collection.queries)
        for document in without_text
        | collection.excluded.get(query, frozenset())
        | ({query} if collection.exclude_self else set())
        if document in position
    ]
    rows, positions = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return rows, positions


def _by_id(document_ids: list[str]) -> np.ndarray:
    """(D,) the order in which trec_eval breaks ties: by id, descending."""
    return np.array(sorted(range(len(document_ids)), key=document_ids.__getitem__, reverse=True), dtype=np.int64)


def _refuse_space(name: str, path: Path) -> None:
    if name.split() != [name]:
        raise DataError(f"{name!r} is empty or holds white space, which a TREC run file cannot store", path)


def _finite(score: str, path: Path, line: int) -> float:
    try:
        value = float(score)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"expected a finite score, found {score!r}", path, line)
    return value
