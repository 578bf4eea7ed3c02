from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from offsphere.config import CompareConfig, read_config
from offsphere.errors import ConfigError
from offsphere.similarity import FIXED, NAMES, Similarity

NEEDED = {"model": "package:wordllama", "train": ["nq"], "eval": ["nq", "hotpot"], "out": "runs/first"}


def as_yaml(config):
    return yaml.safe_dump(config.model_dump(mode="json"), allow_unicode=True)


@pytest.fixture
def write(tmp_path):
    def write(content) -> Path:
        path = tmp_path / "run.yaml"
        text = content if isinstance(content, str) else yaml.safe_dump(content, allow_unicode=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_defaults_are_those_of_the_paper():
    config = read_config(CompareConfig, None, NEEDED)
    assert config.similarities == list(NAMES) and config.seeds == [0, 42, 1337]
    assert config.scale == "auto" and config.weight_decay == 0.01 and config.schedule == "cosine"
    assert config.warmup_ratio == 0 and config.split == "test" and config.init == "pretrained"
    assert (config.steps, config.epochs, config.batch_size, config.learning_rate, config.max_pairs) == (None,) * 5
    assert config.out == Path("runs/first")


# Where settings come from


def test_flags_stand_before_the_file_and_the_file_before_defaults(write):
    path = write(NEEDED | {"steps": 10, "split": "dev", "seeds": [1]})
    config = read_config(CompareConfig, path, {"steps": 20, "split": None, "max_pairs": 5})
    assert (config.steps, config.split, config.seeds, config.max_pairs) == (20, "dev", [1], 5)


def test_a_flag_that_is_false_or_zero_counts(write):
    config = read_config(
        CompareConfig, write(NEEDED | {"strict": True, "freeze_layers": 3}), {"strict": False, "freeze_layers": 0}
    )
    assert config.strict is False and config.freeze_layers == 0


def test_the_file_is_utf8(write):
    config = read_config(CompareConfig, write(NEEDED | {"query_prompt": "frage für → "}), {})
    assert config.query_prompt == "frage für → "


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a\n- b\n", r"run\.yaml: expected settings such as 'model: NAME', found list"),
        ("", "found NoneType"),
        ("model: [", r"run\.yaml is not YAML"),
        ("model: !!python/object/apply:os.getcwd []", r"run\.yaml is not YAML"),
    ],
)
def test_a_file_that_holds_no_settings(write, content, message):
    with pytest.raises(ConfigError, match=message):
        read_config(CompareConfig, write(content), NEEDED)


def test_a_file_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(ConfigError, match=f"cannot read --config {path}"):
            read_config(CompareConfig, path, NEEDED)


def test_a_file_in_another_encoding(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes("query_prompt: für\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml"):
        read_config(CompareConfig, path, NEEDED)


# What is refused


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("batchsize", "; did you mean 'batch_size'?"),
        ("batch-size", "; did you mean 'batch_size'?"),
        ("learning_rat", "; did you mean 'learning_rate'?"),
        ("similarity", "; did you mean 'similarities'?"),
        ("qqqqqq", "$"),
    ],
)
def test_an_unknown_setting(write, name, suggestion):
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'{suggestion}".replace("?", r"\?")):
        read_config(CompareConfig, write(NEEDED | {name: 1}), {})


def test_a_setting_that_is_no_name(write):
    with pytest.raises(ConfigError, match="unknown setting '7'"):
        read_config(CompareConfig, write("7: 1\n"), NEEDED)


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_setting(name):
    with pytest.raises(ConfigError, match=f"{name} is missing; give --{name} or '{name}:' in the configuration file"):
        read_config(CompareConfig, None, {key: value for key, value in NEEDED.items() if key != name})


