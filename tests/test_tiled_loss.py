"""The tiled loss against the plain one: same value, same gradients, none of its memory."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offsphere import info_nce
from offsphere.losses import KnownPositiveMask, KnownPositives, known_positive_mask
from offsphere.similarity import NAMES, Similarity
from offsphere.tiled_loss import tiled_info_nce

SHAPES = [(1, 1, 3), (1, 4, 2), (7, 7, 5), (256, 256, 8), (257, 514, 6), (300, 613, 16)]
"""Batch, documents, dimension; most are no multiples of the tile."""


def parameters(batch, documents, dimension, name="dot", dtype=torch.float64):
    generator = torch.Generator().manual_seed(batch * documents + dimension)
    queries = torch.randn(batch, dimension, generator=generator, dtype=dtype).requires_grad_()
    passages = torch.randn(documents, dimension, generator=generator, dtype=dtype).requires_grad_()
    scale = torch.tensor(3.0, dtype=dtype, requires_grad=True)
    similarity = Similarity.parse(name)
    learned = []
    if similarity.learned:
        learned = [torch.tensor(gamma, dtype=dtype, requires_grad=True) for gamma in (0.3, 0.6)]
        similarity = Similarity(*learned, learned=True)
    masked = torch.rand(batch, documents, generator=generator) < 0.2
    return queries, passages, similarity, scale, masked, learned


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference_with_every_gradient(shape, name):
    queries, documents, similarity, scale, masked, learned = parameters(*shape, name)
    leaves = (queries, documents, scale, *learned)
    values, gradients = [], []
    for impl in ("reference", "tiled"):
        value = info_nce(queries, documents, similarity, scale, masked, impl)
        values.append(value)
        gradients.append(torch.autograd.grad(value, leaves, allow_unused=True))
    torch.testing.assert_close(values[0], values[1], rtol=1e-12, atol=1e-12)
    for reference, tiled in zip(*gradients, strict=True):
        if shape[1] == 1:  # one document has nothing to lose against
            assert float(tiled.abs().max()) < 1e-12
        torch.testing.assert_close(tiled, reference, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("tile", [1, 2, 3, 64])
def test_the_tile_changes_nothing(tile):
    queries, documents, _, scale, masked, _ = parameters(7, 20, 5)
    one = tiled_info_nce(queries, documents, scale, masked.__getitem__)
    other = tiled_info_nce(queries, documents, scale, masked.__getitem__, tile)
    torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_finite_differences():
    queries, documents, _, scale, masked, _ = parameters(5, 9, 3)
    assert torch.autograd.gradcheck(
        lambda q, d, s: tiled_info_nce(q, d, s, masked.__getitem__, 2), (queries, documents, scale)
    )


def test_finite_differences_would_see_a_wrong_gradient():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, queries, documents, scale):
            return tiled_info_nce(queries, documents, scale)

        @staticmethod
        def backward(ctx, incoming):
            return incoming * torch.ones(5, 3, dtype=torch.float64), None, None

    queries, documents, _, scale, _, _ = parameters(5, 9, 3)
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(lambda q: Wrong.apply(q, documents.detach(), scale.detach()), (queries,))


def test_what_comes_in_scales_the_gradient():
    queries, documents, _, scale, _, _ = parameters(6, 6, 4)
    once = torch.autograd.grad(tiled_info_nce(queries, documents, scale), queries)[0]
    thrice = torch.autograd.grad(3 * tiled_info_nce(queries, documents, scale), queries)[0]
    torch.testing.assert_close(thrice, 3 * once)


def test_the_positive_counts_whatever_the_mask_says():
    queries, documents, _, scale, _, _ = parameters(4, 6, 3)
    everything = torch.ones(4, 6, dtype=torch.bool)
    assert tiled_info_nce(queries, documents, scale, everything.__getitem__).item() == pytest.approx(0.0, abs=1e-12)


def test_a_masked_document_gets_no_gradient():
    queries, documents, _, scale, _, _ = parameters(4, 6, 3)
    masked = torch.zeros(4, 6, dtype=torch.bool)
    masked[:, 5] = True
    gradient = torch.autograd.grad(tiled_info_nce(queries, documents, scale, masked.__getitem__), documents)[0]
    assert gradient[5].abs().max() == 0
    assert gradient[4].abs().max() > 0


def test_no_gradient_is_made_where_none_is_asked():
    queries, documents, _, _, _, _ = parameters(6, 6, 4)
    with torch.no_grad():
        assert not tiled_info_nce(queries, documents, 3.0).requires_grad


def test_scores_are_in_single_precision_under_autocast():
    queries, documents, _, _, _, _ = parameters(64, 64, 8, dtype=torch.float32)
    plain = tiled_info_nce(queries, documents, 3.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tiled_info_nce(queries, documents, 3.0).item() == plain.item()
        assert (queries @ documents.T).dtype == torch.bfloat16  # the canary: autocast is on


def test_rows_of_the_mask_are_the_mask():
    generator = torch.Generator().manual_seed(0)
    queries, documents = (torch.randint(0, 6, (n,), generator=generator) for n in (30, 70))
    known = KnownPositives([(0, 1), (3, 5)], n_documents=6)
    whole = known_positive_mask(queries, documents, known)
    rows = KnownPositiveMask(queries, documents, known)
    assert torch.equal(torch.cat([rows(slice(start, min(start + 7, 30))) for start in range(0, 30, 7)]), whole)
    assert rows.masked == int(whole.sum()) > 0


class LargestTensor(TorchDispatchMode):
    """How many numbers the largest tensor holds that is made inside."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        made = function(*arguments, **(keywords or {}))
        self.size = max([self.size, *(leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor))])
        return made


@pytest.mark.parametrize(("impl", "holds_it"), [("tiled", False), ("reference", True)])
def test_whether_the_matrix_is_ever_made(impl, holds_it):
    queries, documents, similarity, scale, _, _ = parameters(2000, 3000, 4, dtype=torch.float32)
    keys = torch.arange(2000), torch.arange(3000)
    with LargestTensor() as largest:
        info_nce(queries, documents, similarity, scale, KnownPositiveMask(*keys), impl).backward()
    assert (largest.size >= 2000 * 3000) == holds_it
    assert largest.size >= 256 * 3000  # a tile


def test_auto_tiles_large_batches_only():
    for batch, tiled in ((512, False), (4096, True)):
        queries, documents, similarity, scale, _, _ = parameters(batch, batch, 2, dtype=torch.float32)
        with LargestTensor() as largest:
            info_nce(queries, documents, similarity, scale)
        assert (largest.size < batch * batch) == tiled
