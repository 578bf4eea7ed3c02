"""A model and data made ready to be looked at: opened, sampled, and encoded once with every length kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offsphere.diagnosis.material import Material
from offsphere.encoders import declared_similarity, open_encoder, strip_normalize
from offsphere.evaluation.embedding import embed
from offsphere.evaluation.ranking import EmbeddedCollection
from offsphere.progress import Progress
from offsphere.similarity import Similarity

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


@dataclass(frozen=True)
class Encoder:
    """An encoder with its Normalize modules taken off.

    Attributes:
        source: As the user named it.
        model: Gives raw embeddings.
        normalize_modules: Where the Normalize modules stood.
        declared: The similarity that it says it was trained with, if it says one.
    """

    source: str
    model: SentenceTransformer
    normalize_modules: list[int]
    declared: Similarity | None


def open_bare(source: str, max_length: int | None, prompts: Mapping[str, str] | None, device: str | None) -> Encoder:
    """The encoder without Normalize modules, and what it was with them (see ``open_encoder`` for the arguments)."""
    model = open_encoder(source, max_length=max_length, prompts=prompts, device=device)
    declared = declared_similarity(model)
    return Encoder(source, model, strip_normalize(model), declared)


def embed_material(encoder: Encoder, material: Material, progress: Progress) -> EmbeddedCollection:
    """Raw embeddings of the collection, with a progress that counts texts.

    Raises:
        EncoderError: If an embedding is NaN or infinite.
    """
    from offsphere.encoding.cache import cache_at_hand

    collection = material.collection
    for note in collection.notes:
        progress.say(f"note: {collection.name}: {note}")
    counts = f"{len(collection.queries):,} queries and {len(collection.documents):,} documents"
    progress.say(f"encode {counts} of {collection.name} ({collection.split}) with {encoder.source}")
    done = progress.start("encode", len(collection.queries) + len(collection.documents))
    with _counted(encoder.model, done):
        return embed(encoder.model, collection, cache=cache_at_hand())


@contextmanager
def _counted(model: SentenceTransformer, on_texts: Callable[[int], None]) -> Iterator[None]:
    """Tells how many texts the model has read."""
    total = 0

    def count(module: Any, inputs: tuple[dict[str, Any], ...], output: Any) -> None:
        nonlocal total
        total += len(inputs[0].get("offsets", inputs[0]["input_ids"]))
        on_texts(total)

    handle = model[0].register_forward_hook(count)
    try:
        yield
    finally:
        handle.remove()
