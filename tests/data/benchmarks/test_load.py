from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from offsphere.data import load_collection
from offsphere.data.benchmarks import CATALOGUE
from offsphere.data.scored_pairs import load_scored_pairs
from offsphere.errors import DataError

DOCUMENTS = [
    {"_id": i, "title": title, "text": text} for i, title, text in ((1, "Tides", "The moon."), (2, "", "Iron."))
]
QUERIES = [{"_id": i, "text": text} for i, text in ((1, "why are there tides"), (7, "rust"), (9, "never judged"))]
QRELS = [{"query-id": 1, "corpus-id": 2, "score": 2}, {"query-id": 7, "corpus-id": 2, "score": 1}]
BRIGHT = [
    {"id": "0", "query": "a", "gold_ids": ["x"], "gold_ids_long": ["L"], "excluded_ids": ["y", "z"]},
    {"id": "1", "query": "b", "gold_ids": ["y"], "gold_ids_long": ["L"], "excluded_ids": ["N/A"]},
]


@pytest.fixture
def beir(home):
    """Writes one of the collections above in BEIR layout, under the name of a benchmark."""

    def write(name: str, split: str = "test") -> Path:
        folder = home / name
        (folder / "qrels").mkdir(parents=True)
        for file, rows in (("corpus", DOCUMENTS), ("queries", QUERIES)):
            text = "".join(json.dumps(row | {"_id": str(row["_id"])}) + "\n" for row in rows)
            (folder / f"{file}.jsonl").write_text(text, encoding="utf-8")
        lines = ["\t".join(map(str, row.values())) for row in QRELS]
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(lines) + "\n")
        return folder

    return write


def test_from_a_folder_in_beir_layout(beir):
    beir("beir/arguana")
    found = load_collection("beir/arguana")
    assert (found.name, found.split, found.exclude_self) == ("beir-arguana", "test", True)
    assert found.documents == {"1": "Tides The moon.", "2": "Iron."}
    assert found.qrels == {"1": {"2": 2}, "7": {"2": 1}}
    assert found.notes == ("not the published size: 2 queries, published 1,406; 2 documents, published 8,674",)


def test_equal_ids_mean_nothing_where_no_rule_is_declared(beir):
    """T-H3: integer ids on both sides."""
    beir("beir/fiqa")
    assert not load_collection("beir/fiqa").exclude_self


def test_the_published_split_has_its_own_name(beir):
    beir("msmarco/dev", "dev")
    found = load_collection("msmarco/dev")
    assert found.split == "dev" and len(found.queries) == 2
    folder = beir("beir/nfcorpus")
    (folder / "qrels" / "dev.tsv").write_text("1\t2\t1\n")
    assert list(load_collection("beir/nfcorpus", "dev").queries) == ["1"]
    with pytest.raises(DataError, match="no split 'train'; this collection has dev, test"):
        load_collection("beir/nfcorpus", "train")


def test_another_size_is_an_error_where_strict(beir):
    beir("beir/scifact")
    with pytest.raises(DataError, match=r"beir/scifact: not the published size: 2 queries, published 300"):
        load_collection("beir/scifact", strict=True)


def test_the_published_size_is_no_note(beir, monkeypatch):
    from dataclasses import replace

    beir("beir/scifact")
    monkeypatch.setitem(CATALOGUE, "beir/scifact", replace(CATALOGUE["beir/scifact"], queries=2, documents=2))
    assert load_collection("beir/scifact", strict=True).notes == ()


def test_from_a_copy_of_a_repository_of_the_hub(home, repository):
    """The layout that mteb's repositories have; integer ids become strings."""
    rows = {
        "corpus": {"corpus": DOCUMENTS},
        "queries": {"queries": QUERIES},
        "default": {"test": QRELS, "dev": QRELS[:1]},
    }
    repository(home / "beir" / "scidocs", rows)
    found = load_collection("beir/scidocs")
    assert found.documents == {"1": "Tides The moon.", "2": "Iron."} and list(found.queries) == ["1", "7"]
    assert found.qrels == {"1": {"2": 2}, "7": {"2": 1}}
    assert load_collection("beir/scidocs", "dev").qrels == {"1": {"2": 2}}
    with pytest.raises(DataError, match="no split 'train'; it has test, dev"):
        load_collection("beir/scidocs", "train")


def test_nanobeir_lists_positives_only(home, repository):
    judged = [{"query-id": "1", "corpus-id": "2"}]
    rows = {"corpus": {"train": DOCUMENTS}, "queries": {"train": QUERIES}, "qrels": {"train": judged}}
    repository(home / "nanobeir" / "quora", rows)
    found = load_collection("nanobeir/quora")
    assert found.qrels == {"1": {"2": 1}} and found.exclude_self


@pytest.mark.parametrize(("name", "gold"), [("bright/pony", "x"), ("bright-long/pony", "L")])
def test_bright_from_a_copy_of_its_repository(home, repository, name, gold):
    """T-H4: exclusions are part of the data, and N/A is none of them."""
    short = [{"id": i, "content": i} for i in "xyz"]
    rows = {"documents": {"pony": short}, "long_documents": {"pony": [{"id": "L", "content": "long"}]},
            "examples": {"pony": BRIGHT}}  # fmt: skip
    repository(home / "bright", rows)
    found = load_collection(name)
    assert found.qrels["0"] == {gold: 1} and found.excluded == {"0": frozenset("yz")}
    assert found.name == name.replace("/", "-") and found.prompts == {}


