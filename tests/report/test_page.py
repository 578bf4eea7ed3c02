from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from statistics import fmean
from xml.etree import ElementTree

import pytest

from offsphere.errors import RunError
from offsphere.evaluation.results import read_results
from offsphere.report.page import render_report, write_report
from offsphere.report.run import read_run
from offsphere.report.summary import surprise

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Tables by caption, text, tags with attributes; fails on a tag that closes another one."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.tables, self.words = [], [], {}, []
        self.caption = self.row = None
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in VOID:
            return
        self.open.append(tag)
        if tag == "table":
            self.rows = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "caption":
            self.caption = ""

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "table":
            self.tables[self.caption] = self.rows

    def handle_data(self, data):
        self.words.append(data)
        if "caption" in self.open:
            self.caption += data
        elif "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data if self.open[-1] != "small" else f"|{data}"

    @property
    def text(self):
        return " ".join("".join(self.words).split())

    def table(self, start):
        (found,) = (rows for caption, rows in self.tables.items() if caption.startswith(start))
        return found


@pytest.fixture(scope="module")
def html(record):
    return render_report([record])


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def averages(record, trained, scored_as, datasets, measure="nDCG@10"):
    """Straight from the file: the mean over all rows of these datasets, which have the same seeds."""
    with (record.folder / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = (trained, scored_as, measure)
    found = [r for r in rows if (r["similarity"], r["scored_as"], r["measure"]) == wanted and r["dataset"] in datasets]
    return f"{100 * fmean(float(row['value']) for row in found):.1f}"


def test_the_verdict_stands_before_any_number(record, page):
    text = page.text
    assert record.comparison.verdict.sentence in text
    assert text.index(record.comparison.verdict.sentence) < text.index("What was compared") < text.index("Trained with")
    assert "Keep cosine" in text  # the default run has no effect in it


def test_a_winner_is_announced(make_run):
    text = Page(render_report([read_run(make_run(lift=0.2))])).text
    assert "Train this encoder with dnorm" in text and "Keep cosine" not in text


@pytest.mark.parametrize("domain", ["in domain", "out of domain"])
def test_scores_equal_results_csv(record, page, domain):
    rows = page.table(f"nDCG@10 × 100, {domain}")
    datasets = record.domains[domain]
    assert [cell.split("|")[0] for cell in rows[0]] == ["Trained with", "mean", *datasets]
    assert [row[0] for row in rows[1:]] == [*record.similarities, "pretrained"]
    for name, *cells in rows[1:]:
        scored_as = "cosine" if name == "pretrained" else name
        for cell, columns in zip(cells, [datasets, *((dataset,) for dataset in datasets)], strict=True):
            assert re.match(r"[\d.]+", cell)[0] == averages(record, name, scored_as, columns)
            assert ("|" in cell) == (name not in ("cosine", "pretrained"))


@pytest.mark.parametrize("domain", ["in domain", "out of domain"])
def test_cross_table_equals_results_csv(record, page, domain):
    header, *rows = page.table(f"Trained with (row), scored as (column): nDCG@10 × 100, {domain}.")
    assert header[1:] == list(record.scored_as)
    for name, *cells in rows:
        assert cells == [averages(record, name, scored_as, record.domains[domain]) for scored_as in record.scored_as]


def test_other_measures_equal_results_csv(record, page):
    header, *rows = page.table("Other measures")
    for name, *cells in rows:
        for title, cell in zip(header[1:], cells, strict=True):
            measure, domain = title.split(" ", 1)
            assert cell == averages(record, name, name, record.domains[domain], measure)


def test_differences_carry_interval_and_corrected_p(record, page):
    rows = page.table("Difference to cosine in points, mean") + page.table("Difference to cosine in points on each")
    shown = [row for row in rows if len(row) == 5 and row[0] != "Trained with"]
    tested = [d for d in record.comparison.differences if d.scope != "all"]
    assert len(shown) == len(tested) == 4 * 6
    for found in tested:
        low, high = (f"{100 * end:+.1f}".replace("-", "−").replace("+0.0", "±0.0") for end in (found.low, found.high))
        p = "< 0.001" if found.p_holm < 0.001 else f"{found.p_holm:.3f}"
        assert any(r[0] == found.similarity and r[2] == f"{low} to {high}" and r[3] == p for r in shown)


def test_a_surprise_is_named_where_there_is_one(record, page):
    assert surprise(record) is not None
    assert f"Surprise: {surprise(record)}" in page.text
    cosine_only = tuple(row for row in record.results if row.scored_as == row.similarity)
    assert "Surprise:" not in Page(render_report([replace(record, results=cosine_only)])).text


def test_nothing_is_loaded_from_elsewhere(page, html):
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "img", "object", "base")
        for name in ("src", "srcset", "href", "xlink:href", "action", "data"):
            assert attributes.get(name, "#").startswith("#"), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert "@import" not in html
    assert set(re.findall(r"url\((.)", html)) <= {"#"}


def test_ids_are_unique_and_links_resolve(make_run, record):
    second = read_run(make_run("second", model="other", seeds=(0,)))
    page = Page(render_report([record, second]))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = [value[1:] for _, attributes in page.tags for key, value in attributes.items() if key.endswith("href")]
    assert {"run-1", "run-2"} <= set(targets) <= set(ids)


