from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "evaluate.py"


def test_a_small_run_gives_every_ratio_on_equal_values(tmp_path):
    pytest.importorskip("mteb")
    sizes = ["--model", "package:wordllama", "--max-queries", "20", "--max-documents", "60", "--rounds", "1"]
    command = [sys.executable, BENCHMARK, *sizes, "--json", tmp_path / "figures.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["queries"], figures["documents"], figures["similarities"]) == (20, 60, 5)
    assert figures["largest_difference_to_sentence_transformers"] < 1e-9
    assert figures["largest_difference_to_mteb"] < 1e-5  # it rounds to five digits
    assert figures["ndcg_cosine"] == figures["ndcg_dnorm"] != figures["ndcg_dot"] == figures["ndcg_qnorm"]
    for name in ("sentence_transformers", "mteb"):
        ratio = figures[f"seconds_{name}"] / figures["seconds_ours"]
        assert figures[f"ratio_vs_{name}"] == pytest.approx(ratio) and ratio > 0
        assert f"{figures[f'ratio_vs_{name}']:.4f}" in done.stdout
