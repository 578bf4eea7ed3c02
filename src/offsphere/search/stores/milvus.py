"""Milvus: a server, or a milvus-lite file, through the same client."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offsphere.errors import StoreError
from offsphere.search.stores.engines import MOST_RECORDS, as_json, batches, in_order, reported
from offsphere.search.stores.store import Found, Record, Stamp, checked

METRICS = {"IP": "ip", "COSINE": "cosine", "L2": "l2"}
STAMP = "offsphere.stamp"
"""The property of a collection that holds the stamp."""

MOST_TEXT = 65_535
"""Bytes of UTF-8 in a VARCHAR field, the most that Milvus allows; a JSON field takes about as many."""

MOST_QUERIES = 1000

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}", re.ASCII)
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})
_files: Counter[Path] = Counter()
"""How many stores of this process use a milvus-lite file: they share one engine, and the last one stops it."""


@dataclass(frozen=True)
class _Layout:
    """Where a collection keeps ids and vectors; one made by hand has names of its own."""

    id: str
    id_is_text: bool
    vector: str
    dimension: int


class MilvusStore:
    """A Milvus collection of metric IP with a FLAT index, whose answers are exact.

    Titles and texts are VARCHAR fields, metadata a JSON field, so that Milvus can filter by them. A collection made
    by hand may name its fields otherwise and may number its documents.

    Args:
        location: ``http://host:19530`` (the token for it in the variable MILVUS_TOKEN), or a file ``NAME.db``.
        collection: ASCII letters, digits and underscores, not starting with a digit, 255 at most.

    Raises:
        StoreError: If the collection's or the file's name cannot be used.
    """

    kind = "milvus"

    def __init__(self, location: str, collection: str) -> None:
        self._target = f"milvus:{location}#{collection}"
        if not _NAME.fullmatch(collection):
            raise StoreError(
                f"{collection!r} cannot name a Milvus collection: it may hold the letters a-z and A-Z, digits and "
                f"underscores, must not start with a digit, and has 255 characters at most; "
                f"type a name such as milvus:{location}#documents"
            )
        served = location.startswith(("http://", "https://"))
        if not served and not location.endswith(".db"):
            raise StoreError(
                f"{location!r} is neither a Milvus server (http://host:19530) nor a milvus-lite file; "
                "the name of a file must end in .db"
            )
        # Imported here, so that a missing package is told of when the store is opened.
        import pymilvus  # noqa: F401

        if not served:
            import milvus_lite  # noqa: F401
        self._location = location
        self._file = None if served else Path(location).resolve()
        self._collection = collection
        self._client: Any = None
        self._loaded = False
        self._closed = False

    def exists(self) -> bool:
        """Whether the collection is there; asking does not create the file."""
        if self._file is not None and not self._file.exists():
            return False
        with self._asking() as client:
            return client.has_collection(self._collection)

    def create(self, dimension: int, stamp: Stamp) -> None:
        """Make an empty collection for the inner product.

        Raises:
            StoreError: If it is there already.
        """
        if self.exists():
            raise StoreError(f"{self._target} exists already; name another collection")
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._asking() as client:
            from pymilvus import DataType

            schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
            schema.add_field("id", DataType.VARCHAR, is_primary=True, max_length=MOST_TEXT)
            schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dimension)
            schema.add_field("norm", DataType.DOUBLE)
            schema.add_field("title", DataType.VARCHAR, max_length=MOST_TEXT)
            schema.add_field("text", DataType.VARCHAR, max_length=MOST_TEXT)
            schema.add_field("metadata", DataType.JSON)
            schema.add_field("digest", DataType.VARCHAR, max_length=32)
            index = client.prepare_index_params()
            index.add_index("vector", index_type="FLAT", metric_type="IP")
            client.create_collection(
                self._collection,
                schema=schema,
                index_params=index,
                properties={STAMP: json.dumps(stamp.to_dict())},
                consistency_level="Strong",
            )

    def metric(self) -> str:
        """The metric of the live index: ``ip``, ``cosine``, ``l2``, or Milvus' own word.

        Raises:
            StoreError: If the vectors have no index, so that no metric is fixed.
        """
        vector = self._layout().vector
        with self._asking() as client:
            for name in client.list_indexes(self._collection):
                index = client.describe_index(self._collection, name)
                if index["field_name"] == vector:
                    return METRICS.get(index["metric_type"], index["metric_type"].lower())
        raise StoreError(f"{self._target} has no index on {vector!r}, which fixes the metric; create one of metric IP")

    def dimension(self) -> int:
        """Of the live collection's vectors."""
        return self._layout().dimension

    def stamp(self) -> Stamp | None:
        """Which model wrote the live collection; None where nobody said so."""
        with self._asking() as client:
            stored = client.describe_collection(self._collection).get("properties", {}).get(STAMP)
        return None if stored is None else Stamp.from_dict(json.loads(stored))

    def sign(self, stamp: Stamp) -> None:
        """Note the stamp among the properties of the collection."""
        with self._asking() as client:
            client.alter_collection_properties(self._collection, properties={STAMP: json.dumps(stamp.to_dict())})

    def digests(self, ids: Sequence[str]) -> dict[str, str]:
        """The digests of those documents that are stored."""
        layout = self._layout()
        rows = self._rows(layout, ids, "digest")  # a collection made by hand has no such field
        return {str(row[layout.id]): row["digest"] for row in rows if "digest" in row}

    def write(self, records: Sequence[Record]) -> None:
        """Insert or replace; what was written survives the end of this process, however it ends.

        Raises:
            StoreError: If a text has more than 65,535 bytes, or a record cannot be stored otherwise; names its id.
        """
        rows = dict(zip((record.id for record in records), checked(records, self.dimension()).tolist(), strict=True))
        for record in records:
            for what, text in (("id", record.id), ("title", record.title), ("text", record.text)):
                self._check_length(record, what, text)
            self._check_length(record, "metadata", as_json(record))
        with self._asking() as client:
            for batch in batches(records):
                client.upsert(self._collection, [_as_row(record, rows[record.id]) for record in batch])

    def delete(self, ids: Iterable[str]) -> None:
        """Remove those that are there."""
        layout = self._layout()
        with self._asking() as client:
            for condition in _conditions(layout, list(ids)):
                client.delete(self._collection, filter=condition)

    def count(self) -> int:
        """Documents stored."""
        with self._asking(loaded=True) as client:
            [row] = client.query(self._collection, filter="", output_fields=["count(*)"], consistency_level="Strong")
            return row["count(*)"]

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        """(len(ids), n) float32 as stored now.

        Raises:
            StoreError: If an id is not there.
        """
        layout = self._layout()
        found = {str(row[layout.id]): row[layout.vector] for row in self._rows(layout, ids, layout.vector)}
        return in_order(ids, found, self._target)

    def search(self, queries: np.ndarray, k: int) -> list[list[Found]]:
        """The k best documents of each prepared query (Q, n), best first; a score is the inner product itself."""
        layout = self._layout()
        if queries.shape[1:] != (layout.dimension,):
            raise StoreError(
                f"{self._target} holds vectors of {layout.dimension} dimensions, found queries of shape {queries.shape}"
            )
        answers: list[list[Found]] = []
        with self._asking(loaded=True) as client:
            for start in range(0, len(queries), MOST_QUERIES):
                some = np.asarray(queries[start : start + MOST_QUERIES], np.float32).tolist()
                for hits in client.search(
                    self._collection,
                    some,
                    anns_field=layout.vector,
                    limit=k,
                    output_fields=[layout.id],
                    consistency_level="Strong",
                ):
                    answers.append([Found(str(hit.id), hit.distance) for hit in hits])
        return answers

    def close(self) -> None:
        """Release the file or the connection; further use is an error."""
        if self._client is not None:
            self._client.close()
            self._client = None
            if self._file is not None:
                _release(self._file)
        self._closed = True

    @contextmanager
    def _asking(self, loaded: bool = False) -> Iterator[Any]:
        """The client, made when it is first needed, with its errors as StoreErrors and its log of them silent."""
        if self._closed:
            raise StoreError(f"{self._target}: this store is closed")
        with _silent_logs(), reported(self._target):
            if self._client is None:
                self._client = self._connect()
            if loaded and not self._loaded:
                self._client.load_collection(self._collection)  # a server searches what it has in memory
                self._loaded = True
            yield self._client

    def _connect(self) -> Any:
        from pymilvus import MilvusClient
        from pymilvus.exceptions import ConnectionConfigException

        if self._file is None:
            return MilvusClient(uri=self._location, token=os.environ.get("MILVUS_TOKEN", ""))
        try:
            client = MilvusClient(uri=str(self._file))
        except ConnectionConfigException as error:
            raise StoreError(
                f"{self._file} cannot be opened as a milvus-lite file; if another process has it open, close that and "
                f"try again: {error.message}"
            ) from error
        _files[self._file] += 1
        return client

    def _layout(self) -> _Layout:
        with self._asking() as client:
            from pymilvus import DataType

            fields = client.describe_collection(self._collection)["fields"]
        dense = [field for field in fields if field["type"] == DataType.FLOAT_VECTOR]
        if len(dense) != 1:
            names = ", ".join(repr(field["name"]) for field in dense) or "none"
            raise StoreError(f"{self._target} must hold one field of float vectors, found {names}")
        [identifier] = [field for field in fields if field.get("is_primary")]
        return _Layout(
            identifier["name"],
            identifier["type"] == DataType.VARCHAR,
            dense[0]["name"],
            int(dense[0]["params"]["dim"]),
        )

    def _rows(self, layout: _Layout, ids: Sequence[str], field: str) -> Iterator[dict[str, Any]]:
        with self._asking(loaded=True) as client:
            for condition in _conditions(layout, ids):
                yield from client.query(
                    self._collection,
                    filter=condition,
                    output_fields=[layout.id, field],
                    consistency_level="Strong",
                )

    def _check_length(self, record: Record, what: str, text: str) -> None:
        length = len(text.encode("utf-8"))
        if length > MOST_TEXT:
            raise StoreError(
                f"{self._target}: the {what} of {record.id[:200]!r} has {length} bytes, and Milvus holds {MOST_TEXT} "
                "at most; split the document into passages, or export to another destination"
            )


