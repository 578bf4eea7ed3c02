from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from offsphere.data.documents import Document
from offsphere.diagnosis.subject import open_bare
from offsphere.search.index import Index
from offsphere.search.sources import EncodedDocuments
from offsphere.search.stores import open_store
from offsphere.similarity import Similarity


@pytest.fixture
def model(static, save) -> str:
    return str(save(static))


@pytest.fixture
def documents(sentences) -> list[Document]:
    return [
        Document(f"d{number}", text.split()[0], text, {"number": number, "lang": "en" if number % 2 else "de"})
        for number, text in enumerate(sentences(30, 0))
    ]


@pytest.fixture
def index(tmp_path: Path, model: str, documents: list[Document]) -> Index:
    made = Index.create(tmp_path / "index", model, similarity="dot")
    made.add(documents)
    return made


@pytest.fixture
def content() -> Callable[[Index], dict[str, tuple]]:
    """All that an index stores, by id; an id that is there twice fails."""

    def read(index: Index) -> dict[str, tuple]:
        records = [record for batch in index.records(7, Similarity.parse("dot")) for record in batch]
        assert len({record.id for record in records}) == len(records) == index.count()
        return {one.id: (one.vector.tobytes(), one.norm, one.title, one.text, one.metadata) for one in records}

    return read


@pytest.fixture
def target(tmp_path: Path) -> Callable[..., str]:
    """Gives the target of a kind in an empty place."""

    def make(kind: str, place: str = "destinations") -> str:
        folder = tmp_path / place
        if kind in ("faiss", "parquet"):
            return f"{kind}:{folder / f'documents.{kind}'}"
        return f"milvus:{folder / 'milvus.db'}" if kind == "milvus" else f"{kind}:{folder / kind}"

    return make


@pytest.fixture
def corpus(tmp_path: Path, sentences) -> Callable[..., str]:
    """Writes a collection's corpus of 300 documents, the last of them a title alone, and gives its folder."""

    def make(texts: list[str] | None = None, name: str = "corpus") -> str:
        texts = [*sentences(299, 0), ""] if texts is None else texts
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        with (folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
            for number, text in enumerate(texts):
                row = {"_id": f"doc/{number} é", "title": "iron" if number % 3 else "", "text": text, "year": number}
                file.write(json.dumps(row) + "\n")
        return str(folder)

    return make


@pytest.fixture
def prompted_model(static, save) -> str:
    """A static encoder with a prompt before each document; trained with dot."""
    static.prompts["document"] = "passage : "
    static.similarity_fn_name = "dot"
    return str(save(static, "static"))


@pytest.fixture
def source(prompted_model: str, corpus: Callable[..., str]) -> Callable[..., EncodedDocuments]:
    """Documents of the corpus, encoded by the static encoder with the prompt."""

    def make(similarity: str | None = None, data: str | None = None, **options) -> EncodedDocuments:
        encoder = open_bare(prompted_model, None, None, "cpu")
        return EncodedDocuments(encoder, [data or corpus()], similarity, **options)

    return make


@pytest.fixture
def contents() -> Callable[[str, list[str]], np.ndarray]:
    """The vectors that a target holds for ids."""

    def read(target: str, ids: list[str]) -> np.ndarray:
        with closing(open_store(target)) as store:
            return store.vectors(ids)

    return read
