from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from offsphere.packed import attention
from offsphere.packed.attention import attend, drop, equal_runs

HEADS, WIDTH = 3, 12


def packed(tokens: int, seed: int = 0) -> list[Tensor]:
    """Query, key and value in float64 that take gradients."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, WIDTH, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]


def reference(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], bias: Tensor | None, masks: list
) -> Tensor:
    """One text and one head at a time; ``masks`` holds what the weights of each are multiplied by."""
    outputs, first, masks = [], 0, list(masks)
    for length in lengths:
        rows, heads = slice(first, first + length), []
        for head, columns in enumerate(torch.arange(WIDTH).chunk(HEADS)):
            scores = query[rows][:, columns] @ key[rows][:, columns].T / math.sqrt(WIDTH // HEADS)
            if bias is not None:
                scores = scores + bias[head, :length, :length]
            weights = scores.exp() / scores.exp().sum(1, keepdim=True)
            heads.append((weights * masks.pop(0) if masks else weights) @ value[rows][:, columns])
        outputs.append(torch.cat(heads, 1))
        first += length
    assert not masks
    return torch.cat(outputs)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The mask of each text and head as it is drawn."""
    masks: list[Tensor] = []
    draw = attention._draw_kept

    def record(kept: Tensor, dropout: float) -> None:
        draw(kept, dropout)
        masks.extend(kept.clone().unbind() if kept.dim() == 3 else [kept.clone()])

    monkeypatch.setattr(attention, "_draw_kept", record)
    return masks


def test_runs_of_equal_length():
    assert equal_runs([1, 1, 2, 5, 5, 5]) == [(2, 1), (1, 2), (3, 5)]
    assert equal_runs([]) == []


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8).map(sorted), biased=st.booleans())
def test_each_text_attends_to_itself_alone(lengths: list[int], biased: bool):
    query, key, value = packed(sum(lengths))
    bias = torch.randn(HEADS, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) if biased else None
    with torch.no_grad():
        found = attend(query, key, value, equal_runs(lengths), HEADS, bias)
        torch.testing.assert_close(found, reference(query, key, value, lengths, bias, []), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scores", [1, 30, 200, 10**6])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_written_out_attention_and_its_gradients(
    monkeypatch: pytest.MonkeyPatch, recorded: list[Tensor], scores: int, biased: bool, dropout: float
):
    """Against autograd through a loop over texts and heads, for tiles of one head, of some heads and of many texts."""
    monkeypatch.setattr(attention, "SCORES", scores)
    lengths = [1, 3, 3, 3, 5, 7, 7]
    inputs = packed(sum(lengths))
    if biased:
        inputs.append(torch.randn(HEADS, 8, 8, dtype=torch.float64).requires_grad_())
    bias = inputs[3] if biased else None
    found = attend(*inputs[:3], equal_runs(lengths), HEADS, bias, dropout)
    kept = 1 - round(dropout * 65536) / 65536
    masks = [mask.double() / kept for mask in recorded]
    assert len(masks) == (len(lengths) * HEADS if dropout else 0)
    expected = reference(*inputs[:3], lengths, bias, masks)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    weights = torch.randn(found.shape, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((output * weights).sum(), inputs) for output in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        assert other.abs().max() > 1e-2, "gradients near zero would agree whatever the code does"
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_gradient_that_is_not_contiguous():
    inputs = packed(6)
    attend(*inputs, [(2, 3)], HEADS, dropout=0.5).sum().backward()
    assert inputs[2].grad is not None and inputs[2].grad.abs().max() > 0


def test_without_dropout_both_ways_agree():
    query, key, value = packed(20)
    bias = torch.zeros(HEADS, 5, 5, dtype=torch.float64, requires_grad=True)
    runs = [(5, 1), (5, 3)]
    plain, written = attend(query, key, value, runs, HEADS), attend(query, key, value, runs, HEADS, bias)
    assert "_Attention" not in type(plain.grad_fn).__name__ and "_Attention" in type(written.grad_fn).__name__
    torch.testing.assert_close(plain, written, rtol=1e-10, atol=1e-12)


# The draw


@pytest.mark.parametrize("dropout", [0.001, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_and_each_by_itself(dropout: float):
    torch.manual_seed(0)
    kept = torch.empty(1000, 1003, dtype=torch.bool)
    attention._draw_kept(kept, dropout)
    n, share = kept.numel(), round(dropout * 65536) / 65536
    variance = share * (1 - share)
    deviations = [(~kept).double().mean().item() - share]
    centred = kept.flatten().double() - (1 - share)
    deviations += [(centred[lag:] * centred[:-lag]).mean().item() / math.sqrt(variance) for lag in (1, 2, 3, 4, 1003)]
    assert share == pytest.approx(dropout, abs=1 / 65536)
    for deviation in deviations:
        assert abs(deviation) < 5 * math.sqrt(variance / n)
    # Had the sixteen bits a fixed one among them, as torch's default range leaves, shares above a half would be off.


@pytest.mark.parametrize("dropout", [0.0, 1.0, 1e-9])
def test_nothing_and_everything_dropped(dropout: float):
    values = torch.randn(40, 50, requires_grad=True)
    module = nn.Dropout(dropout)
    found = drop(values, module)
    expected = torch.zeros_like(values) if dropout == 1.0 else values
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    attended = attend(*(values[:12, :12].clone() for _ in range(3)), [(3, 4)], HEADS, dropout=dropout)
    assert torch.isfinite(attended).all() and bool((attended == 0).all()) == (dropout == 1.0)


def test_dropout_keeps_the_expectation_and_its_gradient_has_the_same_mask():
    torch.manual_seed(0)
    values = torch.rand(1000, 500, requires_grad=True)
    found = drop(values, nn.Dropout(0.2))
    zero = found == 0
    assert abs(zero.float().mean().item() - 0.2) < 5 * math.sqrt(0.16 / zero.numel())
    torch.testing.assert_close(found.mean(), values.mean(), rtol=5e-3, atol=0)
    found.sum().backward()
    torch.testing.assert_close(values.grad == 0, zero)
    torch.testing.assert_close(values.grad[~zero], (found / values)[~zero])


def test_dropout_is_for_training_and_other_modules_do_what_they_do():
    values = torch.ones(4, 4)
    assert drop(values, nn.Dropout(0.5).eval()) is values
    torch.testing.assert_close(drop(values, nn.Tanh()), values.tanh())


@pytest.mark.parametrize("call", ["attend", "drop"])
def test_the_draw_is_torchs_own(call: str):
    """The same state of torch's generator gives the same result bit by bit, another state another one."""
    values = [part.detach() for part in packed(30)]
    calls: dict[str, Callable[[], Tensor]] = {
        "attend": lambda: attend(*values, [(6, 5)], HEADS, dropout=0.4),
        "drop": lambda: drop(values[0], nn.Dropout(0.4)),
    }
    torch.manual_seed(3)
    state = torch.get_rng_state()
    one, other = calls[call](), calls[call]()
    torch.set_rng_state(state)
    assert torch.equal(calls[call](), one) and not torch.equal(one, other)
