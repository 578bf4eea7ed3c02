"""The command line: arguments, exit codes, machine output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from offsphere import cli
from offsphere.cli.app import app
from offsphere.config import CompareConfig, TrainConfig

ROOT = Path(__file__).parents[1]
NEEDED = ["--model", "nothing", "--train", "nowhere", "--out", "out"]
XQUAD = str(ROOT / "datasets" / "xquad_en")


def offsphere(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "offsphere", *arguments], capture_output=True, text=True)


def test_lists_can_be_given_in_every_usual_way() -> None:
    separate = ["compare", "--train", "a", "--train", "b", "--seeds", "0", "--seeds", "1", "--out", "x"]
    assert cli.spread_lists(["compare", "--train", "a", "b", "--seeds", "0,1", "--out", "x"]) == separate
    assert cli.spread_lists(["compare", "--train=a", "b", "--seeds=0", "1", "--out", "x"]) == separate
    assert cli.spread_lists(separate) == separate


def test_a_positional_argument_is_no_value_of_a_list() -> None:
    assert cli.spread_lists(["report", "one", "two", "--out", "x"]) == ["report", "one", "two", "--out", "x"]


def test_exponents_are_one_value_though_they_hold_a_comma() -> None:
    assert cli.spread_lists(["--similarities", "cosine", "gamma_q=0.2,gamma_d=0.9"]) == [
        "--similarities", "cosine", "--similarities", "gamma_q=0.2,gamma_d=0.9",
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["compare", "evaluate", "report", "train"])
def test_help_shows_an_example(command: str) -> None:
    shown = offsphere(command, "--help")
    assert shown.returncode == 0
    assert f"Example: offsphere {command}" in " ".join(shown.stdout.split())


@pytest.mark.parametrize("kind", [CompareConfig, TrainConfig])
def test_every_setting_has_a_description_and_a_flag(kind: type[CompareConfig | TrainConfig]) -> None:
    undescribed = [name for name, field in kind.model_fields.items() if not field.description]
    assert undescribed == []
    command = {CompareConfig: "compare", TrainConfig: "train"}[kind]
    flags = {flag for one in get_command(app).commands[command].params for flag in one.opts}
    assert {f"--{name.replace('_', '-')}" for name in kind.model_fields} - flags == {"--processes"}
    assert {"--config", "--json", "--seed"} <= flags


def test_flags_reach_the_settings_with_their_types(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[TrainConfig] = []
    monkeypatch.setattr(
        "offsphere.training.train.train", lambda settings, progress: seen.append(settings) or sys.exit(0)
    )
    given = {
        "--model": "m", "--train": "a b", "--out": str(tmp_path), "--seed": "3", "--lr-grid": "1e-6,2e-6",
        "--scale": "auto", "--alpha-grid": "20,50",
        "--dropout": "0", "--max-grad-norm": "0", "--tokens-per-batch": "512", "--similarity": "dnorm",
    }  # fmt: skip
    words = [word for flag, value in given.items() for word in (flag, *value.split(" "))]
    monkeypatch.setattr("sys.argv", ["offsphere", "train", *words, "--stop-when-converged"])
    monkeypatch.setattr("offsphere.cli.train.quiet_libraries", lambda: None)
    with pytest.raises(SystemExit):
        cli.main()
    expected = TrainConfig(
        model="m", train=["a", "b"], out=tmp_path, seeds=[3], lr_grid=[1e-6, 2e-6], alpha_grid=[20.0, 50.0],
        dropout=0.0, max_grad_norm=0.0, tokens_per_batch=512, similarity="dnorm", stop_when_converged=True,
    )  # fmt: skip
    assert seen == [expected]


@pytest.mark.parametrize(
    ("command", "goes_on"), [("train", True), ("compare", True), ("mine", False), ("serve", False), ("evaluate", False)]
)
def test_ctrl_c_promises_to_go_on_only_where_that_is_true(
    command: str, goes_on: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object, **named: object) -> None:
        sys.exit(130)

    monkeypatch.setattr("offsphere.cli.app", interrupted)
    monkeypatch.setattr("sys.argv", ["offsphere", command])
    with pytest.raises(SystemExit, match="130"):
        cli.main()
    assert capsys.readouterr().err == "stopped" + "; the same command goes on from here" * goes_on + "\n"


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from offsphere import cli; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["compare", "--model", "package:wordllama"], 2, "train is missing; give --train"),
        (["compare", "--modle", "x"], 2, "No such option"),
        (["evaluate", "--model", "package:nothing", "--data", XQUAD], 1, "pip install nothing"),
        (["evaluate", "--model", "package:wordllama", "--data", XQUAD, "--measures", "nDCG@1O"], 2, "nDCG"),
        (["evaluate", "--model", "package:wordllama", "--data", "nowhere"], 1, "nowhere"),
        (["evaluate", "--model", "package:wordllama", "--data", XQUAD, "--similarity", "euclid"], 2, "expected one of"),
        (["report", "nowhere"], 1, "nowhere"),
        (["train", "--measure", "nDGC@10", *NEEDED], 2, "did you mean nDCG@10?"),
        (["train", "--similarity", "cosin", *NEEDED], 2, "expected one of cosine, dot, qnorm, dnorm, learnable"),
    ],
)
def test_exit_codes_and_what_to_do(arguments: list[str], code: int, says: str) -> None:
    done = offsphere(*arguments)
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_json_is_alone_on_standard_output() -> None:
    done = offsphere("evaluate", "--model", "package:wordllama", "--data", XQUAD, "--similarity", "own,dot", "--json")
    rows = json.loads(done.stdout)
    assert {(row["scored_as"], row["measure"]) for row in rows} == {
        (name, measure) for name in ("cosine", "dot") for measure in ("nDCG@10", "R@100", "RR@10")
    }
    assert all(row["n_queries"] == 1190 and 0 <= row["value"] <= 1 for row in rows)


def test_evaluate_writes_results_and_run_files(tmp_path: Path) -> None:
    from offsphere.data import load_collection
    from offsphere.evaluation import per_query, read_results, read_trec

    done = offsphere("evaluate", "--model", "package:wordllama", "--data", XQUAD, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    row = next(row for row in read_results(tmp_path / "out" / "results.csv") if row.measure == "nDCG@10")
    run = read_trec(tmp_path / "out" / "runs" / "cosine-xquad_en.trec")
    values = per_query(run, load_collection(XQUAD).qrels, ("nDCG@10",))["nDCG@10"]
    assert row.value == pytest.approx(sum(values.values()) / len(values), abs=1e-12)
