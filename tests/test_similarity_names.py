from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offsphere.errors import ConfigError
from offsphere.similarity import LEARNABLE, NAMES, Similarity

COSINE = Similarity.parse("cosine")
ALL = [*map(Similarity.parse, NAMES), Similarity(0.2, 0.9), Similarity(1.5, -0.5)]


def test_the_five_names():
    assert NAMES == ("cosine", "dot", "qnorm", "dnorm", LEARNABLE)
    table = {"cosine": (1, 1), "dot": (0, 0), "qnorm": (1, 0), "dnorm": (0, 1), "learnable": (0.5, 0.5)}
    assert {name: Similarity.parse(name).gammas for name in NAMES} == table
    assert [Similarity.parse(name).name for name in NAMES] == list(NAMES) == [str(Similarity.parse(n)) for n in NAMES]
    assert [Similarity.parse(name).learned for name in NAMES] == [False] * 4 + [True]


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=300)
def test_every_digit_survives_name_mapping_and_repr(gamma_q, gamma_d):
    similarity = Similarity(gamma_q, gamma_d)
    assert Similarity.parse(similarity.name) == similarity
    assert Similarity.parse(similarity.to_dict()) == similarity == Similarity.from_dict(similarity.to_dict())
    assert eval(repr(similarity), {"Similarity": Similarity}) == similarity
    assert Similarity.parse(similarity) is similarity


def test_names_and_repr_are_short_where_they_can_be():
    assert Similarity(0.2, 0.9).name == "gamma_q=0.2,gamma_d=0.9"
    assert Similarity(0.5, 1).name == "gamma_q=0.5,gamma_d=1"
    assert repr(COSINE) == "Similarity(gamma_q=1, gamma_d=1)"
    assert repr(Similarity.parse("learnable")) == "Similarity(gamma_q=0.5, gamma_d=0.5, learned=True)"


def test_learned_gammas_keep_their_mark_in_a_mapping():
    learned = Similarity(0.3, 0.8, learned=True)
    assert learned.to_dict() == {"gamma_q": 0.3, "gamma_d": 0.8, "learned": True}
    assert Similarity.from_dict(learned.to_dict()) == learned and learned.name == "learnable"
    assert "learned" not in Similarity(0.3, 0.8).to_dict()


def test_equality_and_hash():
    assert Similarity(1, 1) == COSINE and hash(Similarity(1, 1)) == hash(COSINE)
    assert len(set(ALL)) == len(ALL)
    assert Similarity(0.5, 0.5) != Similarity(0.5, 0.5, learned=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        COSINE.gamma_q = 0.0


def test_detached_leaves_the_graph():
    gamma_q, gamma_d = torch.tensor(0.25, requires_grad=True), torch.tensor(0.75, requires_grad=True)
    trained = Similarity(gamma_q, gamma_d, learned=True)
    detached = trained.detached()
    assert detached == Similarity(0.25, 0.75, learned=True) and trained.gammas == (0.25, 0.75)
    assert trained.name == "learnable" and repr(trained) == repr(detached) and trained.to_dict() == detached.to_dict()
    queries, documents = torch.randn(2, 3), torch.randn(4, 3)
    assert trained.scores(queries, documents).requires_grad
    assert not detached.scores(queries, documents).requires_grad
    torch.testing.assert_close(trained.scores(queries, documents).detach(), detached.scores(queries, documents))
    np.testing.assert_allclose(
        trained.scores(queries.numpy(), documents.numpy()), detached.scores(queries, documents), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "value",
    [
        *("", "Cosine", "euclidean", "cosine ", "gamma_q=1-2,gamma_d=0", "gamma_q=e,gamma_d=.", "gamma_q=0.2"),
        *("gamma_q=1e999,gamma_d=0", "gamma_q=nan,gamma_d=0", 3, None, ["cosine"]),
        *({}, {"gamma_q": 1}, {"gamma_q": 1, "gamma_d": 1, "gamma": 2}, {"gamma_q": None, "gamma_d": 1}),
        *({"gamma_q": "1", "gamma_d": 1}, {"gamma_q": True, "gamma_d": 1}),
    ],
    ids=repr,
)
def test_what_is_no_similarity_is_refused(value):
    with pytest.raises(ConfigError):
        Similarity.parse(value)


def test_errors_say_what_was_found_and_what_to_type():
    with pytest.raises(ConfigError, match=r"unknown similarity 'cos'; expected one of cosine, dot, .*gamma_q=0\.2"):
        Similarity.parse("cos")
    with pytest.raises(ConfigError, match=r"needs gamma_q and gamma_d.*found \{'gamma_q': 1\}"):
        Similarity.from_dict({"gamma_q": 1})
    with pytest.raises(ConfigError, match=r"gamma_d must be a finite number .*found inf"):
        Similarity(1, math.inf)
