from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def collection(tmp_path: Path, sentences) -> Callable[..., Path]:
    """Writes a collection of that many documents: the last but one is empty, the last says what the first says."""

    def make(count: int = 30, name: str = "collection", seed: int = 0) -> Path:
        folder = tmp_path / name
        (folder / "qrels").mkdir(parents=True)
        texts = [*sentences(count - 2, seed), "", sentences(1, seed)[0]]
        queries = sentences(6, seed + 1)
        rows = [{"_id": f"d{i}", "title": "", "text": text} for i, text in enumerate(texts)]
        (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        rows = [{"_id": f"q{i}", "text": text} for i, text in enumerate(queries)]
        (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        judged = "".join(f"q{i}\td{2 * i}\t1\n" for i in range(6))
        (folder / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}", encoding="utf-8")
        return folder

    return make


@pytest.fixture
def model(transformer, save) -> str:
    """The small transformer, in a folder."""
    return str(save(transformer, "model"))


@pytest.fixture
def table(static, save) -> str:
    """The small table of token embeddings, in a folder."""
    return str(save(static, "table"))
