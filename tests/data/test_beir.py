from __future__ import annotations

import os
import subprocess
import sys

import pytest

from offsphere.data import available_splits, load_collection
from offsphere.errors import DataError


def test_a_small_collection(make_collection):
    loaded = load_collection(make_collection())
    assert loaded.documents == {
        "d1": "Tides The moon pulls the sea.",
        "d2": "Iron rusts in water.",
        "d3": "Bees dance.",
        "d4": "Salt Sodium and chlorine.",
    }
    assert loaded.queries == {"q1": "why are there tides", "q2": "what does water do to iron"}
    assert loaded.qrels == {"q1": {"d1": 1, "d4": 0}, "q2": {"d2": 2, "d1": 1}}
    assert (loaded.name, loaded.split, loaded.notes, loaded.licence) == ("small", "test", (), None)
    assert (loaded.excluded, loaded.exclude_self, loaded.prompts) == ({}, False, {})


def test_compression_does_not_matter(make_collection):
    plain, zipped = load_collection(make_collection("a")), load_collection(make_collection("b", suffix=".gz"))
    assert plain.documents == zipped.documents
    assert plain.fingerprint() == zipped.fingerprint()


def test_settings_beside_the_files(make_collection):
    settings = (
        "name: tides\nlicence: CC0\nexclude_self: true\nexcluded: {q1: [d2], q3: [d1]}\nprompts: {query: 'query: '}\n"
    )
    loaded = load_collection(make_collection(settings=settings), strict=True)
    assert (loaded.name, loaded.licence, loaded.exclude_self) == ("tides", "CC0", True)
    assert loaded.excluded == {"q1": frozenset({"d2"})}
    assert loaded.prompts == {"query": "query: "}


def test_exclusions_of_unknown_queries_are_reported(make_collection):
    folder = make_collection(settings="excluded: {q9: [d2], q1: [d2]}")
    assert load_collection(folder).notes == ("excluded names 1 unknown query (q9)",)
    with pytest.raises(DataError, match=r"collection\.yaml: excluded names 1 unknown query"):
        load_collection(folder, strict=True)


def test_ids_are_strings_and_equal_ids_on_both_sides_are_no_exclusion(make_collection):
    """T-H3 and T-I3."""
    folder = make_collection(
        documents=[{"_id": 1, "text": "a"}, {"_id": 2, "text": "b"}],
        queries=[{"_id": 1, "text": "x"}],
        qrels="1\t1\t1\n1\t2\t1\n",
    )
    loaded = load_collection(folder)
    assert loaded.qrels == {"1": {"1": 1, "2": 1}}
    assert not loaded.exclude_self


def test_null_is_the_empty_text_and_counted(make_collection, documents, queries):
    folder = make_collection(
        documents=[*documents, {"_id": "d5", "title": None, "text": None}, {"_id": "d6", "title": " ", "text": "\n"}],
        queries=[{"_id": "q1", "text": ""}, *queries[1:]],
    )
    loaded = load_collection(folder)
    assert loaded.documents["d5"] == loaded.documents["d6"] == ""
    assert loaded.notes == ("1 query without text", "2 documents without text")


def test_queries_without_a_positive_judgement_are_left_out_and_counted(make_collection, qrels):
    """Row 77: they enter no mean."""
    loaded = load_collection(make_collection(qrels=qrels + "q3\td4\t0\n"))
    assert set(loaded.queries) == {"q1", "q2"}
    assert loaded.notes == ("1 query without a positive judgement left out",)


def test_judgements_of_missing_documents_are_left_out_and_counted(make_collection, qrels):
    """T-G8; what they are is kept for the ceiling."""
    missing = "".join(f"q1\tx{number}\t1\n" for number in range(4)) + "q3\tx0\t1\n"
    folder = make_collection(qrels=qrels + missing)
    loaded = load_collection(folder)
    assert loaded.qrels == load_collection(make_collection("clean")).qrels
    assert loaded.missing == {"q1": {f"x{number}": 1 for number in range(4)}, "q3": {"x0": 1}}
    assert loaded.notes == (
        "5 judgements name documents that are not in the corpus (x0, x1, x2, ...); left out",
        "1 query without a positive judgement left out",
    )
    with pytest.raises(DataError, match=r"test\.tsv: 5 judgements name documents that are not in the corpus"):
        load_collection(folder, strict=True)


def test_judgements_of_missing_queries_are_left_out_and_counted(make_collection, qrels):
    folder = make_collection(qrels=qrels + "q8\td1\t1\nq8\td2\t1\nq9\td1\t1\n")
    assert load_collection(folder).notes == (
        "2 judged ids name queries that are not in queries.jsonl (q8, q9); left out",
    )
    with pytest.raises(DataError, match="2 judged ids name queries"):
        load_collection(folder, strict=True)


