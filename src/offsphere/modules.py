"""The sentence-transformers module that carries what is learned beside the weights: gamma_q, gamma_d and the scale.

Because they live in the model, they are in its ``state_dict``, in every checkpoint, and in the saved folder.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Module
from torch import Tensor, nn

from offsphere.errors import ConfigError
from offsphere.similarity import Similarity

LEARNED_PARAMETERS = r"norm\.(gamma_q|gamma_d|log_scale)$"
"""Matches the parameters below by name; give it to ``learning_rate_mapping`` for a learning rate of their own."""


class LearnedSimilarity(Module):
    """Embeddings as they come in training, prepared for the inner product in ``encode_query`` and ``encode_document``.

    The gammas are sigmoids of unbounded parameters that start at 0, so gamma starts at 0.5 (paper, section 3). The
    parameters stand in a container called ``norm``, which keeps them out of transformers' weight decay.

    Args:
        similarity: The start; its gammas are trained if it is ``learned`` and stay as they are otherwise.
        scale: The inverse temperature alpha of InfoNCE that training starts with.
        learn_scale: Train the scale as well, through its logarithm.

    Raises:
        ConfigError: If the scale is not positive, or a gamma to be trained is not between 0 and 1.
    """

    config_file_name = "learned_similarity.json"
    forward_kwargs = {"task", "raw"}  # noqa: RUF012  (the declaration that sentence-transformers expects)

    def __init__(self, similarity: Similarity, scale: float = 20.0, learn_scale: bool = False):
        super().__init__()
        if not 0 < scale < math.inf:
            raise ConfigError(f"scale must be a positive number, found {scale!r}")
        if similarity.learned and not all(0 < gamma < 1 for gamma in similarity.gammas):
            raise ConfigError(f"gammas that are trained start between 0 and 1, both excluded; found {similarity!r}")
        self.start = similarity.detached()
        self.learn_scale = learn_scale
        self.norm = nn.ParameterDict()
        if similarity.learned:
            for side, gamma in zip(("gamma_q", "gamma_d"), similarity.gammas, strict=True):
                self.norm[side] = nn.Parameter(torch.tensor(math.log(gamma / (1 - gamma))))
        self.norm["log_scale"] = nn.Parameter(torch.tensor(math.log(scale)), requires_grad=learn_scale)

    @property
    def similarity(self) -> Similarity:
        """The similarity with the gammas as they are now; tensors in the graph where they are trained."""
        if not self.start.learned:
            return self.start
        return Similarity(self.norm["gamma_q"].sigmoid(), self.norm["gamma_d"].sigmoid(), learned=True)

    @property
    def scale(self) -> Tensor:
        """The inverse temperature as it is now, a 0-d tensor."""
        return self.norm["log_scale"].exp()

    def forward(
        self, features: dict[str, Tensor | Any], task: str | None = None, raw: bool = False
    ) -> dict[str, Tensor | Any]:
        """Features with the embedding prepared for its side; as it came when no side is named or ``raw`` is asked."""
        if raw or task not in ("query", "document"):
            return features
        prepare = self.similarity.prepare_query if task == "query" else self.similarity.prepare_document
        features["sentence_embedding"] = prepare(features["sentence_embedding"])
        return features

    def get_config_dict(self) -> dict[str, Any]:
        """The arguments that make this module again; the trained values are with the weights."""
        return {"similarity": self.start.to_dict(), "scale": self.scale.item(), "learn_scale": self.learn_scale}

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write configuration and parameters into the module's folder."""
        self.save_config(output_path)
        self.save_torch_weights(output_path, safe_serialization=safe_serialization)

    @classmethod
    def load(cls, model_name_or_path: str, **kwargs: Any) -> LearnedSimilarity:
        """The module that ``save`` wrote, from a folder or the hub."""
        where = {key: kwargs[key] for key in _HUB_OPTIONS if key in kwargs}
        config = cls.load_config(model_name_or_path, **where)
        module = cls(Similarity.from_dict(config["similarity"]), config["scale"], config["learn_scale"])
        return cls.load_torch_weights(model_name_or_path, model=module, **where)


_HUB_OPTIONS = ("subfolder", "token", "cache_folder", "revision", "local_files_only")


def learned_similarity(model: SentenceTransformer) -> LearnedSimilarity | None:
    """The module that carries the model's learned gammas and scale, if it has one."""
    return next((module for module in model if isinstance(module, LearnedSimilarity)), None)
