"""Shards: every document in exactly one, the same one everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offsphere.data.shard import WHOLE, Shard
from offsphere.errors import ConfigError


@given(st.lists(st.text(min_size=1), unique=True), st.integers(1, 50))
def test_every_document_is_in_exactly_one_shard(ids, count):
    held = [[one for one in ids if Shard(number, count).holds(one)] for number in range(1, count + 1)]
    assert sorted(one for part in held for one in part) == sorted(ids)


def test_the_whole_holds_everything():
    assert WHOLE.holds("anything") and str(WHOLE) == "1/1" and Shard.parse("1/1") == WHOLE


def test_shards_are_of_nearly_the_same_size():
    sizes = [sum(Shard(number, 8).holds(f"doc{one}") for one in range(16_000)) for number in range(1, 9)]
    assert all(abs(size - 2000) < 250 for size in sizes)  # six standard deviations


def test_the_shard_of_a_document_never_changes():
    # Indexes and collections that were written once hang on these.
    expected = {"doc1": 8, "a/b": 2, "é": 2, "💡": 5}  # by sha256sum
    found = {one: next(n for n in range(1, 11) if Shard(n, 10).holds(one)) for one in expected}
    assert found == expected


@pytest.mark.parametrize("text", ["", "1", "1/", "/2", "a/b", "1/2/3", "-1/2", " 1/2", "1/2\n", "1.0/2", "٣/4"])
def test_what_is_no_shard_says_what_one_looks_like(text):
    with pytest.raises(ConfigError, match="expected a shard I/N, such as 1/4"):
        Shard.parse(text)


@pytest.mark.parametrize("text", ["0/4", "5/4", "0/0", "1/0"])
def test_a_shard_that_there_is_not(text):
    number, count = text.split("/")
    with pytest.raises(ConfigError, match=f"no shard {number} of {count}; expected I/N with I from 1 to N"):
        Shard.parse(text)
