"""InfoNCE without the (B, M) matrix: a tile of queries at a time, gradients accumulated on the way forward.

Inside a tile the softmax over all documents is complete, so the gradients of queries and documents follow at once and
the backward pass only multiplies them by what comes in: three matrix products in all, nothing computed twice. Beside
the gradients there are a tile of logits and, where their length is removed, the prepared documents, so that memory
grows with M, not with B times M.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from offsphere.similarity import Similarity, pull_back

TILE = 256
"""Queries in a tile: (256, M) logits keep the matrix products at full speed and fit a cache for moderate M."""

CACHED = 2**17
"""Logits whose softmax a CPU computes at a time: half a megabyte, which stays in its cache."""

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
        at_queries = torch.empty_like(queries, dtype=prepared.dtype) if differentiate else None
        at_documents = torch.zeros_like(prepared) if differentiate else None
        exact = prepared.dtype if queries.device.type == "mps" else torch.float64  # which that one does not have
        total_loss, at_gamma_q, at_scale = (prepared.new_zeros((), dtype=exact) for _ in range(3))
        # One buffer for all tiles: fresh pages for each would cost a tenth of the time.
        buffer = prepared.new_empty(min(tile, len(queries)), len(documents))
        for start in range(0, len(queries), tile):
            rows = slice(start, min(start + tile, len(queries)))
            own = torch.arange(rows.stop - start, device=queries.device)
            some = similarity.prepare_query(queries[rows])
            logits = torch.mm(some * scale, prepared.T, out=buffer[: len(own)])
            positives = logits[own, start + own]
            if mask_rows is not None:
                logits.masked_fill_(mask_rows(rows), -torch.inf)
                logits[own, start + own] = positives
            weights, normalisers = _softmax(logits)
            total_loss += normalisers.sum(dtype=exact) - positives.sum(dtype=exact)
            if at_queries is None or at_documents is None:
                continue
            weights[own, start + own] -= 1
            gradient = torch.mm(weights, prepared, out=at_queries[rows])
            at_documents.addmm_(weights.T, some)
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
        return (total_loss / len(queries)).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        if incoming != 1:
            gradients = [gradient * incoming for gradient in gradients]
        wanted = zip(gradients, ctx.needs_input_grad[:5], strict=True)
        return *(gradient if needed else None for gradient, needed in wanted), None, None


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax of each row, in place of the logits, and the logarithm of its normaliser (rows,)."""
    rows = max(1, CACHED // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    normalisers = []
    for part in logits.split(rows):
        largest = part.amax(1, keepdim=True)
        total = part.sub_(largest).exp_().sum(1, keepdim=True)
        part.div_(total)
        normalisers.append((largest + total.log())[:, 0])
    return logits, torch.cat(normalisers)