def _as_row(record: Record, vector: list[float]) -> dict[str, Any]:
    return {
        "id": record.id,
        "vector": vector,
        "norm": float(record.norm),
        "title": record.title,
        "text": record.text,
        "metadata": record.metadata,
        "digest": record.digest,
    }


def _conditions(layout: _Layout, ids: Sequence[str]) -> Iterator[str]:
    """Filter expressions that hold for these ids, as many at a time as one answer may have."""
    literals = [_literal(identifier) for identifier in ids]
    if not layout.id_is_text:
        literals = [identifier for identifier in ids if re.fullmatch(r"-?\d{1,19}", identifier, re.ASCII)]
    for start in range(0, len(literals), MOST_RECORDS):
        yield f"{layout.id} in [{', '.join(literals[start : start + MOST_RECORDS])}]"


def _literal(text: str) -> str:
    """A string as a literal of Milvus' filter language, whose escapes are fewer than those of JSON."""
    return f'"{text.translate(_ESCAPES)}"'


def _release(file: Path) -> None:
    from milvus_lite.server_manager import server_manager_instance

    _files[file] -= 1
    if not _files[file]:
        server_manager_instance.release_server(str(file))


@contextmanager
def _silent_logs() -> Iterator[None]:
    """A context in which client and engine do not print the errors that they also raise."""
    loggers = [logging.getLogger(name) for name in ("pymilvus", "milvus_lite", "grpc._server")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
