"""The prompts in force: what stands before the texts of each side, and how many tokens of a model that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offsphere.encoders import token_counts

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


@dataclass(frozen=True)
class Prompts:
    """What stands before each text, as one model reads it.

    Attributes:
        texts: By side; empty where nothing stands there.
        tokens: By side, how many tokens that adds to a text.
    """

    texts: dict[str, str]
    tokens: dict[str, int]

    def __bool__(self) -> bool:
        return any(self.texts.values())

    def __str__(self) -> str:
        return ", ".join(self._of(side) if text else f"no {side} prompt" for side, text in self.texts.items())

    def in_place_of(self, models: Prompts) -> str:
        """Where they differ from the model's, in words; empty where they do not."""
        return "; ".join(
            f"its own {self._of(side)}" + (f", in place of the model's {before!r}" if before else "")
            for side, before in models.texts.items()
            if self.texts[side] != before
        )

    def to_dict(self) -> dict[str, Any]:
        """As a manifest of embeddings has them too."""
        return {"prompts": self.texts, "prompt_tokens": self.tokens}

    def _of(self, side: str) -> str:
        tokens = self.tokens[side]
        return f"{side} prompt {self.texts[side]!r} ({tokens} token{'' if tokens == 1 else 's'})"


def prompts_in_force(
    model: SentenceTransformer, own: Mapping[str, str] | None = None, sides: Sequence[str] = ("query", "document")
) -> Prompts:
    """What stands before each query and each document: the data's own prompt, else the model's.

    Args:
        model: The encoder, with the prompts that the user gave.
        own: Of the data, by side; one that is empty takes the model's away.
        sides: Which ones are asked for.
    """
    texts = {side: (own or {}).get(side, model.prompts.get(side) or "") for side in sides}
    if not any(texts.values()):
        return Prompts(texts, dict.fromkeys(texts, 0))
    alone, *counts = token_counts(model, ["", *texts.values()]).tolist()
    return Prompts(texts, {side: count - alone for side, count in zip(texts, counts, strict=True)})
