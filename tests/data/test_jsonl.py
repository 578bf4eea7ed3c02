from __future__ import annotations

import pytest

from offsphere.data.jsonl import read_jsonl
from offsphere.errors import DataError


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_rows_keep_their_line_numbers_over_blank_lines(tmp_path, write, name):
    path = write(tmp_path / name, '{"a": 1}\r\n\r\n{"a": "\u2028"}')
    assert list(read_jsonl(path)) == [(1, {"a": 1}), (3, {"a": "\u2028"})]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"a": 1', r":2: malformed JSON \(.* at column \d+\); expected one object a line"),
        ('{"a": 1} {"a": 2}', ":2: malformed JSON"),
        ("[1]", ":2: found list, expected one JSON object a line"),
    ],
)
def test_malformed_lines_are_errors(tmp_path, write, line, message):
    with pytest.raises(DataError, match=message):
        list(read_jsonl(write(tmp_path / "a.jsonl", '{"a": 0}\n' + line + "\n")))
