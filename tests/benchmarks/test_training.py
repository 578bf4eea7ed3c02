from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "training.py"


def test_a_small_run_measures_every_way_on_equal_losses(tmp_path):
    sizes = ["--batch-size", "4", "--max-length", "12", "--uniform-batch-size", "4", "--steps", "1", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, BENCHMARK, *sizes, "--json", tmp_path / "figures.json"],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["way"] == "packed forward pass, fused"
    assert figures["loss_difference"] < 2e-6 and 0 < figures["gradient_difference"] < 1e-4
    found = figures["natural_lengths"]
    assert list(found) == ["mnrl", "cached16", "cached32", "ours", "ours_cached"]
    assert all(one["seconds"] > 0 and one["megabytes"] > 0 for one in found.values())
    assert figures["ratio_vs_mnrl"] == pytest.approx(found["mnrl"]["seconds"] / found["ours"]["seconds"])
    better = min(("cached16", "cached32"), key=lambda way: found[way]["seconds"])
    assert figures["ratio_vs_cached"] == pytest.approx(found[better]["seconds"] / found["ours_cached"]["seconds"])
    memory = found["ours_cached"]["megabytes"] / found[better]["megabytes"]
    assert figures["memory_ratio_vs_cached"] == pytest.approx(memory)
    assert figures["memory_ratio_vs_mnrl"] > 0 and figures["ratio_uniform_lengths"] > 0
    assert 0 < figures["gemm_share"] < 2
    for title in ("Natural lengths, batch 4, at most 12 tokens", "Uniform lengths, batch 4, 12 tokens"):
        assert title in done.stdout
    assert f"{figures['ratio_vs_mnrl']:.2f}" in done.stdout
