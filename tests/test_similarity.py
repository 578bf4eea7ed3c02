from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import offsphere
from offsphere.similarity import FIXED, NAMES, Similarity, norms

COSINE, DOT, QNORM, DNORM = map(Similarity.parse, FIXED)
ALL = [*map(Similarity.parse, NAMES), Similarity(0.2, 0.9), Similarity(1.5, -0.5)]
DTYPES = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}

gammas = st.floats(0, 1)
numbers = st.floats(-4, 4).filter(lambda x: x == 0 or abs(x) > 1e-3)
rows = arrays(np.float64, (5,), elements=numbers).filter(lambda row: np.abs(row).sum() > 0)


def matrices(count: int) -> st.SearchStrategy[np.ndarray]:
    return st.lists(rows, min_size=count, max_size=count).map(np.array)


def leaf(array: np.ndarray | float) -> torch.Tensor:
    return torch.tensor(array, dtype=torch.float64, requires_grad=True)


def slow_score(q: list[float], d: list[float], gamma_q: float, gamma_d: float) -> float:
    """The definition, one number at a time."""
    product = math.fsum(a * b for a, b in zip(q, d, strict=True))
    length_q, length_d = (math.sqrt(math.fsum(a * a for a in side)) for side in (q, d))
    if length_q == 0 or length_d == 0:
        return 0.0
    return product / (length_q**gamma_q * length_d**gamma_d)


# The definition


