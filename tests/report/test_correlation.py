from __future__ import annotations

import io
import re

from rich.console import Console

from offsphere.evaluation.correlation import Point
from offsphere.report.correlation import correlation_plot, print_correlations, write_correlations

POINTS = [
    Point(model, similarity, f"set{i}", effect, 0.4 + sign * 0.1 * effect, 0.4)
    for model, sets in (("one", 5), ("two<&>", 2))
    for similarity, sign in (("dot", 1), ("qnorm", -1))
    for i, effect in enumerate((-0.4, 0.1, 0.5, 0.9, 0.2)[:sets])
]


def printed(points) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_correlations(console, points)
    return console.file.getvalue()


def test_a_panel_a_model_with_the_correlation_in_words():
    svg = correlation_plot(POINTS, "nDCG@10", "figure")
    assert svg == correlation_plot(POINTS, "nDCG@10", "figure")
    description = re.search(r"<desc[^>]*>(.*?)</desc>", svg)[1]
    assert "one, dot, r = +1.00" in description and "one, qnorm, r = −1.00" in description
    assert "two&lt;&amp;&gt;, dot over 2 data sets" in description  # too few for a correlation
    assert svg.count("stroke-dasharray") >= 1 and "gain in nDCG@10 over cosine, %" in svg


def test_the_table_has_what_can_be_told():
    text = printed(POINTS)
    assert "+1.00" in text and "−1.00" in text and "two" not in text
    assert printed(POINTS[:2]) == ""


def test_nothing_is_written_without_points(tmp_path):
    write_correlations([], tmp_path, "nDCG@10")
    assert list(tmp_path.iterdir()) == []
    write_correlations(POINTS, tmp_path, "nDCG@10")
    lines = (tmp_path / "correlation.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "model,similarity,dataset,cohens_d,value,cosine,relative_gain" and len(lines) == 1 + len(POINTS)
