"""Whether an encoder can be packed, checked against its ordinary forward pass, and the packing of it for a while."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from torch import nn

from offsphere.cached_inputs import FrozenTrunk
from offsphere.packed.families import FAMILIES, find_family
from offsphere.packed.fused import FusedLinears
from offsphere.packed.transformer import PackedTransformer, model_of

logger = logging.getLogger(__name__)

PARITY = 1e-5
"""How far, in share of the largest activation, the packed forward pass may be from the ordinary one."""

PROBES = [
    "length",
    "where does the length of an embedding come from, and what does a ranking make of it",
    "a",
    "length of what",
    "an embedding is as long as it is sure; the ranking is told so, or is told the direction alone, as you choose",
    "lengths",
]
"""What parity is checked on: texts of unlike length and texts of equal length, not in their order."""


@dataclass(frozen=True)
class Packing:
    """How the encoder computes inside ``packed_input``; as a string, for a person to read.

    Attributes:
        packed: Whether tokens are packed; otherwise they are padded, as ever.
        fused: Whether bias, GELU and residual sum are part of the matrix products (oneDNN) where nothing is trained.
        reason: Why not, where one of the two is false.
    """

    packed: bool
    fused: bool
    reason: str | None = None

    def __str__(self) -> str:
        way = "packed" if self.packed else "ordinary"
        return f"{way} forward pass" + (", fused" if self.fused else "") + (f" ({self.reason})" if self.reason else "")


@contextmanager
def packed_input(model: SentenceTransformer, trained: bool = False) -> Iterator[Packing]:
    """Inside, the model's transformer computes on packed tokens, where that gives what the padded ones give.

    The modules stay where they are, under their own names: only the ``forward`` of the first one is another. So
    saving, optimizers, checkpoints and copies see the model as it is. What it gives differs by rounding.

    Args:
        model: Any encoder. One that cannot be packed keeps its ordinary forward pass.
        trained: Whether weights change inside. Where they do not, oneDNN's order of them is kept as well, which takes
            the memory of the linear layers once more.

    Yields:
        How it computes, with the reason where it is the ordinary way.
    """
    first = model[0]
    packing = _how(first)
    mine = packing.packed and "forward" not in vars(first)
    if mine:
        first.forward = PackedTransformer(first, FusedLinears() if packing.fused else None)
    forward = vars(first).get("forward")
    fused = forward.fused if isinstance(forward, PackedTransformer) else None
    try:
        with nullcontext() if trained or fused is None else fused.at_rest():
            yield packing
    finally:
        if mine:
            vars(first).pop("forward", None)  # another thread may have been quicker


def is_packed(model: SentenceTransformer) -> bool:
    """Whether ``packed_input`` is in force, so that padding costs nothing."""
    return isinstance(vars(model[0]).get("forward"), PackedTransformer)


_found: WeakKeyDictionary[nn.Module, tuple[list[Any], Packing]] = WeakKeyDictionary()
"""What was found out about a module, and what it was made of then: the check takes three forward passes."""


def _how(first: nn.Module) -> Packing:
    """How a first module is to compute, checked once for the same parts."""
    replaced = vars(first).get("forward")
    if replaced is not None and not isinstance(replaced, PackedTransformer):
        return Packing(False, False, "something else has replaced its forward pass")
    reason = _cannot_pack(first)
    if reason is not None:
        return Packing(False, False, reason)
    parts = [next(first.parameters()).dtype, *((id(part), _hooks(part)) for part in first.modules())]
    if first not in _found or _found[first][0] != parts:
        _found[first] = parts, _check(first)
        logger.info("%s: %s", type(model_of(first)).__name__, _found[first][1])
    return _found[first][1]


def _cannot_pack(first: nn.Module) -> str | None:
    """Why a first module has no packed forward pass; None where it may have one."""
    if not isinstance(first, Transformer | FrozenTrunk):
        return f"the encoder begins with {type(first).__name__}, not with a transformer"
    model = model_of(first)
    if find_family(model) is None:
        return f"{type(model).__name__} is none of {', '.join(FAMILIES)}"
    weights = next(model.parameters())
    if weights.device.type != "cpu" or weights.dtype not in (torch.float32, torch.float64):
        found = f"{weights.dtype} on {weights.device}".removeprefix("torch.")
        return f"packing is for float32 on a CPU, and the weights are {found}"
    if any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
        return "gradient checkpointing is on"
    if getattr(model.config, "is_decoder", False):
        return "the model is a decoder"
    return "the model gives all hidden states" if model.config.output_hidden_states else None


def _check(first: Transformer | FrozenTrunk) -> Packing:
    """Packed if that agrees with the ordinary forward pass, and fused if that does as well."""
    failure = _failure(PackedTransformer(first))
    if failure is not None:
        return Packing(False, False, failure)
    packed = PackedTransformer(first, linears := FusedLinears(many=1))
    with linears.at_rest():
        reason = _cannot_fuse(packed) or _failure(packed)
    return Packing(True, reason is None, reason)


def _cannot_fuse(packed: PackedTransformer) -> str | None:
    """Why bias, GELU and residual sum cannot be part of the matrix products; None where they may be."""
    operations = ("_linear_pointwise", "_reorder_linear_weight")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(torch.ops.mkldnn, name) for name in operations):
        return "not fused: this build of torch has no oneDNN"
    for layer in packed.layers:
        for part in (layer.query, layer.key, layer.value, layer.output, layer.up, layer.down):
            if type(part) is not nn.Linear or _hooks(part):
                return f"not fused: a linear layer is a {type(part).__name__}" + (" with hooks" if _hooks(part) else "")
            if part.weight.dtype != torch.float32:
                return f"not fused: the weights are {part.weight.dtype}".replace("torch.", "")
        if getattr(layer.activation, "act", layer.activation) is not nn.functional.gelu:
            return "not fused: the activation is not the exact GELU"
    return None


def _hooks(part: nn.Module) -> int:
    return len(part._forward_hooks) + len(part._forward_pre_hooks)


def _failure(packed: PackedTransformer) -> str | None:
    """What keeps a packed forward pass from being used; None if it agrees with the ordinary one without dropout."""
    original = packed.original
    training = {module: module.training for module in original.modules()}
    original.eval()
    try:
        features = original.preprocess(PROBES)
        with torch.no_grad():
            expected = type(original).forward(original, dict(features))["token_embeddings"]
            found = packed(dict(features))["token_embeddings"]
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return f"the {'fused' if packed.fused else 'packed'} forward pass fails: {error}"
    finally:
        for module, was in training.items():
            module.training = was
    kept = features["attention_mask"].bool()
    if found.shape != expected.shape:
        return f"the outputs have shapes {tuple(found.shape)} and {tuple(expected.shape)}"
    difference = float((expected[kept] - found[kept]).abs().max() / expected[kept].abs().max())
    if difference <= PARITY:
        return None
    return f"{'fused' if packed.fused else 'packed'}, the outputs differ by {difference:.1e} of the largest"
