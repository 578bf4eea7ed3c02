from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offsphere.data.delimited import read_csv
from offsphere.errors import DataError

texts = st.text(st.characters(exclude_characters="\r\0\ufeff", exclude_categories=["Cs"]))


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_strings_stay_strings(tmp_path, write, name):
    path = write(tmp_path / name, "\ufeffquery,positive\r\nNA,nan\r\n007,\r\n\r\n1e5,\u2028null\r\n")
    assert list(read_csv(path, ",")) == [
        (2, {"query": "NA", "positive": "nan"}),
        (3, {"query": "007", "positive": ""}),
        (5, {"query": "1e5", "positive": "\u2028null"}),
    ]


@pytest.mark.parametrize("delimiter", [",", "\t"])
@given(rows=st.lists(st.tuples(texts, texts), min_size=1))
def test_rows_come_back_as_written(tmp_path_factory, delimiter, rows):
    written = io.StringIO(newline="")
    csv.writer(written, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    path.write_bytes(written.getvalue().encode())
    assert [tuple(row.values()) for _, row in read_csv(path, delimiter)] == rows


def test_a_document_longer_than_the_csv_modules_limit(tmp_path, write):
    path = write(tmp_path / "a.csv", "query,positive\nq," + "x" * 200_000 + "\n")
    assert [len(row["positive"]) for _, row in read_csv(path, ",")] == [200_000]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a,b\nc\n", r"a\.csv:3: found 1 fields, expected the 2 of the header \(query, positive\)"),
        ("a,b,c\n", ":2: found 3 fields"),
        ('"two\nlines",b\n"a"b,c\n', ":4: malformed row"),
        ('a,"never closed\n', ":2: malformed row"),
    ],
)
def test_malformed_rows_are_errors(tmp_path, write, rows, message):
    path = write(tmp_path / "a.csv", "query,positive\n" + rows)
    with pytest.raises(DataError, match=message):
        list(read_csv(path, ","))


def test_an_empty_file_has_no_rows(tmp_path, write):
    assert list(read_csv(write(tmp_path / "a.csv", ""), ",")) == []
