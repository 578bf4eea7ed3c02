from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

from offsphere.config import CompareConfig
from offsphere.errors import ConfigError
from offsphere.training.plan import STATIC, TRANSFORMER, make_plan


@pytest.fixture
def asked() -> Callable[..., CompareConfig]:
    def make(**settings: object) -> CompareConfig:
        return CompareConfig(model="m", train=["t"], eval=["e"], out=Path("o"), **settings)

    return make


@pytest.mark.parametrize(("name", "default"), [("static_model", STATIC), ("bert_model", TRANSFORMER)])
def test_what_is_left_open_follows_from_encoder_and_data(
    request: pytest.FixtureRequest, asked: Callable[..., CompareConfig], name: str, default: object
) -> None:
    plan = make_plan(asked(), request.getfixturevalue(name), 10_000)
    assert plan.batch_size == default.batch_size
    assert plan.learning_rate == default.learning_rate
    assert plan.encode_batch_size == default.encode_batch_size
    assert plan.steps == default.epochs * (10_000 // default.batch_size)
    assert plan.gamma_learning_rate == 0.01
    assert plan.weight_decay == 0.01
    assert plan.schedule == "cosine"
    assert plan.warmup_steps == 0
    assert not plan.learn_scale


def test_what_is_asked_is_what_is_planned(
    static_model: SentenceTransformer, asked: Callable[..., CompareConfig]
) -> None:
    given = {
        "steps": 40,
        "batch_size": 7,
        "learning_rate": 0.3,
        "gamma_learning_rate": 0.2,
        "schedule": "linear",
        "weight_decay": 0.5,
        "learn_scale": True,
    }
    plan = make_plan(asked(**given, warmup_ratio=0.25, evaluations=4), static_model, 1000)
    assert {name: getattr(plan, name) for name in given} == given
    assert plan.warmup_steps == 10
    assert plan.evaluate_every == 10


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 10), (0.5, 5), (3.0, 30), (0.01, 1)])
def test_epochs_count_whole_batches(
    static_model: SentenceTransformer, asked: Callable[..., CompareConfig], epochs: float, steps: int
) -> None:
    assert make_plan(asked(epochs=epochs, batch_size=10), static_model, 109).steps == steps


def test_a_batch_is_never_larger_than_the_data(
    static_model: SentenceTransformer, asked: Callable[..., CompareConfig]
) -> None:
    plan = make_plan(asked(), static_model, 5)
    assert (plan.batch_size, plan.steps) == (5, 2)


@pytest.mark.parametrize("n_pairs", [0, 1])
def test_one_pair_has_no_negative(
    static_model: SentenceTransformer, asked: Callable[..., CompareConfig], n_pairs: int
) -> None:
    with pytest.raises(ConfigError, match=f"at least 2 training pairs, found {n_pairs}"):
        make_plan(asked(), static_model, n_pairs)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.integers(1, 5000), evaluations=st.integers(1, 50))
def test_no_more_validations_than_asked(
    static_model: SentenceTransformer, asked: Callable[..., CompareConfig], steps: int, evaluations: int
) -> None:
    plan = make_plan(asked(steps=steps, evaluations=evaluations), static_model, 1000)
    assert 1 <= math.ceil(steps / plan.evaluate_every) <= evaluations
    assert 1 <= plan.log_every <= steps


def test_what_is_written_down_is_the_request_with_nothing_left_open(
    static_model: SentenceTransformer, asked: Callable[..., CompareConfig]
) -> None:
    config = asked(epochs=3)
    plan = make_plan(config, static_model, 1000)
    resolved = plan.resolve(config)
    assert "out" not in resolved
    again = CompareConfig(**resolved, out=Path("elsewhere"))
    assert make_plan(again, static_model, 1000) == plan
    assert (again.steps, again.batch_size, again.learning_rate) == (plan.steps, plan.batch_size, plan.learning_rate)


def test_processes_share_the_pairs(static_model: SentenceTransformer, asked: Callable[..., CompareConfig]) -> None:
    """Two of them with half the batch take the steps of one; no batch is larger than a process's share."""
    one = make_plan(asked(batch_size=64, epochs=3), static_model, 1000)
    two = make_plan(asked(batch_size=32, epochs=3), static_model, 1000, processes=2)
    assert (two.steps, two.batch_size, two.processes) == (one.steps, 32, 2)
    assert one.negatives == two.negatives == 63
    assert make_plan(asked(), static_model, 9, processes=2).batch_size == 4
    with pytest.raises(ConfigError, match="at least 4 training pairs, found 3"):
        make_plan(asked(), static_model, 3, processes=2)
    assert two.resolve(asked(batch_size=32))["processes"] == 2


def test_accumulated_batches_make_fewer_steps(
    static_model: SentenceTransformer, asked: Callable[..., CompareConfig]
) -> None:
    plan = make_plan(asked(batch_size=10, accumulate=4, epochs=2), static_model, 109)
    assert (plan.steps, plan.accumulate, plan.negatives) == (6, 4, 9)  # 10 batches: 4, 4 and 2


@pytest.mark.parametrize(("grid", "name"), [("lr_grid", "learning_rate"), ("alpha_grid", "alpha")])
def test_what_a_grid_will_find_stays_open(
    static_model: SentenceTransformer, asked: Callable[..., CompareConfig], grid: str, name: str
) -> None:
    config = asked(**{grid: [0.2, 0.1, 0.2]})
    assert config.grids == {name: [0.1, 0.2]}
    resolved = make_plan(config, static_model, 1000).resolve(config)
    assert resolved[name] is None
    assert {"learning_rate", "alpha"} - {name} < {key for key, value in resolved.items() if value is not None}
    found = config.model_copy(update={name: 0.2})  # as config.yaml has it afterwards
    assert found.grids == {}
    assert getattr(make_plan(found, static_model, 1000), name) == 0.2


def test_alpha_is_that_of_the_paper_and_no_part_of_a_given_scale(
    static_model: SentenceTransformer, asked: Callable[..., CompareConfig]
) -> None:
    for wanted, alpha in (({}, 20.0), ({"alpha": 50.0}, 50.0), ({"scale": 5.0}, None)):
        config = asked(**wanted)
        resolved = make_plan(config, static_model, 1000).resolve(config)
        assert resolved["alpha"] == alpha
        assert make_plan(type(config)(**resolved, out=config.out), static_model, 1000).alpha == (alpha or 20.0)
