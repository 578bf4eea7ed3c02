"""Tables that somebody made in PostgreSQL without us, and our export beside them, verified against the model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from offsphere.diagnosis.subject import open_bare
from offsphere.errors import StoreError
from offsphere.search.export import export
from offsphere.search.sources import EncodedDocuments
from offsphere.search.verify import verify
from offsphere.similarity import Similarity

COUNT = 120


@pytest.fixture
def documents(model, collection) -> EncodedDocuments:
    return EncodedDocuments(open_bare(model, None, None, "cpu"), [collection])


@pytest.fixture
def by_hand(postgres, target, documents) -> Callable[..., str]:
    """A table with an id and a vector, and an index of the given operator class."""

    def make(operators: str | None, change: Callable[[np.ndarray], np.ndarray] = lambda raw: raw) -> str:
        import psycopg
        from pgvector.psycopg import register_vector

        at = target("pgvector", "theirs")
        (batch,) = documents.batches(COUNT)
        vectors = change(batch.embed(range(COUNT)))
        with psycopg.connect(postgres) as connection:
            connection.execute("DROP TABLE IF EXISTS theirs")
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            register_vector(connection)
            connection.execute(f"CREATE TABLE theirs (id text PRIMARY KEY, vector vector({documents.dimension}))")
            with connection.cursor() as cursor:
                rows = [(one.id, row) for one, row in zip(batch.documents, vectors, strict=True)]
                cursor.executemany("INSERT INTO theirs VALUES (%s, %s)", rows)
            if operators:
                connection.execute(f"CREATE INDEX ON theirs USING hnsw (vector {operators})")
        return at

    return make


@pytest.mark.parametrize("similarity", ["dot", "cosine", "gamma_q=0.3,gamma_d=0.7"])
def test_our_table_ranks_as_the_model(similarity, model, collection, target):
    at = target("pgvector")
    documents = EncodedDocuments(open_bare(model, None, None, "cpu"), [collection], similarity)
    (first,) = export(documents, [at], at_once=50)
    (second,) = export(documents, [at])
    assert (first.written, first.stored, second.written) == (COUNT, COUNT, 0)
    found = verify(at, model, collection, similarity=similarity, device="cpu")
    assert found.passed and found.overlap == 1.0 and found.metric == "ip" and not found.causes


@pytest.mark.parametrize(("operators", "metric"), [("vector_cosine_ops", "cosine"), ("vector_l2_ops", "l2")])
def test_a_table_with_another_operator_class_fails(operators, metric, by_hand, model, collection):
    found = verify(by_hand(operators), model, collection, device="cpu")
    assert not found.passed and found.metric == metric
    assert [cause.name for cause in found.causes] == ["metric"]


def test_a_table_of_normalised_vectors_fails(by_hand, model, collection):
    at = by_hand("vector_ip_ops", Similarity.parse("cosine").prepare_document)
    found = verify(at, model, collection, device="cpu")
    assert not found.passed and [cause.name for cause in found.causes] == ["normalised"]


@pytest.mark.parametrize("operators", ["vector_ip_ops", None])
def test_a_right_table_passes(operators, by_hand, model, collection):
    found = verify(by_hand(operators), model, collection, device="cpu")
    assert found.passed and found.overlap == 1.0 and found.metric == ("ip" if operators else "none")


def test_a_table_of_somebody_else_is_not_written_to(by_hand, documents):
    with pytest.raises(StoreError, match="carries no stamp of offsphere"):
        export(documents, [by_hand("vector_ip_ops")])
    with pytest.raises(StoreError, match="compares by l2"):
        export(documents, [by_hand("vector_l2_ops")], adopt=True)
