"""Open an encoder whose embeddings keep their length, encode with it, and save it so that others can load it.

An encoder is a plain ``SentenceTransformer``. It comes from a hub name, a folder, a GGUF file, or an installed package
(``package:NAME``). A Normalize module at its end erases every length, so it is found, named and taken off; which
length counts is then the business of ``offsphere.similarity`` alone.
"""

from __future__ import annotations

from offsphere.encoders.changes import checkpoint_gradients, limit_length, randomise, set_dropout
from offsphere.encoders.decoders import set_pooling
from offsphere.encoders.devices import resolve_device
from offsphere.encoders.embedding import Side, encode, model_fingerprint
from offsphere.encoders.lora import add_lora, merged_lora
from offsphere.encoders.normalization import (
    UNIT_LENGTH_SPREAD,
    check_lengths,
    declared_similarity,
    find_normalize,
    strip_normalize,
)
from offsphere.encoders.opening import PACKAGE, open_encoder
from offsphere.encoders.precision import Precision, check_precision, computing_in
from offsphere.encoders.saving import replace_folder, save_encoder
from offsphere.encoders.tokens import token_counts, token_limit

__all__ = [
    "PACKAGE",
    "UNIT_LENGTH_SPREAD",
    "Precision",
    "Side",
    "add_lora",
    "check_lengths",
    "check_precision",
    "checkpoint_gradients",
    "computing_in",
    "declared_similarity",
    "encode",
    "find_normalize",
    "limit_length",
    "merged_lora",
    "model_fingerprint",
    "open_encoder",
    "randomise",
    "replace_folder",
    "resolve_device",
    "save_encoder",
    "set_dropout",
    "set_pooling",
    "strip_normalize",
    "token_counts",
    "token_limit",
]
