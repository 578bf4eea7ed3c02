"""Attention and dropout on packed tokens: texts one after the other, sorted by length, without padding.

Texts of equal length that stand together are a view (texts, length, heads, width) of the packed matrix, so that each
run of them takes one call without a mask, a pad or a gather.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Runs = Sequence[tuple[int, int]]
"""(texts, tokens of each text), in the order of the packed tokens."""

SCORES = 2**18
"""Attention scores at a time where they are written out: a megabyte, which stays in the cache."""
STEPS = 2**16
"""Dropout probabilities are rounded to this share."""


def equal_runs(lengths: Iterable[int]) -> list[tuple[int, int]]:
    """How many texts of each length stand together."""
    return [(len(list(group)), length) for length, group in itertools.groupby(lengths)]


def attend(
    query: Tensor, key: Tensor, value: Tensor, runs: Runs, heads: int, bias: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """What each token takes from the tokens of its own text.

    Args:
        query: (tokens, width), contiguous, as are ``key`` and ``value``; or columns of a wider matrix, but not with
            dropout or a bias that takes a gradient.
        key: Of the same shape.
        value: Of the same shape.
        runs: Texts of equal length; they cover all tokens.
        heads: A divisor of the width.
        bias: (heads, longest, longest) added to the scaled scores; a text of n tokens gets the first n of each axis.
        dropout: The share of attention weights that is dropped.

    Returns:
        (tokens, width). With a bias that takes a gradient, or dropout, it can be differentiated once.
    """
    if dropout > 0.0 or (bias is not None and bias.requires_grad and torch.is_grad_enabled()):
        return _Attention.apply(query, key, value, bias, runs, heads, dropout)
    sizes = [texts * length for texts, length in runs]
    outputs = []
    packed = (query.split(sizes), key.split(sizes), value.split(sizes))
    for (texts, length), *parts in zip(runs, *packed, strict=True):
        q, k, v = (part.view(texts, length, heads, -1).transpose(1, 2) for part in parts)
        mask = None if bias is None else bias[None, :, :length, :length]
        output = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        outputs.append(output.transpose(1, 2).reshape(texts * length, -1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def drop(values: Tensor, module: nn.Module) -> Tensor:
    """What the dropout module makes of the values, several times faster than ``nn.functional.dropout`` on a CPU."""
    if type(module) is not nn.Dropout:
        return module(values)
    return _Dropout.apply(values, module.p) if module.training and module.p > 0.0 else values


def _scale(dropout: float) -> float:
    """What the kept values are multiplied by, so that their expectation stays: exact for the rounded probability."""
    kept = STEPS - round(dropout * STEPS)
    return STEPS / kept if kept else 0.0


def _draw_kept(kept: Tensor, dropout: float) -> None:
    """Fill a boolean tensor: each value false with the probability ``dropout``, rounded to a 65536th.

    Four values come from one 64-bit draw of torch's global generator, as ``bernoulli_`` takes seven times as long.
    """
    bits = torch.empty((kept.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    halves = bits.view(torch.int16)[: kept.numel()].view(kept.shape)
    dropped = round(dropout * STEPS)
    if dropped < STEPS:
        torch.ge(halves, dropped - STEPS // 2, out=kept)
    else:
        kept.fill_(False)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, dropout: float) -> Tensor:
        kept = torch.empty(values.shape, dtype=torch.bool)
        _draw_kept(kept, dropout)
        ctx.save_for_backward(kept)
        ctx.scale = _scale(dropout)
        return (values * kept).mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return (gradient * kept).mul_(ctx.scale), None


class _Attention(torch.autograd.Function):
    """Attention with its scores written out, a cache full at a time; the backward pass computes them again.

    Of the (heads, length, length) scores of a text only the dropout mask is kept, a byte each. With S the scores, P
    their softmax, M the mask over 1 - p, O = (P M) V and G the gradient of O: dV = (P M)' G and
    dS = (P M) (G V') - P d with d = rowsum(G O), as in FlashAttention-2 (Dao, 2023, algorithm 2).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, runs: Runs, heads: int, dropout: float
    ) -> Tensor:
        output = torch.empty_like(query)
        kept = torch.empty(heads * sum(n * length**2 for n, length in runs) if dropout else 0, dtype=torch.bool)
        for texts, length, tokens, masks in _walk(runs, heads, kept):
            q, k, v = (_by_head(part[tokens], texts, length, heads) for part in (query, key, value))
            q = q * q.shape[-1] ** -0.5
            result = torch.empty_like(q)
            for rows in _tiles(texts, length, heads):
                weights = _weights(q[rows], k[rows], bias, rows.start % heads)
                if dropout:
                    mask = masks[rows]
                    _draw_kept(mask, dropout)
                    weights.mul_(mask)
                torch.bmm(weights, v[rows], out=result[rows])
            if dropout:
                result.mul_(_scale(dropout))
            _from_heads(result, output[tokens], texts, length, heads)
        ctx.save_for_backward(query, key, value, bias, output, kept)
        ctx.runs, ctx.heads, ctx.dropout = runs, heads, dropout
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, output, kept = ctx.saved_tensors
        gradient = gradient.contiguous()
        heads, dropout = ctx.heads, ctx.dropout
        gradients = [torch.empty_like(part) for part in (query, key, value)]
        bias_gradient = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None
        for texts, length, tokens, masks in _walk(ctx.runs, heads, kept):
            parts = (query, key, value, gradient, output)
            q, k, v, g, o = (_by_head(part[tokens], texts, length, heads) for part in parts)
            scale = q.shape[-1] ** -0.5
            q = q * scale
            row_sums = (g * o).sum(-1, keepdim=True)
            if dropout:
                g = g * _scale(dropout)
            results = [torch.empty_like(q) for _ in gradients]
            for rows in _tiles(texts, length, heads):
                weights = _weights(q[rows], k[rows], bias, rows.start % heads)
                dropped = weights * masks[rows] if dropout else weights
                torch.bmm(dropped.mT, g[rows], out=results[2][rows])
                scores = torch.bmm(g[rows], v[rows].mT).mul_(dropped).sub_(weights * row_sums[rows])
                torch.bmm(scores, k[rows], out=results[0][rows])
                torch.bmm(scores.mT, q[rows], out=results[1][rows])
                if bias_gradient is not None:
                    part = _bias_of(bias_gradient, scores, rows.start % heads)
                    part.add_(scores.view(-1, *part.shape).sum(0))
            results[0].mul_(scale)
            for result, target in zip(results, gradients, strict=True):
                _from_heads(result, target[tokens], texts, length, heads)
        return *gradients, bias_gradient, None, None, None


