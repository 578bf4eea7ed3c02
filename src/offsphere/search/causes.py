"""Why vectors at a destination are not the ones that the model gives: found by measuring them, not by asking."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from offsphere.encoders import UNIT_LENGTH_SPREAD
from offsphere.search.other_encodings import Encoding
from offsphere.similarity import Similarity, norms

SAME = 1e-3
"""Vectors closer than this share of their length arrived as they were sent: half precision moves them less."""

EQUAL = 1e-4
"""Vectors closer than this share of their length are the same: another device or batch moves them less."""

SAME_DIRECTION = 0.999
EXACT_DIRECTION = 1 - 1e-5
FEWEST = 3

COSINE = Similarity.parse("cosine")


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong with a destination.

    Attributes:
        name: A word for programs: ``dimension``, ``normalised``, ``gamma``, ``scaled``, ``quantised``, ``ids``,
            ``prompt``, ``title``, ``pooling``, ``max_length``, ``model``, ``distorted``, ``metric``, ``reversed``,
            ``scores``, ``changed``, ``missing``, ``extra``, ``recall``, ``stamp``.
        sentence: What was measured, and what to do about it.
    """

    name: str
    sentence: str


@dataclass(frozen=True)
class LengthLaw:
    """The lengths of vectors as factor * |d|^(1 - gamma) of the raw embeddings of the same texts.

    Attributes:
        gamma: The exponent that was removed; NaN where the raw lengths do not differ enough to tell.
        factor: What they were multiplied by besides.
        spread: Standard deviation of log length around the law: 0 when it is exact.
    """

    gamma: float
    factor: float
    spread: float


def length_law(raw: np.ndarray, seen: np.ndarray) -> LengthLaw:
    """How the lengths of some vectors follow from raw embeddings, by least squares on their logarithms.

    Args:
        raw: (N, n) raw embeddings.
        seen: (N, m) vectors of the same texts. Rows that are zero on either side are left out.
    """
    lengths, found = norms(raw).astype(np.float64), norms(seen).astype(np.float64)
    both = (lengths > 0) & (found > 0)
    x, y = np.log(lengths[both]), np.log(found[both])
    if len(x) < FEWEST or x.std() < UNIT_LENGTH_SPREAD:
        shift = float((y - x).mean()) if len(x) else 0.0
        return LengthLaw(float("nan"), float(np.exp(shift)), float((y - x).std()) if len(x) else 0.0)
    slope, start = np.polyfit(x, y, 1)
    spread = float((y - start - slope * x).std())
    return LengthLaw(float(1 - slope), float(np.exp(start)), spread)