@given(matrices(3), matrices(4), gammas, gammas)
def test_scores_are_the_definition(queries, documents, gamma_q, gamma_d):
    similarity = Similarity(gamma_q, gamma_d)
    expected = [[slow_score(q, d, gamma_q, gamma_d) for d in documents.tolist()] for q in queries.tolist()]
    np.testing.assert_allclose(similarity.scores(queries, documents), expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(similarity.pairwise(queries, documents[:3]), np.diag(expected), rtol=1e-10, atol=1e-10)


@given(matrices(3), matrices(4), st.sampled_from(ALL), st.sampled_from([np.float16, np.float32, np.float64]))
def test_numpy_and_torch_agree(queries, documents, similarity, dtype):
    queries, documents = queries.astype(dtype), documents.astype(dtype)
    tensors = torch.from_numpy(queries), torch.from_numpy(documents)
    tolerance = 1e-12 if dtype == np.float64 else 1e-5
    for method in ("scores", "pairwise"):
        arguments = (queries[:3], documents[:3]), (tensors[0][:3], tensors[1][:3])
        ours, theirs = (getattr(similarity, method)(*pair) for pair in arguments)
        assert theirs.dtype == (torch.float64 if dtype == np.float64 else torch.float32)
        assert ours.dtype == (np.float64 if dtype == np.float64 else np.float32)
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(norms(queries), norms(tensors[0]).numpy(), rtol=tolerance)


@given(matrices(3), matrices(4), st.sampled_from(ALL))
def test_the_score_is_the_inner_product_of_what_is_stored(queries, documents, similarity):
    stored = similarity.prepare_query(queries) @ similarity.prepare_document(documents).T
    np.testing.assert_array_equal(similarity.scores(queries, documents), stored)


# Identities of the family


@given(rows, rows, gammas, gammas)
def test_derivatives_by_the_gammas(q, d, gamma_q, gamma_d):
    gamma_q, gamma_d = leaf(gamma_q), leaf(gamma_d)
    score = Similarity(gamma_q, gamma_d).pairwise(torch.from_numpy(q), torch.from_numpy(d))
    by_q, by_d = torch.autograd.grad(score, (gamma_q, gamma_d))
    assert by_q.item() == pytest.approx(-math.log(np.linalg.norm(q)) * score.item(), rel=1e-9, abs=1e-12)
    assert by_d.item() == pytest.approx(-math.log(np.linalg.norm(d)) * score.item(), rel=1e-9, abs=1e-12)


@given(rows, rows, gammas)
def test_no_gradient_along_a_vector_whose_length_is_removed(q, d, other):
    for similarity, which in ((Similarity(1, other), 0), (Similarity(other, 1), 1)):
        pair = leaf(q), leaf(d)
        (gradient,) = torch.autograd.grad(similarity.pairwise(*pair), pair[which])
        size = gradient.norm().item() * pair[which].norm().item()
        assert abs((gradient @ pair[which]).item()) <= 1e-10 * max(1, size)


@given(rows, rows, gammas.filter(lambda gamma: gamma < 0.9))
def test_a_gradient_along_a_vector_whose_length_stays(q, d, gamma):
    """By Euler's theorem q . ds/dq = (1 - gamma_q) s; what makes the test above one that can fail."""
    query = leaf(q)
    score = Similarity(gamma, 0.5).pairwise(query, torch.from_numpy(d))
    (gradient,) = torch.autograd.grad(score, query)
    assert (gradient @ query).item() == pytest.approx((1 - gamma) * score.item(), rel=1e-9, abs=1e-10)


@given(rows, matrices(6), st.floats(0.02, 2))
def test_the_temperature_of_dnorm_is_tau_over_the_length_of_the_query(q, documents, tau):
    ours = torch.softmax(torch.from_numpy(DNORM.scores(q[None], documents)[0]) / tau, 0)
    cosine = torch.from_numpy(COSINE.scores(q[None], documents)[0])
    torch.testing.assert_close(ours, torch.softmax(cosine / (tau / np.linalg.norm(q)), 0), rtol=1e-8, atol=1e-12)


@given(rows, matrices(6), st.floats(0.1, 2))
def test_the_gradient_of_dnorm_by_the_direction_of_the_positive(q, documents, tau):
    directions = leaf(documents / np.linalg.norm(documents, axis=1, keepdims=True))
    query = torch.from_numpy(q)
    loss = -torch.log_softmax(directions @ query / tau, 0)[0]
    p = torch.softmax(torch.from_numpy(DNORM.scores(q[None], documents)[0]) / tau, 0)[0]
    (gradient,) = torch.autograd.grad(loss, directions)
    expected = -(query.norm() / tau) * (1 - p) * query / query.norm()
    torch.testing.assert_close(gradient[0], expected, rtol=1e-8, atol=1e-10)


@given(rows, matrices(6), st.floats(0.1, 2))
def test_the_gradient_of_dnorm_by_the_positive_is_that_gradient_off_its_direction(q, documents, tau):
    """The chain rule from d to d/|d|: projected off the direction, and divided by the length."""
    positive = leaf(documents[:1])
    logits = DNORM.scores(torch.from_numpy(q[None]), torch.cat([positive, torch.from_numpy(documents[1:])])) / tau
    (gradient,) = torch.autograd.grad(-torch.log_softmax(logits[0], 0)[0], positive)
    p = torch.softmax(logits.detach()[0], 0)[0]
    length = np.linalg.norm(documents[0])
    direction = documents[0] / length
    along = -(1 - p.item()) / tau * q
    expected = (along - (along @ direction) * direction) / length
    np.testing.assert_allclose(gradient[0].numpy(), expected, rtol=1e-7, atol=1e-9)


@given(matrices(3), matrices(4))
def test_cosine_and_dot_are_symmetric(a, b):
    for similarity in (COSINE, DOT):
        np.testing.assert_allclose(similarity.scores(a, b), similarity.scores(b, a).T, rtol=1e-12, atol=1e-12)


@given(rows, rows)
def test_qnorm_and_dnorm_are_not_symmetric_but_mirror_each_other(a, b):
    assume(abs(np.linalg.norm(a) / np.linalg.norm(b) - 1) > 1e-3 and abs(a @ b) > 1e-3)
    for similarity, mirror in ((QNORM, DNORM), (DNORM, QNORM)):
        assert similarity.pairwise(a, b) != pytest.approx(similarity.pairwise(b, a), rel=1e-6)
        assert similarity.pairwise(a, b) == pytest.approx(mirror.pairwise(b, a), rel=1e-12)


@given(rows, matrices(8), gammas, gammas, gammas)
def test_the_ranking_of_a_query_depends_on_gamma_d_alone(q, documents, gamma_d, one, other):
    """Scores under two gamma_q differ by one positive factor, so no pair of documents changes its order."""
    first, second = (Similarity(gamma, gamma_d).scores(q[None], documents)[0] for gamma in (one, other))
    factor = np.linalg.norm(q) ** (one - other)
    np.testing.assert_allclose(second, first * factor, rtol=1e-10, atol=1e-12)


def test_rankings_of_the_four_names():
    random = np.random.default_rng(0)
    queries, documents = random.normal(size=(50, 8)), random.normal(size=(99, 8)) * random.uniform(0.2, 5, (99, 1))
    order = {name: Similarity.parse(name).scores(queries, documents).argsort(1) for name in FIXED}
    np.testing.assert_array_equal(order["cosine"], order["dnorm"])
    np.testing.assert_array_equal(order["dot"], order["qnorm"])
    assert (order["cosine"] != order["dot"]).any()


@given(rows, rows, st.floats(0.01, 100), gammas, gammas)
def test_a_length_survives_to_the_power_one_minus_gamma(q, d, factor, gamma_q, gamma_d):
    similarity = Similarity(gamma_q, gamma_d)
    before = similarity.pairwise(q, d)
    assert similarity.pairwise(q * factor, d) == pytest.approx(before * factor ** (1 - gamma_q), rel=1e-9, abs=1e-12)
    assert similarity.pairwise(q, d * factor) == pytest.approx(before * factor ** (1 - gamma_d), rel=1e-9, abs=1e-12)


@given(rows, rows)
def test_cosine_stays_between_minus_one_and_one(q, d):
    assert abs(COSINE.pairwise(q, d)) <= 1 + 1e-12
    assert COSINE.pairwise(q, q) == pytest.approx(1)


# Zero vectors, precision and range


@pytest.mark.parametrize("similarity", ALL[:-1], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e4])
def test_a_zero_vector_scores_zero_with_finite_gradients(similarity, dtype, scale):
    torch.manual_seed(0)
    vectors = (torch.randn(3, 8) * scale).to(dtype)
    for queries, documents in ((vectors * 0, vectors), (vectors, vectors * 0), (vectors * 0, vectors * 0)):
        queries, documents = queries.detach().requires_grad_(), documents.detach().requires_grad_()
        trained = [torch.tensor(gamma, requires_grad=True) for gamma in similarity.gammas]
        for one in (similarity, Similarity(*trained)):
            scores = one.scores(queries, documents)
            assert (scores == 0).all()
            assert (one.pairwise(queries, documents) == 0).all()
            for score in (scores.mean(), one.pairwise(queries, documents).mean()):
                gradients = torch.autograd.grad(score, (queries, documents), retain_graph=True)
                assert all(torch.isfinite(gradient).all() for gradient in gradients)
        by_gammas = torch.autograd.grad(Similarity(*trained).scores(queries, documents).mean(), trained)
        assert [gradient.item() for gradient in by_gammas] == [0, 0]