def _walk(runs: Runs, heads: int, kept: Tensor) -> Iterator[tuple[int, int, slice, Tensor]]:
    """Texts, length, tokens and masks (texts * heads, length, length) of each run; the masks are empty without any."""
    token = score = 0
    for texts, length in runs:
        tokens, scores = texts * length, texts * heads * length**2 if len(kept) else 0
        yield texts, length, slice(token, token + tokens), kept[score : score + scores].view(-1, length, length)
        token, score = token + tokens, score + scores


def _tiles(texts: int, length: int, heads: int) -> Iterator[slice]:
    """Rows of (texts * heads) whose scores fit the cache: whole texts, or an equal share of the heads of one."""
    fitting = max(1, SCORES // length**2)
    tile = fitting // heads * heads or next(share for share in range(fitting, 0, -1) if heads % share == 0)
    for start in range(0, texts * heads, tile):
        yield slice(start, min(start + tile, texts * heads))


def _by_head(part: Tensor, texts: int, length: int, heads: int) -> Tensor:
    """(tokens, width) as (texts * heads, length, width of a head), contiguous."""
    return part.view(texts, length, heads, -1).transpose(1, 2).contiguous().view(texts * heads, length, -1)


def _from_heads(part: Tensor, target: Tensor, texts: int, length: int, heads: int) -> None:
    """The way back, into the target."""
    target.view(texts, length, heads, -1).copy_(part.view(texts, heads, length, -1).transpose(1, 2))


def _weights(query: Tensor, key: Tensor, bias: Tensor | None, first_head: int) -> Tensor:
    """The softmax of the scores of a tile."""
    scores = torch.bmm(query, key.mT)
    if bias is not None:
        part = _bias_of(bias, scores, first_head)
        scores.view(-1, *part.shape).add_(part)
    return torch.softmax(scores, -1)


def _bias_of(bias: Tensor, scores: Tensor, first_head: int) -> Tensor:
    """The part of the bias that a tile of scores gets: of all heads, or of those in the tile."""
    length = scores.shape[-1]
    return bias[first_head : first_head + len(scores), :length, :length]
