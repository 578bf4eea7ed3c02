"""Texts on their way through a model: tokenised once, in batches of a similar number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from offsphere.encoders import Side, token_counts, token_limit

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from torch import Tensor

TOKENS = 4096
"""Tokens of one batch, padding included: the speed is flat from 1k to 8k."""
CHUNK = 256
"""Texts that are tokenised together, neighbours in length."""
PADDED = {"input_ids", "attention_mask", "token_type_ids"}

T = TypeVar("T")
Batch = tuple[np.ndarray, dict[str, Any]]


@dataclass(frozen=True)
class Tokenised:
    """Texts as a model reads them.

    Attributes:
        batches: Which texts, and their features. A text without a visible character is in none.
        read: (T,) int64 tokens that the model reads of each text, prompt and special tokens included.
        lost: (T,) int64 tokens of each text behind them, which the length limit cuts off.
    """

    batches: list[Batch]
    read: np.ndarray
    lost: np.ndarray


def tokenise(
    model: SentenceTransformer, texts: Sequence[str], side: Side, prompt: str, tokens: int = TOKENS
) -> Tokenised:
    """Every text in a batch of texts of a similar length; what is in a batch depends on the texts and ``tokens`` alone.

    Args:
        model: The encoder.
        texts: Any order.
        side: ``query`` or ``document``, for models that tokenise them differently.
        prompt: Stands before each text.
        tokens: Most tokens of a batch, padding included; a longer text is a batch of its own.
    """
    read, lost = np.zeros((2, len(texts)), np.int64)
    filled = [row for row, text in enumerate(texts) if text.strip()]
    filled.sort(key=lambda row: len(texts[row]), reverse=True)
    whole: list[Batch] = []
    padded: dict[int, tuple[dict[str, Any], int]] = {}
    for start in range(0, len(filled), CHUNK):
        rows = np.array(filled[start : start + CHUNK])
        features = model.preprocess([texts[row] for row in rows], prompt=prompt or None, task=side)
        if "attention_mask" in features:
            read[rows] = features["attention_mask"].sum(1).numpy()
        elif "offsets" in features:
            read[rows] = np.diff(features["offsets"].numpy(), append=len(features["input_ids"]))
        else:
            read[rows] = token_counts(model, [prompt + texts[row] for row in rows])
        if _is_padded(features):
            padded |= {int(row): (features, place) for place, row in enumerate(rows)}
        else:
            whole.append((rows, features))
    limit = token_limit(model)
    if limit is not None and len(full := np.flatnonzero(read >= limit)):
        lost[full] = (token_counts(model, [prompt + texts[row] for row in full.tolist()]) - read[full]).clip(0)
    groups = _grouped(sorted(padded, key=lambda row: (-read[row], row)), read, tokens)
    pad = getattr(model.tokenizer, "pad_token_id", None) or 0
    return Tokenised(whole + [(np.array(rows), _gathered(rows, padded, read, pad)) for rows in groups], read, lost)


def forward(model: SentenceTransformer, tokenised: Tokenised, side: Side) -> np.ndarray:
    """(T, n) float32 raw embeddings of tokenised texts; zero vectors for those without a visible character.

    Call it inside ``packed_input(model)`` to leave the padding out where that is exact.
    """
    import torch
    from sentence_transformers.util import batch_to_device

    model.eval()
    raw = {"raw": True} if "raw" in model.get_model_kwargs() else {}
    embeddings = np.zeros((len(tokenised.read), model.get_embedding_dimension() or 0), np.float32)
    with torch.inference_mode():
        for rows, features in tokenised.batches:
            found = model(batch_to_device(features, model.device), task=side, **raw)["sentence_embedding"]
            part = found[:, : model.truncate_dim].float().cpu().numpy()
            if embeddings.shape[1] != part.shape[1]:
                embeddings = np.zeros((len(embeddings), part.shape[1]), np.float32)
            embeddings[rows] = part
    return embeddings


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items; each is made by a thread while the one before is in use."""
    done = object()
    with ThreadPoolExecutor(1, "ahead") as pool:
        following = pool.submit(next, items, done)
        while (item := following.result()) is not done:
            following = pool.submit(next, items, done)
            yield item  # type: ignore[misc]


def _is_padded(features: dict[str, Any]) -> bool:
    """Whether rows can be taken out one by one: there is nothing but (texts, longest) and settings of the batch."""
    shapes = {tuple(value.shape) for value in features.values() if hasattr(value, "shape")}
    keys = {key for key, value in features.items() if hasattr(value, "shape")}
    return {"input_ids", "attention_mask"} <= keys <= PADDED and len(shapes) == 1


def _grouped(rows: list[int], read: np.ndarray, tokens: int) -> Iterator[list[int]]:
    """Rows, the longest first, in groups whose padded size is at most ``tokens``."""
    group: list[int] = []
    for row in rows:
        if group and (len(group) + 1) * read[group[0]] > tokens:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _gathered(
    rows: list[int], padded: dict[int, tuple[dict[str, Any], int]], read: np.ndarray, pad: int
) -> dict[str, Any]:
    """The features of these rows, padded to the longest of them on the side where the tokenizer pads."""
    longest = int(read[rows[0]])
    first = padded[rows[0]][0]
    features = {key: value for key, value in first.items() if key not in PADDED}
    for key in PADDED & first.keys():
        filling = pad if key == "input_ids" else 0
        out: Tensor = first[key].new_full((len(rows), longest), filling)
        for place, row in enumerate(rows):
            values, mask = padded[row][0][key][padded[row][1]], padded[row][0]["attention_mask"][padded[row][1]]
            length = int(read[row])
            if mask[0]:
                out[place, :length] = values[:length]
            else:
                out[place, longest - length :] = values[len(values) - length :]
        features[key] = out
    return features
