from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest

from offsphere.report import figures
from offsphere.report.run import read_run

SVG = "{http://www.w3.org/2000/svg}"
DRAW = (figures.learning_curves, figures.gamma_trajectories, figures.forest_plot, figures.norm_histograms)


def all_panels(record, name="run-1"):
    return [panel for draw in DRAW for panel in draw(record, name)]


def texts(panel):
    return [element.text for element in ElementTree.fromstring(panel).iter(f"{SVG}text")]


@pytest.fixture(scope="module")
def panels(record):
    return all_panels(record)


def test_panels_parse_and_carry_title_and_description(panels):
    assert len(panels) == 2 + 1 + 2 + 4
    for panel in panels:
        root = ElementTree.fromstring(panel)
        assert root.tag == f"{SVG}svg" and root.get("role") == "img"
        labels = [root.find(f"{SVG}title"), root.find(f"{SVG}desc")]
        assert root.get("aria-labelledby").split() == [label.get("id") for label in labels]
        assert all(label.text for label in labels)


def test_ids_are_unique_across_panels_and_every_reference_resolves(record, panels):
    text = "".join(panels + figures.forest_plot(record, "run-2"))
    ids = re.findall(r'(?<= )id="([^"]+)"', text)
    references = re.findall(r'(?:href="#|url\(#)([^")]+)', text)
    assert len(ids) == len(set(ids))
    assert references and set(references) <= set(ids)


def test_output_depends_on_the_record_alone(record, panels):
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert all_panels(record) == panels


def test_colours_are_variables_that_the_page_defines_in_light_and_dark(panels):
    text = "".join(panels)
    assert not re.search(r"(fill|stroke): #(?!000000)", text)
    css = Path(figures.__file__).with_name("page.css").read_text(encoding="utf-8")
    screens = css.split("@media")[:3]
    for variable in figures.THEME:
        assert all(f"--{variable}:" in screen for screen in screens), variable
    for variable, colour in figures.THEME.items():
        assert f"--{variable}: {colour}" in screens[0]


@pytest.mark.parametrize(("screen", "page"), [(0, "#ffffff"), (1, "#14171b")])
def test_series_contrast_with_the_page(screen, page):
    css = Path(figures.__file__).with_name("page.css").read_text(encoding="utf-8").split("@media")[screen]
    assert f"--page: {page}" in css
    for variable in (*figures.SERIES, *figures.OTHERS, "good", "bad", "soft", "ink", "link"):
        colour = re.search(rf"--{variable}: (#\w+)", css)[1]
        wanted = 3.0 if variable in figures.THEME and variable != "ink" else 4.5  # WCAG 2: graphics 3, text 4.5
        assert contrast(colour, page) >= wanted, (variable, contrast(colour, page))


def contrast(one, other):
    def luminance(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_forest_describes_every_difference(record):
    described = " ".join(ElementTree.fromstring(p).findtext(f"{SVG}desc") for p in figures.forest_plot(record, "f"))
    for found in record.comparison.differences:
        if found.scope != "all":
            assert f"{found.scope}, {found.similarity} {figures.signed(found.difference)}" in described


def test_forest_places_markers_by_their_difference(record):
    """Marker positions along the axis are an affine map of the differences."""
    (panel, _) = figures.forest_plot(record, "f")
    xs = [float(x) for x in re.findall(r'<use [^>]*x="([\d.]+)"[^>]*style="[^"]*(?:var\(--(?!faint|ink))', panel)]
    scopes = ["in domain", *record.comparison.in_domain]
    expected = [
        record.difference(name, s).difference for s in scopes for name in record.similarities if name != "cosine"
    ]
    xs = xs[: len(expected)]
    slope = (xs[1] - xs[0]) / (expected[1] - expected[0])
    assert slope > 0
    assert xs == pytest.approx([xs[0] + slope * (value - expected[0]) for value in expected], abs=0.05)


def test_histograms_show_the_contender_above_cosine(record):
    panels = figures.norm_histograms(record, "n")
    norms = {(n["similarity"], n["dataset"]): n["cohens_d"] for n in record.norms if n["seed"] == 0}
    for panel, dataset in zip(panels, ("nq_qed", "medquad", "hotpotqa", "musique"), strict=True):
        shown = texts(panel)
        assert dataset in shown
        for similarity in (record.contender, "cosine"):
            assert f"trained with {similarity}: Cohen's d {norms[similarity, dataset]:+.2f}".replace("-", "−") in shown


def test_undefined_effect_and_an_empty_group(make_run):
    record = read_run(make_run(similarities=("cosine",), in_domain=("tiny",), out_of_domain=()))
    record.norms[0].update(cohens_d=None, relevant=[0] * 40)
    (panel,) = figures.norm_histograms(record, "n")
    assert "trained with cosine: Cohen's d undefined" in texts(panel)


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a$\\frac$b", "日本語", 'x" id="y'])
def test_any_dataset_name_is_drawn_as_it_is(make_run, name):
    record = read_run(make_run(in_domain=(name,)))
    for panel in [*figures.forest_plot(record, "f"), *figures.norm_histograms(record, "n")]:
        ElementTree.fromstring(panel)
    assert name in texts(figures.norm_histograms(record, "n")[0])


def test_nothing_to_draw_gives_no_panel(make_run):
    record = read_run(make_run(similarities=("cosine",), log=False))
    assert figures.learning_curves(record, "l") == figures.gamma_trajectories(record, "g") == []
    assert figures.forest_plot(record, "f") == []


def test_seeds_that_stop_at_different_steps(make_run):
    record = read_run(make_run())
    for event in record.log:
        event["step"] += 1000 * event["seed"]  # no step in common: no mean to draw, and no crash
    assert len(figures.learning_curves(record, "l")) == 2


def test_other_similarities_get_their_own_colours():
    names = figures.series_names(["cosine", "gamma_q=0.2,gamma_d=0.9", "gamma_q=0.4,gamma_d=0.9"])
    assert len({names[name] for name in names}) == len(names)
    assert set(names.values()) <= set(figures.THEME)
