from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from offsphere.data import Collection
from offsphere.evaluation import EmbeddedCollection


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
