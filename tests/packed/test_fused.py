from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from offsphere.packed.fused import FusedLinears


def reference(module: nn.Linear, values: Tensor, gelu: bool, plus: Tensor | None) -> Tensor:
    result = values.double() @ module.weight.double().T + (0 if module.bias is None else module.bias.double())
    if gelu:
        return result * (1 + torch.erf(result * 2**-0.5)) / 2
    return result if plus is None else result + plus


@given(
    tokens=st.integers(1, 70),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    bias=st.booleans(),
    what=st.sampled_from(["alone", "gelu", "plus"]),
    many=st.sampled_from([1, 32, 10_000]),
)
@torch.no_grad()
def test_it_is_the_product_in_double_precision(tokens: int, sizes: tuple[int, int], bias: bool, what: str, many: int):
    torch.manual_seed(tokens)
    module, values = nn.Linear(*sizes, bias=bias), torch.randn(tokens, sizes[0])
    plus = torch.randn(tokens, sizes[1]) if what == "plus" else None
    linears = FusedLinears(many)
    expected = reference(module, values, what == "gelu", plus)
    plain = linears(module, values, gelu=what == "gelu", plus=plus)
    torch.testing.assert_close(plain.double(), expected, rtol=0, atol=1e-5)
    with linears.at_rest():
        found = linears(module, values, gelu=what == "gelu", plus=plus)
        assert bool(linears._ordered) == (tokens >= many), "canary: weights are laid out for many tokens alone"
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@given(
    tokens=st.integers(1, 70),
    outs=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    inside=st.booleans(),
    bias=st.booleans(),
    many=st.sampled_from([1, 32]),
)
@torch.no_grad()
def test_layers_together_give_what_they_give_alone(tokens: int, outs: list[int], inside: bool, bias: bool, many: int):
    torch.manual_seed(tokens)
    modules, values = [nn.Linear(12, out, bias=bias) for out in outs], torch.randn(tokens, 12)
    linears = FusedLinears(many)
    with linears.at_rest() if inside else nullcontext():
        for _ in range(2):
            results = linears.together(modules, values)
            for module, found in zip(modules, results, strict=True):
                expected = reference(module, values, False, None)
                torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
        assert bool(linears._ordered) == (inside and tokens >= many), "canary: one product where weights are laid out"


def test_weights_are_laid_out_once_while_at_rest_and_anew_the_next_time():
    """Fused optimizers change weights without a trace that torch would count."""
    module, values = nn.Linear(24, 8), torch.randn(5, 24)
    linears = FusedLinears(many=1)
    with torch.no_grad(), linears.at_rest():
        before = linears(module, values)
        assert linears._ordered is not None
        ordered = linears._ordered[module, "alone"]
        with linears.at_rest():
            linears(module, values)
        assert linears._ordered[module, "alone"] is ordered, "canary: laid out for every call"
    module(values).sum().backward()
    torch.optim.AdamW(module.parameters(), 0.1, fused=True).step()
    for resting in (nullcontext(), linears.at_rest()):
        with torch.no_grad(), resting:
            found = linears(module, values)
        torch.testing.assert_close(found, module(values), rtol=0, atol=1e-5)
    assert (found - before).abs().max() > 1e-3, "canary: nothing has changed"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda linears: pickle.loads(pickle.dumps(linears))])
def test_copies_begin_anew(copied):
    linears = FusedLinears(many=7)
    with torch.no_grad(), linears.at_rest():
        linears(nn.Linear(24, 8), torch.randn(9, 24))
        other = copied(linears)
        assert linears._ordered and not other._ordered and other.many == 7
