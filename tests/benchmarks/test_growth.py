from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "growth.py"


def test_a_small_run_measures_every_step(tmp_path):
    pytest.importorskip("lancedb")
    flags = ["--documents", "200", "600", "--dimension", "16", "--rounds", "1", "--exports", "parquet"]
    flags += ["--postgres", "none", "--project", "5000", "--folder", tmp_path, "--json", tmp_path / "figures.json"]
    done = subprocess.run([sys.executable, BENCHMARK, *flags], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [row["documents"] for row in figures["measured"]] == [200, 600]
    for row in figures["measured"]:
        assert row["build"]["disk"] > row["documents"] * 16 * 4
        assert row["parquet"]["rows_per_second"] == pytest.approx(row["documents"] / row["parquet"]["seconds"])
        assert (row["memory"]["fits"], row["disk"]["fits"]) == (True, False)
        for step in ("build", "memory", "disk", "parquet"):
            assert row[step]["memory"] > 0
        written = [row["build"]["seconds"], row["build"]["memory"] / 2**20, row["build"]["disk"] / 2**20]
        assert f"| {row['documents']} | {' | '.join(f'{one:,.1f}' for one in written)} |" in done.stdout
    (ahead,) = figures["projected"]
    measured = [row["build"]["disk"] / 2**20 for row in figures["measured"]]
    slope = (measured[1] - measured[0]) / 400
    assert ahead["Write the index"]["on disk, MB"] == pytest.approx(measured[1] + slope * 4400, rel=0.2)
    assert "5,000 (projected)" in done.stdout and "computed, not measured" in done.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["figures.json"]  # nothing is left behind
