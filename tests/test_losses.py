from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offsphere.errors import TrainingError
from offsphere.losses import (
    ALPHA,
    KnownPositives,
    auto_scale,
    info_nce,
    known_positive_mask,
    resolve_scale,
    warn_of_saturation,
)
from offsphere.similarity import NAMES, Similarity, norms

ALL = [*map(Similarity.parse, NAMES), Similarity(0.2, 0.9)]
COSINE, DOT = ALL[:2]
DOUBLE = torch.float64


def embeddings(*shape: int, seed: int = 0) -> torch.Tensor:
    """Rows whose lengths differ by up to 4."""
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.normal(size=shape) * 2.0 ** random.uniform(-1, 1, (shape[0], 1)))


def slow_info_nce(queries, documents, similarity, scale, masked=None) -> float:
    """Equation 1 of the paper, one number at a time."""
    gamma_q, gamma_d = similarity.gammas
    total = 0.0
    for i, q in enumerate(queries.tolist()):
        exponentials = []
        for j, d in enumerate(documents.tolist()):
            product = math.fsum(a * b for a, b in zip(q, d, strict=True))
            score = product / (math.hypot(*q) ** gamma_q * math.hypot(*d) ** gamma_d)
            if j == i or masked is None or not masked[i][j]:
                exponentials.append(math.exp(scale * score))
            if j == i:
                positive = exponentials[-1]
        total -= math.log(positive / math.fsum(exponentials))
    return total / len(queries)


# info_nce


