"""InfoNCE without the (B, M) matrix: a tile of queries at a time, gradients accumulated on the way forward.

Inside a tile the softmax over all documents is complete, so the gradients of queries and documents follow at once and
the backward pass only multiplies them by what comes in: three matrix products in all, nothing computed twice, and
memory that grows with M, not with B times M.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 256
"""Queries in a tile: (256, M) logits keep the matrix products at full speed and fit a cache for moderate M."""

MaskRows = Callable[[slice], Tensor]


def tiled_info_nce(
    queries: Tensor, documents: Tensor, scale: float | Tensor, mask_rows: MaskRows | None = None, tile: int = TILE
) -> Tensor:
    """Mean over queries of -log softmax(scale * q_i . d)[i], of prepared embeddings (see ``Similarity``).

    Args:
        queries: (B, n) prepared queries in float32 or float64.
        documents: (M, n) prepared documents, M >= B; row i < B is the positive of query i.
        scale: Inverse temperature, a number or a 0-d tensor in the graph.
        mask_rows: For a slice of queries, the (rows, M) boolean mask of documents that must not be their negatives. A
            query's own positive counts whatever the mask says.
        tile: Queries at a time; changes memory and speed, and the result by rounding only.

    Returns:
        A 0-d tensor of the same dtype. It can be differentiated once.
    """
    scale = scale if isinstance(scale, Tensor) else queries.new_tensor(scale)
    with torch.autocast(queries.device.type, enabled=False):
        return _TiledInfoNCE.apply(queries, documents, scale, mask_rows, tile)


class _TiledInfoNCE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, documents: Tensor, scale: Tensor, mask_rows: MaskRows | None, tile: int
    ) -> Tensor:
        differentiate = any(ctx.needs_input_grad)
        query_gradient = torch.empty_like(queries) if differentiate else None
        document_gradient = torch.zeros_like(documents) if differentiate else None
        total_loss = queries.new_zeros((), dtype=torch.float64)
        for start in range(0, len(queries), tile):
            rows = slice(start, min(start + tile, len(queries)))
            own = torch.arange(rows.stop - start, device=queries.device)
            logits = (queries[rows] * scale) @ documents.T
            positives = logits[own, start + own]
            if mask_rows is not None:
                logits.masked_fill_(mask_rows(rows), -torch.inf)
                logits[own, start + own] = positives
            largest = logits.amax(1, keepdim=True)
            weights = logits.sub_(largest).exp_()
            total = weights.sum(1, keepdim=True)
            total_loss += (largest + total.log()).sum(dtype=torch.float64) - positives.sum(dtype=torch.float64)
            if query_gradient is not None and document_gradient is not None:
                weights.div_(total)[own, start + own] -= 1
                torch.mm(weights, documents, out=query_gradient[rows])
                document_gradient.addmm_(weights.T, queries[rows])
        if query_gradient is not None and document_gradient is not None:
            scale_gradient = torch.linalg.vecdot(query_gradient, queries).sum() / len(queries)
            share = scale / len(queries)
            ctx.save_for_backward(query_gradient.mul_(share), document_gradient.mul_(share), scale_gradient)
        return (total_loss / len(queries)).to(queries.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query_gradient, document_gradient, scale_gradient = ctx.saved_tensors
        return query_gradient * incoming, document_gradient * incoming, scale_gradient * incoming, None, None
