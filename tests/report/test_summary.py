from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offsphere.report.run import read_run
from offsphere.report.summary import (
    count,
    cross_rows,
    domain_columns,
    measure_rows,
    p_value,
    points,
    score_rows,
    signed,
    surprise,
)


@given(st.floats(0, 1))
def test_points_are_the_value_rounded(value):
    assert float(points(value)) == pytest.approx(100 * value, abs=0.05 + 1e-9)


@given(st.floats(-1, 1))
def test_signed_says_the_direction_and_never_minus_zero(value):
    text = signed(value)
    shown = float(text.replace("−", "-").replace("±", ""))
    assert shown == pytest.approx(100 * value, abs=0.05 + 1e-9)
    assert text[0] == ("±" if shown == 0 else "+" if value > 0 else "−")


def test_small_p_values_and_counts():
    assert (p_value(0.00012), p_value(0.04), p_value(1.0)) == ("< 0.001", "0.040", "1.000")
    assert (count(1, "seed"), count(1355, "query", "queries")) == ("1 seed", "1,355 queries")


def test_columns_start_with_the_mean_and_count_queries(record):
    columns = domain_columns(record, "in domain")
    assert [(column.name, column.n_queries) for column in columns] == [
        ("in domain", 120),
        ("nq_qed", 60),
        ("medquad", 60),
    ]


def test_best_is_the_highest_trained_similarity_of_a_column(record):
    for domain in record.domains:
        columns = domain_columns(record, domain)
        rows = score_rows(record, columns)
        assert [name for name, _ in rows] == [*record.similarities, "pretrained"]
        for index, column in enumerate(columns):
            scores = {name: record.score(name, name, column.datasets).mean for name in record.similarities}
            assert [name for name, cells in rows if cells[index].best] == [max(scores, key=scores.get)]
        assert not any(cell.difference or cell.best or cell.significant for cell in dict(rows)["pretrained"])


def test_significance_follows_the_corrected_p(make_run):
    record = read_run(make_run(lift=0.04))
    columns = domain_columns(record, "out of domain")
    marks = {
        (name, column.name): cell.significant
        for name, cells in score_rows(record, columns)
        for column, cell in zip(columns, cells, strict=True)
    }
    tested = {(d.similarity, d.scope): d.p_holm < 0.05 for d in record.comparison.differences}
    assert any(marks.values()) and not all(marks.values())  # otherwise the next line proves nothing
    assert marks == {key: tested.get(key, False) for key in marks}


def test_cross_columns_of_cosine_and_dnorm_agree_and_own_is_the_diagonal(record):
    for domain in record.domains:
        for name, cells in cross_rows(record, domain):
            by_name = dict(zip(record.scored_as, cells, strict=True))
            assert by_name["cosine"].value == by_name["dnorm"].value
            assert by_name["dot"].value == by_name["qnorm"].value
            assert [scored for scored, cell in by_name.items() if cell.own] == [name] * (name != "pretrained")


def test_other_measures_leave_out_the_deciding_one(record):
    headers, rows = measure_rows(record)
    assert headers == ["R@100 in domain", "R@100 out of domain", "RR@10 in domain", "RR@10 out of domain"]
    assert dict(rows)["dot"][1] == points(record.score("dot", "dot", ("hotpotqa", "musique"), "R@100").mean)


def _with(record, changed):
    """The record with the nDCG@10 of (trained, scored_as) pairs replaced on every dataset and seed."""
    rows = [
        replace(row, value=changed.get((row.similarity, row.scored_as), 0.3)) if row.measure == "nDCG@10" else row
        for row in record.results
    ]
    return replace(record, results=tuple(rows))


def test_surprise_names_the_largest_gain(record):
    record = _with(record, {("dot", "cosine"): 0.329, ("dot", "dnorm"): 0.329, ("qnorm", "cosine"): 0.31})
    sentence = surprise(record)
    assert sentence is not None
    assert "trained with dot ranks better as cosine (32.9) than as dot (30.0)" in sentence
    assert "3 of 3 seeds, above the model trained with cosine (30.0)" in sentence


def test_no_surprise_where_every_model_is_best_under_its_own(record):
    own = {(name, name): 0.4 for name in record.similarities}
    assert surprise(_with(record, own)) is None
    assert surprise(_with(record, {})) is None
    assert surprise(_with(record, {("dot", "cosine"): 0.3004})) is None  # would print as 30.0 against 30.0