@pytest.mark.parametrize("similarity", ALL, ids=str)
def test_a_zero_row_beside_others_changes_nothing(similarity):
    random = np.random.default_rng(0)
    queries, documents = random.normal(size=(3, 8)), random.normal(size=(4, 8))
    documents[1] = 0
    scores = similarity.scores(queries, documents)
    assert (scores[:, 1] == 0).all() and (scores[:, [0, 2, 3]] != 0).all()
    np.testing.assert_allclose(scores[:, [0, 2, 3]], similarity.scores(queries, documents[[0, 2, 3]]), rtol=1e-12)


@pytest.mark.parametrize("similarity", ALL, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.items(), ids=str)
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e4])
def test_every_dtype_is_as_exact_as_its_input(similarity, dtype, tolerance, scale):
    """Computed in float32 at least: the only error left is that of the rounded input, which the reference shares."""
    torch.manual_seed(0)
    queries, documents = (torch.randn(4, 384) * scale).to(dtype), (torch.randn(5, 384) * scale).to(dtype)
    got = similarity.scores(queries, documents)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    wanted = similarity.scores(queries.double(), documents.double())
    size = similarity.prepare_query(queries.double()).norm(dim=1)[:, None]
    size = size * similarity.prepare_document(documents.double()).norm(dim=1)
    assert ((got - wanted).abs() <= min(tolerance, 1e-5) * size).all()