@given(
    similarity=st.sampled_from(ALL),
    batch=st.integers(1, 5),
    hard=st.integers(0, 3),
    scale=st.floats(0.1, 10),
    masking=st.sampled_from([None, 0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_equals_the_explicit_loop(similarity, batch, hard, scale, masking, seed):
    queries, documents = embeddings(batch, 4, seed=seed), embeddings(batch * (1 + hard), 4, seed=seed + 1)
    random = np.random.default_rng(seed)
    masked = None if masking is None else torch.from_numpy(random.random((batch, len(documents))) < masking)
    expected = slow_info_nce(queries, documents, similarity, scale, masked)
    assert info_nce(queries, documents, similarity, scale, masked).item() == pytest.approx(
        expected, rel=1e-9, abs=1e-12
    )
    single = info_nce(queries.float(), documents.float(), similarity, scale, masked)
    assert single.dtype == torch.float32 and single.item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("gammas", [(0.0, 0.0), (1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (0.2, 0.9)])
@pytest.mark.parametrize("hard", [0, 1])
def test_gradients_agree_with_finite_differences(gammas, hard):
    queries, documents = embeddings(3, 4).requires_grad_(), embeddings(3 * (1 + hard), 4, seed=1).requires_grad_()
    gamma_q, gamma_d, scale = (torch.tensor(x, dtype=DOUBLE, requires_grad=True) for x in (*gammas, 2.0))
    masked = torch.zeros(3, 3 * (1 + hard), dtype=torch.bool)
    masked[0, 2] = masked[1, 0] = True

    def loss(q, d, gamma_q, gamma_d, scale):
        return info_nce(q, d, Similarity(gamma_q, gamma_d), scale, masked)

    assert torch.autograd.gradcheck(loss, (queries, documents, gamma_q, gamma_d, scale))


def test_a_masked_column_leaves_a_learned_scale_a_finite_gradient():
    """T-C3. The gradient is that of the batch without the column."""
    queries, documents = embeddings(3, 4), embeddings(4, 4, seed=1)
    masked = torch.zeros(3, 4, dtype=torch.bool)
    masked[:, 3] = True
    scale = torch.tensor(5.0, dtype=DOUBLE, requires_grad=True)
    (with_mask,) = torch.autograd.grad(info_nce(queries, documents, COSINE, scale, masked), scale)
    (without,) = torch.autograd.grad(info_nce(queries, documents[:3], COSINE, scale), scale)
    assert torch.isfinite(with_mask) and without != 0
    torch.testing.assert_close(with_mask, without)

    too_early = COSINE.scores(queries, documents).masked_fill(masked, -torch.inf) * scale
    loss = torch.nn.functional.cross_entropy(too_early, torch.arange(3))
    assert torch.isfinite(loss) and torch.isnan(torch.autograd.grad(loss, scale)[0])  # what the order prevents


@pytest.mark.parametrize("similarity", ALL, ids=str)
def test_the_positive_is_never_masked(similarity):
    """T-E4. With everything masked the positive stands alone: probability 1, loss 0."""
    queries, documents = embeddings(3, 4).requires_grad_(), embeddings(6, 4, seed=1)
    everything = torch.ones(3, 6, dtype=torch.bool)
    loss = info_nce(queries, documents, similarity, 3.0, everything)
    assert loss.item() == 0
    assert torch.isfinite(torch.autograd.grad(loss, queries)[0]).all()
    assert everything.all()  # the caller's mask is left alone

    diagonal = torch.zeros(3, 6, dtype=torch.bool)
    diagonal[range(3), range(3)] = True
    plain = info_nce(queries, documents, similarity, 3.0)
    assert info_nce(queries, documents, similarity, 3.0, diagonal).item() == plain.item()
    diagonal[0, 1] = True
    assert info_nce(queries, documents, similarity, 3.0, diagonal).item() < plain.item()  # masks do work


@given(st.sampled_from(ALL), st.integers(0, 2**16))
def test_the_order_of_the_batch_does_not_matter(similarity, seed):
    queries, documents = embeddings(4, 3, seed=seed), embeddings(8, 3, seed=seed + 1)
    order = np.random.default_rng(seed).permutation(4)
    moved = torch.cat([documents[:4][order], documents[4:]])
    expected = info_nce(queries, documents, similarity, 3.0).item()
    assert info_nce(queries[order], moved, similarity, 3.0).item() == pytest.approx(expected, rel=1e-9)


def test_a_batch_of_one():
    query, positive, negative = embeddings(3, 4).split(1)
    assert info_nce(query, positive, DOT).item() == 0
    gap = DOT.pairwise(query, negative) - DOT.pairwise(query, positive)
    with_negative = info_nce(query, torch.cat([positive, negative]), DOT, 0.5)
    torch.testing.assert_close(with_negative, torch.nn.functional.softplus(0.5 * gap)[0])


@pytest.mark.parametrize("similarity", ALL, ids=str)
def test_an_empty_text_trains_on(similarity):
    queries, documents = embeddings(3, 4), embeddings(3, 4, seed=1)
    queries[0], documents[1] = 0, 0
    queries.requires_grad_()
    loss = info_nce(queries, documents, similarity, 1.0)
    assert torch.isfinite(loss) and torch.isfinite(torch.autograd.grad(loss, queries)[0]).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_training(bad):
    queries, documents = embeddings(3, 4), embeddings(3, 4, seed=1)
    queries[1, 2] = bad
    with pytest.raises(TrainingError, match=r"loss is (nan|inf) under Similarity\(gamma_q=0, .*--scale auto"):
        info_nce(queries, documents, DOT)


def test_a_score_beyond_single_precision_stops_the_training():
    huge = torch.full((2, 4), 1e30)
    with pytest.raises(TrainingError, match=r"largest query length 2e\+30"):
        info_nce(huge, huge, DOT)
    assert torch.isfinite(info_nce(huge, huge, COSINE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_embeddings_are_scored_in_single(dtype):
    queries, documents = embeddings(4, 64).to(dtype), embeddings(4, 64, seed=1).to(dtype)
    for similarity in ALL:
        loss = info_nce(queries, documents, similarity, 0.1)
        assert loss.dtype == torch.float32
        expected = info_nce(queries.double(), documents.double(), similarity, 0.1)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


# The scale


@pytest.fixture
def measured():
    """Lengths of 5.0 and 2.4 on average, as of MiniLM, that vary by a fifth."""
    random = np.random.default_rng(0)
    sides = random.normal(size=(2, 200, 64))
    sides /= np.linalg.norm(sides, axis=-1, keepdims=True)
    return sides * random.normal(1, 0.2, (2, 200, 1)) * np.array([5.0, 2.4])[:, None, None]


def spread(similarity: Similarity, scale: float, queries: np.ndarray, documents: np.ndarray) -> float:
    return float((scale * similarity.scores(queries, documents)).std(axis=1).mean())


def test_auto_starts_where_there_is_something_to_learn(measured):
    """T-C1: a softmax over 200 documents that is neither flat nor decided, in nats of at most 5.3."""
    queries, documents = measured

    def entropy(similarity: Similarity, scale: float) -> float:
        logits = torch.from_numpy(scale * similarity.scores(queries, documents))
        return torch.distributions.Categorical(logits=logits).entropy().mean().item()

    for similarity in ALL:
        assert 2 < entropy(similarity, auto_scale(similarity, norms(queries), norms(documents))) < 5
    assert entropy(DOT, ALPHA) < 1  # the scale of the paper, under raw products


def test_auto_starts_every_variant_with_the_same_spread(measured):
    queries, documents = measured
    spreads = {s: spread(s, auto_scale(s, norms(queries), norms(documents)), queries, documents) for s in ALL}
    assert max(spreads.values()) < 1.1 * min(spreads.values())
    assert spread(DOT, ALPHA, queries, documents) > 10 * spreads[COSINE]  # what 20 does to dot
    assert auto_scale(COSINE, norms(queries), norms(documents)) == ALPHA


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.floats(0.1, 100))
def test_auto_gives_the_logits_of_cosine_where_lengths_do_not_vary(length_q, length_d, alpha):
    random = np.random.default_rng(0)
    queries, documents = (COSINE.prepare_query(random.normal(size=(4, 8))) for _ in range(2))
    expected = alpha * COSINE.scores(queries, documents)
    for similarity in ALL:
        scale = auto_scale(similarity, np.full(4, length_q), np.full(4, length_d), alpha)
        got = scale * similarity.scores(queries * length_q, documents * length_d)
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


def test_auto_takes_tensors_and_leaves_zeros_out():
    lengths = np.array([2.0, 4.0, 0.0, 0.0])
    assert auto_scale(DOT, lengths, lengths) == pytest.approx(20 / 9)
    assert auto_scale(DOT, torch.from_numpy(lengths), torch.from_numpy(lengths)) == pytest.approx(20 / 9)
    with pytest.raises(TrainingError, match="every document embedding has length 0"):
        auto_scale(COSINE, lengths, np.zeros(3))


@given(st.floats(1e-6, 1e6), st.sampled_from(ALL))
def test_a_number_that_the_user_gave_is_never_changed(scale, similarity):
    """T-C2."""
    lengths = np.array([3.0, 5.0])
    assert resolve_scale(scale, similarity, lengths, lengths) == scale
    assert resolve_scale(scale, similarity, lengths, lengths, alpha=3.0) == scale
    assert resolve_scale("auto", similarity, lengths, lengths) == auto_scale(similarity, lengths, lengths)
    assert resolve_scale("auto", similarity, lengths, lengths, 50.0) == pytest.approx(
        2.5 * auto_scale(similarity, lengths, lengths)
    )


@pytest.mark.parametrize(
    ("name", "scale", "saturates"),
    [
        ("dot", ALPHA, True),
        ("dot", "auto", False),
        ("dot", 10.0, False),
        ("qnorm", ALPHA, False),
        ("learnable", ALPHA, False),
        ("cosine", ALPHA, False),
        ("cosine", 100.0, False),
        ("cosine", 500.0, True),
        ("dot", 1e-9, False),
    ],
)
def test_a_saturating_scale_is_warned_of(measured, name, scale, saturates):
    """T-C2: with the reason, which the softmax itself bears out, and with the automatic scale."""
    queries, documents = measured
    lengths, similarity = [norms(side) for side in measured], Similarity.parse(name)
    resolved = resolve_scale(scale, similarity, *lengths)
    warning = warn_of_saturation(resolved, similarity, *lengths)
    assert (warning is not None) == saturates
    if warning is not None:
        logits = torch.from_numpy(resolved * similarity.scores(queries, documents))
        assert logits.softmax(1).amax(1).mean() > 0.8
        automatic = auto_scale(similarity, *lengths)
        assert warning.startswith(
            f"scale {resolved:g} is {resolved / automatic:.0f} times the {automatic:.3g} of --scale auto"
        )
        assert "saturated" in warning and "kept as given" in warning


# Known positives


def slow_mask(queries, documents, known=()):
    batch = len(queries)
    positives = {(q, d) for q, d in zip(queries, documents[:batch], strict=True)} | set(known)
    return [
        [m != b and (queries[b], document) in positives for m, document in enumerate(documents)] for b in range(batch)
    ]


keys = st.integers(0, 4)


@given(
    st.integers(1, 4).flatmap(
        lambda batch: st.tuples(
            st.lists(keys, min_size=batch, max_size=batch), st.lists(keys, min_size=batch, max_size=batch * 3)
        )
    ),
    st.none() | st.lists(st.tuples(st.integers(0, 9), keys), max_size=6),
)
def test_the_mask_is_the_definition(batch, pairs):
    queries, documents = batch
    known = None if pairs is None else KnownPositives(pairs, n_documents=5)
    mask = known_positive_mask(torch.tensor(queries), torch.tensor(documents), known)
    assert mask.tolist() == slow_mask(queries, documents, pairs or ())


def test_several_positives_of_a_query_are_not_each_others_negatives():
    """T-E1."""
    mask = known_positive_mask(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 2]))
    assert mask.tolist() == [[False, True, False], [True, False, False], [False, False, False]]
