"""Linear layers with what follows them, in one pass of oneDNN over the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MANY = 1024
"""Tokens from which on it pays to lay weights out for oneDNN first."""


class FusedLinears:
    """Computes linear layers with GELU or a residual sum; nothing is differentiated.

    Args:
        many: Tokens from which on weights that are at rest are laid out; with fewer they are used as they are.
    """

    def __init__(self, many: int = MANY) -> None:
        self.many = many
        self._ordered: dict[tuple[nn.Linear, str], Tensor] | None = None

    def __reduce__(self) -> tuple[type[FusedLinears], tuple[int]]:
        """A copy, or what another process gets, begins anew."""
        return FusedLinears, (self.many,)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Inside, no weight changes, so that weights are laid out in oneDNN's own order once and kept so.

        That is a twentieth faster. torch's count of changes would not do instead: fused optimizers do not count.
        """
        outer = self._ordered
        self._ordered = {} if outer is None else outer
        try:
            yield
        finally:
            self._ordered = outer

    def __call__(self, module: nn.Module, values: Tensor, gelu: bool = False, plus: Tensor | None = None) -> Tensor:
        """(tokens, in) to (tokens, out), then GELU or the sum with ``plus`` (tokens, out), in float32."""
        if not isinstance(module, nn.Linear):  # a layer of int8, which has a pass of its own
            layer: Any = module
            return layer.pointwise(values, gelu=gelu, plus=plus)
        weight = self._weight(module, len(values))
        if plus is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(values, plus, weight, module.bias, "add")
        after, variant = ("gelu", "none") if gelu else ("none", "")
        return torch.ops.mkldnn._linear_pointwise(values, weight, module.bias, after, [], variant)

    def together(self, modules: Sequence[nn.Module], values: Tensor) -> Sequence[Tensor]:
        """(tokens, out) of each linear layer, in one product where weights are laid out and all have biases."""
        ordered = self._ordered
        linear = [module for module in modules if isinstance(module, nn.Linear) and module.bias is not None]
        if ordered is None or len(values) < self.many or len(linear) < len(modules):
            return [self(module, values) for module in modules]
        key = linear[0], "together"
        if key not in ordered:
            weights = torch.cat([module.weight.detach() for module in linear])
            ordered[key] = torch.ops.mkldnn._reorder_linear_weight(weights, self.many)
        biases = torch.cat([module.bias.detach() for module in linear])
        result = torch.ops.mkldnn._linear_pointwise(values, ordered[key], biases, "none", [], "")
        return result.split([module.out_features for module in linear], dim=1)

    def _weight(self, module: nn.Linear, tokens: int) -> Tensor:
        """The weights, in oneDNN's order where that pays."""
        ordered = self._ordered
        if ordered is None or tokens < self.many:
            return module.weight
        key = module, "alone"
        if key not in ordered:
            ordered[key] = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), self.many)
        return ordered[key]
