from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from offsphere.diagnosis import fisher
from offsphere.diagnosis.fisher import NO_CALL, fisher_information
from offsphere.errors import EncoderError
from offsphere.losses import info_nce
from offsphere.similarity import NAMES, Similarity

ALL = {name: Similarity.parse(name) for name in NAMES}
SCALES = dict.fromkeys(NAMES, 2.0)


def pairs(number: int, dimension: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    queries = random.normal(size=(number, dimension)) * random.uniform(0.5, 2, (number, 1))
    documents = queries + random.normal(size=(number, dimension)) * np.linspace(0.3, 2, dimension)
    return queries.astype(np.float32), documents.astype(np.float32)


def of_batch(queries: np.ndarray, documents: np.ndarray, similarity: Similarity, scale: float) -> np.ndarray:
    """E[g g'] of both sides by autograd, one pair after the other."""
    q, d = (torch.from_numpy(side.astype(np.float64)).requires_grad_() for side in (queries, documents))
    (len(q) * info_nce(q, d, similarity, scale)).backward()
    total = np.zeros((q.shape[1], q.shape[1]))
    for gradients in (q.grad.numpy(), d.grad.numpy()):
        for gradient in gradients:
            total += np.outer(gradient, gradient)
    return total / len(q)


def log10_kappa(matrix: np.ndarray) -> float:
    values = np.linalg.eigvalsh(matrix)
    return math.log10(values[-1] / values[0])


@pytest.mark.parametrize("name", NAMES)
def test_one_batch_equals_the_reference(name):
    queries, documents = pairs(60)
    found = fisher_information(queries, documents, ALL, SCALES, batch_size=60).spectra[name]
    expected = of_batch(queries, documents, ALL[name], 2.0)
    assert found.log10_kappa == pytest.approx(log10_kappa(expected), abs=1e-8)
    assert found.all_directions_log10_kappa == pytest.approx(log10_kappa(expected), abs=1e-8)
    assert (found.rank, found.null_directions, found.scale) == (6, 0, 2.0)


def test_batches_are_summed_and_the_order_of_work_does_not_matter(monkeypatch):
    queries, documents = pairs(200)
    whole = fisher_information(queries, documents, ALL, SCALES, batch_size=16, seed=3)
    assert whole.n_pairs == 192  # whole batches only, as in training
    order = np.random.default_rng(3).permutation(200)[:192].reshape(-1, 16)
    for name in NAMES:
        expected = np.mean([of_batch(queries[one], documents[one], ALL[name], 2.0) for one in order], axis=0)
        assert whole.spectra[name].log10_kappa == pytest.approx(log10_kappa(expected), abs=1e-8)
    monkeypatch.setattr(fisher, "ROWS_AT_ONCE", 1)
    again = fisher_information(queries, documents, ALL, SCALES, batch_size=16, seed=3)
    for name in NAMES:
        assert again.spectra[name].log10_kappa == pytest.approx(whole.spectra[name].log10_kappa, abs=1e-9)


def test_the_same_seed_gives_the_same_bits():
    arguments = (*pairs(200), ALL, SCALES)
    assert fisher_information(*arguments, batch_size=16) == fisher_information(*arguments, batch_size=16)


def test_a_direction_in_which_embeddings_do_not_move_is_found_and_left_out():
    """A LayerNorm at the end puts every embedding on a plane beside the origin."""
    queries, documents = pairs(400)
    random = np.random.default_rng(1)
    rotation = np.linalg.qr(random.normal(size=(7, 7)))[0]
    lifted = [np.hstack([side, np.full((len(side), 1), 0.7)]) @ rotation for side in (queries, documents)]
    found = fisher_information(*(one.astype(np.float32) for one in lifted), ALL, SCALES, batch_size=20)
    plain = fisher_information(*(one.astype(np.float64) for one in lifted), ALL, SCALES, batch_size=20)
    for name, one in found.spectra.items():
        assert (one.rank, one.null_directions) == (6, 1)
        assert one.log10_kappa == pytest.approx(plain.spectra[name].log10_kappa, abs=1e-4)
        # Where length is removed the gradient has a small part there, which no encoder can follow.
        assert one.all_directions_log10_kappa > one.log10_kappa


def test_the_shrinkage_estimate_lies_between_plain_and_identity_and_converges():
    def both(number: int) -> tuple[float, float]:
        one = fisher_information(*pairs(number), ALL, SCALES, batch_size=20).spectra["dot"]
        return one.log10_kappa, one.shrinkage_log10_kappa

    (few, few_shrunk), (many, many_shrunk) = both(60), both(6_000)
    assert 0 < few_shrunk < few
    assert 0 < many_shrunk < many
    assert many - many_shrunk < few - few_shrunk


def test_shrinkage_follows_ledoit_and_wolf():
    gradients = np.random.default_rng(0).normal(size=(50, 4)) * [1, 2, 3, 4]
    sample = gradients.T @ gradients / 50
    error = sum(np.sum((np.outer(g, g) - sample) ** 2) for g in gradients) / 50**2
    mean = np.trace(sample) / 4
    distance = np.sum((sample - mean * np.eye(4)) ** 2)
    expected = np.linalg.eigvalsh((1 - error / distance) * sample + error / distance * mean * np.eye(4))
    fourth = np.mean([np.sum(np.outer(g, g) ** 2) for g in gradients])
    np.testing.assert_allclose(fisher._shrunk(np.linalg.eigvalsh(sample), fourth, 50), expected, rtol=1e-10)


def one_sided(number: int, better: str) -> tuple[np.ndarray, np.ndarray]:
    """Pairs whose query (or document) lengths differ so much that keeping them spoils the condition."""
    random = np.random.default_rng(4)
    directions = random.normal(size=(number, 4))
    lengths = np.exp(np.abs(directions[:, :1]))
    long, short = directions * lengths, directions + 0.5 * random.normal(size=(number, 4))
    return (long, short) if better == "qnorm" else (short, long)


@pytest.mark.parametrize("better", ["qnorm", "dnorm"])
def test_the_call_goes_to_the_better_conditioned_side(better):
    found = fisher_information(*one_sided(2_000, better), ALL, dict.fromkeys(NAMES, 0.05), batch_size=20)
    assert found.call.similarity == better
    kappas = {name: found.spectra[name].log10_kappa for name in ("qnorm", "dnorm")}
    assert kappas[better] == min(kappas.values())
    assert found.call.difference == pytest.approx(kappas["qnorm"] - kappas["dnorm"])
    assert found.call.low < found.call.difference < found.call.high
    assert found.call.low * found.call.high > 0


def test_no_call_where_the_sides_are_alike():
    random = np.random.default_rng(0)
    queries, documents = random.normal(size=(2, 800, 4))
    found = fisher_information(queries + documents, queries - documents, ALL, SCALES, batch_size=20)
    assert found.call.similarity == NO_CALL
    assert found.call.low <= 0 <= found.call.high
    assert "holds 0" in found.call.reason


def test_the_interval_is_as_wide_as_samples_differ():
    contenders = {name: ALL[name] for name in ("qnorm", "dnorm")}
    calls = [
        fisher_information(*pairs(200, seed=seed), contenders, SCALES, batch_size=10, seed=seed).call
        for seed in range(25)
    ]
    differences = np.array([call.difference for call in calls])
    claimed = np.mean([(call.high - call.low) / (2 * 1.96) for call in calls])
    assert 0.6 < claimed / differences.std(ddof=1) < 1.6
    assert np.mean([call.low < differences.mean() < call.high for call in calls]) >= 0.8


def test_no_call_below_ten_pairs_a_dimension():
    found = fisher_information(*one_sided(39, "qnorm"), ALL, SCALES, batch_size=10)
    assert found.call.similarity == NO_CALL
    assert (found.call.low, found.call.high) == (None, None)
    assert "fewer than 10 x 4 dimensions; give more, such as --max-queries 40" in found.call.reason
    assert found.spectra["qnorm"].log10_kappa is not None


def test_effective_pairs_follow_their_definition():
    queries, documents = pairs(60)
    found = fisher_information(queries, documents, ALL, SCALES, batch_size=60).spectra["dot"]
    q, d = (torch.from_numpy(side.astype(np.float64)).requires_grad_() for side in (queries, documents))
    (60 * info_nce(q, d, ALL["dot"], 2.0)).backward()
    squares = ((q.grad**2).sum(1) + (d.grad**2).sum(1)).numpy()
    assert found.effective_pairs == pytest.approx(squares.sum() ** 2 / (squares**2).sum())
    assert 1 < found.effective_pairs < 60


def test_no_call_where_shrinkage_turns_the_order_round(monkeypatch):
    arguments = (*one_sided(2_000, "dnorm"), ALL, SCALES)
    assert fisher_information(*arguments, batch_size=20).call.similarity == "dnorm"
    shrunk = iter([np.array([1.0, 1.0 if name == "qnorm" else 100.0]) for name in ALL])
    monkeypatch.setattr(fisher, "_shrunk", lambda *arguments: next(shrunk))
    found = fisher_information(*arguments, batch_size=20).call
    assert found.similarity == NO_CALL
    assert "after shrinkage" in found.reason
    assert found.low > 0  # the plain estimate alone would have called


def test_too_few_pairs_give_no_number():
    found = fisher_information(*pairs(19), ALL, SCALES)
    assert found.spectra == {}
    assert found.call.difference is None
    assert "not enough data" in found.call.reason


def test_without_a_negative_there_is_no_gradient_and_no_number():
    queries, documents = pairs(40)
    found = fisher_information(
        queries, documents, ALL, SCALES, batch_size=10, masked=lambda p: np.ones((*p.shape, p.shape[-1]), bool)
    )
    assert {one.log10_kappa for one in found.spectra.values()} == {None}
    assert {one.rank for one in found.spectra.values()} == {0}
    assert found.call.similarity == NO_CALL


def test_masks_reach_the_batches_they_belong_to():
    queries, documents = pairs(60)
    documents[30:] = documents[:30]  # every document comes twice
    keys = np.arange(60) % 30

    def masked(positions: np.ndarray) -> np.ndarray:
        return keys[positions][..., :, None] == keys[positions][..., None, :]

    with_mask, without = (
        fisher_information(queries, documents, ALL, SCALES, batch_size=60, masked=mask).spectra["cosine"].log10_kappa
        for mask in (masked, None)
    )
    q, d = (torch.from_numpy(side.astype(np.float64)).requires_grad_() for side in (queries, documents))
    (60 * info_nce(q, d, ALL["cosine"], 2.0, torch.from_numpy(keys[:, None] == keys))).backward()
    total = sum(side.grad.numpy().T @ side.grad.numpy() for side in (q, d))
    assert with_mask == pytest.approx(log10_kappa(total), abs=1e-8)
    assert with_mask != pytest.approx(without, abs=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_embeddings_are_an_error(bad):
    queries, documents = pairs(60)
    documents[7, 2] = bad
    with pytest.raises(EncoderError, match="NaN or infinite"):
        fisher_information(queries, documents, ALL, SCALES)


def test_unpaired_sides_are_an_error():
    queries, documents = pairs(60)
    with pytest.raises(EncoderError, match="row by row"):
        fisher_information(queries, documents[:50], ALL, SCALES)


def test_progress_ends_at_the_number_of_pairs():
    told: list[int] = []
    found = fisher_information(*pairs(100), ALL, SCALES, batch_size=16, on_pairs=told.append)
    assert told == sorted(told)
    assert told[-1] == found.n_pairs == 96
