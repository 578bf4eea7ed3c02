"""Other ways in which the same model may have encoded the same texts: the usual slips of a serving layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from offsphere.encoders import Side, encode

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

LENGTHS = (64, 128, 256, 512)
POOLING = ("mean", "cls", "lasttoken", "max")


@dataclass(frozen=True)
class Encoding:
    """A way to encode some texts.

    Attributes:
        cause: The name of the slip, see ``causes.Cause``.
        sentence: The slip in words.
        embed: (N, n) float32 raw embeddings made in this way; nothing is computed before the call.
    """

    cause: str
    sentence: str
    embed: Callable[[], np.ndarray]


def other_encodings(model: SentenceTransformer, texts: Sequence[str], side: Side, prompt: str) -> Iterator[Encoding]:
    """Without the prompt, with the prompt of the other side, with other pooling, with other length limits.

    Args:
        model: An encoder without Normalize modules. It is left as it was.
        texts: Without their prompt.
        side: Of the texts.
        prompt: What should stand before each.
    """
    own = [("no", ""), *((f"the model's {name}", text) for name, text in model.prompts.items() if text)]
    seen = {prompt}
    for whose, other in own:
        if other not in seen:
            seen.add(other)
            found = f"{whose} prompt" + (f" {other!r}" if other else "")
            sentence = f"encoded with {found}, expected the prompt {prompt!r}"
            yield Encoding("prompt", sentence, _with_prompt(model, texts, side, other))
    for mode in POOLING:
        if (pooled := _with_pooling(model, mode)) is not None:
            yield Encoding("pooling", f"encoded with {mode} pooling", _with_prompt(pooled, texts, side, prompt))
    limit, longest = model.max_seq_length, _positions(model)
    for length in (*LENGTHS, longest):
        if limit is not None and longest is not None and length is not None and length != limit and length <= longest:
            sentence = f"texts were cut after {length} tokens, not {limit}"
            yield Encoding("max_length", sentence, _with_limit(model, length, texts, side, prompt))


def _with_prompt(model: SentenceTransformer, texts: Sequence[str], side: Side, prompt: str) -> Callable[[], np.ndarray]:
    return lambda: encode(model, texts, side, prompt=prompt)


def _with_pooling(model: SentenceTransformer, mode: str) -> SentenceTransformer | None:
    """The same weights under another pooling; None where there is no pooling, or it is this one."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    if not any(isinstance(module, Pooling) and module.pooling_mode != mode for module in model):
        return None
    modules = [
        Pooling(module.embedding_dimension, mode, module.include_prompt) if isinstance(module, Pooling) else module
        for module in model
    ]
    return SentenceTransformer(modules=modules, device=str(model.device), prompts=dict(model.prompts))


def _positions(model: SentenceTransformer) -> int | None:
    """Tokens that a transformer can read."""
    return getattr(getattr(getattr(model[0], "auto_model", None), "config", None), "max_position_embeddings", None)


def _with_limit(
    model: SentenceTransformer, length: int, texts: Sequence[str], side: Side, prompt: str
) -> Callable[[], np.ndarray]:
    def embed() -> np.ndarray:
        before = model.max_seq_length
        model.max_seq_length = length
        try:
            return encode(model, texts, side, prompt=prompt)
        finally:
            model.max_seq_length = before

    return embed
