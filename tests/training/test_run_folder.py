from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from offsphere.errors import RunError
from offsphere.evaluation.results import (
    QueryValue,
    Result,
    read_query_values,
    read_results,
    write_query_values,
    write_results,
)
from offsphere.similarity import Similarity
from offsphere.training.run_folder import Finished, RunFolder, write_variant

SETTINGS = {"model": "m", "steps": 5, "learning_rate": 2e-5, "seeds": [0, 1], "scale": "auto", "split": None}
DATA = {"pairs a": "123", "evaluation b": "456"}

Fill = Callable[[RunFolder, str], Finished]
Content = Callable[[Path], dict[str, tuple[int, bytes]]]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "deep" / "run")
    folder.begin(SETTINGS, DATA)
    return folder


@pytest.fixture
def fill() -> Fill:
    """Makes a finished variant with one row of everything."""

    def fill(run: RunFolder, name: str) -> Finished:
        trained_as, _, seed = name.partition("-seed")
        similarity = Similarity.parse(trained_as) if seed else Similarity.parse("cosine")
        finished = Finished(name, similarity, trained_as, int(seed) if seed else None, 20.0, 4, 0.5)
        with run.unfinished(name) as folder:
            row = ("m", "a", trained_as, *similarity.gammas, "cosine", finished.seed, "b", "test", "nDCG@10", 0.5, 1)
            write_results(folder / "results.csv", [Result(*row)])
            value = QueryValue("m", trained_as, finished.seed, "b", "nDCG@10", "q", 0.5)
            write_query_values(folder / "per_query.parquet", [value])
            (folder / "norms.json").write_text(json.dumps([{"similarity": trained_as, "seed": finished.seed}]))
            if finished.seed is not None:
                (folder / "log.jsonl").write_text(json.dumps({"similarity": trained_as}) + "\n")
                (folder / "model").mkdir()
                (folder / "model" / "README.md").write_text(name)
                (folder / "runs").mkdir()
                (folder / "runs" / f"{name}-b.trec").write_text(f"q Q0 d 1 0.5 {name}\n")
            write_variant(folder, finished)
        return finished

    return fill


class TestBegin:
    def test_settings_and_surroundings_are_written(self, run: RunFolder) -> None:
        assert yaml.safe_load((run.path / "config.yaml").read_text(encoding="utf-8")) == SETTINGS
        environment = json.loads((run.path / "environment.json").read_text(encoding="utf-8"))
        assert environment["data"] == DATA
        assert environment["command"][0] == "offsphere"
        assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
        assert {"offsphere", "torch", "sentence-transformers"} <= environment["versions"].keys()

    def test_the_same_request_goes_on_and_changes_nothing(self, run: RunFolder, fill: Fill, content: Content) -> None:
        fill(run, "cosine-seed0")
        before = content(run.path)
        RunFolder(run.path).begin(SETTINGS, DATA)
        assert content(run.path) == before

    def test_how_it_is_computed_may_change(self, run: RunFolder, content: Content) -> None:
        before = content(run.path)
        RunFolder(run.path).begin(SETTINGS | {"checkpoint_every": 7, "tokens_per_batch": 512}, DATA)
        assert content(run.path) == before

    @pytest.mark.parametrize(
        ("settings", "data", "says"),
        [
            (SETTINGS | {"steps": 6}, DATA, "steps: it has 5, now 6"),
            (SETTINGS | {"learning_rate": 2.1e-5}, DATA, "learning_rate: it has 2e-05, now 2.1e-05"),
            (SETTINGS | {"extra": True}, DATA, "extra: it has None, now True"),
            ({name: SETTINGS[name] for name in SETTINGS if name != "model"}, DATA, "model: it has 'm', now None"),
            (SETTINGS, DATA | {"evaluation b": "457"}, "evaluation b: it has '456', now '457'"),
            (SETTINGS, DATA | {"dev c": "789"}, "dev c: it has None, now '789'"),
        ],
    )
    def test_another_request_is_refused_and_changes_nothing(
        self, run: RunFolder, fill: Fill, settings: dict[str, object], data: dict[str, str], says: str, content: Content
    ) -> None:
        fill(run, "cosine-seed0")
        (run.variants / ".dot-seed0").mkdir()
        (run.variants / ".dot-seed0" / "log.jsonl").write_text("half")
        before = content(run.path)
        with pytest.raises(RunError, match="Give another --out") as error:
            RunFolder(run.path).begin(settings, data)
        assert says in str(error.value)
        assert len(str(error.value).splitlines()) == 3, "only what differs is listed"
        assert content(run.path) == before

    def test_a_folder_of_something_else_is_left_alone(self, tmp_path: Path, content: Content) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        before = content(tmp_path)
        with pytest.raises(RunError, match="neither empty nor a run folder"):
            RunFolder(tmp_path).begin(SETTINGS, DATA)
        assert content(tmp_path) == before

    def test_an_empty_folder_is_fine(self, tmp_path: Path) -> None:
        RunFolder(tmp_path).begin(SETTINGS, DATA)
        assert (tmp_path / "config.yaml").is_file()


