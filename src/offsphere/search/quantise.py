"""Quantisation that keeps length: the direction in 8 bits or 1 bit a dimension, the length apart in float32.

Whole vectors share one range of values, so one long vector takes the digits of every short one, or is cut off; a sign
has no length at all. A direction has no such spread, and the score is the product of both parts:
(q . d) / |d|^gamma_d = |d|^(1 - gamma_d) (q . d/|d|).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Literal

import numpy as np

from offsphere.errors import ConfigError
from offsphere.search.candidates import Candidates
from offsphere.search.exact import ExactSearch, Pairs
from offsphere.search.prefix import truncate
from offsphere.similarity import Similarity, norms

if TYPE_CHECKING:
    from offsphere.evaluation import EmbeddedCollection

Kind = Literal["int8", "binary"]
KINDS: tuple[Kind, ...] = ("int8", "binary")
RESCORE = 4
LEVELS = 127
BLOCK = 2**13
QUERIES_AT_ONCE = 512
SAMPLE = 10_000


@dataclass(frozen=True)
class Fidelity:
    """How far quantised documents are from the prepared ones; zero vectors, which are kept as they are, aside.

    Attributes:
        cosine_mean: Of the angle between a document and what is stored of it.
        cosine_min: The worst one.
        length_error_mean: Of the length, as a share.
        length_error_max: The worst one.
    """

    cosine_mean: float
    cosine_min: float
    length_error_mean: float
    length_error_max: float


class Quantised:
    """Documents as codes, and the search over them; made by ``quantise``.

    Attributes:
        kind: ``int8`` or ``binary``.
        similarity: What documents and queries are scored under.
        dimension: Of the prefix that was quantised.
        codes: (D, dimension) int8, or (D, dimension / 8 rounded up) uint8 with one bit a dimension, 1 for positive.
        weights: (D,) float32: a prepared document is its codes (-127..127, or -1 and 1) times this.
        keeps_length: Whether the direction was quantised and the length kept, or the whole vector.
    """

    def __init__(
        self,
        documents: np.ndarray,
        kind: Kind,
        similarity: Similarity,
        codes: np.ndarray,
        weights: np.ndarray,
        keeps_length: bool,
    ):
        self.kind, self.similarity, self.keeps_length = kind, similarity, keeps_length
        self.codes, self.weights, self.dimension = codes, weights, documents.shape[1]
        self._exact = ExactSearch(documents, gamma_d=similarity.gammas[1])
        self._documents = documents

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def bytes_per_vector(self) -> int:
        """Of the codes and, where it is kept, the length; the float32 vectors for rescoring may stay on disk."""
        return self.codes.shape[1] + (4 if self.keeps_length else 0)

    def search(self, queries: np.ndarray, k: int, *, rescore: int = RESCORE, excluded: Pairs | None = None) -> Pairs:
        """The k best documents of every query, best first.

        Args:
            queries: (Q, n) raw embeddings, cut to the prefix here.
            k: Length of the answer.
            rescore: Candidates by code, as a multiple of k, that are scored exactly from the float32 documents. With 0
                the answer has the scores that the codes give.
            excluded: Pairs that no answer holds, see ``ExactSearch.search``.

        Returns:
            (Q, k) rows in int64, -1 where there are fewer than k, and (Q, k) scores in float32, there -inf. Of equal
            scores the lower row wins.

        Raises:
            ConfigError: If k is below 1 or rescore below 0.
            EncoderError: If the queries are no matrix of finite numbers with at least the prefix's dimensions.
        """
        if k < 1 or rescore < 0:
            raise ConfigError(f"k must be at least 1 and rescore at least 0, found {k} and {rescore}")
        with np.errstate(invalid="ignore"):  # an infinite query is named below
            prepared = self.similarity.prepare_query(truncate(queries, self.dimension).astype(np.float64))
        rows, scores = self._exact.rescore(prepared, np.empty((len(prepared), 0), np.int64), k)
        candidates = self._candidates(prepared.astype(np.float32), min(k * max(1, rescore), len(self)), excluded)
        if rescore:
            return self._exact.rescore(prepared, candidates.rows, k)
        best = np.lexsort((candidates.rows, -candidates.scores))
        rows[:, : candidates.size] = np.take_along_axis(candidates.rows, best, axis=1)
        scores[:, : candidates.size] = np.take_along_axis(candidates.scores, best, axis=1)
        return rows, scores

    def decode(self, start: int, stop: int) -> np.ndarray:
        """(stop - start, dimension) float32: what is stored of these prepared documents."""
        return self._values(start, stop) * self.weights[start:stop, None]

    def fidelity(self) -> Fidelity:
        """How far the stored documents are from the prepared ones, over all of them."""
        cosines, errors = [np.empty(0)], [np.empty(0)]
        for start in range(0, len(self), BLOCK):
            raw = self._documents[start : start + BLOCK].astype(np.float64)
            stored = self.decode(start, start + BLOCK).astype(np.float64)[norms(raw) > 0]
            prepared = self.similarity.prepare_document(raw[norms(raw) > 0])
            cosines.append(Similarity(1.0, 1.0).pairwise(prepared, stored))
            errors.append(np.abs(norms(stored) / norms(prepared) - 1))
        cosine, error = np.concatenate(cosines), np.concatenate(errors)
        if not len(cosine):
            return Fidelity(1.0, 1.0, 0.0, 0.0)
        return Fidelity(float(cosine.mean()), float(cosine.min()), float(error.mean()), float(error.max()))

    def _values(self, start: int, stop: int) -> np.ndarray:
        """The codes of some rows as float32 numbers."""
        codes = self.codes[start:stop]
        if self.kind == "int8":
            return codes.astype(np.float32)
        return np.unpackbits(codes, axis=1, count=self.dimension).astype(np.float32) * 2 - 1

    def _candidates(self, queries: np.ndarray, size: int, excluded: Pairs | None) -> Candidates:
        """The best by code."""
        candidates = Candidates(len(queries), size)
        columns, rows = (np.asarray(side, np.int64) for side in (([], []) if excluded is None else excluded))
        for start in range(0, len(self), BLOCK):
            values = self._values(start, start + BLOCK)
            for first in range(0, len(queries), QUERIES_AT_ONCE):
                scores = values @ queries[first : first + QUERIES_AT_ONCE].T
                scores *= self.weights[start : start + BLOCK, None]
                row, column = rows - start, columns - first
                inside = (row >= 0) & (row < len(scores)) & (column >= 0) & (column < scores.shape[1])
                scores[row[inside], column[inside]] = -np.inf
                candidates.add(scores, first, start)
        return candidates


def quantise(
    documents: np.ndarray,
    kind: Kind,
    similarity: Similarity,
    *,
    dimension: int | None = None,
    keep_length: bool = True,
) -> Quantised:
    """Documents as codes of their direction, with their length apart.

    ``int8`` divides each direction by its largest component and rounds to -127..127; what is stored is codes / |codes|,
    so the length is that of the document whatever the rounding does. ``binary`` keeps the signs. Memory beside the
    codes is a block of 8192 documents.

    Args:
        documents: (D, n) raw embeddings in float32, which may be an ``np.memmap``; they are kept for rescoring.
        kind: ``int8`` or ``binary``.
        similarity: What documents and queries are scored under.
        dimension: Of a Matryoshka prefix. Embeddings are cut first, and the exponents apply to the prefix's length.
        keep_length: False for the usual quantisation of the whole prepared vector, to compare with: signs, or one range
            of values for every component of every vector, beyond which 1 component in n + 1 is cut off (the default
            of Lucene's scalar quantisation).

    Raises:
        ConfigError: If the kind is unknown or the dimension below 1.
        EncoderError: If the documents are no matrix of finite numbers with at least so many dimensions.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of quantisation {kind!r}; expected one of {', '.join(KINDS)}")
    documents = truncate(documents, np.shape(documents)[-1] if dimension is None else dimension)
    ExactSearch(documents)  # names what cannot be quantised, before anything is computed from it
    width = documents.shape[1]
    whole = None if keep_length else _whole(documents, similarity)
    codes = np.empty((len(documents), width), np.int8) if kind == "int8" else _bits(np.empty((len(documents), width)))
    weights = np.empty(len(documents), np.float32)
    for start in range(0, len(documents), BLOCK):
        block = slice(start, start + BLOCK)
        raw = documents[block].astype(np.float64)
        prepared = similarity.prepare_document(raw)
        if kind == "int8":
            largest = np.abs(prepared).max(axis=1, keepdims=True) if whole is None else whole.range
            codes[block] = _levels(prepared, largest)
            lengths = norms(codes[block].astype(np.float64))
            constant = None if whole is None else whole.range / LEVELS
        else:
            codes[block] = _bits(prepared)
            lengths = np.full(len(raw), width**0.5)
            constant = None if whole is None else whole.length / width**0.5
        own = np.divide(norms(prepared), lengths, out=np.zeros(len(raw)), where=lengths > 0)
        weights[block] = own if constant is None else constant
    return Quantised(documents, kind, similarity, codes, weights, keep_length)


@dataclass(frozen=True)
class Measured:
    """One way to quantise, measured on a collection; see ``measure``.

    Attributes:
        kind: ``float32``, ``int8`` or ``binary``.
        keeps_length: Whether the length stands apart; True for float32.
        rescore: Candidates scored from float32, as a multiple of k; 0 for none.
        bytes_per_vector: What is searched.
        ndcg: nDCG@k on average over the queries.
        overlap: Share of the exact k best that is found, on average over the queries.
        fidelity: Of the documents; None for float32.
    """

    kind: str
    keeps_length: bool
    rescore: int
    bytes_per_vector: int
    ndcg: float
    overlap: float
    fidelity: Fidelity | None


def measure(
    embedded: EmbeddedCollection,
    similarity: Similarity,
    *,
    kinds: Sequence[Kind] = KINDS,
    rescore: Sequence[int] = (0, RESCORE),
    dimension: int | None = None,
    k: int = 10,
) -> list[Measured]:
    """float32, and each kind with its length apart and of the whole vector, by what they find and what they weigh.

    Args:
        embedded: Raw embeddings of a collection.
        similarity: What to score under.
        kinds: Of quantisation.
        rescore: Each is measured.
        dimension: Of a Matryoshka prefix, in which float32 is measured as well.
        k: Of nDCG@k and of the overlap.
    """
    from offsphere.evaluation import Ranking, per_query
    from offsphere.evaluation.ranking import excluded_pairs

    collection = embedded.collection
    ids = list(collection.documents)
    excluded = excluded_pairs(collection, ids)
    name = f"nDCG@{k}"

    def ndcg(found: Pairs) -> float:
        run = Ranking(list(collection.queries), ids, *found).run()
        return fmean(per_query(run, collection.qrels, (name,))[name].values())

    width = embedded.documents.shape[1] if dimension is None else dimension
    documents, queries = truncate(embedded.documents, width), truncate(embedded.queries, width)
    prepared = similarity.prepare_query(queries.astype(np.float64))
    exact = ExactSearch(documents, gamma_d=similarity.gammas[1]).search(prepared, k, excluded)
    measured = [Measured("float32", True, 0, 4 * width, ndcg(exact), 1.0, None)]
    for kind in kinds:
        for keep_length in (True, False):
            quantised = quantise(documents, kind, similarity, keep_length=keep_length)
            fidelity = quantised.fidelity()
            for multiple in rescore:
                found = quantised.search(queries, k, rescore=multiple, excluded=excluded)
                shares = (_overlap(one, other) for one, other in zip(found[0], exact[0], strict=True))
                weight = quantised.bytes_per_vector
                measured.append(Measured(kind, keep_length, multiple, weight, ndcg(found), fmean(shares), fidelity))
    return measured


def _overlap(found: np.ndarray, exact: np.ndarray) -> float:
    """Share of the exact rows that are found; 1 where there is none to find."""
    wanted = set(exact[exact >= 0].tolist())
    return len(wanted & set(found.tolist())) / len(wanted) if wanted else 1.0


def _levels(values: np.ndarray, largest: np.ndarray | float) -> np.ndarray:
    """int8 levels of values up to ``largest``; 0 where that is 0."""
    scaled = np.divide(LEVELS * values, largest, out=np.zeros_like(values), where=np.asarray(largest) > 0)
    return np.clip(np.rint(scaled), -LEVELS, LEVELS).astype(np.int8)


def _bits(values: np.ndarray) -> np.ndarray:
    """One bit a value, 1 for positive, rows packed by themselves."""
    return np.packbits(values > 0, axis=1)


@dataclass(frozen=True)
class _Whole:
    """What all prepared vectors have in common: one range of components, and a length."""

    range: float
    length: float


def _whole(documents: np.ndarray, similarity: Similarity) -> _Whole:
    """Measured on at most ``SAMPLE`` documents, evenly chosen."""
    rows = np.unique(np.linspace(0, len(documents) - 1, min(SAMPLE, len(documents)), dtype=np.int64))
    prepared = similarity.prepare_document(documents[rows].astype(np.float64))
    if not len(rows):
        return _Whole(0.0, 0.0)
    inside = 1 - 1 / (documents.shape[1] + 1)
    return _Whole(float(np.quantile(np.abs(prepared), inside)), float(norms(prepared).mean()))
