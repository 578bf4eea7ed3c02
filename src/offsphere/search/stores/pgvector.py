"""A PostgreSQL table with a pgvector column and an HNSW index for the inner product."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from offsphere.errors import StoreError
from offsphere.search.stores.engines import in_order
from offsphere.search.stores.store import Found, Record, Stamp, checked

if TYPE_CHECKING:
    import psycopg
    from psycopg import sql

KEY = "offsphere"
"""Of the notes in the comment of a table."""

INDEXABLE = 2000
"""Dimensions that an HNSW index on the type ``vector`` takes; above, a query reads the whole table and is exact."""

LONGEST_NAME = 63
"""Bytes of a table name; PostgreSQL would cut a longer one without an error."""

LONGEST_ID = 2692
"""Bytes that an entry of the index on ids holds, whatever they are (2704, less its header and the length)."""

CREATE = """
CREATE TABLE {table} (
    id text PRIMARY KEY, vector vector({dimension}) NOT NULL, norm real NOT NULL,
    title text NOT NULL, text text NOT NULL, metadata jsonb NOT NULL, digest text NOT NULL
)
"""
INDEX = "CREATE INDEX ON {table} USING hnsw (vector vector_ip_ops) WITH (m = 16, ef_construction = 128)"
INCOMING = "CREATE TEMPORARY TABLE IF NOT EXISTS offsphere_incoming (LIKE {table}) ON COMMIT DELETE ROWS"
COPY = """
COPY pg_temp.offsphere_incoming (id, vector, norm, title, text, metadata, digest) FROM STDIN (FORMAT BINARY)
"""
# Two processes that write the same ids take them in the same order, or they would lock each other out.
# A row that would stay the same is not written: every new version of it is one more entry in the index.
UPSERT = """
INSERT INTO {table} AS old (id, vector, norm, title, text, metadata, digest)
SELECT id, vector, norm, title, text, metadata, digest FROM pg_temp.offsphere_incoming ORDER BY id
ON CONFLICT (id) DO UPDATE SET vector = excluded.vector, norm = excluded.norm, title = excluded.title,
    text = excluded.text, metadata = excluded.metadata, digest = excluded.digest
