from __future__ import annotations

import datasets
import pytest

from offsphere.data import huggingface
from offsphere.data.huggingface import is_saved_dataset, read_hub, read_saved
from offsphere.errors import DataError

COLUMNS = {"query": ["a", "b", "c"], "positive": ["x", None, "z"]}
ROWS = [
    (1, {"query": "a", "positive": "x"}),
    (2, {"query": "b", "positive": None}),
    (3, {"query": "c", "positive": "z"}),
]


@pytest.fixture(autouse=True)
def _quiet():
    datasets.disable_progress_bars()


@pytest.mark.parametrize("batch", [1, 2, 10])
def test_a_saved_dataset(tmp_path, monkeypatch, batch):
    monkeypatch.setattr(huggingface, "BATCH", batch)
    datasets.Dataset.from_dict(COLUMNS).save_to_disk(tmp_path / "one")
    assert is_saved_dataset(tmp_path / "one")
    assert not is_saved_dataset(tmp_path)
    assert list(read_saved(tmp_path / "one", "train")) == ROWS


def test_a_selection_of_rows_is_what_is_read(tmp_path):
    datasets.Dataset.from_dict(COLUMNS).select([2, 0]).save_to_disk(tmp_path / "one")
    assert [row["query"] for _, row in read_saved(tmp_path / "one", "train")] == ["c", "a"]


def test_a_split_of_a_saved_dictionary(tmp_path):
    parts = {"train": datasets.Dataset.from_dict(COLUMNS), "dev": datasets.Dataset.from_dict({"query": ["d"]})}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "both")
    assert is_saved_dataset(tmp_path / "both")
    assert list(read_saved(tmp_path / "both", "train")) == ROWS
    with pytest.raises(DataError, match="no split 'test'; this dataset has dev, train"):
        list(read_saved(tmp_path / "both", "test"))


def test_a_damaged_folder_is_an_error(tmp_path, write):
    write(tmp_path / "dataset_info.json", "{")
    with pytest.raises(DataError, match="cannot be read as a saved dataset"):
        list(read_saved(tmp_path, "train"))


@pytest.mark.parametrize(
    ("name", "asked"), [("owner/name", ("owner/name", None)), ("owner/name:triplet", ("owner/name", "triplet"))]
)
def test_the_hub_is_asked_for_name_configuration_and_split(monkeypatch, name, asked):
    calls = []

    def load_dataset(*arguments, split):
        calls.append((*arguments, split))
        return datasets.Dataset.from_dict(COLUMNS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(read_hub(name, "dev")) == ROWS
    assert calls == [(*asked, "dev")]


def test_what_the_hub_does_not_have_is_an_error(monkeypatch):
    def load_dataset(*arguments, split):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"'o/n' is neither a file or folder here .*ConnectionError: no network"):
        list(read_hub("o/n", "train"))