def test_svg_is_xml_and_readable_by_all(page, html):
    for svg in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL):
        ElementTree.fromstring(svg)
    assert html.startswith("<!DOCTYPE html>")
    names = [tag for tag, _ in page.tags]
    assert names.count("table") == names.count("caption") == len(page.tables)
    assert dict(page.tags)["html"] == {"lang": "en"}
    assert any(a.get("name") == "viewport" and "width=device-width" in a["content"] for _, a in page.tags)
    for scheme in ("prefers-color-scheme: dark", "@media print"):
        assert scheme in html


def test_every_text_of_a_run_is_escaped(make_run):
    evil = "<script>alert('x')</script>"
    folder = make_run(model=f"m{evil}", in_domain=(evil,), out_of_domain=(f'b"{evil}',))
    (folder / "environment.json").write_text(json.dumps({"host": evil}), encoding="utf-8")
    record = read_run(folder)
    verdict = replace(record.comparison.verdict, sentence=evil)
    html = render_report([replace(record, comparison=replace(record.comparison, verdict=verdict))])
    assert "<script" not in html.lower()
    page = Page(html)
    assert page.text.count(evil) >= 8


@pytest.mark.parametrize(
    "settings",
    [
        {"seeds": (0,)},
        {"in_domain": ("only",), "out_of_domain": ()},
        {"in_domain": (), "out_of_domain": ("only",)},
        {"similarities": ("cosine", "dnorm")},
        {"similarities": ("cosine",)},
        {"similarities": ("cosine", "gamma_q=0.2,gamma_d=0.9"), "seeds": (0,)},
        {"pretrained": False, "log": False},
    ],
    ids=str,
)
def test_smaller_runs_make_a_whole_page(make_run, settings):
    record = read_run(make_run(**settings))
    page = Page(render_report([record]))
    assert record.comparison.verdict.sentence in page.text
    assert ("±" in str(page.table(f"nDCG@10 × 100, {next(iter(record.domains))}"))) == (len(record.seeds) > 1)
    assert ("Only cosine was trained" in page.text) == (record.similarities == ("cosine",))
    assert ("No exponent was learned" in page.text) == ("learnable" not in record.similarities or not record.log)
    assert ("No validation was logged" in page.text) == (not record.log)
    assert ("pretrained" in page.text) == record.has_pretrained


@pytest.mark.parametrize(
    ("winner", "metric"),
    [("dnorm", "Metric: cosine"), ("dot", "Metric: inner product (dot"), ("learnable", "to the power gamma_d")],
)
def test_the_database_metric_follows_the_saved_model(record, winner, metric):
    verdict = replace(record.comparison.verdict, similarity=winner, beats_cosine=True)
    text = Page(render_report([replace(record, comparison=replace(record.comparison, verdict=verdict))])).text
    assert metric in text
    assert str(record.folder / "model") in text
    assert ("open_encoder" in text) == (winner == "learnable")


def test_a_collapse_in_the_log_is_named(record):
    event = {"event": "collapse", "similarity": "dot", "seed": 1, "sentence": "magnitude collapse at step 40"}
    collapsed = replace(record, log=(*record.log, event))
    assert "dot, seed 1: magnitude collapse at step 40." in Page(render_report([collapsed])).text
    assert "Collapse:" not in Page(render_report([record])).text


def test_write_report_is_the_same_each_time_and_leaves_no_other_file(make_run, tmp_path):
    folder = make_run()
    before = sorted(path.name for path in folder.iterdir())
    out = write_report([folder], folder / "report.html")
    first = out.read_bytes()
    assert write_report([folder], folder / "report.html").read_bytes() == first
    assert sorted(path.name for path in folder.iterdir()) == sorted([*before, "report.html"])


def test_several_runs_get_one_page_and_one_results_csv(make_run, tmp_path):
    folders = [make_run("a", model="first"), make_run("b", model="second", seeds=(0,))]
    out = write_report(folders, tmp_path / "new" / "report.html")
    text = Page(out.read_text(encoding="utf-8")).text
    assert "first" in text and "second" in text
    rows = [row for folder in folders for row in read_results(folder / "results.csv")]
    assert read_results(tmp_path / "new" / "results.csv") == rows


def test_the_results_of_a_run_are_never_replaced_by_those_of_several(make_run):
    folders = [make_run("a"), make_run("b", model="second")]
    before = (folders[0] / "results.csv").read_bytes()
    with pytest.raises(RunError, match="another folder"):
        write_report(folders, folders[0] / "report.html")
    assert (folders[0] / "results.csv").read_bytes() == before


def test_an_unfinished_run_is_refused(make_run, tmp_path):
    folder = make_run()
    (folder / "norms.json").unlink()
    with pytest.raises(RunError, match=r"norms\.json"):
        write_report([folder], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_heavy_packages_wait_until_they_are_needed():
    """The command line imports these modules before it knows what was asked."""
    code = (
        "import sys, offsphere.report.page, offsphere.report.tables\n"
        "print(*{'matplotlib', 'jinja2', 'rich', 'torch', 'scipy', 'pyarrow'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
