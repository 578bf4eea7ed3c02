"""The same command again: after the end, with other settings, and after every kind of interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from offsphere import cli
from offsphere.config import CompareConfig
from offsphere.errors import RunError
from offsphere.training.compare import compare
from offsphere.training.run_folder import RunFolder

Settings = Callable[..., CompareConfig]
Content = Callable[[Path], dict[str, tuple[int, bytes]]]


class TestRepeating:
    def test_a_finished_run_trains_nothing_again(
        self, finished_run: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, content: Content
    ) -> None:
        before = content(finished_run)
        stored = json.loads(before["comparison.json"][1])
        monkeypatch.setattr("offsphere.training.run.train_variant", pytest.fail)
        monkeypatch.setattr("offsphere.training.run.embed", pytest.fail)
        assert json.loads(json.dumps(compare(settings(finished_run)).to_dict())) == stored
        after = content(finished_run)
        assert {name: data for name, (_, data) in after.items()} == {name: data for name, (_, data) in before.items()}
        variants = {name for name in before if name.startswith("variants/")}
        assert {name: after[name] for name in variants} == {name: before[name] for name in variants}

    @pytest.mark.parametrize("changed", [{"steps": 7}, {"seeds": [0, 1, 2]}, {"max_pairs": 20}, {"scale": 20.0}])
    def test_other_settings_are_refused(
        self, finished_run: Path, settings: Settings, changed: dict[str, object], content: Content
    ) -> None:
        before = content(finished_run)
        with pytest.raises(RunError, match="holds a run with other settings") as error:
            compare(settings(finished_run, **changed))
        assert all(f"{name}: it has" in str(error.value) for name in changed)
        assert content(finished_run) == before

    def test_on_the_command_line_that_is_exit_code_1(
        self,
        finished_run: Path,
        settings: Settings,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        content: Content,
    ) -> None:
        config = tmp_path / "settings.yaml"
        config.write_text(yaml.safe_dump(settings(finished_run, steps=7).model_dump(mode="json")), encoding="utf-8")
        monkeypatch.setattr("sys.argv", ["offsphere", "compare", "--config", str(config)])
        monkeypatch.setattr("offsphere.cli.compare.quiet_libraries", lambda: None)
        before = content(finished_run)
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code == 1
        assert "steps: it has 6, now 7" in capsys.readouterr().err
        assert content(finished_run) == before

    def test_other_data_is_refused(
        self, settings: Settings, tmp_path: Path, write_collection: Callable[..., Path], content: Content
    ) -> None:
        data = write_collection(tmp_path / "data", {"train": 24, "dev": 12, "test": 12}, seed=9)
        small = {"train": [str(data)], "eval": [str(data)], "seeds": [0], "similarities": ["cosine"], "steps": 1}
        compare(settings(tmp_path / "run", **small))
        before = content(tmp_path / "run")
        with (data / "qrels" / "test.tsv").open("a", encoding="utf-8") as file:
            file.write("q24\td0\t1\n")
        with pytest.raises(RunError, match="evaluation data: it has"):
            compare(settings(tmp_path / "run", **small))
        assert content(tmp_path / "run") == before

    def test_a_folder_of_something_else_is_refused(self, settings: Settings, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        with pytest.raises(RunError, match="neither empty nor a run folder"):
            compare(settings(tmp_path))
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


class TestInterrupted:
    @pytest.fixture
    def start(self, settings: Settings, tmp_path: Path) -> Callable[[], subprocess.Popen[str]]:
        """Starts the comparison of ``finished_run`` on the command line, into ``tmp_path / run``."""
        config = tmp_path / "settings.yaml"
        config.write_text(yaml.safe_dump(settings(tmp_path / "run").model_dump(mode="json")), encoding="utf-8")
        command = [sys.executable, "-m", "offsphere", "compare", "--config", str(config)]

        def start() -> subprocess.Popen[str]:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

        return start

    def test_a_run_that_was_killed_and_stopped_ends_as_one_that_was_not(
        self,
        start: Callable[[], subprocess.Popen[str]],
        settings: Settings,
        finished_run: Path,
        tmp_path: Path,
        content: Content,
    ) -> None:
        out = tmp_path / "run"
        run = RunFolder(out)
        with start() as first:
            wait_for_training(first, run, finished=2)
            first.kill()
        assert first.returncode == -signal.SIGKILL
        done = [one.name for one in run.finished()]
        assert len(done) < 11
        before = {name: content(run.variants / name) for name in done}

        with start() as second:
            wait_for_training(second, run, finished=len(done) + 2)
            second.send_signal(signal.SIGINT)
            _, said = second.communicate(timeout=300)
        assert second.returncode == 130, said
        assert "Traceback" not in said
        assert f"({len(done) - 1} of 10 variants are done already)" in said
        for unfinished in run.variants.glob(".*"):
            assert list(unfinished.glob("checkpoints/step-*")), "nothing is left that cannot be gone on with"
        assert not (out / "results.csv").exists()
        assert len(done) < len(run.finished()) < 11

        compare(settings(out))
        for name in done:
            after = content(run.variants / name)
            assert {file: after[file] for file in after} == {file: before[name][file] for file in after}
            assert {file.split("/")[0] for file in before[name].keys() - after.keys()} <= {"model"}
        for name in ("results.csv", "per_query.parquet", "comparison.json", "norms.json", "model/model.safetensors"):
            assert (out / name).read_bytes() == (finished_run / name).read_bytes(), name
        assert content(out).keys() == content(finished_run).keys()

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    def test_an_error_in_the_evaluation_leaves_no_variant(
        self, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
    ) -> None:
        config = settings(tmp_path / "run", seeds=[0], similarities=["cosine", "dot"], steps=1)

        def fail(*args: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr("offsphere.training.run.model_card", fail)
            with pytest.raises(error):
                compare(config)
        run = RunFolder(config.out)
        assert [path.name for path in run.variants.iterdir()] == ["pretrained"]
        compare(config)
        assert {one.name for one in run.finished()} == {"pretrained", "cosine-seed0", "dot-seed0"}


def wait_for_training(process: subprocess.Popen[str], run: RunFolder, finished: int) -> None:
    """Until that many are finished and the next one trains."""
    deadline = time.monotonic() + 300
    while len(run.finished()) < finished or not list(run.variants.glob(".*/log.jsonl")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_ctrl_c_says_how_to_go_on(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    config = tmp_path / "settings.yaml"
    config.write_text(yaml.safe_dump(settings(tmp_path / "run").model_dump(mode="json")), encoding="utf-8")
    monkeypatch.setattr("offsphere.training.compare.compare", interrupt)
    monkeypatch.setattr("offsphere.cli.compare.quiet_libraries", lambda: None)
    monkeypatch.setattr("sys.argv", ["offsphere", "compare", "--config", str(config)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 130
    assert "the same command goes on from here" in capsys.readouterr().err
