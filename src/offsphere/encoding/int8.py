"""An encoder whose feed-forward layers compute in 8 bits, and how far its embeddings are then from those of float32.

Each token has a scale of its own, and so has each output of a layer; sums are exact in 32 bits. Attention stays in
float32: its projections are a third of the work and make most of the error. Eight bits change the length of an
embedding more than its direction, so what is checked is the length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from offsphere.encoders import Side
from offsphere.encoding.batches import forward, tokenise
from offsphere.errors import ConfigError, EncoderError
from offsphere.similarity import norms

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

INT8 = "int8"


@dataclass(frozen=True)
class Fidelity:
    """Embeddings of int8 against those of float32 on the same texts.

    Attributes:
        texts: How many were compared.
        cosine_mean: Of the angle between both.
        cosine_min: The worst one.
        norm_error_mean: Of the length, as a share of it.
        norm_error_max: The worst one.
    """

    texts: int
    cosine_mean: float
    cosine_min: float
    norm_error_mean: float
    norm_error_max: float

    @classmethod
    def between(cls, exact: np.ndarray, found: np.ndarray) -> Fidelity:
        """Of embeddings (T, n) of the same texts; zero vectors aside."""
        exact, found = (side.astype(np.float64) for side in (exact, found))
        some = norms(exact) > 0
        exact, found = exact[some], found[some]
        lengths, others = norms(exact), norms(found)
        cosines = (exact * found).sum(1) / (lengths * np.where(others > 0, others, 1.0))
        errors = np.abs(others - lengths) / lengths
        return cls(len(exact), *(float(one) for one in (cosines.mean(), cosines.min(), errors.mean(), errors.max())))

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"cosine {self.cosine_mean:.5f} on average and {self.cosine_min:.5f} at worst, length off by "
            f"{self.norm_error_mean:.2%} on average and {self.norm_error_max:.2%} at worst"
        )


@contextmanager
def int8_layers(model: SentenceTransformer) -> Iterator[None]:
    """Inside, the feed-forward layers of the model compute in int8; outside again in float32, from the same weights.

    Args:
        model: A transformer of a family that ``offsphere.packed`` knows, on a CPU, inside ``packed_input``.

    Raises:
        ConfigError: If it is another one.
    """
    from torch import nn

    from offsphere.encoding.int8_linear import Int8Linear
    from offsphere.packed import is_packed
    from offsphere.packed.families import FAMILIES, find_family
    from offsphere.packed.transformer import model_of

    if not is_packed(model):
        raise ConfigError(
            f"--precision int8 is for transformers whose forward pass can be packed ({', '.join(FAMILIES)}), on a CPU; "
            "this encoder has to be computed in float32"
        )
    transformer = model_of(model[0])
    family = find_family(transformer)
    layers = family.layers(transformer) if family else []
    linear = {id(part) for layer in layers for part in (layer.up, layer.down) if isinstance(part, nn.Linear)}
    places = [
        (parent, name, part)
        for parent in transformer.modules()
        for name, part in parent.named_children()
        if id(part) in linear
    ]
    try:
        for parent, name, part in places:
            setattr(parent, name, Int8Linear(part))
        yield
    finally:
        for parent, name, part in places:
            setattr(parent, name, part)


def check_fidelity(
    model: SentenceTransformer, texts: Sequence[str], side: Side, prompt: str, max_norm_error: float
) -> Fidelity:
    """How far int8 is from float32 on a sample of the user's own texts.

    Args:
        model: The encoder.
        texts: The sample.
        side: Of the texts.
        prompt: What stands before each.
        max_norm_error: The largest mean error of a length, as a share, that is accepted.

    Raises:
        EncoderError: If it is larger, with the numbers.
    """
    from offsphere.packed import packed_input

    tokenised = tokenise(model, texts, side, prompt)
    with packed_input(model):
        exact = forward(model, tokenised, side)
        with int8_layers(model):
            found = forward(model, tokenised, side)
    fidelity = Fidelity.between(exact, found)
    if not fidelity.norm_error_mean <= max_norm_error:
        raise EncoderError(
            f"int8 is too far from float32 on {fidelity.texts} of these texts: {fidelity}; the limit is "
            f"{max_norm_error:.2%} on average. Every similarity but cosine uses the length: encode in float32, or "
            "accept more with --max-norm-error"
        )
    return fidelity
