"""``offsphere train``: one similarity, with or without evaluation, seeds, and a grid of learning rates."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from offsphere import cli, open_encoder
from offsphere.config import TrainConfig
from offsphere.encoders import declared_similarity
from offsphere.errors import ConfigError, RunError
from offsphere.evaluation.results import read_results
from offsphere.training.train import TrainedModel


def test_without_evaluation_there_are_a_model_and_a_log(run: Callable[..., TrainedModel], tmp_path: Path) -> None:
    trained = run(similarity="dnorm")
    out = tmp_path / "run"
    assert {path.name for path in out.iterdir()} == {
        "config.yaml", "environment.json", "log.jsonl", "model", "variants",
    }  # fmt: skip
    assert trained.results == []
    assert trained.model == out / "model"
    assert SentenceTransformer(str(trained.model)).similarity_fn_name == "cosine"  # as dnorm ranks
    assert "trained with dnorm" in (trained.model / "README.md").read_text("utf-8")
    events = [json.loads(line)["event"] for line in (out / "log.jsonl").read_text("utf-8").splitlines()]
    assert events.count("train") == 6
    assert events.count("validation") == 4


def test_with_evaluation_the_untrained_encoder_is_measured_too(
    run: Callable[..., TrainedModel], tmp_path: Path, home: Path, away: Path, listener: Any
) -> None:
    trained = run(similarity="learnable", eval=[str(home), str(away)])
    rows = read_results(tmp_path / "run" / "results.csv")
    assert trained.results == rows
    assert {(row.similarity, row.dataset) for row in rows} == {
        (name, data) for name in ("pretrained", "learnable") for data in ("home", "away")
    }
    own = {row.value for row in rows if row.similarity == row.scored_as == "learnable" and row.measure == "nDCG@10"}
    assert len(own) == 2
    assert declared_similarity(open_encoder(trained.model)) == trained.finished.similarity
    assert (tmp_path / "run" / "runs" / "learnable-seed0-away.trec").exists()
    described = trained.to_dict()
    assert json.loads(json.dumps(described)) == described
    assert described["training"]["gamma_d"] == trained.finished.similarity.gammas[1]
    assert "training       48 pairs" in listener.text
    assert "6 steps of 12, rate 0.1, scale auto" in listener.text


def test_it_trains_as_compare_does(
    run: Callable[..., TrainedModel], home: Path, away: Path, finished_run: Path
) -> None:
    """``finished_run`` has the same settings: the same weights come out."""
    trained = run(similarity="qnorm", eval=[str(home), str(away)], seeds=[0])
    own = [row for row in trained.results if row.similarity == "qnorm" and row.scored_as != "learnable"]
    compared = read_results(finished_run / "results.csv")
    assert own == [
        row for row in compared if (row.similarity, row.seed) == ("qnorm", 0) and row.scored_as != "learnable"
    ]


def test_the_seed_with_the_best_validation_is_kept(
    run: Callable[..., TrainedModel], tmp_path: Path, listener: Any
) -> None:
    trained = run(similarity="dot", seeds=[3, 4, 5])
    folders = list((tmp_path / "run" / "variants").iterdir())
    assert {folder.name for folder in folders} == {"dot-seed3", "dot-seed4", "dot-seed5"}
    values = [json.loads((folder / "variant.json").read_text())["validation"] for folder in folders]
    assert trained.finished.validation == max(values)
    listener.started.clear()
    assert run(similarity="dot", seeds=[3, 4, 5]) == trained
    assert listener.started == [], "the same command again repeats nothing"
    with pytest.raises(RunError, match="similarity: it has 'dot', now 'cosine'"):
        run(seeds=[3, 4, 5])


@pytest.mark.parametrize("as_json", [True, False])
def test_the_command_prints_results_and_where_the_model_is(
    as_json: bool,
    static_encoder: Path,
    home: Path,
    away: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    words = (
        f"--model {static_encoder} --train {home} --eval {away} --similarity qnorm --steps 1 --device cpu --out {out}"
    )
    monkeypatch.setattr("sys.argv", ["offsphere", "train", *words.split(), *(["--json"] if as_json else [])])
    monkeypatch.setattr("offsphere.cli.train.quiet_libraries", lambda: None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    if as_json:
        found = json.loads(shown)
        assert found["model"] == str(out / "model")
        assert found["training"]["trained_as"] == "qnorm"
        assert {row["similarity"] for row in found["results"]} == {"pretrained", "qnorm"}
    else:
        words = " ".join(shown.split())
        assert "away 24 qnorm" in words
        assert "away 24 qnorm, untrained" in words
        assert f"SentenceTransformer('{out / 'model'}')" in words


class TestSettings:
    def test_a_given_scale_is_kept_and_a_saturating_one_is_warned_of(
        self, run: Callable[..., TrainedModel], tmp_path: Path, listener: Any
    ) -> None:
        """T-C2: a number of the user's is never changed; why raw products cannot start with it is said, once."""

        def said(name: str, **changed: Any) -> tuple[TrainedModel, list[str]]:
            listener.said.clear()
            trained = run(out=tmp_path / name, eval=[], **changed)
            return trained, [line for line in listener.said if line.startswith("warning")]

        automatic, nothing = said("auto", similarity="dot")
        assert nothing == []
        assert said("cosine", similarity="cosine", scale=20.0)[1] == []
        trained, (warning,) = said("dot", similarity="dot", scale=20.0, seeds=[0, 1])
        assert warning.startswith("warning: dot: scale 20 is ") and "the softmax is saturated" in warning
        assert f"times the {automatic.finished.scale:.3g} of --scale auto" in warning
        assert 20.0 / automatic.finished.scale > 10, "canary"
        assert trained.finished.scale == 20.0
        for seed in (0, 1):
            log = (tmp_path / "dot" / "variants" / f"dot-seed{seed}" / "log.jsonl").read_text("utf-8").splitlines()
            scales = {line["scale"] for line in map(json.loads, log) if line["event"] in ("train", "validation")}
            assert scales == {20.0}

    def test_random_weights_are_measured_seed_by_seed_and_warned_of_once(
        self, run: Callable[..., TrainedModel], listener: Any
    ) -> None:
        run(init="random", similarity="dot", scale=1e6, seeds=[0, 1], steps=1)
        (warning,) = [line for line in listener.said if line.startswith("warning: dot: scale 1e+06 is ")]
        assert "saturated" in warning

    def test_the_memory_plan_is_said(self, run: Callable[..., TrainedModel], listener: Any) -> None:
        """T-D4: what the encoder and what the logits take, and which way of computing was taken for it."""
        run()
        (line,) = [line for line in listener.said if line.startswith("memory ")]
        assert re.fullmatch(
            r"memory         encoder .* of activations for \d+ tokens a batch, logits .* in all, .* free: one graph, "
            r"plain loss",
            line,
        )

    def test_a_measure_is_checked_before_anything_is_loaded(self, tmp_path: Path) -> None:
        """T-F3: with a suggestion; the encoder named here does not exist."""
        with pytest.raises(ValueError, match=r"unknown measure 'nDGC@10' \(did you mean nDCG@10\?\)"):
            TrainConfig(model="nothing", train=["nowhere"], out=tmp_path, measure="nDGC@10")

    def test_another_measure_picks_the_weights(self, run: Callable[..., TrainedModel], tmp_path: Path) -> None:
        trained = run(measure="RR@10")
        lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text("utf-8").splitlines()]
        values = {line["step"]: line["RR@10"] for line in lines if line["event"] == "validation" and line["step"]}
        assert trained.finished.validation == max(values.values()) == values[trained.finished.best_step]
        assert all("nDCG@10" in line for line in lines if line["event"] == "validation")

    def test_the_prompts_in_force_are_said(
        self,
        run: Callable[..., TrainedModel],
        tmp_path: Path,
        write_collection: Callable[..., Path],
        listener: Any,
    ) -> None:
        """Row 92: the run's own, and those of a collection that is read with others; else not a word."""
        run(steps=1)
        assert not [line for line in listener.said if line.startswith("prompts")]
        own = write_collection(tmp_path / "own", {"test": 12}, seed=9, settings="prompts: {document: 'answer : '}\n")
        run(steps=1, query_prompt="ask : ", eval=[str(own)], out=tmp_path / "prompted")
        assert "prompts        query prompt 'ask : ' (2 tokens), no document prompt" in listener.said
        assert [line for line in listener.said if line.startswith("note: own")] == [
            "note: own (test): its own document prompt 'answer : ' (2 tokens); training applies the model's, set with "
            "--query-prompt and --document-prompt"
        ]

    def test_accumulating_is_said_to_add_no_negatives(
        self, run: Callable[..., TrainedModel], tmp_path: Path, listener: Any
    ) -> None:
        run(accumulate=2, steps=4)
        assert "4 steps of 12 x 2 batches" in listener.text
        assert "accumulated in a step, which adds no negatives: each query still meets 11" in listener.text
        lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text("utf-8").splitlines()]
        assert {line["negatives_per_query"] for line in lines if line["event"] == "train"} == {11.0}

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"stop_when_converged": True}, "--evaluations, such as 20"),
            ({"processes": 2}, r"those of 2 processes, and 1 would train; start with: torchrun --nproc-per-node 2"),
            ({"max_pairs": 1}, "at least 2 training pairs, found 1"),
        ],
    )
    def test_what_cannot_be_done_is_said_before_training(
        self, run: Callable[..., TrainedModel], changed: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            run(**changed)

    def test_gradients_are_cut_as_asked(self, run: Callable[..., TrainedModel], tmp_path: Path) -> None:
        """AdamW undoes a common scale of all gradients, but for its epsilon."""
        tables = []
        for clip in (0.0, 1e9, 1e-6):
            trained = run(max_grad_norm=clip, steps=2, out=tmp_path / f"clip-{clip}")
            tables.append(load_file(trained.model / "model.safetensors")["embedding.weight"])
        assert torch.equal(tables[0], tables[1])
        assert not torch.allclose(tables[0], tables[2], atol=1e-2)

    @pytest.mark.parametrize(
        ("schedule", "rates"),
        [
            ("constant", [0.05, 0.1, 0.1, 0.1]),
            ("linear", [0.05, 0.1, 0.1 * 2 / 3, 0.1 / 3]),
            ("cosine", [0.05, 0.1, 0.075, 0.025]),
        ],
    )
    def test_schedules_after_a_warm_up(
        self, run: Callable[..., TrainedModel], tmp_path: Path, schedule: str, rates: list[float]
    ) -> None:
        """The rate that a step leaves for the next one; half of the peak after the first of two steps of warm-up."""
        run(schedule=schedule, steps=5, warmup_ratio=0.4)
        lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text("utf-8").splitlines()]
        found = [line["learning_rate"] for line in lines if line["event"] == "train"]
        assert found[:1] == [0.0]
        assert found[1:] == pytest.approx(rates)


