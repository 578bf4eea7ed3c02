"""Normalize modules, which erase every length: finding them, taking them off, and what the model was made for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from offsphere.errors import EncoderError
from offsphere.similarity import FIXED, Similarity, norms

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

UNIT_LENGTH_SPREAD = 1e-3
"""Encoders whose lengths vary by less than this share of their mean carry no length to train or rank with."""


def find_normalize(model: SentenceTransformer) -> list[int]:
    """The positions of the modules that scale every embedding to length 1."""
    from sentence_transformers.sentence_transformer.modules import Normalize

    return [position for position, module in enumerate(model) if isinstance(module, Normalize)]


def strip_normalize(model: SentenceTransformer) -> list[int]:
    """Take the Normalize modules off, in place, so that embeddings keep their length; returns where they stood."""
    found = find_normalize(model)
    for position in reversed(found):
        del model[position]
    return found


def declared_similarity(model: SentenceTransformer) -> Similarity | None:
    """The similarity that the model says it was made for, learned gammas included; None where it says nothing.

    A model with a Normalize module says cosine, whatever name it stores: the dot product of unit vectors is their
    cosine. One that says nothing is never taken for a cosine model.
    """
    from offsphere.modules import learned_similarity

    learned = learned_similarity(model)
    if learned is not None:
        return learned.similarity.detached()
    # The public property would answer, and store, cosine for a model that declares nothing.
    name = "cosine" if find_normalize(model) else model._similarity_fn_name
    return Similarity.parse(name) if name in FIXED else None


def check_lengths(queries: np.ndarray, documents: np.ndarray, similarity: Similarity) -> None:
    """Refuse a similarity that needs a length which the encoder does not give.

    Args:
        queries: (Q, n) raw embeddings of a sample of queries.
        documents: (D, n) raw embeddings of a sample of documents.
        similarity: The one to be trained.

    Raises:
        EncoderError: If a gamma below 1 meets lengths that all agree to a thousandth.
    """
    for side, embeddings, gamma in zip(("query", "document"), (queries, documents), similarity.gammas, strict=True):
        lengths = norms(embeddings)
        lengths = lengths[lengths > 0]
        mean, deviation = (float(lengths.mean()), float(lengths.std())) if lengths.size else (0.0, 0.0)
        spread = deviation / mean if mean else 0.0
        if gamma < 1.0 and spread < UNIT_LENGTH_SPREAD:
            raise EncoderError(
                f"every {side} embedding of this encoder has the same length (mean {mean:.4g}, spread "
                f"{spread:.1e} of it), so {similarity.name} has nothing to learn from: its {side} length is kept.\n"
                "The last layer of the encoder scales its output. Use an encoder without such a layer, start the same "
                "architecture from random weights with --init random, or compare --similarities cosine only."
            )
