"""``mine`` from the command line, on real data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from offsphere import cli
from offsphere.cli import mine as commands
from offsphere.data import load_collection, load_pairs
from offsphere.errors import ConfigError, OffsphereError

ROOT = Path(__file__).parents[2]
HOTPOTQA = ROOT / "datasets" / "hotpotqa"


@pytest.fixture
def offsphere(monkeypatch, capsys):
    """Runs the program in this process; gives what it printed, and raises what it would turn into an exit code."""
    monkeypatch.setattr(commands, "quiet_libraries", lambda: None)

    def run(*arguments: object) -> str:
        capsys.readouterr()
        try:
            cli.app(cli.spread_lists([str(argument) for argument in arguments]), standalone_mode=False)
        except OffsphereError as error:
            raise type(error)(f"{error}") from error
        return capsys.readouterr().out

    return run


def test_real_data_under_its_own_similarity_and_another(offsphere, tmp_path):
    settings = ("--train", HOTPOTQA, "--range", "1-50", "--negatives", 3, "--margin", 0.25)
    printed = offsphere("mine", "--model", "package:wordllama", *settings, "--out", tmp_path / "own.jsonl", "--json")
    summary = json.loads(printed)
    assert summary == json.loads((tmp_path / "own.mining.json").read_text(encoding="utf-8"))
    assert summary["similarity"]["name"] == "cosine"
    assert summary["skipped"]["known to be relevant"] > 200 and summary["skipped"]["margin"] > 0
    collection = load_collection(HOTPOTQA, "train")
    pairs = load_pairs(tmp_path / "own.jsonl")
    assert len(pairs) == summary["kept"] > 100 and len(pairs.negatives) == 3
    relevant = {
        collection.queries[query]: {collection.documents[one] for one, grade in grades.items() if grade > 0}
        for query, grades in collection.qrels.items()
    }
    corpus = set(collection.documents.values())
    for query, *negatives in zip(pairs.queries, *pairs.negatives, strict=True):
        assert set(negatives) <= corpus - relevant[query]
        assert len(set(negatives)) == 3
    table = offsphere(
        "mine", "--model", "package:wordllama", *settings, "--out", tmp_path / "dot.parquet", "--similarity", "dot"
    )
    assert "under dot" in table and "known to be relevant" in table
    by_dot = load_pairs(tmp_path / "dot.parquet")
    common = set(zip(pairs.queries, pairs.positives, strict=True)) & set(
        zip(by_dot.queries, by_dot.positives, strict=True)
    )
    assert common
    assert pairs.negatives != by_dot.negatives


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--range", "10"), "two ranks such as 10-100, found '10'"),
        (("--range", "50-10"), "the first from 1 on, found 50-10"),
        (("--sample", "best"), "top or random"),
        (("--margin", "-1"), "--margin must be a finite number"),
        (("--range", "1-2", "--negatives", "3"), "fewer than --negatives 3"),
    ],
)
def test_impossible_settings_are_named_before_anything_is_loaded(offsphere, tmp_path, arguments, says):
    with pytest.raises(ConfigError, match=says):
        offsphere("mine", "--model", "nowhere", "--train", "nowhere", "--out", tmp_path / "x.jsonl", *arguments)


def test_help_shows_an_example_and_says_what_a_margin_is():
    done = subprocess.run([sys.executable, "-m", "offsphere", "mine", "--help"], capture_output=True, text=True)
    text = " ".join(done.stdout.replace("│", " ").split())
    assert done.returncode == 0
    assert "Example: offsphere mine" in text and "standard deviations" in text
