from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offsphere.errors import DataError, RunError
from offsphere.evaluation import (
    QueryValue,
    Result,
    read_query_values,
    read_results,
    write_query_values,
    write_results,
)

HEADER = "model,training_data,similarity,gamma_q,gamma_d,scored_as,seed,dataset,split,measure,value,n_queries"
text = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)
fraction = st.floats(0, 1)
results = st.builds(
    Result,
    model=text,
    training_data=text,
    similarity=text,
    gamma_q=st.none() | fraction,
    gamma_d=st.none() | fraction,
    scored_as=text,
    seed=st.none() | st.integers(0, 2**31),
    dataset=text,
    split=text,
    measure=text,
    value=fraction,
    n_queries=st.integers(0, 10**6),
)
query_values = st.builds(
    QueryValue,
    model=text,
    similarity=text,
    seed=st.none() | st.integers(0, 2**31),
    dataset=text,
    measure=text,
    query_id=text,
    value=fraction,
)
ROW = Result("m, with comma", 'a "b"', "cosine", 1.0, 0.1 + 0.2, "dot", 42, "nq\u2028é", "test", "nDCG@10", 1 / 3, 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run")


@given(rows=st.lists(results, max_size=5))
@settings(deadline=None)
def test_results_read_back_exactly(folder, rows):
    write_results(folder / "results.csv", rows)
    assert read_results(folder / "results.csv") == rows


@given(rows=st.lists(query_values, max_size=5))
@settings(deadline=None)
def test_query_values_read_back_exactly(folder, rows):
    write_query_values(folder / "per_query.parquet", rows)
    assert read_query_values(folder / "per_query.parquet") == rows


def test_the_header_is_the_contract_and_no_temporary_file_stays(tmp_path):
    write_results(tmp_path / "results.csv", [ROW])
    write_query_values(tmp_path / "per_query.parquet", [])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["per_query.parquet", "results.csv"]
    assert (tmp_path / "results.csv").read_text(encoding="utf-8").splitlines()[0] == HEADER
    assert read_results(tmp_path / "results.csv") == [ROW]


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "results.csv"
    write_results(path, [ROW])

    def interrupted():
        yield ROW
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_results(path, interrupted())
    assert read_results(path) == [ROW]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "results.csv:1: expected the header model,"),
        ("a,b\n", "found 'a,b'"),
        (f"{HEADER}\nm,t,cosine\n", "results.csv:2: expected 12 cells, found 3"),
        (f"{HEADER}\nm,t,cosine,1,1,dot,0,d,test,R@100,high,7\n", "results.csv:2: expected a number"),
    ],
)
def test_malformed_results_are_named_with_their_line(tmp_path, content, message):
    path = tmp_path / "results.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError) as error:
        read_results(path)
    assert message in str(error.value)


def test_missing_files_name_the_command_that_writes_them(tmp_path):
    for read, name in ((read_results, "results.csv"), (read_query_values, "per_query.parquet")):
        with pytest.raises(RunError, match="offsphere compare --out"):
            read(tmp_path / name)


def test_other_parquet_and_no_parquet_are_refused(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "per_query.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(DataError, match="expected Parquet with the columns model, similarity"):
        read_query_values(path)
    pyarrow.parquet.write_table(pyarrow.table({"model": ["m"]}), path)
    with pytest.raises(DataError, match="expected Parquet with the columns"):
        read_query_values(path)


def test_values_are_plain_numbers(tmp_path):
    write_results(tmp_path / "results.csv", [dataclasses.replace(ROW, seed=None, gamma_q=None)])
    (row,) = read_results(tmp_path / "results.csv")
    assert row.seed is None and row.gamma_q is None
    assert math.isclose(row.value, 1 / 3, rel_tol=0) and type(row.n_queries) is int
