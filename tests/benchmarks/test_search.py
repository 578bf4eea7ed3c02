from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "search.py"


def test_a_small_run_measures_every_ratio_on_equal_answers(tmp_path):
    pytest.importorskip("faiss")
    sizes = ["--documents", "3000", "--dimension", "32", "--queries", "1", "6", "--rounds", "2", "--k", "10"]
    command = [
        sys.executable,
        BENCHMARK,
        *sizes,
        "--repeats",
        "2",
        "--threads",
        "2",
        "--json",
        tmp_path / "figures.json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["same_as_float64"] == 1.0
    for count in (1, 6):
        for name in ("faiss_flat", "semantic_search", "torch"):
            assert figures[f"same_as_{name}_{count}_queries"] == 1.0
            assert f"{figures[f'ratio_vs_{name}_{count}_queries']:.2f}" in done.stdout
            seconds = [figures[f"seconds_{one}_{count}_queries"] for one in (name, "ours")]
            assert all(second > 0 for second in seconds)
        assert 0 < figures[f"share_of_products_{count}_queries"]
    assert figures["ratio_vs_semantic_search"] == figures["ratio_vs_semantic_search_6_queries"]
    assert figures["ratio_vs_faiss_flat_1_query"] == figures["ratio_vs_faiss_flat_1_queries"]
