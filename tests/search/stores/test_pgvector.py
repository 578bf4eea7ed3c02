from __future__ import annotations

import random
import string
import time

import numpy as np
import psycopg
import pytest

from offsphere.errors import StoreError
from offsphere.search.stores import Record, open_store
from offsphere.search.stores.pgvector import INDEXABLE, LONGEST_ID, LONGEST_NAME, SEARCH
from offsphere.similarity import Similarity

WITHOUT_SCANS = "&options=-c%20enable_seqscan%3Doff"


@pytest.fixture
def sql(postgres, target):
    """A connection of its own to the database of the targets, with the extension."""
    target("pgvector")
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        yield connection


@pytest.fixture
def store(created):
    return created("pgvector", similarity="qnorm")


def record(name: str, **more) -> Record:
    return Record(name, np.array([1, 2, 3], dtype=np.float32), 1.0, **more)


def test_the_index_serves_the_query(store, sql):
    store.write([record(str(number)) for number in range(500)])
    query = SEARCH.format(table="documents", type="vector").replace("%(query)b", "'[1,2,3]'").replace("%(k)s", "10")
    sql.execute("SET enable_seqscan = off")
    (plan,) = ("\n".join(row[0] for row in sql.execute("EXPLAIN " + query)),)
    assert "Index Scan using documents_vector_idx" in plan
    assert "<#>" in plan
    (other,) = ("\n".join(row[0] for row in sql.execute("EXPLAIN " + query.replace("<#>", "<=>"))),)
    assert "documents_vector_idx" not in other  # an operator of another class finds no index, whatever it costs


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_the_top_10_through_the_index_is_the_exact_one(similarity, postgres, sql, opened, xquad):
    # Mixtures of real embeddings: enough of them that the graph has several layers.
    parsed = Similarity.parse(similarity)
    drawn = np.random.default_rng(0)
    pairs = drawn.integers(0, len(xquad.documents), (2000, 2))
    raw = (xquad.documents[pairs[:, 0]] + drawn.uniform(0, 1, (2000, 1)) * xquad.documents[pairs[:, 1]]).astype("f4")
    vectors = parsed.prepare_document(raw)
    store = opened(f"pgvector:{postgres}{WITHOUT_SCANS}#documents")
    store.create(raw.shape[1], xquad.stamp(similarity))
    store.write([Record(str(row), vector, 1.0) for row, vector in enumerate(vectors)])
    before = scans(sql)
    queries = parsed.prepare_query(xquad.queries)
    answers = store.search(queries, 10)
    exact = queries.astype(np.float64) @ vectors.T.astype(np.float64)
    best = np.sort(exact, axis=1)[:, ::-1][:, :10]
    found = np.array([[exact[query, int(hit.id)] for hit in answer] for query, answer in enumerate(answers)])
    np.testing.assert_allclose(found, best, atol=1e-5 * np.abs(best).max())
    store.close()
    # The server counts them when it has noticed that the connection is gone.
    deadline = time.monotonic() + 300
    while scans(sql) < before + len(queries) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert scans(sql) == before + len(queries)


def scans(sql) -> int:
    sql.execute("SELECT pg_stat_clear_snapshot()")
    return sql.execute("SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelname ~ '_vector_idx$'").fetchone()[0]


def test_more_dimensions_than_an_index_takes(created):
    store = created("pgvector", dimension=INDEXABLE + 1)
    vectors = np.random.default_rng(0).normal(size=(20, INDEXABLE + 1)).astype(np.float32)
    store.write([Record(str(row), vector, 1.0) for row, vector in enumerate(vectors)])
    assert (store.metric(), store.dimension()) == ("ip", INDEXABLE + 1)
    (answer,) = store.search(vectors[:1], 20)
    assert [int(hit.id) for hit in answer] == np.argsort(-vectors @ vectors[0]).tolist()


def test_more_dimensions_than_a_column_takes(target, opened, xquad):
    store = opened(target("pgvector"))
    with pytest.raises(StoreError, match="16000"):
        store.create(16_001, xquad.stamp("dot"))
    assert not store.exists()


@pytest.mark.parametrize(
    ("column", "index", "metric"),
    [
        ("vector(3)", "vector_cosine_ops", "cosine"),
        ("vector(3)", "vector_l2_ops", "l2"),
        ("vector(3)", "vector_ip_ops", "ip"),
        ("halfvec(3)", "halfvec_ip_ops", "ip"),
        ("vector(3)", None, "none"),
    ],
)
def test_a_table_made_by_hand(column, index, metric, sql, target, opened):
    sql.execute(f"CREATE TABLE documents (id bigint PRIMARY KEY, vector {column})")
    if index:
        sql.execute(f"CREATE INDEX ON documents USING hnsw (vector {index})")
    sql.execute("INSERT INTO documents VALUES (7, '[1,2,3]'), (8, '[0,0,-1]')")
    sql.execute("COMMENT ON TABLE documents IS 'made by hand'")
    store = opened(target("pgvector"))
    assert (store.exists(), store.metric(), store.dimension(), store.stamp(), store.count()) == (
        (True, metric, 3, None, 2)
    )
    np.testing.assert_array_equal(store.vectors(["8", "7"]), [[0, 0, -1], [1, 2, 3]])
    (answer,) = store.search(np.array([[1, 1, 1]], dtype=np.float32), 10)
    assert [(hit.id, hit.score) for hit in answer] == [("7", 6), ("8", -1)]
    with pytest.raises(StoreError, match="norm"):
        store.write([record("a")])


