from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "compare.py"


def test_a_small_run_ends_where_the_peer_ends(transformer, save, tmp_path):
    sizes = ["--steps", "2", "--batch-size", "8", "--max-length", "16", "--dev", "8", "--dev-documents", "20"]
    sizes += ["--test", "20", "--documents", "30", "--threads", "1", "--model", str(save(transformer))]
    sizes += ["--similarities", "cosine", "qnorm"]
    command = [sys.executable, str(BENCHMARK), *sizes, "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["ndcg_difference"] < 0.02
    assert figures["ratio_vs_trainings"] > 0
    assert "cosine" in done.stdout and "qnorm" in done.stdout
