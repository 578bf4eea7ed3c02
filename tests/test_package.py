from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import offsphere
from offsphere import errors
from offsphere.errors import ConfigError, DataError, OffsphereError, UsageError

MEASURE = """
import json, sys, time
before = set(sys.modules)
start = time.perf_counter()
import {module}
seconds = time.perf_counter() - start
print(json.dumps({{"seconds": seconds, "modules": sorted(m for m in set(sys.modules) - before if "." not in m)}}))
"""
HEAVY = {"torch", "transformers", "sentence_transformers", "datasets", "matplotlib", "scipy", "ir_measures", "pandas"}


def measure(module: str) -> dict:
    command = [sys.executable, "-c", MEASURE.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_public_names():
    assert offsphere.__all__ == sorted(offsphere.__all__)
    assert set(dir(offsphere)) == {*offsphere.__all__, "__version__"}
    assert offsphere.__version__ == metadata.version("offsphere")


@pytest.mark.parametrize("name", offsphere.__all__)
def test_a_public_name_is_importable_and_documented(name):
    value = getattr(offsphere, name)
    assert value.__name__ == name and value.__doc__
    assert value is getattr(importlib.import_module(value.__module__), name)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'offsphere' has no attribute 'Similarty'"):
        _ = offsphere.Similarty


def test_the_import_costs_nothing():
    found = min((measure("offsphere") for _ in range(3)), key=lambda one: one["seconds"])
    assert found["seconds"] < 0.5
    assert not HEAVY & set(found["modules"]) and "numpy" not in found["modules"]
    assert "offsphere" in found["modules"]


@pytest.mark.parametrize("module", ["offsphere.similarity", "offsphere.errors", "offsphere.config", "offsphere.data"])
def test_modules_without_gradients_import_no_torch(module):
    assert not HEAVY & set(measure(module)["modules"])


def test_heavy_imports_are_seen():
    assert "scipy" in HEAVY & set(measure("scipy")["modules"])


def test_every_module_has_a_docstring_and_imports():
    source = Path(offsphere.__file__).parent
    names = [".".join(("offsphere", *file.relative_to(source).with_suffix("").parts)) for file in source.rglob("*.py")]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    assert len(names) > 20
    for name in names:
        assert importlib.import_module(name).__doc__, name


def test_exit_codes_follow_the_tree():
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(classes) == 10 and all(issubclass(one, OffsphereError) for one in classes)
    assert {one.__name__ for one in classes if one.exit_code == 2} == {"UsageError", "ConfigError"}
    assert {one.exit_code for one in classes} == {1, 2}
    assert issubclass(ConfigError, UsageError)


def test_the_tree_in_the_docstring_names_every_error():
    for one in vars(errors).values():
        if isinstance(one, type) and issubclass(one, Exception):
            assert f"{one.__name__} " in errors.__doc__ and f"exit {one.exit_code}" in errors.__doc__


@pytest.mark.parametrize(
    ("path", "line", "shown"),
    [(None, None, "broken"), ("a.tsv", None, "a.tsv: broken"), (Path("a.tsv"), 3, "a.tsv:3: broken")],
)
def test_a_data_error_says_where(path, line, shown):
    error = DataError("broken", path, line)
    assert str(error) == shown and (error.path, error.line) == (path, line)