@pytest.mark.parametrize(
    ("qrels", "message"),
    [
        ("q1\t17\t1\n", "none of the 1 judged documents exists: the judgements name '17', .* ids such as 'd1'"),
        ("17\td1\t1\n", "none of the 1 judged queries exists: the judgements name '17', .* ids such as 'q1'"),
        ("q1\td1\t0\n", "no query has a positive judgement"),
        ("query-id\tcorpus-id\tscore\n", "no query has a positive judgement"),
    ],
)
def test_no_overlap_is_an_error_strict_or_not(make_collection, qrels, message):
    """T-I3: ids that match nothing are an error, not a score of 0."""
    for strict in (False, True):
        with pytest.raises(DataError, match=message):
            load_collection(make_collection(qrels=qrels), strict=strict)


def test_unicode_forms_of_ids_are_left_alone_and_hinted_at(make_collection):
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    documents = [{"_id": composed, "text": "a"}, {"_id": decomposed, "text": "b"}]
    loaded = load_collection(make_collection("both", documents=documents, qrels=f"q1\t{decomposed}\t1\n"))
    assert loaded.qrels == {"q1": {decomposed: 1}}
    with pytest.raises(DataError, match="write both files in NFC"):
        load_collection(make_collection("one", documents=documents[:1], qrels=f"q1\t{decomposed}\t1\n"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"_id": "d1", "text": "again"}, r"corpus\.jsonl:5: the _id 'd1' occurs twice"),
        ({"text": "a"}, r"corpus\.jsonl:5: _id is missing; found the fields text"),
        ({"_id": "d9", "contents": "a"}, r"corpus\.jsonl:5: text is missing; found the fields _id, contents"),
        ({"_id": "d9", "text": "a", "title": 3}, r"corpus\.jsonl:5: title must be a string or null, found int 3"),
    ],
)
def test_malformed_documents_are_errors(make_collection, row, message, documents):
    with pytest.raises(DataError, match=message):
        load_collection(make_collection(documents=[*documents, row]))


def test_splits_are_listed_and_a_wrong_one_is_an_error(make_collection, write, qrels):
    folder = make_collection()
    write(folder / "qrels" / "train.tsv.gz", qrels)
    write(folder / "qrels" / "train.tsv", qrels)
    write(folder / "qrels" / "._dev.tsv", "left by an archive program")
    write(folder / "qrels" / "README.md", "")
    assert available_splits(folder) == ["test", "train"]
    for split in ("dev", "../qrels/test"):
        with pytest.raises(DataError, match=f"no split '{split}'; this collection has test, train"):
            load_collection(folder, split)


def test_what_is_no_collection_says_what_one_looks_like(tmp_path, make_collection, write, qrels):
    layout = "a collection is a folder with corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv"
    with pytest.raises(DataError, match=f"nowhere: not a folder; {layout}"):
        load_collection(tmp_path / "nowhere")
    write(tmp_path / "half" / "corpus.jsonl", "")
    with pytest.raises(DataError, match=f"no judgements in .*qrels; {layout}"):
        load_collection(tmp_path / "half")
    write(tmp_path / "half" / "qrels" / "test.tsv", qrels)
    with pytest.raises(DataError, match=r"corpus\.jsonl: the file is empty"):
        load_collection(tmp_path / "half")
    folder = make_collection()
    (folder / "queries.jsonl").unlink()
    with pytest.raises(DataError, match=f"queries.jsonl is missing; {layout}"):
        load_collection(str(folder))


def test_text_is_utf8_whatever_the_locale(make_collection, documents):
    texts = ["Größe", "שלום", "a\u2028b", "e\u0301"]
    folder = make_collection(documents=[{"_id": "d1", "text": " ".join(texts)}, *documents[1:]], settings="name: größe")
    program = (
        "import sys, locale; from offsphere.data import load_collection; "
        "assert locale.getpreferredencoding(False).upper() not in ('UTF-8', 'UTF8'); "
        "loaded = load_collection(sys.argv[1]); print(ascii((loaded.name, loaded.documents['d1'])))"
    )
    environment = os.environ | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    printed = subprocess.run(
        [sys.executable, "-c", program, str(folder)], env=environment, check=True, capture_output=True, text=True
    )
    assert printed.stdout.strip() == ascii(("größe", " ".join(texts)))


def test_importing_the_package_needs_none_of_the_heavy_libraries():
    program = (
        "import sys, offsphere.data; "
        "print(sorted({'torch', 'datasets', 'pyarrow', 'pandas', 'scipy', 'matplotlib'} & sys.modules.keys()))"
    )
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert printed.stdout.strip() == "[]"


def test_the_fingerprint_is_the_same_in_every_process(make_collection):
    folder = make_collection(settings=f"excluded: {{q1: [{', '.join(f'x{number}' for number in range(20))}]}}")
    program = (
        "import sys; from offsphere.data import load_collection; print(load_collection(sys.argv[1]).fingerprint())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program, str(folder)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert printed == {load_collection(folder).fingerprint()}
