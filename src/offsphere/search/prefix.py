"""Matryoshka prefixes of raw embeddings: cut first, then a similarity's exponents apply to the prefix's own length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offsphere.diagnosis.variation import coefficient_of_variation
from offsphere.errors import ConfigError, EncoderError
from offsphere.similarity import norms


def truncate(embeddings: np.ndarray, dimension: int) -> np.ndarray:
    """The first dimensions of raw embeddings, (rows, dimension): a Matryoshka prefix, still raw.

    Raises:
        ConfigError: If the dimension is below 1.
        EncoderError: If the embeddings are no matrix or have fewer dimensions.
    """
    if dimension < 1:
        raise ConfigError(f"a prefix needs at least 1 dimension, found {dimension}")
    if embeddings.ndim != 2 or embeddings.shape[1] < dimension:
        raise EncoderError(f"embeddings have shape {embeddings.shape}; expected at least {dimension} dimensions a row")
    return embeddings[:, :dimension]


@dataclass(frozen=True)
class PrefixLengths:
    """What is left of the documents' lengths in a Matryoshka prefix; see ``prefix_lengths``.

    Zero vectors, which empty texts have, are in none of the numbers; NaN where one is not defined.

    Attributes:
        dimension: Of the prefix.
        mean: Length of the prefix, on average.
        variation: Deviation of that length over its mean.
        share: Length of the prefix as a share of the whole, on average.
        correlation: Spearman's, between both lengths: 1 where the prefix ranks documents by length as the whole does.
    """

    dimension: int
    mean: float
    variation: float
    share: float
    correlation: float


def prefix_lengths(documents: np.ndarray, dimensions: Sequence[int]) -> list[PrefixLengths]:
    """Whether length survives in the prefixes of raw embeddings, one record a dimension.

    Args:
        documents: (D, n) raw embeddings.
        dimensions: Of the prefixes, each at most n.

    Raises:
        ConfigError: If a dimension is below 1.
        EncoderError: If a dimension is above n.
    """
    from scipy.stats import spearmanr

    whole = norms(documents).astype(np.float64)
    filled = whole > 0
    whole = whole[filled]
    records = []
    for dimension in dimensions:
        lengths = norms(truncate(documents, dimension)).astype(np.float64)[filled]
        varied = len(set(lengths)) > 1 and len(set(whole)) > 1
        records.append(
            PrefixLengths(
                dimension,
                float(lengths.mean()) if len(lengths) else math.nan,
                coefficient_of_variation(lengths),
                float((lengths / whole).mean()) if len(lengths) else math.nan,
                float(spearmanr(lengths, whole).statistic) if varied else math.nan,
            )
        )
    return records
