"""InfoNCE without the (B, M) matrix: a tile of queries at a time, gradients accumulated on the way forward.

Inside a tile the softmax over all documents is complete, so the gradients of queries and documents follow at once and
the backward pass only multiplies them by what comes in: three matrix products in all, nothing computed twice. Beside
the gradients there are a tile of weights and, where their length is removed, the prepared documents, so that memory
grows with M, not with B times M.

A tile is computed in blocks of documents, with a running maximum as in an online softmax (Milakov and Gimelshein,
arXiv 1805.02867): a block goes from logits to the gradient of its queries while it lies in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from offsphere.similarity import Similarity, pull_back

TILE = 512
"""Queries in a tile: enough to keep the matrix products at full speed."""

BLOCK = 1024
"""Documents in a block on a CPU: its (512, 1024) weights, two megabytes, stay close to the processor."""

LN2 = math.log(2)

MaskRows = Callable[[slice], Tensor]


def tiled_info_nce(
    queries: Tensor,
    documents: Tensor,
    similarity: Similarity,
    scale: float | Tensor,
    mask_rows: MaskRows | None = None,
    tile: int = TILE,
) -> Tensor:
    """Mean over queries of -log softmax(scale * s(q_i, .))[i].

    Args:
        queries: (B, n) raw embeddings, any floating dtype.
        documents: (M, n) raw embeddings, M >= B; row i < B is the positive of query i.
        similarity: Its gammas may be tensors in the graph.
        scale: Inverse temperature, a number or a 0-d tensor in the graph.
        mask_rows: For a slice of queries, the (rows, M) boolean mask of documents that must not be their negatives. A
            query's own positive counts whatever the mask says.
        tile: Queries at a time; changes memory and speed, and the result by rounding only.

    Returns:
        A 0-d tensor in float32 or float64. It can be differentiated once.
    """
    with torch.autocast(queries.device.type, enabled=False):
        return _TiledInfoNCE.apply(queries, documents, similarity.gamma_q, similarity.gamma_d, scale, mask_rows, tile)


class _TiledInfoNCE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        documents: Tensor,
        gamma_q: float | Tensor,
        gamma_d: float | Tensor,
        scale: float | Tensor,
        mask_rows: MaskRows | None,
        tile: int,
    ) -> Tensor:
        similarity = Similarity(gamma_q, gamma_d)
        prepared = similarity.prepare_document(documents)
        differentiate = any(ctx.needs_input_grad)
        at_queries = torch.zeros_like(queries, dtype=prepared.dtype) if differentiate else None
        at_documents = torch.zeros_like(prepared) if differentiate else None
        exact = prepared.dtype if queries.device.type == "mps" else torch.float64  # which that one does not have
        total_loss, at_gamma_q, at_scale = (prepared.new_zeros((), dtype=exact) for _ in range(3))
        # One buffer for all tiles: fresh pages for each would cost a tenth of the time.
        buffer = prepared.new_empty(min(tile, len(queries)) * len(documents))
        width = BLOCK if queries.device.type == "cpu" else len(documents)
        blocks = [slice(first, min(first + width, len(documents))) for first in range(0, len(documents), width)]
        for start in range(0, len(queries), tile):
            rows = slice(start, min(start + tile, len(queries)))
            some = similarity.prepare_query(queries[rows])
            scaled = some * (scale / LN2)  # powers of two are computed three times as fast as those of e
            mask = None if mask_rows is None else mask_rows(rows)
            gradient = None if at_queries is None else at_queries[rows]
            total = prepared.new_zeros(len(some), 1)
            largest = torch.full_like(total, torch.finfo(total.dtype).min)
            passed = []
            for columns in blocks:
                weights = buffer[len(some) * columns.start : len(some) * columns.stop].view(len(some), -1)
                torch.mm(scaled, prepared[columns].T, out=weights)
                own = weights.diagonal(start - columns.start)
                total_loss -= own.sum(dtype=exact)
                if mask is not None:
                    positives = own.clone()
                    weights.masked_fill_(mask[:, columns], -torch.inf)
                    own.copy_(positives)
                before, largest = largest, torch.maximum(largest, weights.amax(1, keepdim=True))
                shrunk = (before - largest).exp2_()
                weights.sub_(largest).exp2_()
                total = total * shrunk + weights.sum(1, keepdim=True)
                if gradient is not None:
                    gradient.mul_(shrunk).addmm_(weights, prepared[columns])
                passed.append((columns, weights, largest))
            total_loss += (largest + total.log2()).sum(dtype=exact)
            if gradient is None or at_documents is None:
                continue
            gradient.div_(total).sub_(prepared[rows])
            for columns, weights, relative_to in passed:
                at_documents[columns].addmm_(weights.T, some * ((relative_to - largest).exp2_() / total))
            at_documents[rows] -= some
            at_scale += torch.linalg.vecdot(gradient, some).sum(dtype=exact)
            at_gamma_q += pull_back(queries[rows], gamma_q, gradient)
        dtype = prepared.dtype
        if at_queries is not None and at_documents is not None:
            at_gamma_d = pull_back(documents, gamma_d, at_documents)
            share = scale / len(queries)
            ctx.save_for_backward(
                at_queries.mul_(share),
                at_documents.mul_(share),
                at_gamma_q * share,
                at_gamma_d * share,
                at_scale / len(queries),
            )
        return (total_loss * (LN2 / len(queries))).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        if incoming != 1:
            gradients = [gradient * incoming for gradient in gradients]
        wanted = zip(gradients, ctx.needs_input_grad[:5], strict=True)
        return *(gradient if needed else None for gradient, needed in wanted), None, None
