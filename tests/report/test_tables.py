from __future__ import annotations

import io

import pytest
from rich.console import Console

from offsphere.report.run import read_run
from offsphere.report.summary import points
from offsphere.report.tables import print_comparison


def printed(*records, width=100, styled=False):
    console = Console(
        file=io.StringIO(), width=width, force_terminal=styled, color_system="standard" if styled else None
    )
    print_comparison(console, *records)
    return console.file.getvalue()


def test_the_verdict_comes_first_and_the_numbers_follow(record):
    text = printed(record, width=200)
    assert text.index(record.comparison.verdict.sentence) < text.index("trained with")
    for name in record.similarities:
        for dataset in ("nq_qed", "medquad", "hotpotqa", "musique"):
            assert points(record.score(name, name, [dataset]).mean) in text
        assert points(record.score(name, "dot", ["hotpotqa", "musique"]).mean) in text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_the_terminal_and_no_dataset_is_lost(make_run, width):
    datasets = [f"set_{i}" for i in range(8)]
    text = printed(read_run(make_run(out_of_domain=datasets)), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert all(text.count(f"{dataset} ") >= 1 for dataset in datasets)


def test_best_is_bold(make_run):
    record = read_run(make_run(lift=0.2, pretrained=False))
    best = points(record.score("dnorm", "dnorm", ["hotpotqa"]).mean)
    assert f"\x1b[1m{best}\x1b[0m" in printed(record, styled=True)


def test_markup_in_a_name_is_text(make_run):
    text = printed(read_run(make_run(model="[red]m[/red]", in_domain=("[bold]x",))), width=120)
    assert "[red]m[/red]" in text and "[bold]x" in text


def test_several_records(make_run):
    one, two = read_run(make_run("a", model="one")), read_run(make_run("b", model="two", seeds=(0,)))
    text = printed(one, two, width=200)
    assert one.comparison.verdict.sentence in text and two.comparison.verdict.sentence in text
