"""The raw embeddings of a collection: one encoding pass that serves every similarity."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offsphere.encoders import Side, encode
from offsphere.evaluation.ranking import EmbeddedCollection

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from offsphere.data import Collection


def embed(
    model: SentenceTransformer,
    collection: Collection,
    batch_size: int = 64,
    progress: bool = False,
    cache: Path | None = None,
) -> EmbeddedCollection:
    """The collection with raw embeddings of its queries and documents; its prompts, if any, replace the model's.

    Args:
        model: An encoder without Normalize modules, where length matters.
        collection: What to encode.
        batch_size: Texts in one forward pass.
        progress: Show a progress bar a side.
        cache: Folder of embeddings by text (see ``encoding.cache``), where ``offsphere encode --cache`` puts them too.
    """
    from offsphere.encoding.cache import encode_cached

    def embeddings(side: Side, texts: dict[str, str]) -> np.ndarray:
        prompt = collection.prompts.get(side)
        if cache is not None:
            return encode_cached(model, [*texts.values()], side, prompt=prompt, cache=cache)
        return encode(model, [*texts.values()], side, prompt=prompt, batch_size=batch_size, progress=progress)

    queries, documents = embeddings("query", collection.queries), embeddings("document", collection.documents)
    return EmbeddedCollection(collection, queries, documents)
