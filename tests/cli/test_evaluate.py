"""``evaluate`` on the command line: from names to tables, files and exit codes."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from offsphere import cli
from offsphere.cli.evaluate import _separated

ROOT = Path(__file__).parents[2]
XQUAD = str(ROOT / "datasets" / "xquad_en")


@pytest.fixture
def offsphere(monkeypatch, capsys):
    """Runs the program in this process: its exit code, and what it printed on either stream."""

    def run(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["offsphere", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        return end.value.code or 0, " ".join(printed.out.split()), " ".join(printed.err.split())

    return run


def test_lists() -> None:
    asked = ["evaluate", "--model", "a", "b", "--similarity", "own,gamma_q=0.2,gamma_d=0.9,dot", "--data", "x", "y"]
    assert cli.spread_lists(asked) == [
        "evaluate", "--model", "a", "--model", "b", "--similarity", "own", "--similarity", "gamma_q=0.2,gamma_d=0.9",
        "--similarity", "dot", "--data", "x", "--data", "y",
    ]  # fmt: skip
    assert cli.spread_lists(["index", "--model", "a", "b"]) == ["index", "--model", "a", "b"]


def test_measures_with_settings_of_their_own() -> None:
    names = ("nDCG@10", "AP(rel=2,judged_only=True)@5", "AllSupports@10")
    assert _separated(",".join(names)) == names


def test_the_names_are_listed(offsphere) -> None:
    code, printed, _ = offsphere("evaluate", "--list-benchmarks")
    assert code == 0
    for word in ("beir/scifact", "bright/biology", "msmarco/dev", "multihop/musique", "188,002", "stsb", "NanoBEIR"):
        assert word in printed


@pytest.fixture
def folder(tmp_path, sentences):
    """Writes a collection of 60 documents and 12 queries, each relevant to three documents."""

    def write(name: str, seed: int) -> Path:
        texts, random, folder = sentences(72, seed), np.random.default_rng(seed), tmp_path / name
        (folder / "qrels").mkdir(parents=True)
        for file, kind, part in (("corpus", "d", texts[:60]), ("queries", "q", texts[60:])):
            rows = [json.dumps({"_id": f"{kind}{i}", "text": text}) for i, text in enumerate(part)]
            (folder / f"{file}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
        judged = [f"q{i}\td{j}\t1" for i in range(12) for j in random.choice(60, 3, replace=False)]
        (folder / "qrels" / "test.tsv").write_text("\n".join(judged) + "\n", encoding="utf-8")
        return folder

    return write


def test_from_names_to_tests_and_figures(offsphere, folder, static, save, tmp_path, monkeypatch) -> None:
    """What a user gets: a benchmark by name and folders, several similarities, one pass, tests and run files."""
    monkeypatch.setenv("OFFSPHERE_BENCHMARKS", str(tmp_path / "home"))
    static.similarity_fn_name = "dot"
    model, out = save(static), tmp_path / "out"
    data = [folder("one", 0), folder("two", 1), folder("three", 2)]
    folder("home/multihop/musique", 3)
    asked = ["evaluate", "--model", model, "--data", *data, "multihop/musique", "--similarity", "own,cosine,qnorm",
             "--measures", "nDCG@10,AllSupports@5", "--out", out]  # fmt: skip
    code, printed, told = offsphere(*asked)
    assert code == 0, told
    for word in ("AllSupports@5", "multihop-musique", "all (mean of 4)", "baseline dot", "95 % interval", "wins"):
        assert word in printed
    assert f"{model} declares dot; ranked as cosine, qnorm because --similarity asks for it" in told
    assert "note: multihop-musique: not the published size: 12 queries, published 2,417" in told
    assert {file.name for file in out.iterdir()} == {
        "compared", "correlation.csv", "correlation.svg", "environment.json", "parts", "per_query.parquet",
        "results.csv", "runs",
    }  # fmt: skip
    assert len(list((out / "runs").iterdir())) == 4 * 3
    (compared,) = (out / "compared").iterdir()
    assert (compared / "runs.tex").read_text(encoding="utf-8").count(r"\begin{table}") == 2
    with (out / "correlation.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["dataset"], row["similarity"]) for row in rows] == [
        (name, similarity) for name in ("one", "two", "three", "multihop-musique") for similarity in ("dot", "qnorm")
    ]
    for row in rows:
        gain = float(row["value"]) / float(row["cosine"]) - 1
        assert float(row["relative_gain"]) == pytest.approx(gain)
    svg = (out / "correlation.svg").read_text(encoding="utf-8")
    assert svg.startswith("<svg") and "dot, r = " in svg and "over 4 data sets" in svg
    code, printed, told = offsphere(*asked, "--json")
    assert code == 0 and told.count("finished before, kept") == 4
    assert len(json.loads(printed)) == 4 * 3 * 2


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--data", "beir/scifct"], 1, "did you mean beir/scifact"),
        (["--data", XQUAD, "--measures", "AllSuports@10"], 2, "did you mean AllSupports?"),
        (["--data", "nope"], 1, "a collection is a folder with corpus.jsonl"),
    ],
)
def test_exit_codes_and_what_to_do(offsphere, arguments, code, says) -> None:
    found, _, told = offsphere("evaluate", "--model", "package:wordllama", *arguments)
    assert found == code and says in told
