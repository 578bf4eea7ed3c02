from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offsphere.diagnosis.gradients import info_nce_gradients
from offsphere.losses import info_nce
from offsphere.similarity import NAMES, Similarity, norms

ALL = [*map(Similarity.parse, NAMES), Similarity(0.2, 0.9, learned=True), Similarity(1.5, -0.5)]


def batch(seed: int, queries: int = 6, documents: int = 6, dimension: int = 5) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    lengths = random.uniform(0.2, 5, (queries + documents, 1))
    rows = random.normal(size=(queries + documents, dimension)) * lengths
    return rows[:queries], rows[queries:]


def by_autograd(queries, documents, similarity, scale, masked=None):
    q, d = (torch.from_numpy(side).requires_grad_() for side in (queries, documents))
    mask = None if masked is None else torch.from_numpy(masked)
    (len(q) * info_nce(q, d, similarity, scale, mask)).backward()
    return q.grad.numpy(), d.grad.numpy()


@pytest.mark.parametrize("similarity", ALL, ids=repr)
@pytest.mark.parametrize("scale", [0.3, 20.0])
def test_equals_autograd_in_double_precision(similarity, scale):
    queries, documents = batch(1, documents=9)
    expected = by_autograd(queries, documents, similarity, scale)
    found = info_nce_gradients(queries, documents, similarity, scale)
    for one, other in zip(found, expected, strict=True):
        assert np.abs(other).max() > 1e-3  # or the comparison would be between zeros
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-8)


@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 30))
def test_equals_autograd_for_any_exponents(seed, gamma_q, gamma_d, scale):
    queries, documents = batch(seed)
    similarity = Similarity(gamma_q, gamma_d)
    expected = by_autograd(queries, documents, similarity, scale)
    for one, other in zip(info_nce_gradients(queries, documents, similarity, scale), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("similarity", ALL, ids=repr)
def test_masks_as_the_loss_does(similarity):
    queries, documents = batch(2)
    masked = np.random.default_rng(3).random((6, 6)) < 0.4
    masked[0, 0] = True  # a query's own positive counts whatever the mask says
    expected = by_autograd(queries, documents, similarity, 3.0, masked)
    found = info_nce_gradients(queries, documents, similarity, 3.0, masked)
    unmasked = info_nce_gradients(queries, documents, similarity, 3.0)
    for one, other, without in zip(found, expected, unmasked, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-8)
        assert np.abs(one - without).max() > 1e-3


@pytest.mark.parametrize("similarity", ALL, ids=repr)
def test_a_zero_vector_has_the_gradient_of_autograd(similarity):
    queries, documents = batch(4)
    queries[1], documents[2] = 0.0, 0.0
    expected = by_autograd(queries, documents, similarity, 2.0)
    for one, other in zip(info_nce_gradients(queries, documents, similarity, 2.0), expected, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-8)


@pytest.mark.parametrize("similarity", ALL, ids=repr)
def test_several_batches_at_once_are_the_batches_one_by_one(similarity):
    batches = [batch(seed) for seed in range(3)]
    masks = np.random.default_rng(0).random((3, 6, 6)) < 0.2
    stacked = info_nce_gradients(*map(np.stack, zip(*batches, strict=True)), similarity, 5.0, masks)
    for number, one in enumerate(batches):
        for found, expected in zip(stacked, info_nce_gradients(*one, similarity, 5.0, masks[number]), strict=True):
            np.testing.assert_allclose(found[number], expected, rtol=1e-12, atol=1e-12)


@given(st.integers(0, 10**6))
def test_where_length_is_removed_the_gradient_is_orthogonal(seed):
    queries, documents = batch(seed)
    of_queries, _ = info_nce_gradients(queries, documents, Similarity.parse("qnorm"), 4.0)
    _, of_documents = info_nce_gradients(queries, documents, Similarity.parse("dnorm"), 4.0)
    for gradients, embeddings in ((of_queries, queries), (of_documents, documents)):
        inner = np.abs((gradients * embeddings).sum(1))
        assert (inner <= 1e-12 * (1 + norms(gradients) * norms(embeddings))).all()


def test_single_precision_stays_single():
    queries, documents = (side.astype(np.float32) for side in batch(5))
    for name in NAMES:
        found = info_nce_gradients(queries, documents, Similarity.parse(name), 2.0)
        expected = info_nce_gradients(*batch(5), Similarity.parse(name), 2.0)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == np.float32
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
