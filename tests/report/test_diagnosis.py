from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from offsphere.diagnosis.diagnose import Diagnosis, diagnose
from offsphere.diagnosis.effect_size import Effect
from offsphere.diagnosis.fisher import too_few
from offsphere.diagnosis.tune import GAMMAS, Tuning, choose_gamma
from offsphere.report.diagnosis import (
    gamma_curve,
    norm_histogram,
    print_diagnosis,
    print_tuning,
    symmetry_probe,
    write_diagnosis,
    write_tuning,
)


@pytest.fixture
def diagnosis(static, save, tmp_path, sentences) -> Diagnosis:
    texts = sentences(90, 0)
    rows = [{"query": query, "positive": positive} for query, positive in zip(texts[:40], texts[40:80], strict=True)]
    rows[0] |= {"query": "[markup]"}
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return diagnose(str(save(static)), str(tmp_path / "pairs.jsonl"), task="sts", device="cpu")


@pytest.fixture
def tuning() -> Tuning:
    values = np.random.default_rng(0).uniform(0.3, 0.5, (200, 1)) - 0.2 * np.abs(np.array(GAMMAS) - 0.3)
    return choose_gamma(values, list(GAMMAS), 1.0, 500)


def printed(show, subject, width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    show(console, subject)
    return console.export_text()


def test_the_recommendation_comes_first_then_the_numbers(diagnosis):
    text = printed(print_diagnosis, diagnosis)
    assert text.index("cosine, confidence high") < text.index("log10 kappa")
    for part in (
        "sts",
        "warning: sts is symmetric and qnorm is not",
        "0 irrelevant documents",
        "rank",
        "The rule rests on",
    ):
        assert part in text
    for name, one in diagnosis.fisher.spectra.items():
        assert name in text
        assert f"{one.log10_kappa:.2f}" in text


def test_a_diagnosis_without_numbers_prints(diagnosis):
    nothing = Effect(None, None, None, None, 3, 3, 9, "not enough data: 3 queries, at least 20 needed")
    effect = replace(diagnosis.effect, within_candidates=nothing)
    text = printed(print_diagnosis, replace(diagnosis, fisher=too_few(3, 16, "3 pairs"), effect=effect), width=120)
    assert "not enough data: 3 queries, at least 20 needed" in text
    assert "log10 kappa" not in text


@pytest.mark.parametrize(
    ("value", "shown"), [(0.416, "+0.42"), (-0.1, "-0.10"), (None, "–, because one of them does not vary")]
)
def test_the_correlation_with_tokens_read_is_printed(diagnosis, value, shown):
    """Row 97."""
    effect = replace(diagnosis.effect, text_length_correlation=value)
    lines = printed(print_diagnosis, replace(diagnosis, effect=effect), width=120).splitlines()
    assert f"correlation of a document embedding's length with log(tokens read): {shown}" in lines


def test_a_tuning_prints_its_sentence_and_the_gain_on_held_out_queries(tuning):
    text = printed(print_tuning, tuning)
    assert tuning.sentence.split(":")[0] in text
    assert "gain on held-out queries: +14.0" in text
    assert "top of the curve" in text


def parsed(svg: str) -> ET.Element:
    root = ET.fromstring(svg)
    assert root.tag.endswith("svg")
    return root


def test_figures_are_titled_svg_and_the_same_every_time(diagnosis, tuning):
    probe = diagnosis.symmetry.probe["qnorm"]
    for draw in (
        lambda: gamma_curve(tuning, "a"),
        lambda: symmetry_probe("qnorm", probe, "b"),
        lambda: norm_histogram(diagnosis.norms, "c"),
    ):
        svg = draw()
        texts = [element.text for element in parsed(svg) if element.tag.endswith(("title", "desc"))]
        assert all(texts) and len(texts) == 2
        assert draw() == svg


def test_the_curve_marks_the_choice(tuning):
    other = replace(tuning, gamma_d=0.0)
    assert gamma_curve(tuning, "a") != gamma_curve(other, "a")
    assert tuning.sentence in gamma_curve(tuning, "a")


def test_a_probe_of_nothing_still_draws(diagnosis):
    empty = replace(diagnosis.symmetry.probe["dot"], asymmetry=None, correlation=None, forward=[], backward=[])
    assert "undefined" in symmetry_probe("dot", empty, "a")
    parsed(symmetry_probe("dot", empty, "a"))


def test_everything_is_written(diagnosis, tuning, tmp_path):
    write_diagnosis(diagnosis, tmp_path / "out")
    write_tuning(tuning, tmp_path / "out")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    probes = {f"symmetry-{name}.svg" for name in ("cosine", "dot", "qnorm", "dnorm")}
    assert names == {"diagnosis.json", "norms.svg", "tuning.json", "tuning.svg", *probes}
    assert json.loads((tmp_path / "out/diagnosis.json").read_text()) == json.loads(json.dumps(diagnosis.to_dict()))
    assert json.loads((tmp_path / "out/tuning.json").read_text())["gamma_d"] == tuning.gamma_d
