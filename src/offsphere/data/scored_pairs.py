"""Sentence pairs with a human score of how similar they are, as in the STS Benchmark."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offsphere.data.beir import is_collection
from offsphere.data.records import read_text
from offsphere.data.rows import FILES, file_rows
from offsphere.errors import DataError

COLUMNS = ("sentence1", "sentence2")
SPLITS = ("train", "dev", "test")


@dataclass(frozen=True)
class ScoredPairs:
    """Rows of (sentence1, sentence2, score).

    Attributes:
        name: What results call them: the folder of the file.
        split: The file, without its ending.
        first: One text a row.
        second: One text a row.
        scores: One number a row, higher for more similar; None where the file has no column ``score``.
        path: The file.
    """

    name: str
    split: str
    first: list[str]
    second: list[str]
    scores: list[float] | None
    path: Path

    def __len__(self) -> int:
        return len(self.first)


def load_scored_pairs(source: str | Path, split: str | None = None) -> ScoredPairs | None:
    """The pairs of a file with the columns sentence1 and sentence2, or of a folder of ``SPLIT.jsonl``; else None.

    Args:
        source: A file (.jsonl, .csv, .tsv, .parquet), a folder that is no collection, or the name of a benchmark
            where there is neither.
        split: Of a folder; the first of train, dev, test that there is, if None. A file has no splits.

    Raises:
        DataError: If the file is malformed, with its line, or the folder has scored pairs but not this split.
    """
    from offsphere.data.benchmarks import find_benchmark, load_benchmark_pairs

    if benchmark := find_benchmark(source):
        return load_benchmark_pairs(benchmark, split)
    path = Path(source).expanduser()
    if path.is_dir():
        if is_collection(path):
            return None
        names = [f"{name}.jsonl{end}" for name in ((split,) if split else SPLITS) for end in ("", ".gz")]
        path = next((path / name for name in names if (path / name).is_file()), path)
        if split and path.is_dir() and (found := load_scored_pairs(path)):
            raise DataError(f"no split {split!r}; these scored pairs have {found.split}", path)
    form = path.name.removesuffix(".gz")
    if not path.is_file() or not form.endswith(FILES):
        return None
    rows = file_rows(path)
    first = next(rows, None)
    if first is None or not first[1].keys() >= {*COLUMNS}:
        return None
    numbered = [first, *rows]
    one, two = ([read_text(row, column, path, line) for line, row in numbered] for column in COLUMNS)
    scores = [_score(row, path, line) for line, row in numbered] if "score" in first[1] else None
    return ScoredPairs(path.resolve().parent.name, form.rsplit(".", 1)[0], one, two, scores, path)


def _score(row: Mapping[str, Any], path: Path, line: int) -> float:
    try:
        score = float(row["score"])
    except (KeyError, TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise DataError(f"score must be a number, found {row.get('score')!r}", path, line)
    return score
