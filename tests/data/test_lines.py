from __future__ import annotations

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offsphere.data.lines import read_lines
from offsphere.errors import DataError


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_only_a_line_feed_ends_a_line(tmp_path, write, name):
    path = write(tmp_path / name, b"\xef\xbb\xbfone\r\ntwo\xe2\x80\xa8still two\x0c\x1c\n\nfour")
    assert list(read_lines(path)) == [(1, "one"), (2, "two\u2028still two\x0c\x1c"), (3, ""), (4, "four")]


@given(st.lists(st.text(st.characters(exclude_characters="\r\n\ufeff", exclude_categories=["Cs"]))))
def test_lines_come_back_as_written(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    assert [line for _, line in read_lines(path)] == lines


def test_not_utf8_names_the_line(tmp_path, write):
    path = write(tmp_path / "a.txt", b"fine\ncaf\xe9 au lait\n")
    with pytest.raises(DataError, match=r"a\.txt:2: not UTF-8 .* byte 3.*iconv"):
        list(read_lines(path))


def test_cut_off_gzip_is_an_error_after_the_lines_that_it_still_has(tmp_path, write):
    content = "".join(f"{number:09d}\n" for number in range(50_000)).encode()
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(content)[:-5000])
    read = []
    with pytest.raises(DataError, match=r"a\.txt\.gz: the gzip stream cannot be read on after line \d+"):
        read.extend(read_lines(path))
    assert [number for number, _ in read_lines(write(tmp_path / "whole.txt.gz", content))][-1] == 50_000


@pytest.mark.parametrize("damage", [lambda data: b"plain text\n", lambda data: data[:20] + b"\xff" * 40 + data[60:]])
def test_damaged_gzip_is_an_error(tmp_path, damage):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(damage(gzip.compress(bytes(range(256)) * 50)))
    with pytest.raises(DataError, match="gzip"):
        list(read_lines(path))
