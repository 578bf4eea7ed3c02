"""A linear layer in 8 bits: one scale a row of its input, one a row of its weights, sums exact in 32 bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS = 256
"""Rows at a time: what comes between the products then stays in the processor's cache."""
LEVELS = 127


class Int8Linear(nn.Module):
    """What a linear layer gives, up to the rounding of its input and its weights to 8 bits.

    Args:
        linear: In float32; its weights are rounded once, here.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weights = linear.weight.detach()
        scales = weights.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / LEVELS
        self.scales = scales
        self.weights = (weights / scales[:, None]).round().to(torch.int8).t().contiguous()
        self.bias = linear.bias.detach() if linear.bias is not None else torch.zeros_like(scales)

    def forward(self, values: Tensor) -> Tensor:
        """(..., in) float32 to (..., out) float32."""
        return self.pointwise(values.flatten(0, -2)).unflatten(0, values.shape[:-1])

    def pointwise(self, values: Tensor, gelu: bool = False, plus: Tensor | None = None) -> Tensor:
        """(tokens, in) to (tokens, out), then GELU or the sum with ``plus`` (tokens, out)."""
        out = values.new_empty(len(values), self.weights.shape[1])
        for start in range(0, len(values), ROWS):
            some, result = values[start : start + ROWS], out[start : start + ROWS]
            scales = some.abs().amax(1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny).div_(LEVELS)
            rounded = some.div(scales).round_().to(torch.int8)
            result.copy_(torch._int_mm(rounded, self.weights)).mul_(scales)
            torch.addcmul(self.bias, result, self.scales, out=result)
            if gelu:
                torch.ops.aten.gelu_(result)
            elif plus is not None:
                result += plus[start : start + ROWS]
        return out
