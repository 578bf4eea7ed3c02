from __future__ import annotations

import pytest

from offsphere.data.records import read_id, read_text
from offsphere.errors import DataError


@pytest.mark.parametrize(("value", "expected"), [("a", "a"), (7, "7"), ("007", "007"), ("e\u0301", "e\u0301")])
def test_ids_become_strings_and_are_otherwise_left_alone(value, expected):
    assert read_id({"_id": value}, "_id", "f", 1) == expected


@pytest.mark.parametrize("value", [None, True, 1.5, "", ["a"]])
def test_other_ids_are_errors(value):
    with pytest.raises(DataError, match="f:3: _id must be a string or a whole number, found"):
        read_id({"_id": value}, "_id", "f", 3)


@pytest.mark.parametrize(
    ("value", "expected"), [(None, ""), ("  a b\n", "a b"), ("NA", "NA"), ("nan", "nan"), ("x\ud800y", "x?y")]
)
def test_texts(value, expected):
    assert read_text({"text": value}, "text", "f", 1) == expected


@pytest.mark.parametrize("value", [float("nan"), 3, ["a"], {"a": "b"}])
def test_what_is_not_text_is_an_error(value):
    with pytest.raises(DataError, match=f"f:2: text must be a string or null, found {type(value).__name__}"):
        read_text({"text": value}, "text", "f", 2)


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(DataError) as caught:
        read_text({"text": ["word"] * 1000}, "text", "f", 2)
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize("read", [read_id, read_text])
def test_a_missing_field_lists_the_fields(read):
    with pytest.raises(DataError, match="f:4: text is missing; found the fields _id, contents"):
        read({"_id": 1, "contents": "a"}, "text", "f", 4)
