"""The forward pass of a transformer over packed tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from sentence_transformers.base.modules import Transformer
from torch import Tensor

from offsphere.cached_inputs import FrozenTrunk
from offsphere.packed.attention import Runs, attend, drop, equal_runs
from offsphere.packed.families import Family, Layer, find_family
from offsphere.packed.fused import FusedLinears

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 4096
"""Tokens that go through the layers together, or one text if it has more: the speed is flat from 1k to 8k."""

GIVEN = frozenset({"position_ids", "inputs_embeds", "cu_seq_lens_q"})
"""Features that the packed forward pass leaves to the ordinary one."""


class PackedTransformer:
    """The forward pass of a transformer on packed tokens, to be put in the place of its ``forward``.

    Texts are sorted by their number of tokens and their tokens put one after the other, so that linear layers, norms
    and dropout see no padding and attention sees each run of texts of equal length as one batch. The result is padded
    again, with zeros, for the pooling that follows. It is differentiable, with the dropout of the model in training.

    Args:
        original: A transformer of a family that ``families`` knows, or its trained layers above a frozen trunk. Its
            parts are used, not copied.
        fused: Makes bias, GELU and residual sum part of the matrix products where nothing is trained.

    Attributes:
        original: As given.
    """

    def __init__(self, original: Transformer | FrozenTrunk, fused: FusedLinears | None = None):
        self.original = original
        self.fused = fused

    @property
    def model(self) -> PreTrainedModel:
        """The transformers library's model inside."""
        return model_of(self.original)

    @property
    def family(self) -> Family:
        """That of the model."""
        family = find_family(self.model)
        if family is None:
            raise ValueError(f"{type(self.model).__name__} has no packed forward pass")
        return family

    @property
    def layers(self) -> list[Layer]:
        """Those that run: all, or the ones above the trunk."""
        frozen = self.original.layers if isinstance(self.original, FrozenTrunk) else 0
        return self.family.layers(self.model)[frozen:]

    def __call__(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """The features with ``token_embeddings`` (texts, longest, width), zero where the padding is.

        What is not plain text padded on the right goes the ordinary way: the mask has holes or an empty row, positions
        or embeddings are given, arguments are added, or autocast is on.
        """
        layout = None if kwargs or not GIVEN.isdisjoint(features) else _layout(features)
        if layout is None:
            return type(self.original).forward(self.original, features, **kwargs)
        bias = self.family.bias(self.model, layout.lengths[-1]) if self.family.bias else None
        fused = None if self.model.training or torch.is_grad_enabled() else self.fused
        layers, heads = self.layers, self.model.config.num_attention_heads
        batches = layout.batches()
        sizes = [sum(texts * length for texts, length in runs) for runs in batches]
        outputs = []
        for hidden, runs in zip(self._embed(features, layout).split(sizes), batches, strict=True):
            for layer in layers:
                hidden = _through(layer, hidden, runs, heads, bias, fused)
            outputs.append(hidden)
        features["token_embeddings"] = layout.pad(torch.cat(outputs))
        return features

    def _embed(self, features: dict[str, Any], layout: _Layout) -> Tensor:
        """(tokens, width): what goes into the first layer that runs."""
        if isinstance(self.original, FrozenTrunk):
            return layout.pack(features["trunk_activations"])
        ids = features["input_ids"]
        inputs = {"input_ids": ids, "position_ids": self.family.positions(self.model, ids)}
        if self.family.token_types and "token_type_ids" in features:
            inputs["token_type_ids"] = features["token_type_ids"]
        return self.model.embeddings(**{name: layout.pack(values)[None] for name, values in inputs.items()})[0]


def model_of(module: Transformer | FrozenTrunk) -> PreTrainedModel:
    """The transformers library's model that a module computes with."""
    return (module.original if isinstance(module, FrozenTrunk) else module).auto_model


@dataclass(frozen=True)
class _Layout:
    """Where the tokens of a padded batch stand when packed.

    Attributes:
        lengths: Of the texts, sorted.
        places: (tokens,) where each token stands in the flattened batch.
        shape: (texts, longest) of the batch.
    """

    lengths: list[int]
    places: Tensor
    shape: tuple[int, int]

    def pack(self, padded: Tensor) -> Tensor:
        """(texts, longest, ...) as (tokens, ...)."""
        return padded.flatten(0, 1)[self.places]

    def pad(self, packed: Tensor) -> Tensor:
        """(tokens, width) as (texts, longest, width), with zeros."""
        texts, longest = self.shape
        flat = packed.new_zeros(texts * longest, packed.shape[1]).index_copy(0, self.places, packed)
        return flat.view(texts, longest, -1)

    def batches(self) -> list[Runs]:
        """Runs of equal length, cut so that each part has no more than ``TOKENS`` tokens, or one text."""
        starts, tokens = [0], 0
        for text, length in enumerate(self.lengths):
            if tokens and tokens + length > TOKENS:
                starts.append(text)
                tokens = 0
            tokens += length
        return [equal_runs(self.lengths[start:end]) for start, end in pairwise([*starts, len(self.lengths)])]


def _layout(features: dict[str, Any]) -> _Layout | None:
    """The layout of a batch; None unless every row is tokens and then padding, on a CPU without autocast."""
    mask = features.get("attention_mask")
    if mask is None or "input_ids" not in features or mask.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return None
    lengths, columns = mask.sum(1), torch.arange(mask.shape[1])
    if not torch.equal(mask.bool(), columns < lengths[:, None]) or not lengths.all():
        return None
    order = lengths.argsort(stable=True)
    places = (order[:, None] * mask.shape[1] + columns)[columns < lengths[order, None]]
    return _Layout(lengths[order].tolist(), places, tuple(mask.shape))


def _through(
    layer: Layer, hidden: Tensor, runs: Runs, heads: int, bias: Tensor | None, fused: FusedLinears | None
) -> Tensor:
    """One layer."""
    projections = layer.query, layer.key, layer.value
    query, key, value = [part(hidden) for part in projections] if fused is None else fused.together(projections, hidden)
    dropout = layer.attention_dropout.p if layer.attention_dropout.training else 0.0
    attended = attend(query, key, value, runs, heads, bias, dropout)
    if fused is not None:
        hidden = layer.output_norm(fused(layer.output, attended, plus=hidden))
        return layer.down_norm(fused(layer.down, fused(layer.up, hidden, gelu=True), plus=hidden))
    output = layer.output(attended)
    if layer.output_dropout is not None:
        output = drop(output, layer.output_dropout)
    hidden = layer.output_norm(output + hidden)
    return layer.down_norm(drop(layer.down(layer.activation(layer.up(hidden))), layer.down_dropout) + hidden)
