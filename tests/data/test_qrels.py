from __future__ import annotations

import pytest

from offsphere.data.qrels import read_qrels
from offsphere.errors import DataError

EXPECTED = {"q1": {"d1": 1, "d2": 0}, "q2": {"d1": -1}}


@pytest.mark.parametrize(
    "content",
    [
        "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td2\t0\nq2\td1\t-1\n",
        "\ufeffquery-id\tcorpus-id\tscore\r\nq1\td1\t1\r\nq1\td2\t0\r\n\r\nq2\td1\t-1\r\n",
        "q1\td1\t1\nq1\td2\t0\nq2\td1\t-1",
        "qid did rel\nq1 d1 1\nq1  d2  0\nq2 d1 -1\n",
        "q1 0 d1 1\nq1 0 d2 0\nq2 Q0 d1 -1\n",
        "q1\t0\td1\t1\nq1\t0\td2\t0\nq2\t0\td1\t-1\nq1\t0\td1\t1\n",
    ],
    ids=["beir", "bom-crlf-blank", "no-header", "spaces", "trec", "trec-tabs-repeated"],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_every_accepted_form_reads_the_same(tmp_path, write, content, suffix):
    assert read_qrels(write(tmp_path / f"test.tsv{suffix}", content)) == EXPECTED


def test_ids_between_tabs_may_hold_spaces(tmp_path, write):
    assert read_qrels(write(tmp_path / "test.tsv", "first query\ta document\t1\n")) == {
        "first query": {"a document": 1}
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("q1\td1", ":3: found 2 columns, expected 'query-id<TAB>corpus-id<TAB>score', or the TREC columns"),
        ("q1 0 d1 1 run", ":3: found 5 columns"),
        ("q1\t\t1", ":3: found an empty id"),
        ("q1\td1\t0.5", ":3: the grade '0.5' is not a whole number"),
        ("q1\td1\t1_0", ":3: the grade '1_0' is not a whole number"),
        ("q1\td1\t", ":3: the grade '' is not a whole number"),
        ("q0\td0\t2", ":3: query 'q0' and document 'd0' are judged 2 here and 1 above"),
        ("query-id\tcorpus-id\tscore", ":3: the grade 'score'"),
    ],
)
def test_malformed_lines_are_errors(tmp_path, write, line, message):
    path = write(tmp_path / "test.tsv", f"query-id\tcorpus-id\tscore\nq0\td0\t1\n{line}\n")
    with pytest.raises(DataError, match=message):
        read_qrels(path)


def test_a_malformed_first_line_is_no_header(tmp_path, write):
    with pytest.raises(DataError, match=":1: the grade 'high'"):
        read_qrels(write(tmp_path / "test.tsv", "q1\td1\thigh\n"))
