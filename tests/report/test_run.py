from __future__ import annotations

import csv
import json
from statistics import fmean, stdev

import pytest

from offsphere.errors import DataError, RunError
from offsphere.report.run import opener_of, read_run
from offsphere.similarity import FIXED

PARTS = ("config.yaml", "environment.json", "results.csv", "comparison.json", "norms.json", "log.jsonl")


def test_everything_written_is_read_back(make_run):
    folder = make_run()
    record = read_run(folder)
    assert record.comparison.to_dict().keys() == json.loads((folder / "comparison.json").read_text()).keys()
    assert json.loads(json.dumps(record.comparison.to_dict())) == json.loads((folder / "comparison.json").read_text())
    assert record.similarities == ("cosine", "dot", "qnorm", "dnorm", "learnable")
    assert record.scored_as == record.similarities
    assert record.seeds == (0, 1, 2)
    assert record.domains == {"in domain": ("nq_qed", "medquad"), "out of domain": ("hotpotqa", "musique")}
    assert record.has_pretrained
    assert len(record.norms) == 5 * 3 * 4
    assert len(record.events("validation")) == len(record.events("train")) == 5 * 3 * 11
    assert record.command.startswith("offsphere compare")


def test_scores_equal_the_rows_of_results_csv(make_run):
    folder = make_run()
    record = read_run(folder)
    with (folder / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for trained in record.similarities:
        for scored_as in record.scored_as:
            by_seed = [
                fmean(
                    float(row["value"])
                    for row in rows
                    if row["measure"] == "nDCG@10"
                    and (row["similarity"], row["scored_as"], row["seed"]) == (trained, scored_as, seed)
                    and row["dataset"] in ("hotpotqa", "musique")
                )
                for seed in ("0", "1", "2")
            ]
            score = record.score(trained, scored_as, ["hotpotqa", "musique"])
            assert score is not None
            assert score.mean == pytest.approx(fmean(by_seed), abs=1e-15)
            assert score.deviation == pytest.approx(stdev(by_seed), abs=1e-12)
            assert list(score.by_seed.values()) == pytest.approx(by_seed, abs=1e-15)


def test_a_score_needs_all_datasets(make_run):
    record = read_run(make_run())
    assert record.score("dot", "dot", ["nq_qed"]) is not None
    assert record.score("dot", "dot", ["nq_qed", "unknown"]) is None
    assert record.score("dot", "dot", ["nq_qed"], "AP") is None


def test_own_scores_agree_with_the_comparison(make_run):
    record = read_run(make_run())
    for name, means in record.comparison.means.items():
        for domain, datasets in record.domains.items():
            score = record.score(name, name, datasets)
            assert score is not None
            assert score.mean == pytest.approx(means[domain][0], abs=1e-12)
            assert score.deviation == pytest.approx(means[domain][1], abs=1e-12)


def test_contender_is_the_winner_or_the_closest(make_run):
    winner = read_run(make_run("lifted", lift=0.2))
    assert winner.comparison.verdict.beats_cosine
    assert winner.contender == "dnorm"
    close = read_run(make_run("null"))
    assert not close.comparison.verdict.beats_cosine
    best = max(
        (row for row in close.comparison.differences if row.scope == "out of domain"), key=lambda r: r.difference
    )
    assert close.contender == best.similarity
    assert read_run(make_run("alone", similarities=("cosine",))).contender is None


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_part_is_named_with_the_command_that_makes_it(make_run, part):
    folder = make_run()
    (folder / part).unlink()
    with pytest.raises(RunError, match=rf"no {part}.*offsphere compare") as error:
        read_run(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    ("part", "text", "where"),
    [
        ("log.jsonl", '{"event": "train"}\nnot json\n', "log.jsonl:2: "),
        ("norms.json", "[\n{]", "norms.json:2: "),
        ("comparison.json", "{}", "comparison.json: "),
        ("config.yaml", "- a list\n", "config.yaml: "),
        ("config.yaml", "{unclosed", "config.yaml: "),
    ],
)
def test_a_malformed_part_is_named_with_its_line(make_run, part, text, where):
    folder = make_run()
    (folder / part).write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as error:
        read_run(folder)
    assert f"{folder}/{where}" in str(error.value)


def test_a_line_separator_inside_a_string_does_not_split_a_line(make_run):
    folder = make_run()
    (folder / "log.jsonl").write_text('{"event": "train", "note": "a\u2028b"}\n', encoding="utf-8")
    assert read_run(folder).log == ({"event": "train", "note": "a\u2028b"},)


@pytest.mark.parametrize("similarity", ["learnable", "gamma_q=0.2,gamma_d=0.9"])
def test_a_model_that_carries_exponents_is_opened_by_offsphere(similarity):
    assert opener_of(similarity) == ("offsphere", "open_encoder")
    assert {opener_of(name) for name in FIXED} == {("sentence_transformers", "SentenceTransformer")}