def test_two_indexes_and_one_is_right(store, sql):
    sql.execute("CREATE INDEX ON documents USING hnsw (vector vector_cosine_ops)")
    assert store.metric() == "ip"
    sql.execute("DROP INDEX documents_vector_idx")
    assert store.metric() == "cosine"


@pytest.mark.parametrize("comment", ["", "null", "[]", "17", '{"offsphere": {}}', '{"other": 1}', "made by hand"])
def test_a_comment_of_somebody_else(comment, store, sql):
    assert store.stamp() is not None
    sql.execute(f"COMMENT ON TABLE documents IS '{comment}'")
    assert store.stamp() is None


@pytest.mark.parametrize("column", ["vector", "real[]", "text"])
def test_a_column_that_is_no_vector_of_one_dimension(column, sql, target, opened):
    sql.execute(f"CREATE TABLE documents (id text PRIMARY KEY, vector {column})")
    with pytest.raises(StoreError, match=r"no column vector of the type vector\(n\)"):
        opened(target("pgvector")).dimension()


def test_what_is_stored(store, sql):
    kept = record("it's", title="T", text="two\nlines", metadata={"year": 2024, "tags": ["ä", None]})
    store.write([kept])
    row = sql.execute("SELECT id, vector::text, norm, title, text, metadata, digest FROM documents").fetchone()
    assert row == (kept.id, "[1,2,3]", 1.0, kept.title, kept.text, kept.metadata, kept.digest)


def test_a_record_that_stays_the_same_is_not_written(store, sql):
    store.write([record("a"), record("b")])
    versions = sql.execute("SELECT id, xmin FROM documents ORDER BY id").fetchall()
    store.write([record("b", text="new"), record("a")])
    again = sql.execute("SELECT id, xmin FROM documents ORDER BY id").fetchall()
    assert again[0] == versions[0]
    assert again[1] != versions[1]


@pytest.mark.parametrize("field", ["id", "title", "text", "metadata"])
def test_nul_is_refused_and_nothing_written(field, store):
    value = {"a": ["x\0"]} if field == "metadata" else "x\0"
    with pytest.raises(StoreError, match=r"document '.*' holds a NUL character"):
        store.write([record("fine"), Record(**{**vars(record("b")), field: value})])
    assert store.count() == 0
    store.write([record("c", metadata={"a": "\\u0000 as six letters"})])
    assert store.count() == 1


def test_ids_that_are_never_there(store):
    store.write([record("a")])
    assert store.digests(["a", "b\0"]).keys() == {"a"}
    store.delete(["b\0"])
    assert store.count() == 1


def test_the_longest_id(store):
    letters = random.Random(0).choices(string.ascii_letters + string.digits, k=LONGEST_ID + 1)
    store.write([record("".join(letters[1:]))])  # incompressible, so that all of it must fit
    with pytest.raises(StoreError, match=f"longer than the {LONGEST_ID} bytes"):
        store.write([record("".join(letters))])
    assert store.count() == 1


def test_the_longest_name(created, target, opened):
    longest = "é" * (LONGEST_NAME // 2)
    created("pgvector", longest)
    assert not opened(target("pgvector", longest[:-1])).exists()
    for name in ("é" * (LONGEST_NAME // 2 + 1), "a\0b"):
        with pytest.raises(StoreError, match="63 bytes without NUL"):
            opened(target("pgvector", name))


def test_a_name_is_never_sql(store, created):
    other = created("pgvector", 'x" ; DROP TABLE documents; --')
    other.write([record("a")])
    assert store.exists()
    assert (other.count(), store.count()) == (1, 0)


def test_a_view_is_no_collection(sql, target, opened, xquad):
    sql.execute("CREATE VIEW documents AS SELECT 1 AS id")
    store = opened(target("pgvector"))
    assert not store.exists()
    with pytest.raises(StoreError, match="already exists"):
        store.create(3, xquad.stamp("dot"))


def test_creating_is_all_or_nothing(sql, target, opened, xquad):
    sql.execute("CREATE ROLE guest LOGIN")
    sql.execute("GRANT ALL ON SCHEMA public TO guest")
    sql.execute("DROP EXTENSION vector")
    at = target("pgvector").replace("//postgres:@", "//guest@")
    assert "//guest@" in at
    store = opened(at)
    with pytest.raises(StoreError, match="have a superuser type CREATE EXTENSION vector"):
        store.create(3, xquad.stamp("dot"))
    assert not store.exists()
    sql.execute("CREATE EXTENSION vector")
    store.create(3, xquad.stamp("dot"))
    store.write([record("a")])
    assert store.count() == 1
    store.close()
    sql.execute("DROP TABLE documents")
    sql.execute("DROP OWNED BY guest")
    sql.execute("DROP ROLE guest")


def test_a_lost_connection_is_reported_and_loses_nothing(store, sql, target, opened):
    store.write([record("a")])
    sql.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'offsphere'")
    with pytest.raises(StoreError, match="PostgreSQL, table 'documents'"):
        store.write([record("b")])
    again = opened(target("pgvector"))
    again.write([record("b")])
    assert again.count() == 2


def test_a_server_that_is_not_there_and_a_password_that_stays_secret():
    with pytest.raises(StoreError, match="connection") as caught:
        open_store("pgvector:postgresql://me:geheim@127.0.0.1:1/db?connect_timeout=2#documents")
    assert "geheim" not in str(caught.value)


def test_further_use_is_an_error(store):
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.count()
