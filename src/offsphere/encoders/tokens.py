"""How many tokens a text has, and how many of them an encoder reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


def token_limit(model: SentenceTransformer) -> int | None:
    """Tokens that the encoder reads of a text, prompt and special tokens included; None where there is no limit."""
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    if isinstance(model[0], StaticEmbedding):
        truncation = model[0].tokenizer.truncation
        return int(truncation["max_length"]) if truncation else None
    return None if model.max_seq_length is None else int(model.max_seq_length)


def token_counts(model: SentenceTransformer, texts: Sequence[str]) -> np.ndarray:
    """(len(texts),) tokens of each text before any cut, special tokens included where the encoder adds them."""
    from tokenizers import Tokenizer

    if not texts:
        return np.zeros(0, dtype=np.int64)
    tokenizer = model.tokenizer
    if isinstance(tokenizer, Tokenizer):
        uncut = Tokenizer.from_str(tokenizer.to_str())
        uncut.no_truncation()
        uncut.no_padding()
        return np.array([len(e.ids) for e in uncut.encode_batch_fast(list(texts), add_special_tokens=False)])
    ids = tokenizer(list(texts), truncation=False, padding=False, verbose=False)["input_ids"]
    return np.array([len(row) for row in ids])
