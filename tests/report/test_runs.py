from __future__ import annotations

import csv
import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from offsphere.evaluation.compare_runs import RunComparison, RunScore, compare_values
from offsphere.report.runs import latex, print_run_comparison, tables, win_loss_plot, write_run_comparison

SVG = "{http://www.w3.org/2000/svg}"
FILES = {"scores.csv", "differences.csv", "per_query.csv", "runs.tex", "runs.html"}
SYSTEMS = ("bm25", "a_b & [red]c[/red]", "<b>")


def compared(tied: int = 0) -> RunComparison:
    """Three systems with awkward names on two datasets; the second one is 0.3 better than the baseline."""
    random = np.random.default_rng(0)
    values = {
        dataset: {
            system: dict(zip(map(str, range(size)), np.clip(random.random(size) + lift, 0, 1).tolist(), strict=True))
            for system, lift in zip(SYSTEMS, (0.0, 0.3, 0.0), strict=True)
        }
        for dataset, size in (("one", 50), ("my set", 20))
    }
    scores = [
        RunScore(
            system, dataset, np.mean([*by_query.values()]).item(), 0.5, len(by_query), len(by_query), tied, 0, 0, 0
        )
        for dataset, of_systems in values.items()
        for system, by_query in of_systems.items()
    ]
    scopes = {"all": ("one", "my set"), "one": ("one",), "my set": ("my set",)}
    return compare_values(
        values, SYSTEMS, scopes, measure="nDCG@10", split="test", scores=scores, notes=["one: a note <i>"]
    )


@pytest.fixture(scope="module")
def comparison() -> RunComparison:
    return compared()


def printed(comparison: RunComparison, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_run_comparison(console, comparison)
    return console.file.getvalue()


def test_what_is_printed(comparison):
    text = printed(comparison)
    for system in SYSTEMS:
        assert system in text
        for scope in ("all", "one", "my set"):
            assert f"{100 * comparison.means[scope][system]:.1f}" in text
    for found in comparison.differences:
        assert f"{found.wins}/{found.ties}/{found.losses}" in text
    assert "note: one: a note <i>" in text
    assert "equal scores" not in text and "as trec_eval" not in text


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_loses_nothing(comparison, width):
    text = printed(comparison, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    if width == 80:
        for found in comparison.differences:
            assert f"{found.wins}/{found.ties}/{found.losses}" in text


def test_ties_are_shown_where_there_are_any():
    text = printed(compared(tied=3))
    assert "3 of 50" in text and "3 of 20" in text and "as trec_eval" in text


def test_scores_mark_the_best_and_what_is_significant(comparison):
    scores = tables(comparison)[0]
    assert scores.headers == ("", "queries", *SYSTEMS)
    assert scores.best == {(0, 3), (1, 3), (2, 3)}
    better = next(found for found in comparison.differences if (found.system, found.scope) == (SYSTEMS[1], "one"))
    assert better.p_holm < 0.05
    assert scores.rows[1][1:3] == ("50", f"{100 * comparison.means['one']['bm25']:.1f}")
    assert re.fullmatch(r"[0-9.]+ \(\+[0-9.]+\*\)", scores.rows[1][3])
    assert "*" not in scores.rows[1][4]
    assert scores.rows[0][0] == "all (mean of 2)"


def test_files(comparison, tmp_path):
    write_run_comparison(comparison, tmp_path / "new" / "folder")
    names = {file.name for file in (tmp_path / "new" / "folder").iterdir()}
    assert names == FILES | {"per-query-one.svg", "per-query-my set.svg"}


def test_csv_files_hold_every_number_exactly(comparison, tmp_path):
    write_run_comparison(comparison, tmp_path)
    texts = {name: (tmp_path / name).read_text(encoding="utf-8") for name in FILES if name.endswith(".csv")}
    rows = {name: [*csv.DictReader(text.splitlines())] for name, text in texts.items()}
    assert len(rows["scores.csv"]) == 6 and len(rows["differences.csv"]) == 6 and len(rows["per_query.csv"]) == 210
    for row, found in zip(rows["differences.csv"], comparison.differences, strict=True):
        assert {name: str(value) for name, value in vars(found).items()} == row
    for row, score in zip(rows["scores.csv"], comparison.scores, strict=True):
        assert float(row["value"]) == score.value and row["system"] == score.system
    for row in rows["per_query.csv"]:
        assert float(row["nDCG@10"]) == comparison.values[row["dataset"]][row["system"]][row["query_id"]]


def test_latex_is_balanced_and_escaped(comparison):
    text = latex(tables(comparison))
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == 2
    assert r"a\_b \& [red]c[/red]" in text and "$<$b$>$" in text
    assert not re.search(r"(?<!\\)[&_%#]", re.sub(r" & |^% .*$", "", text, flags=re.M))
    for body in re.findall(r"\\toprule\n(.*?)\\bottomrule", text, re.S):
        lines = [line for line in body.splitlines() if line != r"\midrule"]
        assert all(line.endswith(r" \\") for line in lines)
        assert len({line.count(" & ") for line in lines}) == 1
    assert not {"−", "±", "×", "–"} & {*text}
    assert r"\textbf{" in text


def test_the_page_is_whole_and_escaped(comparison, tmp_path):
    write_run_comparison(comparison, tmp_path)
    page = (tmp_path / "runs.html").read_text(encoding="utf-8")
    assert "<b>" not in page and "&lt;b&gt;" in page and "a note &lt;i&gt;" in page
    assert page.count("<svg") == 2 and page.count("<table") == 2
    assert not re.search(r'(src|href)="http', page)
    ids = re.findall(r'(?<= )id="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_the_figure_shows_every_query(comparison):
    svg = win_loss_plot(comparison, "my set", "per-query-1")
    root = ElementTree.fromstring(svg)
    assert "my set" in root.find(f"{SVG}title").text
    description = root.find(f"{SVG}desc").text
    for found in comparison.differences:
        if found.scope == "my set":
            assert f"{found.wins} wins, {found.ties} ties, {found.losses} losses" in description
    assert "var(--dnorm" in svg and "var(--dot" in svg
    assert win_loss_plot(comparison, "my set", "per-query-1") == svg