WHERE (old.vector, old.norm, old.digest) IS DISTINCT FROM (excluded.vector, excluded.norm, excluded.digest)
"""
# The operator itself must be the order, or no index serves it; it is the negative inner product.
SEARCH = """
SELECT id::text, vector <#> %(query)b::{type} FROM {table} ORDER BY vector <#> %(query)b::{type} LIMIT %(k)s
"""
OPERATOR_CLASSES = """
SELECT opcname FROM pg_index JOIN pg_opclass ON pg_opclass.oid = ANY (indclass::oid[])
WHERE indrelid = %s AND indisvalid AND opcname ~ '^(vector|halfvec)_'
"""
RELATION = "SELECT oid FROM pg_class WHERE oid = to_regclass(%s) AND relkind IN ('r', 'p')"
COLUMN = """
SELECT typname, atttypmod FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid
WHERE attrelid = %s AND attname = 'vector' AND NOT attisdropped
"""


class PgvectorStore:
    """A table with the columns id, vector, norm, title, text, metadata and digest, and the stamp as its comment.

    The score is minus what the operator ``<#>`` gives.

    Args:
        url: ``postgresql://user@host/database``, or any other connection string of libpq.
        name: Of the table, in the first schema of the search path; any characters but NUL, at most 63 bytes.
    """

    kind = "pgvector"

    def __init__(self, url: str, name: str):
        import pgvector.psycopg
        import psycopg

        size = len(name.encode("utf-8", "surrogatepass"))
        if "\0" in name or size > LONGEST_NAME:
            raise StoreError(f"PostgreSQL names a table in at most {LONGEST_NAME} bytes without NUL, found {name!r}")
        self._name = name
        self._register = pgvector.psycopg.register_vector
        self._registered = False
        with self._refusals():
            self._connection = psycopg.connect(url, autocommit=True, application_name="offsphere")

    def exists(self) -> bool:
        """Whether the table is there."""
        return self._relation() is not None

    def create(self, dimension: int, stamp: Stamp) -> None:
        """Make the table, its index (up to 2000 dimensions) and the extension if need be, in one transaction.

        Raises:
            StoreError: If the table is there already, or the server has no pgvector.
        """
        from psycopg import sql

        with self._refusals(), self._connection.transaction():
            # Only a superuser may make the extension; whoever finds it there need not be one.
            if not self._one("SELECT 1 FROM pg_extension WHERE extname = 'vector'"):
                self._connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            self._connection.execute(self._sql(CREATE, dimension=sql.Literal(dimension)))
            if dimension <= INDEXABLE:
                self._connection.execute(self._sql(INDEX))
            self.sign(stamp)

    def metric(self) -> str:
        """Of the index on the vectors; where there is none, ``ip`` in a table of ours and ``none`` in another one."""
        with self._refusals():
            found = self._connection.execute(OPERATOR_CLASSES, [self._there()]).fetchall()
        metrics = [name.split("_")[1] for (name,) in found]
        if metrics:
            return "ip" if "ip" in metrics else str(metrics[0])
        return str(self._notes().get("metric", "none"))

    def dimension(self) -> int:
        """Of the column of vectors."""
        return self._column()[1]

    def stamp(self) -> Stamp | None:
        """Which model wrote the table."""
        stored = self._notes().get("stamp")
        return None if stored is None else Stamp.from_dict(stored)

    def sign(self, stamp: Stamp) -> None:
        """Note the stamp in the comment; a comment that was there is kept beside it."""
        from psycopg import sql

        noted = self._comment() | {KEY: {"metric": "ip", "stamp": stamp.to_dict()}}
        comment = sql.Literal(json.dumps(noted, ensure_ascii=False))
        with self._refusals():
            self._connection.execute(self._sql("COMMENT ON TABLE {table} IS {comment}", comment=comment))

    def digests(self, ids: Sequence[str]) -> dict[str, str]:
        """The digests of those documents that are stored."""
        query = self._sql("SELECT id, digest FROM {table} WHERE id = ANY (%s)")
        with self._refusals():
            return dict(self._connection.execute(query, [_storable(ids)]).fetchall())

    def write(self, records: Sequence[Record]) -> None:
        """Insert or replace, in one transaction.

        Raises:
            StoreError: If PostgreSQL cannot hold a record.
        """
        if not records:
            return
        vectors = checked(records, self.dimension())
        rows = [_row(record, vector) for record, vector in zip(records, vectors, strict=True)]
        with self._refusals(), self._vectors_known().transaction():
            self._connection.execute(self._sql(INCOMING))
            with self._connection.cursor() as cursor:
                with cursor.copy(COPY) as copy:
                    copy.set_types(["text", "vector", "float4", "text", "text", "jsonb", "text"])
                    for row in rows:
                        copy.write_row(row)
                cursor.execute(self._sql(UPSERT))

    def delete(self, ids: Iterable[str]) -> None:
        """Remove those that are there."""
        with self._refusals():
            self._connection.execute(self._sql("DELETE FROM {table} WHERE id = ANY (%s)"), [_storable(ids)])

    def count(self) -> int:
        """Documents stored."""
        with self._refusals():
            return int(self._one(self._sql("SELECT count(*) FROM {table}")))

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        """(len(ids), n) float32 as stored now.

        Raises:
            StoreError: If an id is not there.
        """
        query = self._sql("SELECT id::text, vector FROM {table} WHERE id::text = ANY (%s)")
        with self._refusals():
            stored = dict(self._vectors_known().execute(query, [_storable(ids)], binary=True).fetchall())
        found = {document: vector.to_numpy() for document, vector in stored.items()}
        return in_order(ids, found, f"the table {self._name!r}")

    def search(self, queries: np.ndarray, k: int) -> list[list[Found]]:
        """The k best documents of each prepared query (Q, n), best first, by the index if the planner takes it."""
        from psycopg import sql

        query = self._sql(SEARCH, type=sql.Identifier(self._column()[0]))
        answers = []
        with self._refusals(), self._vectors_known().transaction():
            # A wider search than the default of 40, and one that goes on until k rows are found.
            self._connection.execute("SELECT set_config('hnsw.ef_search', %s, true)", [str(min(1000, max(200, 2 * k)))])
            self._connection.execute("SET LOCAL hnsw.iterative_scan = strict_order")
            for vector in queries.astype(np.float32, copy=False):
                rows = self._connection.execute(query, {"query": vector, "k": k}).fetchall()
                answers.append([Found(document, -negative) for document, negative in rows])
        return answers

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _sql(self, text: str, **parts: sql.Composable) -> sql.Composed:
        from psycopg import sql

        return sql.SQL(text).format(table=sql.Identifier(self._name), **parts)

    def _one(self, query: Any, parameters: Sequence[Any] = ()) -> Any:
        """The first column of the first row, or None."""
        row = self._connection.execute(query, parameters).fetchone()
        return None if row is None else row[0]

    def _relation(self) -> int | None:
        """What the system catalogues call the table."""
        with self._refusals():
            quoted = self._sql("{table}").as_string(self._connection)
            found = self._one(RELATION, [quoted])
        return None if found is None else int(found)

    def _there(self) -> int:
        relation = self._relation()
        if relation is None:
            raise StoreError(f"there is no table {self._name!r} in the database {self._connection.info.dbname!r}")
        return relation

    def _column(self) -> tuple[str, int]:
        """The type and dimension of the column of vectors."""
        with self._refusals():
            found = self._connection.execute(COLUMN, [self._there()]).fetchone()
        if found is None or found[0] not in ("vector", "halfvec") or found[1] < 1:
            raise StoreError(f"the table {self._name!r} has no column vector of the type vector(n) of pgvector")
        return found[0], found[1]

    def _notes(self) -> dict[str, Any]:
        """What ``sign`` noted in the comment; empty where somebody else made the table."""
        noted = self._comment().get(KEY)
        return noted if isinstance(noted, dict) else {}

    def _comment(self) -> dict[str, Any]:
        """The comment of the table; one that is no JSON object is the value of ``comment``."""
        with self._refusals():
            comment = self._one("SELECT obj_description(%s, 'pg_class')", [self._there()])
        try:
            said = json.loads(comment or "{}")
        except ValueError:
            said = None
        return said if isinstance(said, dict) else {"comment": comment}

    def _vectors_known(self) -> psycopg.Connection[Any]:
        """The connection, once it knows the type ``vector``, which exists with the extension only."""
        if not self._registered:
            self._register(self._connection)
            self._registered = True
        return self._connection

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Errors of the server, in its own words and with what to do about the most usual ones."""
        import psycopg
        from psycopg import errors

        advice: dict[type[Exception], str] = {
            errors.DuplicateTable: "choose another name, or delete it first",
            errors.InsufficientPrivilege: "have a superuser type CREATE EXTENSION vector; in that database once",
            errors.FeatureNotSupported: "install pgvector on the server (https://github.com/pgvector/pgvector)",
            errors.UndefinedFile: "install pgvector on the server (https://github.com/pgvector/pgvector)",
        }
        try:
            yield
        except psycopg.Error as error:
            hint = "; ".join(text for kind, text in advice.items() if isinstance(error, kind))
            said = re.sub(r"\s+", " ", str(error)).strip()
            raise StoreError(f"PostgreSQL, table {self._name!r}: {said}" + (f"; {hint}" if hint else "")) from error


def _row(record: Record, vector: np.ndarray) -> tuple[Any, ...]:
    """The values of a record, in the order of ``COPY``."""
    from psycopg.types.json import Jsonb

    escaped = json.dumps(record.metadata).replace("\\\\", "")
    if any("\0" in text for text in (record.id, record.title, record.text)) or "\\u0000" in escaped:
        raise StoreError(f"document {record.id!r} holds a NUL character, which PostgreSQL cannot store; remove it")
    if len(record.id.encode()) > LONGEST_ID:
        raise StoreError(f"the id {record.id[:60]!r}... is longer than the {LONGEST_ID} bytes that PostgreSQL indexes")
    return record.id, vector, record.norm, record.title, record.text, Jsonb(record.metadata), record.digest


def _storable(ids: Iterable[str]) -> list[str]:
    """Those ids that PostgreSQL could hold at all; asking for another one would be an error."""
    return [document for document in ids if "\0" not in document]
