"""Fisher information of InfoNCE at the embeddings: which similarity gives training the better-conditioned gradient?

F = E[g g'] with g the gradient of the loss at the raw embedding (paper, Fisher analysis). Queries and documents go
through one encoder, so their matrices are added. kappa is the largest eigenvalue over the smallest; of qnorm and dnorm
the one with the smaller kappa is predicted to win. Two things distort it, and both are dealt with here:

- An encoder that ends with a LayerNorm gives embeddings that do not move in one direction at all. No gradient there
  can change anything, so such directions are found in the embeddings and left out, the same for every similarity.
- Few samples make the smallest eigenvalue too small, and a few hard pairs may carry most of the gradient. So below
  10 pairs a dimension there is no call, nor where a shrinkage estimate puts the two in the other order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np

from offsphere.diagnosis.gradients import Batch
from offsphere.errors import EncoderError
from offsphere.similarity import Similarity

TOLERANCE = 1e-10
"""Eigenvalues below this share of the largest count as zero: 1e-5 in length, a hundred roundings of float32."""
PAIRS_PER_DIMENSION = 10
FEWEST_PAIRS = 20
BATCH_SIZE = 128  # of the paper
BLOCKS = 40
RESAMPLES = 100
ROWS_AT_ONCE = 2_048
CONTENDERS = ("qnorm", "dnorm")
NO_CALL = "no call"

Masked = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Spectrum:
    """The condition of F under one similarity; numbers are None where every gradient is zero.

    Attributes:
        log10_kappa: Of both sides together, on the directions in which embeddings move.
        query_log10_kappa: Of the queries alone.
        document_log10_kappa: Of the documents alone.
        shrinkage_log10_kappa: Of both sides, after Ledoit and Wolf's shrinkage towards a multiple of the identity.
        all_directions_log10_kappa: Of both sides, with the directions in which embeddings do not move.
        rank: Eigenvalues above 1e-10 of the largest.
        null_directions: Dimension minus rank.
        effective_pairs: (sum |g|^2)^2 / sum |g|^4: far fewer than the pairs where a few of them carry the gradient.
        scale: The inverse temperature it was measured at.
    """

    log10_kappa: float | None
    query_log10_kappa: float | None
    document_log10_kappa: float | None
    shrinkage_log10_kappa: float | None
    all_directions_log10_kappa: float | None
    rank: int
    null_directions: int
    effective_pairs: float
    scale: float


@dataclass(frozen=True)
class Call:
    """Which of qnorm and dnorm is predicted to train better.

    Attributes:
        similarity: ``qnorm``, ``dnorm`` or ``no call``.
        difference: log10 kappa of qnorm minus that of dnorm: above 0 speaks for dnorm.
        low: Lower end of its 95 % interval.
        high: Its upper end.
        reason: The call in words.
    """

    similarity: str
    difference: float | None
    low: float | None
    high: float | None
    reason: str


@dataclass(frozen=True)
class Fisher:
    """Fisher information under several similarities, from one set of embeddings.

    Attributes:
        n_pairs: Pairs that went in, whole batches only.
        dimension: Of the embeddings.
        batch_size: Pairs a batch, each the others' negatives.
        spectra: By name of the similarity; empty where there is not enough data.
        call: The prediction.
    """

    n_pairs: int
    dimension: int
    batch_size: int
    spectra: dict[str, Spectrum]
    call: Call


def fisher_information(
    queries: np.ndarray,
    documents: np.ndarray,
    similarities: Mapping[str, Similarity],
    scales: Mapping[str, float],
    *,
    batch_size: int = BATCH_SIZE,
    masked: Masked | None = None,
    seed: int = 0,
    on_pairs: Callable[[int], None] = lambda pairs: None,
) -> Fisher:
    """The spectrum of F under each similarity, and the call between qnorm and dnorm if both are among them.

    Memory beyond the embeddings: 16 MB a block of gradients and about 90 matrices of n x n numbers. The interval is
    the estimate plus and minus 1.96 bootstrap deviations over 40 blocks of batches: percentiles would sit too high,
    because a resample holds only two thirds of the pairs and kappa falls with their number.

    Args:
        queries: (N, n) raw embeddings; may be memory-mapped.
        documents: (N, n) raw embeddings; row i is the positive of query i.
        similarities: By name; their gammas are taken as fixed.
        scales: The inverse temperature of each, as in training.
        batch_size: Pairs a batch; all pairs where there are fewer.
        masked: Given (b, B) positions of the pairs in b batches, (b, B, B) booleans: true where the document of a
            column is known to be relevant to the query of a row.
        seed: Of the order of the pairs and of the bootstrap.
        on_pairs: Told how many pairs are done.

    Raises:
        EncoderError: If an embedding is NaN or infinite, or the two sides differ in shape.
    """
    if queries.shape != documents.shape or queries.ndim != 2:
        raise EncoderError(f"queries {queries.shape} and documents {documents.shape} must be pairs, row by row")
    n_pairs, dimension = queries.shape
    batch_size = min(batch_size, n_pairs)
    if n_pairs < FEWEST_PAIRS:
        return too_few(n_pairs, dimension, f"{n_pairs} pairs, at least {FEWEST_PAIRS} needed")
    moving, still = _directions(queries, documents)
    batches = np.random.default_rng(seed).permutation(n_pairs)[: n_pairs - n_pairs % batch_size].reshape(-1, batch_size)
    sums = {name: _Sums(dimension, name in CONTENDERS) for name in similarities}
    done = 0
    for block in np.array_split(batches, min(BLOCKS, len(batches))):
        for one in sums.values():
            one.begin_block()
        for positions in _chunks(block):
            batch = Batch(queries[positions].astype(np.float64), documents[positions].astype(np.float64))
            mask = None if masked is None else masked(positions)
            for name, similarity in similarities.items():
                sums[name].add(*batch.gradients(similarity, scales[name], mask), still)
            done += positions.size
            on_pairs(done)
    spectra = {name: one.spectrum(moving, batches.size, scales[name]) for name, one in sums.items()}
    call = _call(sums, spectra, moving, batches.size, seed)
    return Fisher(int(batches.size), dimension, batch_size, spectra, call)


def too_few(n_pairs: int, dimension: int, what: str) -> Fisher:
    """A Fisher without a number, and what is missing."""
    return Fisher(
        n_pairs, dimension, n_pairs, {}, Call(NO_CALL, None, None, None, f"{NO_CALL}: not enough data, {what}")
    )


class _Sums:
    """Sums of g g' over pairs, per side, and per block for the two contenders."""

    def __init__(self, dimension: int, keep_blocks: bool):
        self.sides = [np.zeros((dimension, dimension)) for _ in range(2)]
        self.second = self.second_squared = self.fourth = 0.0
        self.blocks: list[np.ndarray] | None = [] if keep_blocks else None

    def begin_block(self) -> None:
        if self.blocks is not None:
            self.blocks.append(np.zeros_like(self.sides[0]))

    def add(self, queries: np.ndarray, documents: np.ndarray, still: np.ndarray) -> None:
        sides = [gradients.reshape(-1, gradients.shape[-1]) for gradients in (queries, documents)]
        for total, gradients in zip(self.sides, sides, strict=True):
            product = gradients.T @ gradients
            total += product
            if self.blocks is not None:
                self.blocks[-1] += product
        inside = [(gradients, gradients @ still) for gradients in sides]
        q_q, q_d, d_d = (
            _row_products(first, second) - _row_products(first_still, second_still)
            for (first, first_still), (second, second_still) in combinations_with_replacement(inside, 2)
        )
        self.second += float((q_q + d_d).sum())
        self.second_squared += float(((q_q + d_d) ** 2).sum())
        self.fourth += float((q_q**2 + d_d**2 + 2 * q_d**2).sum())  # of pair by pair, |g g'|^2 of both sides added

    def spectrum(self, moving: np.ndarray, n_pairs: int, scale: float) -> Spectrum:
        query, document = (side / n_pairs for side in self.sides)
        joint = _eigenvalues(moving.T @ (query + document) @ moving)
        return Spectrum(
            log10_kappa=_log10_kappa(joint),
            query_log10_kappa=_log10_kappa(_eigenvalues(moving.T @ query @ moving)),
            document_log10_kappa=_log10_kappa(_eigenvalues(moving.T @ document @ moving)),
            shrinkage_log10_kappa=_log10_kappa(_shrunk(joint, self.fourth / n_pairs, n_pairs)),
            all_directions_log10_kappa=_log10_kappa(_eigenvalues(query + document)),
            rank=len(joint),
            null_directions=len(moving) - len(joint),
            effective_pairs=self.second**2 / self.second_squared if self.second_squared > 0 else 0.0,
            scale=float(scale),
        )


