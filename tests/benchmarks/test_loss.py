from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "loss.py"


def test_a_small_run_gives_ratios_of_equal_losses(tmp_path):
    sizes = ["--batches", "4096", "--tiled-batches", "8192", "--dimension", "64", "--rounds", "1"]
    command = [sys.executable, BENCHMARK, *sizes, "--json", tmp_path / "figures.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["loss_difference_4k"] < 1e-5 and figures["gradient_difference_4k"] < 1e-5
    assert figures["memory_ratio_4k"] < 0.25  # three matrices of 64 MB against a tile of 4
    assert figures["megabytes_8k"] < 4 * figures["megabytes_4k"]
    assert figures["ratio_4k"] > 0 and f"{figures['ratio_4k']:.2f} times as fast" in done.stdout
    assert "memory_ratio_8k" not in figures  # the plain loss was not run
