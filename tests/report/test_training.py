"""The page of one training, from a real one."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from offsphere import cli
from offsphere.config import TrainConfig
from offsphere.errors import DataError, RunError
from offsphere.report.training import TrainingRecord, is_training, read_training, render_training, write_training_report
from offsphere.training.train import train

DATASETS = Path(__file__).parents[2] / "datasets"


def trained(out: Path, **changed: object) -> Path:
    small = {
        "model": "package:wordllama", "train": [str(DATASETS / "nq_qed")], "steps": 4, "max_pairs": 200,
        "batch_size": 32, "max_queries": 20, "max_documents": 60, "validation_queries": 20,
        "validation_documents": 60, "evaluations": 2, "device": "cpu",
    }  # fmt: skip
    train(TrainConfig(**small | changed, out=out))
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds, a grid, learned exponents, and an evaluation."""
    return trained(
        tmp_path_factory.mktemp("trained") / "learnable",
        similarity="learnable", seeds=[3, 4], alpha_grid=[10.0, 20.0], eval=[str(DATASETS / "xquad_en")],
    )  # fmt: skip


@pytest.fixture
def record(folder: Path) -> TrainingRecord:
    return read_training(folder)


def text_of(page: str) -> str:
    body = re.sub(r"<(svg|style)\b.*?</\1>", "", page, flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


def test_it_says_what_was_trained_and_how_it_went(record: TrainingRecord) -> None:
    said = text_of(render_training(record))
    best = record.best
    start = next(event for event in record.events("validation") if (event["step"], event["seed"]) == (0, best.seed))
    expected = f"{100 * best.validation:.1f}, from {100 * start['nDCG@10']:.1f} before training."
    assert f"nDCG@10 on the dev splits: {expected}" in said
    assert "4 steps of 32 pairs, learning rate 0.01" in said
    assert f"3, 4; the model is of seed {best.seed}" in said
    gamma_q, gamma_d = best.similarity.gammas
    assert f"learnable: gamma_q {gamma_q:.3g}, gamma_d {gamma_d:.3g}" in said
    assert "from offsphere import open_encoder" in said


def test_the_model_is_compared_with_the_untrained_encoder(record: TrainingRecord) -> None:
    page = render_training(record)
    for similarity, scored_as, seed, encoder in (
        ("learnable", "learnable", record.best.seed, "trained"),
        ("pretrained", "cosine", None, "untrained"),
    ):
        (row,) = [
            one
            for one in record.results
            if (one.similarity, one.scored_as, one.seed, one.measure) == (similarity, scored_as, seed, "nDCG@10")
        ]
        cells = f"<td>20</td><td>{encoder}</td><td>{scored_as}</td><td>{100 * row.value:.1f}</td>"
        assert f'<th scope="row">xquad_en</th>{cells}' in page


def test_the_grid_says_what_was_used(record: TrainingRecord) -> None:
    page = render_training(record)
    assert [one.alpha for one in record.tried] == [10.0, 20.0]
    assert record.used is not None
    found = re.findall(r"<td>(\d+)</td><td( class=\"best\")?>[\d.]+</td></tr>", page)
    assert [(alpha, bool(best)) for alpha, best in found] == [
        (f"{alpha:g}", alpha == record.used.alpha) for alpha in (10.0, 20.0)
    ]


def test_every_curve_is_drawn_and_named(record: TrainingRecord) -> None:
    page = render_training(record)
    titles = re.findall(r"<title id=[^>]*>(.*?)</title>", page)
    assert titles == [
        "Validation nDCG@10, scored as trained",
        "Validation nDCG@10, scored as cosine",
        "Training loss",
        "Learned exponents",
        "Mean length of embeddings",
        "Temperature of a query",
    ]
    described = re.findall(r"<desc id=[^>]*>(.*?)</desc>", page)
    last = [event["query_norm_mean"] for event in record.events("validation") if event["step"] == 4]
    assert len(last) == 2
    assert f"query {sum(last) / 2:.2f}" in described[4]


def test_it_is_one_file_and_the_same_each_time(record: TrainingRecord, tmp_path: Path) -> None:
    page = write_training_report(record, tmp_path / "new" / "page.html")
    first = page.read_bytes()
    assert write_training_report(record, page).read_bytes() == first
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]
    assert not re.search(rb"(src|href)=\"(?!#)|<script|@import|url\((?!#)", first)


def test_without_evaluation_there_is_less_to_say(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rows = ({"query": f"question {number}", "positive": f"answer {number} <b>"} for number in range(40))
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    out = trained(tmp_path / "<run>", train=[str(pairs)], similarity="cosine", max_pairs=None, batch_size=8)
    page = render_training(read_training(out))
    said = text_of(page)
    assert "Evaluation" not in said and "Tried" not in said and "<run>" not in page
    titles = re.findall(r"<title id=[^>]*>(.*?)</title>", page)
    assert "Training loss" in titles and not {"Learned exponents", "Temperature of a query"} & set(titles)
    assert "from sentence_transformers import SentenceTransformer" in said


def test_the_command_writes_it_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert is_training(folder)
    for arguments, code in (([folder, "--out", page], 0), ([folder, folder], 2)):
        monkeypatch.setattr("sys.argv", ["offsphere", "report", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert (ended.value.code or 0) == code
    printed = capsys.readouterr()
    assert f"report   {page}" in printed.out and page.exists()
    assert "is of offsphere train; give it alone" in printed.err


def test_an_unfinished_training_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    shutil.rmtree(copy / "model")
    with pytest.raises(RunError, match=r"has no model/modules\.json, which a finished run has"):
        read_training(copy)


def test_a_damaged_log_is_named(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    log = copy / "log.jsonl"
    log.write_text(log.read_text("utf-8") + "{half", encoding="utf-8")
    with pytest.raises(DataError, match=r"log\.jsonl"):
        read_training(copy)
