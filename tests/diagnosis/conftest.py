from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest


@pytest.fixture
def write_collection(tmp_path: Path) -> Callable[..., Path]:
    """Writes a folder in BEIR layout from texts by id and ``{query: {document: grade}}``."""

    def write(
        documents: Mapping[str, str],
        queries: Mapping[str, str],
        qrels: Mapping[str, Mapping[str, int]],
        split: str = "test",
        name: str = "made",
        settings: str = "",
    ) -> Path:
        folder = tmp_path / name
        (folder / "qrels").mkdir(parents=True)
        for file, texts in (("corpus", documents), ("queries", queries)):
            rows = (json.dumps({"_id": i, "title": "", "text": text}) + "\n" for i, text in texts.items())
            (folder / f"{file}.jsonl").write_text("".join(rows), encoding="utf-8")
        lines = [f"{q}\t{d}\t{grade}\n" for q, grades in qrels.items() for d, grade in grades.items()]
        (folder / f"qrels/{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines), encoding="utf-8")
        if settings:
            (folder / "collection.yaml").write_text(settings, encoding="utf-8")
        return folder

    return write


@pytest.fixture
def small(write_collection: Callable[..., Path], sentences: Callable[[int, int], list[str]]) -> Callable[..., Path]:
    """Writes a collection of short texts, each query with a document of its own."""

    def make(n_queries: int = 40, n_documents: int = 70, **changed) -> Path:
        texts = sentences(n_queries + n_documents, 0)
        queries = {f"q{i}": text for i, text in enumerate(texts[:n_queries])}
        documents = {f"d{i}": text for i, text in enumerate(texts[n_queries:])}
        given = {"qrels": {q: {f"d{i % n_documents}": 1} for i, q in enumerate(queries)}} | changed
        return write_collection(documents, queries, **given)

    return make