def test_every_fault_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        read_config(CompareConfig, None, {"model": "m", "stepz": 3, "dropout": 2})
    for part in ("train is missing", "eval is missing", "out is missing", "did you mean 'steps'", "dropout: "):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((name, [0, -1, 1.5, "many"]) for name in ("steps", "max_pairs", "max_queries", "max_documents")),
        *((name, [0, -1]) for name in ("evaluations", "validation_queries", "validation_documents")),
        *((name, [1, 0, -1]) for name in ("batch_size", "max_length")),
        ("epochs", [0, -1.0, float("inf"), float("nan")]),
        *((name, [0, -1e-3, float("inf"), float("nan")]) for name in ("learning_rate", "gamma_learning_rate")),
        ("scale", [0, -20, float("inf"), float("nan"), "big"]),
        ("weight_decay", [-0.1, float("inf")]),
        ("dropout", [-0.1, 1, 1.5]),
        ("warmup_ratio", [-0.1, 1]),
        ("freeze_layers", [-1, 0.5]),
        ("schedule", ["exponential", ""]),
        ("init", ["zero"]),
        ("run_files", ["some"]),
        ("train", [[], "nq", 3]),
        ("eval", [[], "nq"]),
        ("seeds", [[], [0, 0], [1.5], [-1], 3]),
        ("similarities", [[], ["dot"], ["cosine", "cosine"], ["cosine", "l2"], ["cosine", 3], "cosine"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_impossible_value(name, values):
    for value in values:
        with pytest.raises(ConfigError) as caught:
            read_config(CompareConfig, None, NEEDED | {name: value})
        assert "Value error" not in str(caught.value)
        assert name in str(caught.value) or name == "similarities"


def test_messages_say_why():
    for settings, message in [
        ({"similarities": ["dot", "dnorm"]}, "cosine must be among the similarities"),
        ({"similarities": ["cosine", "dot", {"gamma_q": 0, "gamma_d": 0}]}, "named twice: dot"),
        ({"seeds": [3, 3]}, r"a seed is named twice in \[3, 3\]; the same seed gives the same run"),
        ({"steps": 5, "epochs": 1}, "give steps or epochs, not both"),
        ({"init": "random", "freeze_layers": 2}, "freeze_layers would keep random layers as they are"),
        ({"dropout": 1.5}, r"dropout: .*less than 1.*found 1\.5"),
    ]:
        with pytest.raises(ConfigError, match=message):
            read_config(CompareConfig, None, NEEDED | settings)


def test_similarities_may_be_given_as_exponents():
    given_as = ["cosine", {"gamma_q": 1 / 3, "gamma_d": 0.9}, "gamma_q=0.25,gamma_d=1", {"gamma_q": 1, "gamma_d": 0}]
    config = read_config(CompareConfig, None, NEEDED | {"similarities": given_as})
    parsed = [Similarity.parse(name) for name in config.similarities]
    assert [similarity.gammas for similarity in parsed] == [(1, 1), (1 / 3, 0.9), (0.25, 1), (1, 0)]
    assert config.similarities[-1] == "qnorm"


def test_settings_do_not_change_afterwards():
    config = read_config(CompareConfig, None, NEEDED)
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 3


# Written back

texts = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=12)
positive = st.floats(1e-8, 1e6)
exponents = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(lambda pair: {"gamma_q": pair[0], "gamma_d": pair[1]})


@given(
    settings=st.fixed_dictionaries(
        {"model": texts, "train": st.lists(texts, min_size=1, max_size=3), "eval": st.lists(texts, min_size=1)},
        optional={
            "seeds": st.lists(st.integers(0, 2**31), min_size=1, max_size=4, unique=True),
            "steps": st.integers(1, 10**6),
            "batch_size": st.integers(2, 4096),
            "learning_rate": positive,
            "gamma_learning_rate": positive,
            "scale": positive | st.just("auto"),
            "dropout": st.floats(0, 0.99),
            "query_prompt": texts,
            "document_prompt": texts,
            "learn_scale": st.booleans(),
            "run_files": st.sampled_from(["none", "first", "all"]),
        },
    ),
    gammas=exponents.filter(lambda pair: tuple(pair.values()) not in FIXED.values()),
)
def test_what_is_written_reads_back_the_same(tmp_path_factory, settings, gammas):
    config = read_config(CompareConfig, None, settings | {"out": "runs/ü", "similarities": ["dot", "cosine", gammas]})
    path = tmp_path_factory.getbasetemp() / "resolved.yaml"
    path.write_text(as_yaml(config), encoding="utf-8")
    again = read_config(CompareConfig, path, {})
    assert again == config and as_yaml(again) == as_yaml(config)
    assert set(yaml.safe_load(as_yaml(config))) == set(CompareConfig.model_fields)  # resolved: nothing left unsaid


def test_every_setting_is_described():
    assert all(field.description for field in CompareConfig.model_fields.values())