def test_exclusions_are_said_and_recorded(
    run: Callable[..., TrainedModel],
    tmp_path: Path,
    static_encoder: Path,
    write_collection: Callable[..., Path],
    listener: Any,
) -> None:
    """Rows 78 and 85, of what validates and of what is evaluated; a folder from before it was recorded goes on."""
    rules = "exclude_self: true\nexcluded: {q24: [d1], q36: [d1, d2]}\nprompts: {query: 'ask : '}\n"
    data = str(write_collection(tmp_path / "rules", {"train": 24, "dev": 12, "test": 12}, seed=9, settings=rules))
    run(train=[data], eval=[data], steps=1)
    excluded = {"dev": 1, "test": 2}
    assert [line for line in listener.said if "never ranked" in line] == [
        f"note: rules ({split}): never ranked: a document with the id of the query; {number} documents that it "
        "excludes for single queries"
        for split, number in excluded.items()
    ]
    file = tmp_path / "run" / "environment.json"
    written = json.loads(file.read_text("utf-8"))
    assert written["datasets"].keys() == {"dev rules", "evaluation rules"} < written["data"].keys()
    for name, split in (("dev rules", "dev"), ("evaluation rules", "test")):
        described = written["datasets"][name]
        assert (described["exclude_self"], described["excluded"]) == (True, excluded[split])
        assert (described["split"], described["queries"]) == (split, 12)
        assert described["models"] == {
            str(static_encoder): {
                "prompts": {"query": "ask : ", "document": ""},
                "prompt_tokens": {"query": 2, "document": 0},
            }
        }
    del written["datasets"]
    file.write_text(json.dumps(written), encoding="utf-8")
    listener.started.clear()
    run(train=[data], eval=[data], steps=1)
    assert listener.started == []
    assert json.loads(file.read_text("utf-8")) == written