class TestUnfinished:
    def test_a_variant_appears_when_it_is_whole(self, run: RunFolder, fill: Fill) -> None:
        with run.unfinished("cosine-seed0") as folder:
            write_variant(folder, Finished("cosine-seed0", Similarity.parse("cosine"), "cosine", 0))
            assert run.find("cosine-seed0") is None
            assert run.finished() == [], "not even when variant.json is written and the model is not"
        assert [one.name for one in run.finished()] == ["cosine-seed0"]

    def test_what_is_read_is_what_was_written(self, run: RunFolder, fill: Fill) -> None:
        learned = Finished("learnable-seed7", Similarity(0.25, 0.75, learned=True), "learnable", 7, 3.5, 12, None)
        with run.unfinished(learned.name) as folder:
            write_variant(folder, learned)
        assert run.find(learned.name) == learned
        others = [fill(run, name) for name in ("cosine-seed0", "pretrained")]
        assert run.finished() == [others[0], learned, others[1]]

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
    def test_after_an_error_nothing_is_left(self, run: RunFolder, error: type[BaseException]) -> None:
        with pytest.raises(error), run.unfinished("cosine-seed0") as folder:
            (folder / "variant.json").write_text("{}")
            raise error
        assert list(run.variants.iterdir()) == []

    def test_after_a_kill_it_is_no_variant_and_the_next_start_sweeps_it_away(self, run: RunFolder) -> None:
        code = (
            "import os, signal, sys; from pathlib import Path\n"
            "from offsphere.similarity import Similarity\n"
            "from offsphere.training.run_folder import Finished, RunFolder, write_variant\n"
            "with RunFolder(Path(sys.argv[1])).unfinished('cosine-seed0') as folder:\n"
            "    write_variant(folder, Finished('cosine-seed0', Similarity.parse('cosine'), 'cosine', 0))\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        killed = subprocess.run([sys.executable, "-c", code, str(run.path)])
        assert killed.returncode == -signal.SIGKILL
        assert list(run.variants.glob(".*/variant.json")), "it was killed inside"
        assert run.finished() == []
        assert run.find("cosine-seed0") is None
        RunFolder(run.path).begin(SETTINGS, DATA)
        assert list(run.variants.iterdir()) == []

    def test_a_checkpoint_and_its_log_stay_until_it_is_whole(self, run: RunFolder) -> None:
        with pytest.raises(RuntimeError), run.unfinished("cosine-seed0") as folder:
            (folder / "checkpoints" / "step-3").mkdir(parents=True)
            (folder / "model").mkdir()
            for name in ("log.jsonl", "results.csv"):
                (folder / name).write_text("half")
            raise RuntimeError
        RunFolder(run.path).begin(SETTINGS, DATA)
        with run.unfinished("cosine-seed0") as folder:
            assert {path.name for path in folder.iterdir()} == {"checkpoints", "log.jsonl"}
            write_variant(folder, Finished("cosine-seed0", Similarity.parse("cosine"), "cosine", 0))
        assert {path.name for path in (run.variants / "cosine-seed0").iterdir()} == {"log.jsonl", "variant.json"}

    def test_what_a_kill_left_does_not_get_into_the_next_attempt(self, run: RunFolder) -> None:
        (run.variants / ".cosine-seed0").mkdir()
        (run.variants / ".cosine-seed0" / "old").write_text("half")
        with run.unfinished("cosine-seed0") as folder:
            assert list(folder.iterdir()) == []


class TestGather:
    def test_parts_stand_in_the_order_asked(self, run: RunFolder, fill: Fill) -> None:
        for name in ("cosine-seed0", "dot-seed0", "pretrained"):
            fill(run, name)
        results, values = run.gather(["pretrained", "dot-seed0", "cosine-seed0"])
        assert [row.similarity for row in results] == ["pretrained", "dot", "cosine"]
        assert read_results(run.path / "results.csv") == results
        assert read_query_values(run.path / "per_query.parquet") == values
        assert [row.similarity for row in values] == ["pretrained", "dot", "cosine"]
        norms = json.loads((run.path / "norms.json").read_text(encoding="utf-8"))
        assert [record["similarity"] for record in norms] == ["pretrained", "dot", "cosine"]
        log = (run.path / "log.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["similarity"] for line in log] == ["dot", "cosine"]
        assert {path.name for path in (run.path / "runs").iterdir()} == {"cosine-seed0-b.trec", "dot-seed0-b.trec"}

    def test_a_second_time_gives_the_same(self, run: RunFolder, fill: Fill, content: Content) -> None:
        fill(run, "cosine-seed0")
        run.gather(["cosine-seed0"])
        first = {name: data for name, (_, data) in content(run.path).items()}
        run.gather(["cosine-seed0"])
        assert {name: data for name, (_, data) in content(run.path).items()} == first

    def test_a_variant_that_is_missing_is_an_error(self, run: RunFolder, fill: Fill) -> None:
        fill(run, "cosine-seed0")
        with pytest.raises(RunError, match=r"dot-seed0.*missing"):
            run.gather(["cosine-seed0", "dot-seed0"])


class TestModels:
    def test_the_recommended_model_is_a_copy(self, run: RunFolder, fill: Fill) -> None:
        for name in ("cosine-seed0", "dot-seed0"):
            fill(run, name)
        for name in ("cosine-seed0", "dot-seed0", "dot-seed0"):
            run.recommend(name)
            assert (run.path / "model" / "README.md").read_text() == name
            assert (run.variants / name / "model" / "README.md").read_text() == name
        assert not [path for path in run.path.iterdir() if path.name.startswith(".")]

    def test_removing_a_model_keeps_the_results(self, run: RunFolder, fill: Fill) -> None:
        finished = fill(run, "cosine-seed0")
        for _ in range(2):
            run.remove_model("cosine-seed0")
            assert not (run.variants / "cosine-seed0" / "model").exists()
        assert run.finished() == [finished]
        assert run.gather(["cosine-seed0"])[0]
