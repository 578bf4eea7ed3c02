from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offsphere.diagnosis.symmetry import SYMMETRIC, detect_task, is_symmetric, probe, symmetry_warning
from offsphere.errors import ConfigError
from offsphere.similarity import FIXED, Similarity


@pytest.mark.parametrize("task", [task for task, symmetric in SYMMETRIC.items() if symmetric])
def test_one_sided_similarities_are_warned_of_where_texts_can_change_places(task):
    for name in ("qnorm", "dnorm", "gamma_q=0.2,gamma_d=0.9"):
        warning = symmetry_warning(task, Similarity.parse(name))
        assert warning is not None
        assert all(part in warning for part in (task, name, "37.5 to 43.5 Spearman points", "use cosine"))
    for name in ("cosine", "dot", "learnable", "gamma_q=0.5,gamma_d=0.5"):
        assert symmetry_warning(task, Similarity.parse(name)) is None


@pytest.mark.parametrize("task", [task for task, symmetric in SYMMETRIC.items() if not symmetric])
def test_nothing_is_warned_of_where_the_sides_have_roles(task):
    assert {symmetry_warning(task, Similarity.parse(name)) for name in FIXED} == {None}


def test_an_unknown_task_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"'serach'.*retrieval"):
        is_symmetric("serach")
    with pytest.raises(ConfigError):
        symmetry_warning("serach", Similarity.parse("cosine"))


def test_sides_that_share_texts_are_duplicates():
    texts = [f"text {i}" for i in range(10)]
    assert detect_task(texts, [*texts[:5], "other"])[0] == "duplicates"
    task, evidence = detect_task(texts, [*texts[:4], "other"])
    assert task == "retrieval"
    assert "40%" in evidence
    assert detect_task([], [])[0] == "retrieval"


@given(st.integers(0, 10**6))
def test_the_probe_tells_symmetric_from_one_sided(seed):
    first, second = np.random.default_rng(seed).normal(size=(2, 20, 4)) * [[[1.0]], [[3.0]]]
    found = probe(first, second, second, first)
    for name in ("cosine", "dot"):
        assert found[name].asymmetry == pytest.approx(0, abs=1e-12)
        assert found[name].correlation == pytest.approx(1)
    for name in ("qnorm", "dnorm"):
        similarity = Similarity.parse(name)
        there = [similarity.pairwise(a, b) for a, b in zip(first, second, strict=True)]
        back = [similarity.pairwise(b, a) for a, b in zip(first, second, strict=True)]
        expected = np.mean(np.abs(np.subtract(there, back))) / np.mean(np.abs([there, back]))
        assert found[name].asymmetry == pytest.approx(expected)
        assert found[name].asymmetry > 0.3
        assert found[name].forward == pytest.approx(there)


def test_the_probe_of_nothing_or_of_zeros_is_undefined_and_keeps_a_hundred_points():
    assert {(one.asymmetry, one.correlation) for one in probe(*np.zeros((4, 0, 3))).values()} == {(None, None)}
    assert {(one.asymmetry, one.correlation) for one in probe(*np.zeros((4, 5, 3))).values()} == {(None, None)}
    many = probe(*np.random.default_rng(0).normal(size=(4, 300, 3)))
    assert {len(one.forward) for one in many.values()} == {len(one.backward) for one in many.values()} == {100}