HOTPOT = {
    "id": "h",
    "question": "who",
    "context": {"title": ["A", "B", "C"], "sentences": [["a.", "aa."], ["b."], ["c."]]},
    "supporting_facts": {"title": ["A", "C", "A"], "sent_id": [0, 0, 1]},
}
MUSIQUE = {
    "id": "m",
    "question": "where",
    "paragraphs": [
        {"idx": i, "title": title, "paragraph_text": "text", "is_supporting": supports}
        for i, (title, supports) in enumerate((("A", True), ("B", False), ("C", True)))
    ],
    "answerable": True,
}


@pytest.mark.parametrize(
    ("name", "rows", "documents", "supports"),
    [
        ("2wikimultihopqa", [HOTPOT], ["A a. aa.", "B b.", "C c."], {"h": {"h-0": 1, "h-2": 1}}),
        ("musique", [MUSIQUE, MUSIQUE | {"id": "n", "answerable": False}], ["A text", "B text", "C text"],
         {"m": {"m-0": 1, "m-2": 1}}),
    ],
)  # fmt: skip
def test_multi_hop_sets_are_questions_with_paragraphs(home, repository, name, rows, documents, supports):
    repository(home / "multihop" / name, {"default": {"train": rows[:1] * 2, "validation": rows}})
    found = load_collection(f"multihop/{name}")
    assert [*found.documents.values()] == documents and found.qrels == supports


def test_novelhopqa_has_one_context_a_question_and_a_split_a_number_of_hops(home, repository):
    splits = {f"hop_{n}": [{"id": f"{n}", "question": f"q{n}", "context": f"c{n}"}] for n in (1, 2)}
    repository(home / "multihop" / "novelhopqa", {"default": splits})
    found = load_collection("multihop/novelhopqa")
    assert found.documents == {"1-0": "c1", "2-0": "c2"} and found.qrels == {"1": {"1-0": 1}, "2": {"2-0": 1}}


def test_sentence_pairs_from_either_layout(home, repository):
    rows = [{"sentence1": "a", "sentence2": "b", "score": 2.5}, {"sentence1": "c", "sentence2": "d", "score": 1}]
    repository(home / "sick", {"default": {"test": rows}})
    found = load_scored_pairs("sick")
    assert (found.name, found.split, found.first, found.scores) == ("sick", "test", ["a", "c"], [2.5, 1.0])
    (home / "stsb").mkdir()
    (home / "stsb" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert load_scored_pairs("stsb", "test").second == ["b", "d"]
    with pytest.raises(DataError, match="stsb has scored sentence pairs, and no corpus"):
        load_collection("stsb")


@pytest.mark.parametrize(
    ("name", "kept"), [("beir/fiqa", r"~/\.ir_datasets"), ("multihop/musique", "the cache of Hugging Face")]
)
def test_without_a_network_the_error_says_what_to_type(home, name, kept):
    pytest.importorskip("ir_datasets")
    with pytest.raises(DataError, match=rf"{name} cannot be reached at .*{CATALOGUE[name].source}") as error:
        load_collection(name)
    text = str(error.value)
    assert f"put it into {home / name} (corpus.jsonl" in text and kept.replace("\\", "") in text


def test_a_damaged_copy_is_an_error_that_names_it(home, repository):
    folder = repository(home / "beir" / "nq", {"corpus": {"train": DOCUMENTS}, "queries": {"train": QUERIES}})
    with pytest.raises(DataError, match=f"{folder}: cannot be read as a copy of a repository of the hub"):
        load_collection("beir/nq")


# From ir_datasets, whose cache is filled by hand


def cache() -> Path:
    ir_datasets = pytest.importorskip("ir_datasets")
    return ir_datasets.util.home_path()


@pytest.fixture
def nowhere(monkeypatch):
    monkeypatch.delenv("OFFSPHERE_BENCHMARKS", raising=False)


def test_bright_from_ir_datasets(nowhere):
    """T-H4, from where it is published: documents that a query excludes are no judgements of grade -100."""
    from datasets import Dataset

    (cache() / "bright").mkdir(exist_ok=True)
    reasoning = ("Gemini-1.0", "claude-3-opus", "gpt4", "grit", "llama3-70b")
    queries = [row | {"reasoning": "", "gold_answer": ""} for row in BRIGHT]
    files = {"docs": [{"id": i, "content": i} for i in "xyz"], "queries": queries}
    files |= {f"{model}_reason.queries": queries for model in reasoning}
    for name, rows in files.items():
        Dataset.from_list(rows).to_parquet(cache() / "bright" / f"robotics.{name}.parquet")
    found = load_collection("bright/robotics")
    assert found.qrels == {"0": {"x": 1}, "1": {"y": 1}} and found.excluded == {"0": frozenset("yz")}


def test_a_beir_archive_from_ir_datasets(nowhere):
    folder = cache() / "beir" / "quora"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "source.zip", "w") as archive:
        for file, rows in (("corpus", DOCUMENTS), ("queries", QUERIES)):
            text = "".join(json.dumps(row | {"_id": str(row["_id"]), "metadata": {}}) + "\n" for row in rows)
            archive.writestr(f"quora/{file}.jsonl", text)
        for split, rows in (("test", QRELS), ("dev", QRELS[:1])):
            lines = ["\t".join(map(str, row.values())) for row in rows]
            archive.writestr(f"quora/qrels/{split}.tsv", "query-id\tcorpus-id\tscore\n" + "\n".join(lines) + "\n")
    found = load_collection("beir/quora")
    assert found.name == "beir-quora" and found.exclude_self
    assert found.qrels == {"1": {"2": 2}, "7": {"2": 1}} and found.documents["2"] == "Iron."
    assert load_collection("beir/quora", "dev").qrels == {"1": {"2": 2}}
    with pytest.raises(DataError, match=r"no split 'nope' of beir/quora/test"):
        load_collection("beir/quora", "nope")
