"""Exact search by inner product: scanned in float32, scored in float64, and proven to have missed nothing.

A scan in float32 is off by at most gamma_m |q| |d| whatever the order of its additions, with m a little above the
dimension, gamma_m = m u / (1 - m u) and u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition,
section 3.1). So a document whose scanned score lies further than that below the k-th best exact score cannot belong to
the k best. A query whose candidates do not prove this is scanned once more, and every document that the bound leaves in
doubt is scored in float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from offsphere.errors import ConfigError, EncoderError
from offsphere.search.candidates import Candidates
from offsphere.similarity import Similarity, norms

BLOCK_SIZE = 2**18
BLOCK_BYTES = 2**25
SMALL_BLOCK = 2**14
"""Documents from which on a matrix product gains nothing by more of them, but by more queries."""
FEW_QUERIES = (1, 2, 3, 4)
"""For so many, one dot product after another reads the documents faster than a matrix product does."""
VALUES_AT_ONCE = 2**17  # 1 MB of float64: what is scored in float64 stays in the cache
LONGEST = 1e30
LARGEST = float(np.finfo(np.float32).max)
ABSENT = np.iinfo(np.int64).min  # below the key of every document
UNIT = 2.0**-24  # roundings of float32 are off by at most this, as a share
SMALLEST = 2.0**-126  # and by this near zero, even where the processor takes smaller numbers for zero

Pairs = tuple[np.ndarray, np.ndarray]


class ExactSearch:
    """The k documents of largest inner product with each query, whatever the block size and the number of threads.

    Scores are summed in float64 and rounded to float32 once. Of equal scores the lower row wins, or the earlier one in
    ``order``. Documents are neither copied nor changed, and may be an ``np.memmap`` far larger than memory: they are
    read once here, for their lengths, and once a search from front to back, twice where a query is in doubt.

    Memory beside documents, queries and answer, for any number of them: 40 bytes a document, twice the answer, and up
    to 8 ``block_bytes`` in a search (about 1.5 unless many scores tie).

    Args:
        documents: (D, n) prepared vectors (see ``Similarity.prepare_document``), or raw ones with ``gamma_d``. Another
            floating dtype than float32 is converted a block at a time.
        gamma_d: How much of the documents' length is still to be removed: nothing of prepared vectors, the similarity's
            gamma_d of raw ones. The scores are then those of vectors prepared in float64, and no copy is made.
        order: (D,) every row once; the earlier one wins a tie. None for the order of the rows.
        block_size: Most documents scanned at a time; changes memory and speed only.
        block_bytes: Of scores held at a time; changes memory and speed only.
        threads: For one to four queries at a time and for what is scored in float64; other products follow NumPy's own
            setting. None for OMP_NUM_THREADS or, where that is not set, every processor.

    Raises:
        ConfigError: If block_size, block_bytes or threads is below 1, or order does not name every row once.
        EncoderError: If the documents are no matrix of floating numbers, or a row is NaN, infinite or longer than 1e30.
    """

    def __init__(
        self,
        documents: np.ndarray,
        *,
        gamma_d: float = 0.0,
        order: np.ndarray | None = None,
        block_size: int = BLOCK_SIZE,
        block_bytes: int = BLOCK_BYTES,
        threads: int | None = None,
    ):
        threads = _threads() if threads is None else threads
        if min(block_size, block_bytes, threads) < 1:
            raise ConfigError(
                "block_size, block_bytes and threads must be at least 1, "
                f"found {block_size}, {block_bytes} and {threads}"
            )
        _check_matrix(documents, "documents")
        self._documents = documents
        self._block_size, self._block_bytes, self._threads = block_size, block_bytes, threads
        self._order = np.arange(len(documents)) if order is None else np.asarray(order, np.int64)
        self._place = _inverse(self._order, len(documents))
        lengths = _checked_lengths(documents, "documents")
        # A vector of one component has its own length, so this is |d|^(1 - gamma_d): the length once prepared.
        reach = Similarity(0.0, gamma_d).prepare_document(lengths[:, None])[:, 0]
        self._reach = float(reach.max(initial=0.0))
        self._weights = np.divide(reach, lengths, out=np.zeros_like(lengths), where=lengths > 0) if gamma_d else None
        self._scan_weights, self._errors = _scan_weights(reach, self._weights, documents.shape[1])
        self._error = float(self._errors.max(initial=0.0))

    def __len__(self) -> int:
        return len(self._documents)

    def search(self, queries: np.ndarray, k: int, excluded: Pairs | None = None) -> Pairs:
        """The k best documents of every query, best first.

        Args:
            queries: (Q, n) prepared queries (see ``Similarity.prepare_query``), float32 or float64.
            k: Length of the answer.
            excluded: (rows of queries, rows of documents), two arrays of equal length: pairs that no answer holds. The
                answer is refilled to k.

        Returns:
            (Q, k) rows of documents in int64, -1 where there are fewer than k, and (Q, k) scores in float32, there
            -inf.

        Raises:
            ConfigError: If k is below 1.
            EncoderError: If the queries are no matrix of finite numbers of the documents' dimension, or so long that
                scores would not fit float32.
        """
        if k < 1:
            raise ConfigError(f"k must be at least 1, found {k}")
        lengths = self._check_queries(queries)
        # The length of a query changes no ranking of its own, and without it no scan overflows.
        scanned = Similarity(1.0, 0.0).prepare_query(np.asarray(queries, np.float64)).astype(np.float32)
        pairs = _sorted(excluded)
        candidates = Candidates(len(queries), min(k + 16 + k // 8, len(self)))
        with _workers(self._threads) as each:
            for first, start, block in self._scan(scanned, candidates.size, pairs, each):
                candidates.add(block, first, start)
            found, scores = self._best(queries, candidates.rows, k, each)
        doubtful = np.flatnonzero(~self._proven(lengths, candidates, scores[:, -1]))
        self._settle(queries, scanned, lengths, pairs, doubtful, found, scores)
        return found, scores

    def rescore(self, queries: np.ndarray, rows: np.ndarray, k: int) -> Pairs:
        """The k best of some documents for every query, best first, with the same scores as ``search`` gives them.

        Args:
            queries: (Q, n) prepared queries.
            rows: (Q, C) rows of different documents, such as an approximate search found; -1 for none.
            k: Length of the answer.

        Returns:
            Rows and scores as ``search`` returns them.

        Raises:
            ConfigError: If k is below 1.
            EncoderError: As ``search``.
        """
        if k < 1:
            raise ConfigError(f"k must be at least 1, found {k}")
        self._check_queries(queries)
        with _workers(self._threads) as each:
            return self._best(queries, rows, k, each)

    def _check_queries(self, queries: np.ndarray) -> np.ndarray:
        """(Q,) lengths in float64, once everything about them is known to be right."""
        _check_matrix(queries, "queries")
        if queries.shape[1] != self._documents.shape[1]:
            raise EncoderError(
                f"queries have {queries.shape[1]} dimensions and documents {self._documents.shape[1]}; "
                "encode both with the same model"
            )
        lengths = _checked_lengths(queries, "queries")
        if (longest := lengths.max(initial=0.0)) * self._reach > LARGEST:
            raise EncoderError(
                f"scores may reach {longest * self._reach:.1e}, more than float32 holds ({LARGEST:.1e}): the longest "
                f"query has length {longest:.1e}, the longest document {self._reach:.1e}; look for a diverged training"
            )
        return lengths

    def _scan(
        self, queries: np.ndarray, kept: int, excluded: Pairs, each: Callable
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """Every block of scores in float32: its first query, its first document, and (documents, queries).

        The block is overwritten by the next one.
        """
        if not (len(queries) and len(self)):
            return
        height = min(self._block_size, max(SMALL_BLOCK, self._block_bytes // (4 * len(queries))), len(self))
        if self._documents.dtype != np.float32:
            height = min(height, max(1, self._block_bytes // (4 * self._documents.shape[1])))
        most = max(1, min(self._block_bytes // (4 * height), self._block_bytes // (32 * kept)))
        width = -(-len(queries) // -(-len(queries) // most))  # so that the last block is no narrow one
        buffer = np.empty(height * min(width, len(queries)), np.float32)
        for start in range(0, len(self), height):
            documents = np.asarray(self._documents[start : start + height], np.float32)
            for first in range(0, len(queries), width):
                some = queries[first : first + width]
                scores = buffer[: len(documents) * len(some)].reshape(len(documents), len(some))
                _products(documents, some, scores, each, self._threads)
                if self._scan_weights is not None:
                    scores *= self._scan_weights[start : start + height, None]
                if len(excluded[0]):
                    scores[_within(excluded, first, len(some), start, len(documents))] = -np.inf
                yield first, start, scores

    def _best(self, queries: np.ndarray, rows: np.ndarray, k: int, each: Callable) -> Pairs:
        """(Q, k) rows and scores of the best among these rows, (Q, C)."""
        found, scores = np.full((len(queries), k), -1), np.full((len(queries), k), -np.inf, np.float32)
        step = max(1, self._block_bytes // (32 * max(1, rows.shape[1])))
        for first in range(0, len(queries), step):
            some = slice(first, first + step)
            keys = np.sort(self._keys(queries[some], rows[some], each), axis=1)[:, ::-1][:, :k]
            found[some, : keys.shape[1]], scores[some, : keys.shape[1]] = self._answer(keys)
        return found, scores

    def _keys(self, queries: np.ndarray, rows: np.ndarray, each: Callable) -> np.ndarray:
        """(Q, C) keys of the documents in these rows, (Q, C), by their scores in float64; ABSENT where a row is -1."""
        scores = np.empty(rows.shape)
        exact = np.asarray(queries, np.float64)

        def score(some: Iterable[int]) -> None:
            for query in some:
                scores[query] = self._scores(exact[query], rows[query])

        share = -(-len(rows) // self._threads) or 1
        list(each(score, [range(first, min(first + share, len(rows))) for first in range(0, len(rows), share)]))
        return np.where(rows >= 0, _encode(scores, self._place[rows]), ABSENT)

    def _scores(self, query: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """(len(rows),) float64. Each is a dot product by itself, so that it does not depend on the others."""
        scores = np.empty(len(rows))
        step = max(1, VALUES_AT_ONCE // len(query))
        for start in range(0, len(rows), step):
            documents = self._documents[rows[start : start + step]].astype(np.float64)
            np.vecdot(documents, query, out=scores[start : start + step])
        return scores if self._weights is None else scores * self._weights[rows]

    def _answer(self, keys: np.ndarray) -> Pairs:
        """Rows of documents and scores from keys."""
        places, scores = _decode(keys)
        return np.where(places >= 0, self._order[places], -1), scores

    def _proven(self, lengths: np.ndarray, candidates: Candidates, last: np.ndarray) -> np.ndarray:
        """(Q,) whether no document beside the candidates can belong to the k best, whose last score is given."""
        worst = candidates.scores.min(axis=1, initial=np.inf).astype(np.float64)
        complete = (worst == -np.inf) | (candidates.size == len(self))
        return complete | (lengths * (np.where(complete, 0.0, worst) + self._error) < _least(last))

    def _settle(
        self,
        queries: np.ndarray,
        scanned: np.ndarray,
        lengths: np.ndarray,
        excluded: Pairs,
        doubtful: np.ndarray,
        found: np.ndarray,
        scores: np.ndarray,
    ) -> None:
        """Put the right answer in place for the queries in doubt, given that ``scores`` ends in a k-th best of some.

        Whoever may reach that score is scored in float64; the others are proven to lie below.
        """
        if not len(doubtful):
            return
        k = found.shape[1]
        keys = np.full((len(doubtful), k), ABSENT)
        with np.errstate(divide="ignore"):  # a query of length 0 ties with every document: none may be left out
            limits = np.where(lengths[doubtful] > 0, _least(scores[doubtful, -1]) / lengths[doubtful], -np.inf)
        exact = np.asarray(queries[doubtful], np.float64)
        for first, start, block in self._scan(scanned[doubtful], k, _renumbered(excluded, doubtful), map):
            errors = self._errors[start : start + len(block)]
            for number, column in enumerate(block.T, first):
                possible = (column + errors >= limits[number]) & (column > -np.inf)
                rows = start + np.flatnonzero(possible)
                both = np.concatenate([keys[number], _encode(self._scores(exact[number], rows), self._place[rows])])
                keys[number] = np.partition(both, len(rows))[len(rows) :]
        found[doubtful], scores[doubtful] = self._answer(np.sort(keys, axis=1)[:, ::-1])


def _threads() -> int:
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdecimal() and int(setting):
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _workers(threads: int) -> Iterator[Callable]:
    """``map``, by so many threads; to hand work to a single one would only take time."""
    if threads == 1:
        yield map
        return
    with ThreadPoolExecutor(threads) as pool:
        yield lambda work, parts: map(work, parts) if len(parts) == 1 else pool.map(work, parts)


def _check_matrix(vectors: np.ndarray, what: str) -> None:
    if vectors.ndim != 2 or not vectors.shape[1] or not np.issubdtype(vectors.dtype, np.floating):
        raise EncoderError(
            f"{what} have shape {vectors.shape} and dtype {vectors.dtype}; expected floating numbers of shape "
            "(rows, dimension)"
        )


def _checked_lengths(vectors: np.ndarray, what: str) -> np.ndarray:
    """(rows,) lengths in float64, by blocks; every value is looked at."""
    lengths = np.empty(len(vectors))
    step = max(1, VALUES_AT_ONCE // vectors.shape[1])
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(vectors), step):
            lengths[start : start + step] = norms(vectors[start : start + step].astype(np.float64))
    broken = np.flatnonzero(~np.isfinite(lengths))
    if len(broken):
        raise EncoderError(
            f"{len(broken)} of {len(vectors)} {what} are NaN or infinite, such as row {broken[0]}; encode in float32, "
            "and look for a diverged training or an empty text"
        )
    if lengths.max(initial=0.0) > LONGEST:
        raise EncoderError(
            f"row {lengths.argmax()} of the {what} has length {lengths.max():.1e}; expected at most {LONGEST:.0e}: "
            "look for a diverged training"
        )
    return lengths


def _inverse(order: np.ndarray, count: int) -> np.ndarray:
    """(D,) the place of each row in the order."""
    if order.shape != (count,) or not np.array_equal(np.sort(order), np.arange(count)):
        raise ConfigError(f"order has shape {order.shape}; expected each of the {count} rows once")
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    return place


def _scan_weights(
    reach: np.ndarray, weights: np.ndarray | None, dimension: int
) -> tuple[np.ndarray | None, np.ndarray]:
    """What a scanned product is multiplied by, in float32, and how far it may then be off for a query of length 1.

    The bound of the module's head, with m = n + 8 for the n additions, the rounding of query, document and weight, the
    product with the weight, and the far smaller errors of float64; then what may be lost near zero. A document whose
    weight does not fit float32 scans as 0, which is off by its reach.
    """
    m = dimension + 8
    share = m * UNIT / (1 - m * UNIT)
    if weights is None:
        return None, share * reach + 8 * m * SMALLEST
    fits = (weights >= 1e-30) & (weights <= 1e30)
    errors = share * reach + 4 * m * SMALLEST * (weights + 1)
    return np.where(fits, weights, 0.0).astype(np.float32), np.where(fits, errors, reach)


def _products(documents: np.ndarray, queries: np.ndarray, out: np.ndarray, each: Callable, threads: int) -> None:
    """Write every inner product in float32, (documents, queries)."""
    if len(queries) not in FEW_QUERIES:
        np.matmul(documents, queries.T, out=out)
        return

    def part(rows: slice) -> None:
        np.vecdot(documents[rows, None], queries, out=out[rows])

    share = -(-len(documents) // threads)
    list(each(part, [slice(start, start + share) for start in range(0, len(documents), share)]))


def _sorted(pairs: Pairs | None) -> Pairs:
    """The pairs by query."""
    queries, documents = (np.asarray(side, np.int64) for side in (([], []) if pairs is None else pairs))
    order = np.argsort(queries, kind="stable")
    return queries[order], documents[order]


def _within(pairs: Pairs, first: int, width: int, start: int, height: int) -> Pairs:
    """The pairs inside a block as (documents, queries), counted from its corner."""
    queries, documents = (side[slice(*np.searchsorted(pairs[0], [first, first + width]))] for side in pairs)
    inside = (documents >= start) & (documents < start + height)
    return documents[inside] - start, queries[inside] - first


def _renumbered(pairs: Pairs, queries: np.ndarray) -> Pairs:
    """The pairs of these queries (ascending), which are numbered anew."""
    number = np.searchsorted(queries, pairs[0])
    mine = (number < len(queries)) & (queries[np.minimum(number, len(queries) - 1)] == pairs[0])
    return number[mine], pairs[1][mine]


def _least(scores: np.ndarray) -> np.ndarray:
    """The number half-way to the next float32 below: what lies under it rounds to less. -inf for -inf."""
    return (scores.astype(np.float64) + np.nextafter(scores, np.float32(-np.inf))) / 2


def _encode(scores: np.ndarray, places: np.ndarray) -> np.ndarray:
    """One int64 a score that sorts as (score in float32, then lower place): a total order, without ties."""
    bits = (scores.astype(np.float32) + np.float32(0)).view(np.int32)  # adding 0 turns -0 into 0, with which it ties
    return (_flip(bits).astype(np.int64) << 32) + (2**32 - 1 - places)


def _decode(keys: np.ndarray) -> Pairs:
    """Places and scores from keys: -1 and -inf where there is no document."""
    absent = keys == ABSENT
    scores = _flip((keys >> 32).astype(np.int32)).view(np.float32)
    return np.where(absent, -1, 2**32 - 1 - (keys & (2**32 - 1))), np.where(absent, np.float32(-np.inf), scores)


def _flip(bits: np.ndarray) -> np.ndarray:
    """The bits of float32 as integers of the same order; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
