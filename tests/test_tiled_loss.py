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

SHAPES = [(1, 1, 3), (1, 4, 2), (7, 7, 5), (256, 256, 8), (513, 514, 6), (600, 2100, 16)]
"""Batch, documents, dimension; most are no multiples of the tile or of the block."""


DOT = Similarity.parse("dot")


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


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("tile", [1, 2, 3, 64])
def test_tiles_and_blocks_change_nothing(tile, block, monkeypatch):
    queries, documents, _, scale, masked, _ = parameters(7, 20, 5)
    masked[1] = True  # but for its positive, so that whole blocks of it are masked
    masked[2, :4] = True
    values, gradients = [], []
    for loss in (
        info_nce(queries, documents, DOT, scale, masked, "reference"),
        tiled_info_nce(queries, documents, DOT, scale, masked.__getitem__),
    ):
        values.append(loss)
        gradients.append(torch.autograd.grad(loss, (queries, documents, scale)))
    monkeypatch.setattr("offsphere.tiled_loss.BLOCK", block)
    loss = tiled_info_nce(queries, documents, DOT, scale, masked.__getitem__, tile)
    gradients.append(torch.autograd.grad(loss, (queries, documents, scale)))
    for value in values:
        torch.testing.assert_close(loss, value, rtol=1e-13, atol=1e-13)
    for reference, plain, tiled in zip(*gradients, strict=True):
        torch.testing.assert_close(tiled, reference, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(plain, reference, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_logits_of_any_size_in_single_precision(size, descending, monkeypatch):
    """The largest logit of a query in its first block or in its last one, and far from the others."""
    monkeypatch.setattr("offsphere.tiled_loss.BLOCK", 4)
    queries, documents, _, _, _, _ = parameters(6, 30, 5, dtype=torch.float32)
    with torch.no_grad():
        documents *= torch.linspace(0, 1, 30).sort(descending=descending).values[:, None] * size
    exact = [side.detach().double().requires_grad_() for side in (queries, documents)]
    found = info_nce(queries, documents, DOT, 20.0, impl="tiled")
    expected = info_nce(*exact, DOT, 20.0, impl="reference")
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for one, other in zip(
        torch.autograd.grad(found, (queries, documents)), torch.autograd.grad(expected, exact), strict=True
    ):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("gammas", [(0.0, 0.0), (1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.3, 0.6), (0.2, 0.9)])
@pytest.mark.parametrize("fixed", [True, False])
def test_finite_differences(gammas, fixed):
    queries, documents, _, scale, masked, _ = parameters(5, 9, 3)
    learned = [torch.tensor(gamma, dtype=torch.float64, requires_grad=True) for gamma in gammas]

    def loss(q, d, s, *given):
        return tiled_info_nce(q, d, Similarity(*(gammas if fixed else given)), s, masked.__getitem__, 2)

    assert torch.autograd.gradcheck(loss, (queries, documents, scale, *([] if fixed else learned)))


@pytest.mark.parametrize("name", NAMES)
def test_zero_vectors_have_the_gradient_of_the_reference(name):
    queries, documents, similarity, scale, masked, learned = parameters(5, 9, 3, name)
    with torch.no_grad():
        queries[1], documents[0], documents[7] = 0, 0, 0
    gradients = []
    for impl in ("reference", "tiled"):
        value = info_nce(queries, documents, similarity, scale, masked, impl)
        gradients.append(torch.autograd.grad(value, (queries, documents, scale, *learned)))
    for reference, tiled in zip(*gradients, strict=True):
        torch.testing.assert_close(tiled, reference, rtol=1e-9, atol=1e-12)
    assert gradients[1][0][1].abs().max() > 0 or name in ("cosine", "dnorm")


@pytest.mark.parametrize("size", [1e-30, 1e25])
def test_lengths_whose_squares_do_not_fit(size):
    """Against double precision, where they do; the graph of the reference overflows in single."""
    queries, documents, similarity, _, masked, _ = parameters(5, 9, 3, "cosine", torch.float32)
    with torch.no_grad():
        queries *= size
    exact = [side.detach().double().requires_grad_() for side in (queries, documents)]
    found = torch.autograd.grad(info_nce(queries, documents, similarity, 3.0, masked, "tiled"), (queries, documents))
    expected = torch.autograd.grad(info_nce(*exact, similarity, 3.0, masked, "reference"), exact)
    for one, other, factor in zip(found, expected, (size, 1.0), strict=True):
        torch.testing.assert_close(one * factor, (other * factor).float(), rtol=1e-4, atol=1e-6)
        assert (other * factor).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["cosine", "learnable"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_scored_in_single(name, dtype):
    """A scaled loss keeps small gradients from vanishing, as they are rounded only at the end."""
    queries, documents, similarity, scale, _, learned = parameters(300, 300, 16, name, torch.float32)
    half = [side.detach().to(dtype).requires_grad_() for side in (queries, documents)]
    same = [side.detach().float().requires_grad_() for side in half]
    values, gradients = [], []
    for sides in (half, same):
        values.append(info_nce(*sides, similarity, scale, impl="tiled"))
        gradients.append(torch.autograd.grad(2**12 * values[-1], (*sides, scale, *learned)))
    assert values[0].dtype == torch.float32 and values[0].item() == values[1].item()
    for low, single in zip(*gradients, strict=True):
        torch.testing.assert_close(low.float(), single.to(low.dtype).float())
    assert gradients[0][0].dtype == dtype


def test_finite_differences_would_see_a_wrong_gradient():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, queries, documents, scale):
            return tiled_info_nce(queries, documents, DOT, scale)

        @staticmethod
        def backward(ctx, incoming):
            return incoming * torch.ones(5, 3, dtype=torch.float64), None, None

    queries, documents, _, scale, _, _ = parameters(5, 9, 3)
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(lambda q: Wrong.apply(q, documents.detach(), scale.detach()), (queries,))


def test_what_comes_in_scales_the_gradient():
    queries, documents, _, scale, _, _ = parameters(6, 6, 4)
    once = torch.autograd.grad(tiled_info_nce(queries, documents, DOT, scale), queries)[0]
    thrice = torch.autograd.grad(3 * tiled_info_nce(queries, documents, DOT, scale), queries)[0]
    torch.testing.assert_close(thrice, 3 * once)


def test_the_positive_counts_whatever_the_mask_says():
    queries, documents, _, scale, _, _ = parameters(4, 6, 3)
    everything = torch.ones(4, 6, dtype=torch.bool)
    assert tiled_info_nce(queries, documents, DOT, scale, everything.__getitem__).item() == pytest.approx(
        0.0, abs=1e-12
    )


def test_a_masked_document_gets_no_gradient():
    queries, documents, _, scale, _, _ = parameters(4, 6, 3)
    masked = torch.zeros(4, 6, dtype=torch.bool)
    masked[:, 5] = True
    gradient = torch.autograd.grad(tiled_info_nce(queries, documents, DOT, scale, masked.__getitem__), documents)[0]
    assert gradient[5].abs().max() == 0
    assert gradient[4].abs().max() > 0


def test_a_masked_column_leaves_a_learned_scale_a_finite_gradient():
    """T-C3."""
    queries, documents, similarity, scale, masked, _ = parameters(5, 9, 3, "cosine")
    masked[:, 6:] = True
    found = torch.autograd.grad(info_nce(queries, documents, similarity, scale, masked, "tiled"), scale)[0]
    without = info_nce(queries, documents[:6], similarity, scale, masked[:, :6], "tiled")
    assert torch.isfinite(found) and found != 0
    torch.testing.assert_close(found, torch.autograd.grad(without, scale)[0])


@pytest.mark.parametrize("impl", ["reference", "tiled"])
@pytest.mark.parametrize("name", NAMES)
def test_a_query_without_a_negative_adds_nothing(name, impl):
    """A batch of one, and a row whose every negative is masked."""
    queries, documents, similarity, scale, _, learned = parameters(4, 8, 3, name)
    alone = info_nce(queries[:1], documents[:1], similarity, scale, None, impl)
    assert alone.item() == pytest.approx(0.0, abs=1e-12)
    gradients = torch.autograd.grad(alone, (queries, documents, scale, *learned))
    assert all(float(gradient.abs().max()) < 1e-12 for gradient in gradients)

    masked = torch.zeros(4, 8, dtype=torch.bool)
    masked[2] = True
    loss = info_nce(queries, documents, similarity, scale, masked, impl)
    gradient = torch.autograd.grad(loss, queries)[0]
    assert gradient[2].abs().max() < 1e-12 and gradient[1].abs().max() > 1e-6
    others = [0, 1, 3, 2]  # the row without negatives last, so that it can be left out
    order = torch.tensor([*others, 4, 5, 6, 7])
    rest = info_nce(queries[others][:3], documents[order], similarity, scale, None, impl)
    torch.testing.assert_close(loss * 4, rest * 3)


def test_no_gradient_is_made_where_none_is_asked():
    queries, documents, _, _, _, _ = parameters(6, 6, 4)
    with torch.no_grad():
        assert not tiled_info_nce(queries, documents, DOT, 3.0).requires_grad


def test_scores_are_in_single_precision_under_autocast():
    queries, documents, _, _, _, _ = parameters(64, 64, 8, dtype=torch.float32)
    plain = tiled_info_nce(queries, documents, DOT, 3.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tiled_info_nce(queries, documents, DOT, 3.0).item() == plain.item()
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
    assert largest.size >= 512 * 3000  # a tile


def test_auto_tiles_large_batches_only():
    for batch, tiled in ((512, False), (4096, True)):
        queries, documents, similarity, scale, _, _ = parameters(batch, batch, 2, dtype=torch.float32)
        with LargestTensor() as largest:
            info_nce(queries, documents, similarity, scale)
        assert (largest.size < batch * batch) == tiled
