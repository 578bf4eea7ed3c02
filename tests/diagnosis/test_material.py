from __future__ import annotations

import json

import pytest

from offsphere.diagnosis.material import load_material
from offsphere.errors import ConfigError, DataError

ROWS = [
    {"sentence1": "a moped", "sentence2": "a scooter", "score": 5.0},
    {"sentence1": "a moped", "sentence2": "a shed", "score": 1.5},
    {"sentence1": "two boys", "sentence2": "two lads", "score": 4.0},
    {"sentence1": "the sun", "sentence2": "a stone", "score": 3.9},
]


def write(path, rows=ROWS):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_collection_takes_the_first_split_that_it_has(small):
    folder = small(5, 6, split="dev")
    assert load_material(str(folder)).collection.split == "dev"
    (folder / "qrels/train.tsv").write_text("q1\td1\t1\n")
    found = load_material(str(folder))
    assert (found.collection.split, len(found.collection.queries), found.task) == ("train", 1, "retrieval")
    assert load_material(str(folder), "dev").collection.split == "dev"
    with pytest.raises(DataError, match="no split 'test'"):
        load_material(str(folder), "test")


def test_scored_sentence_pairs_are_symmetric_and_the_highest_scores_are_the_pairs(tmp_path):
    found = load_material(str(write(tmp_path / "sts/test.jsonl")))
    collection = found.collection
    assert (found.task, found.evidence) == ("sts", "it has sentence1 and sentence2")
    assert sorted(collection.queries.values()) == ["a moped", "two boys"]
    assert sorted(collection.documents.values()) == ["a scooter", "a shed", "a stone", "two lads"]
    pairs = {(collection.queries[q], collection.documents[d]) for q, g in collection.qrels.items() for d in g}
    assert pairs == {("a moped", "a scooter"), ("two boys", "two lads")}


def test_a_folder_of_scored_pairs_needs_no_more_than_its_split(tmp_path):
    write(tmp_path / "sts/dev.jsonl")
    write(tmp_path / "sts/test.jsonl", ROWS[:1])
    assert len(load_material(str(tmp_path / "sts")).collection.documents) == 4
    assert len(load_material(str(tmp_path / "sts"), "test").collection.documents) == 1


def test_without_scores_every_pair_says_the_same(tmp_path):
    rows = [{key: row[key] for key in ("sentence1", "sentence2")} for row in ROWS]
    assert len(load_material(str(write(tmp_path / "pairs.jsonl", rows))).collection.queries) == 3


def test_a_score_that_is_no_number_is_named_with_its_line(tmp_path):
    with pytest.raises(DataError, match=r"bad\.jsonl:2: score must be a number, found 'high'"):
        load_material(str(write(tmp_path / "bad.jsonl", [ROWS[0], ROWS[1] | {"score": "high"}])))


def test_training_pairs_become_a_collection(tmp_path):
    rows = [{"query": f"question {i}", "positive": f"answer {i}", "negative": f"other {i}"} for i in range(3)]
    found = load_material(str(write(tmp_path / "pairs.jsonl", rows)))
    assert found.task == "retrieval"
    assert (len(found.collection.queries), len(found.collection.documents)) == (3, 6)


def test_a_declared_task_is_taken_at_its_word_and_checked_first(tmp_path, small):
    assert load_material(str(small(5, 6)), task="clustering").task == "clustering"
    assert load_material(str(write(tmp_path / "a.jsonl")), task="retrieval").evidence == "declared"
    with pytest.raises(ConfigError, match="unknown task 'qaa'"):
        load_material("nowhere", task="qaa")


def test_the_same_texts_on_both_sides_are_duplicates(write_collection):
    texts = {f"t{i}": f"text {i}" for i in range(6)}
    folder = write_collection(texts, texts, {f"t{i}": {f"t{(i + 1) % 6}": 1} for i in range(6)})
    assert load_material(str(folder)).task == "duplicates"


def test_the_stsb_of_the_repository_is_symmetric():
    found = load_material("datasets/stsb")
    assert found.task == "sts"
    assert len(found.collection.queries) > 100
