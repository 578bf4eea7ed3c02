from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from offsphere.data.fingerprint import digest, text_id

records = st.lists(st.lists(st.text()))


def test_known_values():
    assert digest([["a", 1]]) == hashlib.sha256(b'["a", 1]\n').hexdigest()
    assert text_id("größe") == hashlib.sha256("größe".encode()).hexdigest()[:16]


@given(records, records)
def test_equal_only_for_equal_records(one, other):
    assert (digest(one) == digest(other)) == (one == other)


def test_boundaries_count():
    assert digest([["ab", "c"]]) != digest([["a", "bc"]])
    assert digest([["a"], ["b"]]) != digest([["a", "b"]])