def _directions(queries: np.ndarray, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Orthonormal bases (n, r), (n, n - r) of the directions in which embeddings of either side move, and of the rest.

    Raises:
        EncoderError: If an embedding is NaN or infinite.
    """
    n_pairs, dimension = queries.shape
    spread = np.zeros((dimension, dimension))
    for side in (queries, documents):
        mean = side.mean(0, dtype=np.float64)
        if not np.isfinite(mean).all():
            raise EncoderError(
                "embeddings are NaN or infinite; encode in float32, and look for a diverged training or a damaged file"
            )
        for start in range(0, n_pairs, ROWS_AT_ONCE):
            centred = side[start : start + ROWS_AT_ONCE] - mean
            spread += centred.T @ centred
    values, vectors = np.linalg.eigh(spread)
    moves = values > values[-1] * TOLERANCE
    return vectors[:, moves], vectors[:, ~moves]


def _chunks(batches: np.ndarray) -> Iterator[np.ndarray]:
    step = max(1, ROWS_AT_ONCE // batches.shape[1])
    for start in range(0, len(batches), step):
        yield batches[start : start + step]


def _row_products(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.einsum("ij,ij->i", first, second)


def _eigenvalues(matrix: np.ndarray) -> np.ndarray:
    """Ascending eigenvalues above TOLERANCE of the largest; none of a zero matrix."""
    values = np.linalg.eigvalsh(matrix) if matrix.size else np.empty(0)
    return values[values > max(values[-1], 0.0) * TOLERANCE] if len(values) else values


def _log10_kappa(eigenvalues: np.ndarray) -> float | None:
    return float(np.log10(eigenvalues[-1] / eigenvalues[0])) if len(eigenvalues) else None


def _shrunk(eigenvalues: np.ndarray, fourth: float, n_pairs: int) -> np.ndarray:
    """Eigenvalues pulled to their mean (Ledoit and Wolf 2004): by the error of F over its distance from the identity.

    Args:
        eigenvalues: (r,) of F.
        fourth: E[|g g'|^2], the mean squared Frobenius norm of one pair's contribution.
        n_pairs: How many pairs F is the mean of.
    """
    if not len(eigenvalues):
        return eigenvalues
    mean = eigenvalues.mean()
    distance = ((eigenvalues - mean) ** 2).sum()
    error = (fourth - (eigenvalues**2).sum()) / n_pairs
    part = min(1.0, error / distance) if distance > 0 else 1.0
    return (1 - part) * eigenvalues + part * mean


def _call(
    sums: Mapping[str, _Sums], spectra: Mapping[str, Spectrum], moving: np.ndarray, n_pairs: int, seed: int
) -> Call:
    first, second = (spectra.get(name) for name in CONTENDERS)
    if first is None or second is None or first.log10_kappa is None or second.log10_kappa is None:
        return Call(NO_CALL, None, None, None, f"{NO_CALL}: qnorm and dnorm were not both measured")
    difference, needed = first.log10_kappa - second.log10_kappa, PAIRS_PER_DIMENSION * moving.shape[1]
    if n_pairs < needed:
        reason = (
            f"{NO_CALL}: {n_pairs:,} pairs are fewer than 10 x {moving.shape[1]} dimensions; give more, such as "
            f"--max-queries {needed}"
        )
        return Call(NO_CALL, difference, None, None, reason)
    error = 1.96 * _bootstrap_deviation([sums[name].blocks or [] for name in CONTENDERS], moving, seed)
    low, high = difference - error, difference + error
    interval = f"log10 kappa of qnorm minus dnorm is {difference:+.2f} [{low:+.2f}, {high:+.2f}]"
    if not math.isfinite(error) or low <= 0 <= high:
        return Call(NO_CALL, difference, low, high, f"{NO_CALL}: {interval}, which holds 0")
    shrunk = (first.shrinkage_log10_kappa or 0.0) - (second.shrinkage_log10_kappa or 0.0)
    if shrunk * difference <= 0:
        reason = (
            f"{NO_CALL}: {interval}, but {shrunk:+.2f} after shrinkage: the smallest eigenvalues are not known well "
            f"enough ({n_pairs:,} pairs count as {min(first.effective_pairs, second.effective_pairs):,.0f})"
        )
        return Call(NO_CALL, difference, low, high, reason)
    better = "dnorm" if difference > 0 else "qnorm"
    return Call(better, difference, low, high, f"{better}: {interval}")


def _bootstrap_deviation(contenders: list[list[np.ndarray]], moving: np.ndarray, seed: int) -> float:
    """Standard deviation of the difference in log10 kappa over blocks drawn with replacement, the same for both."""
    blocks = [np.stack([moving.T @ block @ moving for block in one]) for one in contenders]
    n_blocks = len(blocks[0])
    drawn = np.random.default_rng(seed).multinomial(n_blocks, np.full(n_blocks, 1 / n_blocks), RESAMPLES)
    differences = []
    for counts in drawn.astype(np.float64):
        first, second = (_log10_kappa(_eigenvalues(np.tensordot(counts, one, 1))) for one in blocks)
        differences.append((first or math.nan) - (second or math.nan))
    return float(np.std(differences, ddof=1))
