from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

DOCUMENTS = [
    {"_id": "d1", "title": "Tides", "text": "The moon pulls the sea."},
    {"_id": "d2", "title": "", "text": "Iron rusts in water."},
    {"_id": "d3", "text": "Bees dance."},
    {"_id": "d4", "title": "Salt", "text": "Sodium and chlorine."},
]
QUERIES = [
    {"_id": "q1", "text": "why are there tides"},
    {"_id": "q2", "text": "what does water do to iron"},
    {"_id": "q3", "text": "what is salt"},
]
QRELS = "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td4\t0\nq2\td2\t2\nq2\td1\t1\n"


@pytest.fixture
def documents() -> list[dict[str, Any]]:
    return list(DOCUMENTS)


@pytest.fixture
def queries() -> list[dict[str, Any]]:
    return list(QUERIES)


@pytest.fixture
def qrels() -> str:
    return QRELS


@pytest.fixture
def write() -> Callable[[Path, str | bytes], Path]:
    """Writes a file, gzipped where its name says so, and gives its path back."""

    def write(path: Path, content: str | bytes) -> Path:
        content = content.encode() if isinstance(content, str) else content
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        return path

    return write


@pytest.fixture
def make_collection(tmp_path: Path, write: Callable[[Path, str | bytes], Path]) -> Callable[..., Path]:
    """Writes a small collection: q1 and q2 are judged in the test split, q3 is not."""

    def make(
        name: str = "small",
        documents: Iterable[dict[str, Any]] = DOCUMENTS,
        queries: Iterable[dict[str, Any]] = QUERIES,
        qrels: str = QRELS,
        split: str = "test",
        settings: str | None = None,
        suffix: str = "",
    ) -> Path:
        folder = tmp_path / name
        for file, rows in (("corpus", documents), ("queries", queries)):
            write(folder / f"{file}.jsonl{suffix}", "".join(json.dumps(row) + "\n" for row in rows))
        write(folder / "qrels" / f"{split}.tsv{suffix}", qrels)
        if settings is not None:
            write(folder / "collection.yaml", settings)
        return folder

    return make
