from __future__ import annotations

import pytest

from offsphere.data import load_pairs
from offsphere.data.pair_files import pair_file
from offsphere.errors import ConfigError

COLUMNS = ("query", "positive", "negative_1")
ROWS = [
    ["what is\u2028rust", 'iron "oxide"', "a\ttab, ünïcode 日本"],
    ["tide", "moon", "back\\slash"],
    ["bee", "honey", "sun"],
]


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.parquet"])
def test_load_pairs_reads_back_what_was_written_in_blocks(tmp_path, name):
    with pair_file(tmp_path / name, COLUMNS) as write:
        write(ROWS[:2])
        write([])
        write(iter(ROWS[2:]))
    pairs = load_pairs(tmp_path / name)
    assert [list(row) for row in zip(pairs.queries, pairs.positives, *pairs.negatives, strict=True)] == ROWS
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.parquet"])
@pytest.mark.parametrize("ending", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_file_leaves_the_one_before(tmp_path, name, ending):
    (tmp_path / name).write_bytes(b"before")
    with pytest.raises(ending), pair_file(tmp_path / name, COLUMNS) as write:
        write(ROWS)
        raise ending
    assert (tmp_path / name).read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["pairs.csv", "pairs", ".jsonl"])
def test_other_names_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=r"ends in \.jsonl or \.parquet"), pair_file(tmp_path / name, COLUMNS):
        pass
    assert list(tmp_path.iterdir()) == []