def test_lengths_beyond_half_precision():
    """|d|^2 of these rows overflows float16, and the cosine of each with itself is 1 all the same."""
    rows = torch.full((2, 64), 3e4, dtype=torch.float16)
    assert torch.isinf((rows * rows).sum(-1)).all()
    torch.testing.assert_close(norms(rows), rows.double().norm(dim=-1).float())
    torch.testing.assert_close(COSINE.pairwise(rows, rows), torch.ones(2))


@pytest.mark.parametrize("exponent", [-30, -25, -20, 0, 20, 25, 30])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_lengths_beyond_the_squares_of_single_precision(exponent, kind):
    exact = np.random.default_rng(0).normal(size=(3, 16)) * 10.0**exponent
    rows = exact.astype(np.float32) if kind == "numpy" else torch.tensor(exact, dtype=torch.float32)
    lengths = np.asarray(norms(rows))
    np.testing.assert_allclose(lengths, np.sqrt((exact**2).sum(1)), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(COSINE.pairwise(rows, rows)), 1, rtol=1e-6)


def test_autocast_does_not_round_the_scores():
    """In bfloat16 a thousand scores fall together on a few dozen values."""
    torch.manual_seed(0)
    queries, documents = torch.randn(2, 64), torch.randn(1000, 64)
    for similarity in ALL:
        expected = similarity.scores(queries, documents)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (queries @ documents.T).dtype == torch.bfloat16  # autocast is on
            got = similarity.scores(queries, documents)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("similarity", ALL, ids=str)
def test_gradients_agree_with_finite_differences(similarity):
    torch.manual_seed(0)
    queries, documents = torch.randn(3, 4).double().requires_grad_(), torch.randn(5, 4).double().requires_grad_()
    gamma_q, gamma_d = map(leaf, similarity.gammas)

    def scores(q, d, gamma_q, gamma_d):
        return Similarity(gamma_q, gamma_d).scores(q, d)

    assert torch.autograd.gradcheck(scores, (queries, documents, gamma_q, gamma_d))
    assert torch.autograd.gradcheck(similarity.scores, (queries, documents))


def test_a_plain_dot_product_keeps_the_embeddings_themselves():
    rows = np.ones((2, 3), np.float32)
    assert DOT.prepare_query(rows) is rows and QNORM.prepare_document(rows) is rows


def test_no_rows_and_many_dimensions():
    assert COSINE.scores(np.zeros((0, 3)), np.ones((2, 3))).shape == (0, 2)
    assert norms(np.zeros((2, 0))).tolist() == [0, 0]
    stacked = np.random.default_rng(0).normal(size=(2, 3, 4))
    assert norms(stacked).shape == (2, 3) and COSINE.prepare_query(stacked).shape == (2, 3, 4)
    np.testing.assert_allclose(norms(COSINE.prepare_query(stacked)), 1)


def test_the_input_is_left_alone():
    rows = np.random.default_rng(0).normal(size=(3, 4))
    before = rows.copy()
    for similarity in ALL:
        similarity.scores(rows, rows)
    np.testing.assert_array_equal(rows, before)


# Nothing else normalises

NORMALISING = re.compile(
    r"F\.normalize|functional\.normalize|normalize_embeddings\s*=\s*True|linalg\.(vector_)?norm|\.norm\(|cos_sim\(|"
    r"CosineSimilarity|normalize_embeddings\("
)


def test_only_similarity_normalises():
    source = Path(offsphere.__file__).parent
    files = sorted(source.rglob("*.py"))
    assert len(files) > 20
    found = {
        f"{file.relative_to(source)}:{number}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        # the model card warns of the argument by its name
        if NORMALISING.search(line) and "Do not pass `normalize_embeddings=True`" not in line
    }
    assert not found


@pytest.mark.parametrize(
    "line", ["x = F.normalize(x)", "encode(t, normalize_embeddings=True)", "np.linalg.norm(x)", "x / x.norm(dim=1)"]
)
def test_the_search_for_normalising_finds_it(line):
    assert NORMALISING.search(line)


def test_similarities_of_the_family_differ():
    """What every test over ALL rests on."""
    random = np.random.default_rng(0)
    queries, documents = random.normal(size=(3, 8)) * 3, random.normal(size=(4, 8)) * 2
    for one, other in itertools.combinations(ALL, 2):
        assert not np.allclose(one.scores(queries, documents), other.scores(queries, documents))
