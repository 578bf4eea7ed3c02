"""What happens to length on the way from text to score: normalising modules, unit lengths, prompts, overflow, cuts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from offsphere.diagnosis.variation import coefficient_of_variation
from offsphere.encoders import UNIT_LENGTH_SPREAD
from offsphere.similarity import norms

FLOAT16_LARGEST = 65_504.0
NOTABLE_CUTS = 0.05


@dataclass(frozen=True)
class SideAudit:
    """The texts and embeddings of one side.

    Attributes:
        texts: How many there are.
        empty: Texts without a visible character; their embedding is the zero vector.
        zero: Other texts whose embedding is the zero vector.
        unit_length: Whether all lengths agree to a thousandth, so that there is no length to keep.
        largest: The largest length.
        float16_overflow: Share whose squared length, or whose product with the other side's longest, float16 cannot
            hold.
        prompt: What stands before each text.
        cut: Share of texts longer than the encoder reads.
        tokens_lost: Share of all tokens that it does not read.
    """

    texts: int
    empty: int
    zero: int
    unit_length: bool
    largest: float
    float16_overflow: float
    prompt: str
    cut: float
    tokens_lost: float


@dataclass(frozen=True)
class Audit:
    """Everything that may erase, distort or cap length.

    Attributes:
        normalize_modules: Positions of the Normalize modules that the encoder came with.
        declared_similarity: What the encoder says it was trained with; None where it says nothing.
        max_length: Tokens that it reads of each text; None where there is no limit.
        query: The queries.
        document: The documents.
        findings: What deserves attention, a sentence each.
    """

    normalize_modules: list[int]
    declared_similarity: str | None
    max_length: int | None
    query: SideAudit
    document: SideAudit
    findings: list[str]


def has_unit_length(lengths: np.ndarray) -> bool:
    """Whether all lengths above 0 agree to a thousandth; true as well where there is none.

    Args:
        lengths: (N,) lengths of embeddings.
    """
    variation = coefficient_of_variation(lengths[lengths > 0])
    return math.isnan(variation) or variation < UNIT_LENGTH_SPREAD


def audit(
    texts: Mapping[str, Sequence[str]],
    embeddings: Mapping[str, np.ndarray],
    counts: Mapping[str, np.ndarray],
    prompts: Mapping[str, str],
    *,
    normalize_modules: list[int],
    declared_similarity: str | None,
    max_length: int | None,
) -> Audit:
    """The audit of an encoder on its data; every mapping has the keys ``query`` and ``document``.

    Args:
        texts: Of each side.
        embeddings: (N, n) raw embeddings of each side, Normalize modules taken off.
        counts: (N,) tokens of each text behind its prompt, before any cut.
        prompts: Of each side.
        normalize_modules: Where the encoder had Normalize modules.
        declared_similarity: What it says it was trained with.
        max_length: Tokens it reads of each text.
    """
    lengths = {side: norms(matrix).astype(np.float64) for side, matrix in embeddings.items()}
    largest = {side: float(values.max(initial=0.0)) for side, values in lengths.items()}
    sides = {}
    for side, other in (("query", "document"), ("document", "query")):
        values, limit = lengths[side], max_length or math.inf
        empty = np.array([not text.strip() for text in texts[side]], dtype=bool)
        overflow = values * np.maximum(values, largest[other]) > FLOAT16_LARGEST
        sides[side] = SideAudit(
            texts=len(values),
            empty=int(empty.sum()),
            zero=int((values[~empty] == 0).sum()),
            unit_length=has_unit_length(values),
            largest=largest[side],
            float16_overflow=_share(overflow),
            prompt=prompts[side],
            cut=_share(counts[side] > limit),
            tokens_lost=float(np.maximum(counts[side] - limit, 0).sum() / max(1, counts[side].sum())),
        )
    findings = [
        *_about_model(normalize_modules, declared_similarity, prompts),
        *(sentence for side, one in sides.items() for sentence in _about_side(side, one, max_length)),
    ]
    return Audit(normalize_modules, declared_similarity, max_length, sides["query"], sides["document"], findings)


def _about_model(normalize_modules: list[int], declared: str | None, prompts: Mapping[str, str]) -> list[str]:
    found = []
    if normalize_modules:
        found.append(
            f"the encoder has a Normalize module (position {', '.join(map(str, normalize_modules))}), which erases "
            "every length; the numbers here are without it, and so must be a training under dot, qnorm or dnorm"
        )
    if declared is None:
        found.append("the encoder does not say which similarity it was trained with")
    if bool(prompts["query"]) != bool(prompts["document"]):
        has, lacks = ("query", "document") if prompts["query"] else ("document", "query")
        found.append(f"there is a prompt for the {has} ({prompts[has]!r}) and none for the {lacks}; is that meant?")
    return found


def _about_side(side: str, one: SideAudit, max_length: int | None) -> list[str]:
    found = []
    if one.unit_length:
        found.append(f"every {side} embedding has the same length: there is no {side} length to keep")
    if one.empty:
        found.append(f"{one.empty} of {one.texts} {side} texts are empty; they score 0 under every similarity")
    if one.zero:
        found.append(f"{one.zero} {side} texts have a zero embedding, such as texts without a known token")
    if one.cut >= NOTABLE_CUTS:
        found.append(
            f"{one.cut:.0%} of the {side} texts are cut at {max_length} tokens ({one.tokens_lost:.0%} of all tokens "
            "lost); what is cut has no part in their length"
        )
    if one.float16_overflow > 0:
        found.append(
            f"{one.float16_overflow:.1%} of the {side} embeddings are so long (up to {one.largest:.4g}) that float16 "
            "overflows in their squares or scores; keep lengths and scores in float32"
        )
    return found


def _share(flags: np.ndarray) -> float:
    return float(flags.mean()) if len(flags) else 0.0
