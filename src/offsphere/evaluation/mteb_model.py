"""A model inside mteb, with its own similarity: ``mteb.evaluate(MtebModel("runs/first/model"), tasks)``.

A saved model also runs there by itself, as ``SentenceTransformer(folder)``, and ranks alike. What this adds is any
other similarity, the speed of ``encode``, and the rule that an empty text scores 0.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from offsphere.encoders import Side, declared_similarity, encode, model_fingerprint, open_encoder, strip_normalize
from offsphere.errors import UsageError
from offsphere.evaluation.evaluate import OWN, asked_similarity
from offsphere.evaluation.parts import slug
from offsphere.similarity import Similarity

if TYPE_CHECKING:
    from mteb.models import ModelMeta
    from mteb.types import PromptType
    from torch.utils.data import DataLoader


class MtebModel:
    """An encoder as mteb's ``EncoderProtocol`` wants it: raw embeddings, scored under one similarity.

    Args:
        source: The encoder (see ``open_encoder``).
        similarity: ``own`` for the one that the model declares, or any similarity.
        revision: Not used: a folder or package has one. mteb passes it.
        device: Where to encode.
        max_length: Tokens kept of each text.
        prompts: By side, in place of the model's own.

    Raises:
        EncoderError: If the encoder cannot be opened.
        UsageError: If ``own`` is asked of a model that declares no similarity.
    """

    def __init__(
        self,
        source: str,
        similarity: str = OWN,
        revision: str | None = None,
        *,
        device: str | None = None,
        max_length: int | None = None,
        prompts: dict[str, str] | None = None,
    ):
        self._source = source
        self._model = open_encoder(source, max_length=max_length, prompts=prompts, device=device)
        declared = declared_similarity(self._model)
        strip_normalize(self._model)
        self._similarity: Similarity = asked_similarity(similarity, declared, source)

    @cached_property
    def mteb_model_meta(self) -> ModelMeta:
        """What mteb files results under: the encoder and its similarity, and a revision that changes with its weights.

        Raises:
            UsageError: If mteb is not installed.
        """
        try:
            from mteb.models import ModelMeta
        except ImportError:
            raise UsageError("this needs mteb; type: pip install 'offsphere[benchmarks]'") from None
        name = f"offsphere/{slug(self._source)}-{slug(self._similarity.name)}"
        return ModelMeta.create_empty({"name": name, "revision": model_fingerprint(self._model)})

    def encode(
        self,
        inputs: DataLoader[Any],
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        **settings: Any,
    ) -> np.ndarray:
        """Raw embeddings (texts, n) in float32, with the model's prompt of that side; without a side, no prompt.

        Args:
            inputs: Batches of mteb, each with the texts under ``text``.
            task_metadata: Not used: prompts are the model's.
            hf_split: Not used.
            hf_subset: Not used.
            prompt_type: Query or document; None in tasks whose inputs are alike.
            settings: mteb's ``encode_kwargs``; batch_size and show_progress_bar count.
        """
        texts = [text for batch in inputs for text in batch["text"]]
        side: Side = "document" if prompt_type is not None and prompt_type.value == "document" else "query"
        return encode(
            self._model,
            texts,
            side,
            prompt=None if prompt_type is not None else "",
            batch_size=settings.get("batch_size", 64),
            progress=settings.get("show_progress_bar", False),
        )

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """(Q, D) scores of every first embedding, a query, against every second one, a document."""
        return self._similarity.scores(_tensor(embeddings1), _tensor(embeddings2))

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """(N,) scores of each first embedding against the second one in the same row."""
        return self._similarity.pairwise(_tensor(embeddings1), _tensor(embeddings2))


def _tensor(embeddings: Any) -> Any:
    import torch

    return torch.atleast_2d(torch.as_tensor(embeddings))
