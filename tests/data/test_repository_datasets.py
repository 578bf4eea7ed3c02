"""The collections in datasets/: they load cleanly, their READMEs are right, and each has a licence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from offsphere.data import available_splits, load_collection
from offsphere.data.jsonl import read_jsonl

DATASETS = Path(__file__).parents[2] / "datasets"
FOLDERS = sorted(folder.name for folder in DATASETS.iterdir() if folder.is_dir())
COLLECTIONS = [name for name in FOLDERS if name != "stsb"]


def readme(name: str) -> str:
    return (DATASETS / name / "README.md").read_text(encoding="utf-8")


def table(text: str) -> dict[str, list[int]]:
    """The rows of the table of counts: split to numbers."""
    rows = re.findall(r"^\| (train|dev|test) \|((?: \d+ \|)+)$", text, flags=re.MULTILINE)
    return {split: [int(number) for number in re.findall(r"\d+", numbers)] for split, numbers in rows}


def test_they_are_the_ones_that_the_demo_and_the_tests_need():
    assert FOLDERS == ["hotpotqa", "medquad", "musique", "nq_qed", "stsb", "theoremqa", "xquad_en"]


def test_their_size():
    assert sum(file.stat().st_size for file in DATASETS.rglob("*") if file.is_file()) <= 15 * 2**20


@pytest.mark.parametrize("name", COLLECTIONS)
def test_a_collection_loads_strictly_and_counts_as_its_readme_says(name):
    splits = available_splits(DATASETS / name)
    loaded = {split: load_collection(DATASETS / name, split, strict=True) for split in splits}
    counts = table(readme(name))
    assert {split: (len(part.queries), sum(map(len, part.qrels.values()))) for split, part in loaded.items()} == {
        split: tuple(numbers) for split, numbers in counts.items()
    }
    documents = len(loaded["test"].documents)
    assert f"\n{documents} documents\n" in readme(name)
    assert all(part.notes == () and part.name == name for part in loaded.values())
    listed = ", ".join(f"{split} {counts[split][0]}" for split in ("train", "dev", "test") if split in counts)
    licence = loaded["test"].licence
    assert re.search(rf"\| \[{name}\]\({name}/README\.md\) \|.*\| {documents} \| {listed} \| {licence} \|", readme(""))
    assert re.search(rf"## Licence\n\n{licence}[,.]", readme(name))


@pytest.mark.parametrize("name", COLLECTIONS)
def test_no_query_is_in_two_splits(name):
    queries = [
        query
        for split in available_splits(DATASETS / name)
        for query in load_collection(DATASETS / name, split).queries
    ]
    assert len(queries) == len(set(queries)) > 100


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_sentence_pairs_have_an_open_licence_and_count_as_the_readme_says(split):
    rows = [row for _, row in read_jsonl(DATASETS / "stsb" / f"{split}.jsonl.gz")]
    sources = [row["source"] for row in rows]
    assert table(readme("stsb"))[split] == [len(rows), sources.count("images"), sources.count("track5.en-en")]
    assert set(sources) <= {"images", "track5.en-en"}
    assert all(row["sentence1"] and row["sentence2"] and 0 <= row["score"] <= 5 for row in rows)
    assert "## Licence\n\nCC BY-SA 4.0 " in readme("stsb")


@pytest.mark.parametrize("name", FOLDERS)
def test_every_readme_names_source_and_commit(name):
    assert re.search(r"## Source\n\n(.|\n)*https://github\.com/(.|\n)*`[0-9a-f]{40}`", readme(name))
