"""``encode`` and ``info`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from offsphere import cli
from offsphere.cli import encode as commands
from offsphere.errors import ConfigError, OffsphereError
from offsphere.similarity import norms

ROOT = Path(__file__).parents[2]
XQUAD = ROOT / "datasets" / "xquad_en"


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


def test_both_sides(offsphere, tmp_path):
    out = tmp_path / "out"
    arguments = ("encode", "package:wordllama", XQUAD, "--out", out, "--side", "both", "--query-prompt", "q: ")
    query, document = json.loads(offsphere(*arguments, "--max-length", 100, "--shard-size", 100, "--json"))
    assert (query["out"], document["out"]) == (str(out / "query"), str(out / "document"))
    assert query["prompts"] == {"query": "q: "} and query["prompt_tokens"]["query"] > 0
    assert (document["count"], document["shards"], document["texts_encoded"]) == (240, 3, 240)
    assert document["cut"] > 0 and 0 < document["tokens_lost_share"] < 1 and document["max_length"] == 100
    lengths = norms(np.load(out / "document" / "embeddings.npy", mmap_mode="r"))
    assert document["lengths"]["mean"] == pytest.approx(float(lengths.mean()), rel=1e-5)
    again = json.loads(offsphere(*arguments, "--max-length", 100, "--json"))
    assert [(one["texts_encoded"], one["shards_kept"]) for one in again] == [(0, 12), (0, 3)]
    shown = offsphere(*arguments, "--max-length", 100)
    assert "0 of 3 shards written" in shown and f"{document['cut']} of 240 texts are cut at 100 tokens" in shown
    assert f"{document['tokens_lost_share']:.1%} of all" in shown and "length of 240 embeddings: mean" in shown
    told = json.loads(offsphere("info", out, "--side", "document", "--json"))
    assert told["lengths"] == document["lengths"] and told["model"] == "package:wordllama"
    assert "length of 240 embeddings: mean" in offsphere("info", out / "document" / "embeddings.npy")


def test_the_cache_from_the_environment(offsphere, tmp_path, monkeypatch):
    monkeypatch.setenv("OFFSPHERE_CACHE", str(tmp_path / "cache"))
    first, second = (
        json.loads(offsphere("encode", "package:wordllama", XQUAD, "--out", tmp_path / name, "--json"))[0]
        for name in ("one", "two")
    )
    assert (first["texts_encoded"], second["texts_encoded"]) == (240, 0)
    assert second["texts_from_cache"] == 240


def test_flags_that_make_no_sense(offsphere, tmp_path):
    with pytest.raises(ConfigError, match="--side is query, document or both; found 'passage'"):
        offsphere("encode", "package:wordllama", XQUAD, "--out", tmp_path / "out", "--side", "passage")
    with pytest.raises(ConfigError, match="--side is query or document; found 'both'"):
        offsphere("info", "package:wordllama", "--side", "both")
