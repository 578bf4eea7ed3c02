"""``compare-runs`` on the command line: from run files to tables, files and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from offsphere import cli

XQUAD = Path(__file__).parents[2] / "datasets" / "xquad_en"


def offsphere(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "offsphere", *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``evaluate --out`` wrote for package:wordllama under cosine and dot."""
    out = tmp_path_factory.mktemp("runs") / "wordllama"
    done = offsphere("evaluate", "--model", "package:wordllama", "--data", XQUAD, "--similarity", "cosine,dot",
                     "--measures", "nDCG@10,RR@10", "--out", out)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


def test_lists() -> None:
    assert cli.spread_lists(
        ["compare-runs", "a.trec", "b.trec", "--data", "x", "y", "--category", "in=x", "out=x,y", "--out", "z"]
    ) == [
        "compare-runs", "a.trec", "b.trec", "--data", "x", "--data", "y", "--category", "in=x", "--category",
        "out=x,y", "--out", "z",
    ]  # fmt: skip


def test_from_run_files_to_json_and_files(runs: Path, tmp_path: Path) -> None:
    files = [runs / "runs" / f"{name}-xquad_en.trec" for name in ("cosine", "dot")]
    done = offsphere("compare-runs", *files, "--data", XQUAD, "--out", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["baseline"], found["measure"], found["systems"]) == ("cosine", "nDCG@10", ["cosine", "dot"])
    (difference,) = found["differences"]
    assert difference["n_queries"] == 1190 == difference["wins"] + difference["ties"] + difference["losses"]
    import pandas

    measured = pandas.read_csv(runs / "results.csv").set_index(["scored_as", "measure"]).value
    assert difference["baseline"] == pytest.approx(measured["cosine", "nDCG@10"], abs=1e-12)
    assert difference["value"] == pytest.approx(measured["dot", "nDCG@10"], abs=1e-12)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "scores.csv", "differences.csv", "per_query.csv", "runs.tex", "runs.html", "per-query-xquad_en.svg",
    }  # fmt: skip


def test_a_folder_is_printed_as_tables(runs: Path) -> None:
    done = offsphere("compare-runs", runs, "--data", XQUAD, "--measure", "RR@10", "--category", "easy=xquad_en")
    assert done.returncode == 0, done.stderr
    for word in ("RR@10", "baseline cosine", "easy", "1,190", "losses"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--measure", "nDCG@1O"], 2, "unknown measure"),
        (["--category", "easy"], 2, "expected NAME=COLLECTION,COLLECTION"),
        (["--split", "nope"], 1, "no split 'nope'"),
    ],
)
def test_exit_codes_and_what_to_do(runs: Path, arguments: list[str], code: int, says: str) -> None:
    done = offsphere("compare-runs", runs, "--data", XQUAD, *arguments)
    assert done.returncode == code and "Traceback" not in done.stderr
    assert says in " ".join(done.stderr.split())


def test_ids_of_another_collection_are_an_error(runs: Path, tmp_path: Path) -> None:
    """T-I3."""
    other = tmp_path / "other.trec"
    other.write_text("1 Q0 2 1 0.5 x\n", encoding="utf-8")
    done = offsphere("compare-runs", runs, other, "--data", XQUAD)
    assert done.returncode == 1 and "other.trec: no document of the run is in xquad_en" in done.stderr


def test_help_shows_an_example() -> None:
    shown = " ".join(offsphere("compare-runs", "--help").stdout.split())
    assert "Example: offsphere compare-runs" in shown
