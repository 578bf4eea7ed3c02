from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from offsphere.data import Collection
from offsphere.evaluation import EmbeddedCollection, Result
from offsphere.evaluation.embedding import embed as embed_collection
from offsphere.evaluation.models import evaluate_models


def embed(queries: np.ndarray, documents: np.ndarray, **settings) -> EmbeddedCollection:
    """A collection of placeholder texts around given embeddings; ids q0.. and d0.. unless given."""
    query_ids = settings.pop("query_ids", [f"q{i}" for i in range(len(queries))])
    document_ids = settings.pop("document_ids", [f"d{i}" for i in range(len(documents))])
    qrels = settings.pop("qrels", {query: {document_ids[0]: 1} for query in query_ids})
    texts = settings.pop("texts", dict.fromkeys(document_ids, "text"))
    collection = Collection("made", "test", texts, dict.fromkeys(query_ids, "text"), qrels, **settings)
    return EmbeddedCollection(collection, np.asarray(queries, np.float32), np.asarray(documents, np.float32))


@pytest.fixture(name="embed", scope="session")
def _embed() -> Callable[..., EmbeddedCollection]:
    return embed


@pytest.fixture
def make(tmp_path, sentences):
    """Writes a collection of 60 documents and 12 queries, each relevant to three documents."""

    def make(name: str, seed: int = 0, settings: str = ""):
        texts, random = sentences(72, seed), np.random.default_rng(seed)
        folder = tmp_path / name
        (folder / "qrels").mkdir(parents=True)
        for file, first, part in (("corpus", "d", texts[:60]), ("queries", "q", texts[60:])):
            rows = "".join(json.dumps({"_id": f"{first}{i}", "text": text}) + "\n" for i, text in enumerate(part))
            (folder / f"{file}.jsonl").write_text(rows, encoding="utf-8")
        qrels = "".join(f"q{i}\td{j}\t1\n" for i in range(12) for j in random.choice(60, 3, replace=False))
        (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + qrels, encoding="utf-8")
        if settings:
            (folder / "collection.yaml").write_text(settings, encoding="utf-8")
        return folder

    return make


@pytest.fixture(scope="session")
def evaluated() -> Callable[..., list[Result]]:
    """The results of one encoder, ranked by what it declares unless said otherwise."""

    def evaluate(source, data, similarities=("own",), **settings) -> list[Result]:
        return evaluate_models([source], data, similarities, **settings).results

    return evaluate


@pytest.fixture(scope="session")
def values() -> Callable[[Iterable[Result]], dict[tuple[str, str, str], float]]:
    """The values of results by data set, similarity and measure."""
    return lambda rows: {(row.dataset, row.scored_as, row.measure): row.value for row in rows}


@pytest.fixture
def encoded(monkeypatch) -> list[str]:
    """The collections that were encoded, in order."""
    names: list[str] = []

    def counted(model, collection, *arguments, **settings) -> EmbeddedCollection:
        names.append(collection.name)
        return embed_collection(model, collection, *arguments, **settings)

    monkeypatch.setattr("offsphere.evaluation.models.embed", counted)
    return names


class Told:
    """Remembers what long work says."""

    def __init__(self):
        self.lines: list[str] = []
        self.steps: list[tuple[str, int] | int] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def start(self, what: str, total: int) -> Callable[[int], None]:
        self.steps.append((what, total))
        return self.steps.append


@pytest.fixture(scope="session")
def listener() -> type[Told]:
    """Makes something that remembers what long work says."""
    return Told