def relative_errors(expected: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """(N,) distance of each row from the expected one, in units of its length; a zero row counts as length 1."""
    lengths = norms(expected)
    return norms(seen - expected) / np.where(lengths > 0, lengths, 1.0)


def vector_causes(
    raw: np.ndarray, stored: np.ndarray, similarity: Similarity, encodings: Iterable[Encoding] = ()
) -> list[Cause]:
    """What explains that stored vectors are not the prepared embeddings; empty where they are.

    Args:
        raw: (N, n) raw embeddings of some documents.
        stored: (N, m) what the destination gives back for them.
        similarity: The one that they should be prepared for.
        encodings: Other ways in which the documents, or the first of them, may have been encoded; only tried where
            directions differ.
    """
    if raw.shape[1] != stored.shape[1]:
        return [_dimension(raw, stored)]
    expected = similarity.prepare_document(raw)
    if np.max(relative_errors(expected, stored), initial=0.0) <= EQUAL:
        return []
    filled = (norms(raw) > 0) & (norms(stored) > 0)
    kept, found = raw[filled], stored[filled]
    cosines = COSINE.pairwise(found, kept)
    if not len(cosines):
        return [Cause("model", "every stored vector is zero; export again")]
    near = cosines >= SAME_DIRECTION
    if near.mean() < 0.5:
        if quantised := _quantised(found, expected[filled], cosines):
            return [quantised]
        return [_direction_cause(kept, found, cosines, stored, encodings)]
    causes = _length_causes(kept[near], found[near], similarity)
    if _most(cosines) < EXACT_DIRECTION and all(cause.name != "quantised" for cause in causes):
        slip = _slip(stored, encodings, EXACT_DIRECTION, cosines)
        if slip is not None:
            return [slip]
    return causes + _outliers(cosines)


def numbers(vectors: np.ndarray) -> str | None:
    """What components coarser than float32 are: ``float16``, ``bfloat16``, ``binary`` or ``int8``; None otherwise."""
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    with np.errstate(over="ignore"):
        half = vectors.astype(np.float16).astype(np.float32)
    if all(len(np.unique(row)) <= 2 for row in vectors):
        return "binary"
    if not (vectors.view(np.uint32) & 0xFFFF).any():  # before float16, which holds most of them too
        return "bfloat16"
    if np.array_equal(half, vectors):
        return "float16"
    return "int8" if _on_grid(vectors) or (len(vectors) >= 16 and _on_grid(vectors.T)) else None


def _dimension(raw: np.ndarray, stored: np.ndarray) -> Cause:
    """Either the first dimensions of the embedding (Matryoshka), or another model."""
    ours, theirs = raw.shape[1], stored.shape[1]
    found = f"the collection has {theirs} dimensions and the model gives {ours}"
    if theirs < ours and np.median(COSINE.pairwise(stored, raw[:, :theirs])) >= SAME_DIRECTION:
        return Cause("dimension", f"{found}: the first {theirs} of them were stored; export the whole embedding")
    return Cause("dimension", f"{found}: it holds another model's vectors; export to a new collection")


def _length_causes(raw: np.ndarray, stored: np.ndarray, similarity: Similarity) -> list[Cause]:
    """Right directions, and what is wrong with the lengths, if anything."""
    gamma = similarity.gammas[1]
    law, lengths = length_law(raw, stored), norms(stored)
    expected = similarity.prepare_document(raw)
    if relative_errors(expected, stored).max() <= EQUAL:
        return []
    ours = norms(expected)
    unit = np.abs(lengths - 1).max() < SAME < np.abs(ours - 1).max()
    if unit:
        between = f"{ours.min():.3g} to {ours.max():.3g}"
        return [
            Cause(
                "normalised",
                f"normalised on upload: every stored vector has length 1, ours have {between} under gamma_d {gamma:g}; "
                "length no longer ranks. Use a collection for the inner product, and send vectors unnormalised",
            )
        ]
    exact = law.spread < 0.01
    if exact and not np.isnan(law.gamma) and abs(law.gamma - gamma) > 0.01:
        shown = round(law.gamma, 2) + 0.0  # no minus before a zero
        form = "raw embeddings d" if shown == 0 else f"d / |d|^{shown:.2f}"
        return [
            Cause(
                "gamma",
                f"stored as {form} (gamma_d {shown:.2f}, by regression of log lengths), expected "
                f"d / |d|^{gamma:g}; prepare documents with Similarity.prepare_document, or export again",
            )
        ]
    kind = numbers(stored)
    change = float(np.abs(lengths / ours - 1).max())
    if kind is not None and kind != numbers(expected):
        return [_as_quantised(kind, f"lengths move by up to {change:.1%}")]
    factor = float(np.exp(np.log(lengths / ours).mean()))
    if exact and abs(factor - 1) > SAME:
        return [
            Cause("scaled", f"vectors are {factor:.4g} times as long as ours: the order stays, scores are multiplied")
        ]
    if exact:
        return []
    return [Cause("distorted", f"directions agree; lengths differ by up to {change:.1%} and follow no power of ours")]


def _outliers(cosines: np.ndarray) -> list[Cause]:
    """A few documents that are stored with another direction than all others."""
    off = int((cosines < SAME_DIRECTION).sum())
    if not off:
        return []
    return [
        Cause(
            "changed",
            f"{off} of {len(cosines)} stored vectors have another direction than ours: their texts changed, or another "
            "model wrote them; export again",
        )
    ]


def _quantised(stored: np.ndarray, expected: np.ndarray, cosines: np.ndarray) -> Cause | None:
    """Components on a grid, near enough to ours to come from them."""
    kind = numbers(stored)
    if kind is None or numbers(expected) == kind or np.median(cosines) < 0.5:
        return None
    return _as_quantised(kind, f"median cosine {np.median(cosines):.4f} to ours")


def _as_quantised(kind: str, measured: str) -> Cause:
    return Cause(
        "quantised",
        f"quantised: the stored components are {kind} numbers, {measured}; store float32, or quantise the direction "
        "only and keep the norm apart",
    )


def _direction_cause(
    raw: np.ndarray, found: np.ndarray, cosines: np.ndarray, stored: np.ndarray, encodings: Iterable[Encoding]
) -> Cause:
    """Wrong directions: shuffled ids, or another encoding of the same model, or another model."""
    cross = COSINE.scores(found, raw)
    nearest = cross.argmax(axis=1)
    measured = f"median cosine {np.median(cosines):.3f} to ours"
    moved = (nearest != np.arange(len(raw))) & (cross.max(axis=1) >= SAME_DIRECTION)
    if moved.mean() > 0.5:
        return Cause(
            "ids",
            f"vectors stand under the wrong ids: {int(moved.sum())} of {len(raw)} are ours for another document; "
            "export again",
        )
    if slip := _slip(stored, encodings, SAME_DIRECTION, cosines):
        return slip
    if (nearest == np.arange(len(raw))).mean() > 0.9 and np.median(cosines) > 0.9:
        return Cause(
            "distorted",
            f"directions are near ours and not ours ({measured}): lossy compression, a rotation of the model's "
            "weights by further training, or another length limit",
        )
    return Cause("model", f"another model or other texts: {measured}, and no other encoding of this model fits")


def _slip(stored: np.ndarray, encodings: Iterable[Encoding], least: float, ours: np.ndarray) -> Cause | None:
    """The other encoding whose directions are the stored ones; the nearest one, if several come close."""
    best, found = least, None
    for other in encodings:
        embeddings = other.embed()
        first = stored[: len(embeddings)]
        if embeddings.shape != first.shape:
            continue
        cosine = _most(COSINE.pairwise(first, embeddings))
        if cosine >= best:
            best = cosine
            measured = f"cosine {cosine:.5f} or more that way, {_most(ours):.5f} to ours, for 95 % of the documents"
            found = Cause(other.cause, f"{other.sentence} ({measured}); export again")
        if cosine >= EXACT_DIRECTION:
            break
    return found


def _most(cosines: np.ndarray) -> float:
    """What 95 % of the cosines reach: a slip concerns all documents, and a few may have changed besides."""
    return float(np.quantile(cosines, 0.05)) if len(cosines) else -1.0


def _on_grid(rows: np.ndarray) -> bool:
    """Whether the differences within each row are multiples of one step, with no more than 8 bits of steps."""
    ordered = np.sort(rows.astype(np.float64), axis=1)
    span = ordered[:, -1:] - ordered[:, :1]
    rows_with_values = span[:, 0] > 0
    steps = np.diff(ordered, axis=1)[rows_with_values]
    span = span[rows_with_values]
    if not len(steps) or steps.shape[1] < 8:
        return False
    noise = span * 1e-5
    smallest = np.where(steps > noise, steps, np.inf).min(axis=1, keepdims=True)
    for part in (1, 2, 3):  # adjacent levels may not occur, so the step can be a part of the smallest gap
        step = smallest / part
        multiples = steps / step
        off = np.abs(multiples - np.rint(multiples)).mean(axis=1)
        if np.median(off) < 0.05 and np.median(span[:, 0] / step[:, 0]) <= 300:
            return True
    return False
