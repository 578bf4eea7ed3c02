"""Raw embeddings of texts, and the fingerprint of what makes them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Side = Literal["query", "document"]


def encode(
    model: SentenceTransformer,
    texts: Sequence[str],
    side: Side,
    *,
    prompt: str | None = None,
    batch_size: int = 64,
    progress: bool = False,
) -> np.ndarray:
    """Raw embeddings (len(texts), n) in float32: the side's prompt applied, nothing normalised.

    A text without a visible character becomes a zero vector, which every similarity scores 0: an empty document can
    then never be ranked first by the length of its special tokens.

    Args:
        model: The encoder, its Normalize modules taken off where length matters.
        texts: Any order; batches are sorted by length.
        side: ``query`` or ``document``.
        prompt: Replaces the model's own prompt of that side.
        batch_size: Texts in one forward pass.
        progress: Show a progress bar.
    """
    from offsphere.packed import packed_input

    filled = [position for position, text in enumerate(texts) if text.strip()]
    dimension = model.get_embedding_dimension()
    embeddings = np.zeros((len(texts), dimension or 0), np.float32)
    if filled:
        encode_side = model.encode_query if side == "query" else model.encode_document
        raw = {"raw": True} if "raw" in model.get_model_kwargs() else {}
        with packed_input(model):
            encoded = encode_side(
                [texts[position] for position in filled],
                prompt=prompt,
                batch_size=batch_size,
                show_progress_bar=progress,
                convert_to_numpy=True,
                **raw,
            )
        if embeddings.shape[1] != encoded.shape[1]:
            embeddings = np.zeros((len(texts), encoded.shape[1]), np.float32)
        embeddings[filled] = encoded
    return embeddings


def model_fingerprint(model: SentenceTransformer) -> str:
    """A hash (32 hex digits) of all that makes an embedding of a text: modules, weights, tokenizer and length limit.

    Prompts and the declared similarity are no part of it: whoever stores embeddings stores those beside it.
    """
    import torch

    digest = hashlib.sha256()
    for module in model:
        settings = module.get_config_dict() if hasattr(module, "get_config_dict") else {}
        digest.update(f"{type(module).__name__}{sorted(settings.items())}".encode())
        for name, weights in sorted(module.state_dict().items()):
            digest.update(f"{name}{weights.dtype}{tuple(weights.shape)}".encode())
            digest.update(weights.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    tokenizer = json.loads(getattr(model.tokenizer, "backend_tokenizer", model.tokenizer).to_str())
    tokenizer.pop("padding", None)  # set anew for every batch, and so is the truncation of a transformer
    truncation = tokenizer.pop("truncation", None) or {}
    limit = model.max_seq_length
    if limit in (None, math.inf):  # a static embedding cuts where its tokenizer does
        limit = truncation.get("max_length", limit)
    digest.update(json.dumps([tokenizer, limit], sort_keys=True).encode())
    return digest.hexdigest()[:32]
