from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from offsphere.data import load_collection
from offsphere.data.documents import Document, read_documents, read_prompts, read_queries, shared_prompts
from offsphere.errors import DataError

ROOT = Path(__file__).parents[2]
EXPECTED = [
    Document("d1", "Tides", "The moon pulls the sea.", {"lang": "en", "year": 1999}),
    Document("d2", "", "Iron rusts in water.", {"lang": None, "year": 2001}),
]
ROWS = [
    {"_id": "d1", "title": "Tides", "text": "The moon pulls the sea.", "lang": "en", "year": 1999},
    {"_id": "d2", "title": None, "text": " Iron rusts in water. ", "lang": None, "year": 2001},
]


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_collection_needs_no_queries_and_no_judgements(tmp_path, write, suffix):
    write(tmp_path / "only" / f"corpus.jsonl{suffix}", lines(ROWS))
    assert list(read_documents(tmp_path / "only")) == EXPECTED
    assert read_queries(tmp_path / "only") == []


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_files_say_the_same(tmp_path, write, name):
    if name.endswith("parquet"):
        parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / name)
    else:
        write(tmp_path / name, "\ufeff" + lines(ROWS).replace("\n", "\r\n"))
    assert list(read_documents(tmp_path / name)) == EXPECTED


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv.gz", "\t")])
def test_delimited_files_have_texts_only(tmp_path, write, name, delimiter):
    rows = [["id", "title", "text", "year"], ["007", "NA", "The moon, pulled.", "1999"], ["8", "", "x", ""]]
    write(tmp_path / name, "".join(delimiter.join(f'"{cell}"' for cell in row) + "\n" for row in rows))
    assert list(read_documents(tmp_path / name)) == [
        Document("007", "NA", "The moon, pulled.", {"year": "1999"}),
        Document("8", "", "x", {"year": ""}),
    ]


def test_the_passage_is_what_a_collection_embeds():
    folder = ROOT / "datasets" / "xquad_en"
    passages = {document.id: document.passage for document in read_documents(folder)}
    assert passages == load_collection(folder).documents
    assert len(passages) == 240


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"_id": "d1", "text": "again"}, r":3: the _id 'd1' occurs twice"),
        ({"text": "a"}, r":3: _id is missing; found the fields text"),
        ({"_id": "d9"}, r":3: text is missing; found the fields _id"),
        ({"_id": "d9", "text": 3}, r":3: text must be a string or null, found int 3"),
        ({"_id": "", "text": "a"}, r":3: _id must be a string or a whole number, found ''"),
        ({"_id": "\ud800", "text": "a"}, r":3: the _id '\\ud800' holds an unpaired surrogate"),
        ({"_id": "d9", "text": "a", "size": float("inf")}, r":3: the field 'size' holds float inf"),
        ({"_id": "d9", "text": "a", "url": 1, "metadata": {"url": 2}}, r":3: the field 'url' stands both"),
    ],
)
@pytest.mark.parametrize("place", ["folder", "file"])
def test_malformed_rows_are_errors_with_file_and_line(tmp_path, write, row, message, place):
    path = write(tmp_path / "corpus.jsonl", lines([*ROWS, row]))
    with pytest.raises(DataError, match=rf"corpus\.jsonl{message}"):
        list(read_documents(tmp_path if place == "folder" else path))


def test_an_object_called_metadata_adds_its_fields(tmp_path, write):
    row = {"_id": 1, "text": "a", "lang": "en", "metadata": {"url": "u", "tags": ["x", {"y": None}]}}
    other = {"_id": 2, "text": "a", "metadata": "a text of its own"}
    (first, second) = read_documents(write(tmp_path / "a.jsonl", lines([row, other])))
    assert first.metadata == {"lang": "en", "url": "u", "tags": ["x", {"y": None}]}
    assert second.metadata == {"metadata": "a text of its own"}


def test_parquet_values_become_json(tmp_path):
    moment = datetime.datetime(2024, 2, 29, 12, 30)
    values = {"at": moment, "day": moment.date(), "price": decimal.Decimal("1.10"), "n": float("nan")}
    row = {"id": 1, "text": "a"} | values
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    (document,) = read_documents(tmp_path / "a.parquet")
    assert document.metadata == {"at": "2024-02-29T12:30:00", "day": "2024-02-29", "price": "1.10", "n": None}
    parquet.write_table(pa.Table.from_pylist([{"id": 1, "text": "a", "picture": b"\0"}]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet:1: the field 'picture' holds bytes .* leave it out"):
        list(read_documents(tmp_path / "b.parquet"))


def test_surrogates_in_metadata_become_question_marks(tmp_path, write):
    (document,) = read_documents(write(tmp_path / "a.jsonl", '{"_id": "1", "text": "a", "by\\ud800": "x\\udfff"}\n'))
    assert document.metadata == {"by?": "x?"}


def test_what_is_not_there_or_empty_says_what_is_expected(tmp_path, write):
    with pytest.raises(DataError, match=r"nowhere: no such file or folder; a collection is a folder with .*\.parquet"):
        read_documents(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"corpus.jsonl is missing; a collection is"):
        read_documents(tmp_path)
    with pytest.raises(DataError, match="expected a file that ends in"):
        read_documents(write(tmp_path / "a.xml", "<a/>"))
    for name in ("a.jsonl", "corpus.jsonl"):
        write(tmp_path / name, "\n")
    for source in (tmp_path / "a.jsonl", tmp_path):
        with pytest.raises(DataError, match="the file is empty"):
            list(read_documents(source))


def test_prompts_and_queries_of_collections(make_collection: Callable[..., Path], tmp_path, write):
    one = make_collection("one", settings="prompts: {query: 'q: '}")
    two = make_collection("two", settings="prompts: {query: 'q: ', document: 'd: '}")
    other = make_collection("other", settings="prompts: {document: 'passage: '}")
    file = write(tmp_path / "a.jsonl", lines(ROWS))
    assert (read_prompts(one), read_prompts(file)) == ({"query": "q: "}, {})
    assert shared_prompts([one, file, two]) == {"query": "q: ", "document": "d: "}
    with pytest.raises(DataError, match=r"other: it declares the document prompt 'passage: ', .*--document-prompt"):
        shared_prompts([one, two, other])
    assert read_queries(one) == ["why are there tides", "what does water do to iron", "what is salt"]
