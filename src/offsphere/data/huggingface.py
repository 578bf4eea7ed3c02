"""Rows of Hugging Face datasets: a name on the hub, or a folder that ``save_to_disk`` wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offsphere.errors import DataError

BATCH = 10_000


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote the folder."""
    return (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file()


def read_saved(folder: Path, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row of a saved dataset as (1-based row number, {column: value}).

    Args:
        folder: What ``save_to_disk`` wrote.
        split: Which part of a DatasetDict; a single Dataset has no parts.

    Raises:
        DataError: If the folder is damaged or has no such split.
    """
    from datasets import DatasetDict, load_from_disk

    try:
        dataset = load_from_disk(str(folder))
    except Exception as error:  # the library raises whatever its readers meet in a damaged folder
        raise DataError(f"cannot be read as a saved dataset: {error}", folder) from error
    if isinstance(dataset, DatasetDict):
        if split not in dataset:
            raise DataError(f"no split {split!r}; this dataset has {', '.join(sorted(dataset))}", folder)
        dataset = dataset[split]
    yield from dataset_rows(dataset)


def read_hub(name: str, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row of a dataset on the hub as (1-based row number, {column: value}).

    Args:
        name: As in ``load_dataset``, or ``name:config`` for one of its configurations.
        split: Which of its splits.

    Raises:
        DataError: If the datasets library cannot load it.
    """
    from datasets import load_dataset

    repository, _, config = name.partition(":")
    try:
        dataset = load_dataset(repository, config or None, split=split)
    except Exception as error:  # no network, no such name, no such split: the library has no common base for these
        raise DataError(
            f"{name!r} is neither a file or folder here nor a dataset that Hugging Face could load "
            f"({type(error).__name__}: {error}); check the path, or write the name as owner/name or owner/name:config"
        ) from error
    yield from dataset_rows(dataset)


def dataset_rows(dataset: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row of a ``datasets.Dataset`` as (1-based row number, {column: value})."""
    number = 0
    for batch in dataset.with_format("arrow").iter(BATCH):
        for row in batch.to_pylist():
            number += 1
            yield number, row
