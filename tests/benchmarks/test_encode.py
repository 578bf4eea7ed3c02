from __future__ import annotations

import json
import os
from importlib import util
from pathlib import Path

import pytest
import torch

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "encode.py"


@pytest.fixture
def benchmark(monkeypatch):
    """The script as a module; it binds the process to fewer processors, which is undone."""
    monkeypatch.syspath_prepend(BENCHMARK.parent)  # as a script it finds what lies beside it
    processors, threads = os.sched_getaffinity(0), torch.get_num_threads()
    specification = util.spec_from_file_location("benchmark_encode", BENCHMARK)
    module = util.module_from_spec(specification)
    specification.loader.exec_module(module)
    yield module
    os.sched_setaffinity(0, processors)
    torch.set_num_threads(threads)


def test_a_small_run_compares_every_way(benchmark, tmp_path, capsys):
    flags = ["--texts", "6", "--max-length", "32", "--rounds", "1", "--json", str(tmp_path / "figures.json")]
    benchmark.main([*flags, "--ways", "ours", "int8"])
    printed = capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    for kind in ("queries", "docstrings", "bodies", "passages"):
        for name in (f"ratio_{kind}", f"ratio_{kind}_int8"):
            assert figures[name] > 0 and f"{name} " in printed
    assert figures["norm_error"] <= 1e-5 and figures["least_cosine"] >= 0.999999
    assert figures["norm_error"] < figures["norm_error_mean_int8"] < 0.02
    assert figures["missing"] == {}
