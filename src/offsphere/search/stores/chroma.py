"""Chroma: a server, or a folder with the database in this process, through the same client."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from offsphere.errors import StoreError
from offsphere.search.stores.engines import MOST_RECORDS, as_json, batches, in_order, reported
from offsphere.search.stores.store import Found, Record, Stamp, checked

STAMP = "offsphere"
DIMENSION = "dimension"
"""Keys of the collection's metadata: the stamp as JSON, and the dimension, which Chroma fixes with the first vector."""

HNSW = {"space": "ip", "max_neighbors": 64, "ef_construction": 400, "ef_search": 400}
"""The graph that is built. With Chroma's own 16, 100 and 100, a tenth of a collection and more is never reached where
lengths vary: 273 and 544 of 3,000 vectors with lognormal lengths of sigma 0.5 and 1, against 0 and 2 with these."""

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{1,510}[a-zA-Z0-9]", re.ASCII)


class ChromaStore:
    """A Chroma collection of space ``ip``; Chroma's distance 1 - q . d is turned back into q . d.

    Chroma searches a graph, so answers are approximate. The graph is built larger than Chroma's default, and
    ``verify`` measures what it finds. The distance is a float32, so inner products below 1e-5 lose digits.

    The text is the document; the norm, the title, the digest, and the document's metadata as one JSON string are the
    metadata, which Chroma wants flat.

    Args:
        location: ``http://host:8000`` (the token for it in the variable CHROMA_API_KEY), or a folder.
        collection: 3 to 512 of the characters a-z, A-Z, 0-9, dot, underscore and hyphen.

    Raises:
        StoreError: If the collection's name cannot be used.
    """

    kind = "chroma"

    def __init__(self, location: str, collection: str) -> None:
        self._target = f"chroma:{location}#{collection}"
        if not _NAME.fullmatch(collection) or ".." in collection or _is_address(collection):
            raise StoreError(
                f"{collection!r} cannot name a Chroma collection: it has 3 to 512 of the characters a-z, A-Z, 0-9, "
                "dot, underscore and hyphen, starts and ends with a letter or digit, has no two dots in a row, and is "
                f"no IP address; type a name such as chroma:{location}#documents"
            )
        # Imported here, so that a missing package is told of when the store is opened.
        import chromadb  # noqa: F401

        self._location = location
        self._folder = None if location.startswith(("http://", "https://")) else Path(location)
        self._collection = collection
        self._client: Any = None
        self._closed = False

    def exists(self) -> bool:
        """Whether the collection is there; asking does not create the folder."""
        if self._folder is not None and not (self._folder / "chroma.sqlite3").exists():
            return False
        client = self._open()
        with reported(self._target):
            return self._found(client) is not None

    def create(self, dimension: int, stamp: Stamp) -> None:
        """Make an empty collection for the inner product.

        Raises:
            StoreError: If it is there already, or Chroma gave it another space.
        """
        if self.exists():
            raise StoreError(f"{self._target} exists already; name another collection")
        client = self._open()
        with reported(self._target):
            client.create_collection(
                self._collection,
                embedding_function=None,
                configuration={"hnsw": HNSW},
                metadata={STAMP: json.dumps(stamp.to_dict()), DIMENSION: dimension},
            )
        if self.metric() != "ip":
            raise StoreError(f"{self._target}: asked for the space ip, Chroma made {self.metric()}; upgrade Chroma")

    def metric(self) -> str:
        """The space of the live collection: ``ip``, ``cosine`` or ``l2``."""
        configuration = self._live().configuration_json
        return (configuration.get("hnsw") or configuration.get("spann") or {}).get("space", "unknown")

    def dimension(self) -> int:
        """Of the live collection's vectors.

        Raises:
            StoreError: If it is empty and was not made by ``create``, so that any dimension would do.
        """
        collection = self._live()
        with reported(self._target):
            stored = collection.get(limit=1, include=["embeddings"])["embeddings"]
            if len(stored):
                return len(stored[0])
        if DIMENSION in (collection.metadata or {}):
            return collection.metadata[DIMENSION]
        raise StoreError(f"{self._target} is empty, and Chroma has fixed no dimension for it; name another collection")

    def stamp(self) -> Stamp | None:
        """Which model wrote the live collection; None where nobody said so."""
        stored = (self._live().metadata or {}).get(STAMP)
        return None if stored is None else Stamp.from_dict(json.loads(stored))

    def sign(self, stamp: Stamp) -> None:
        """Note the stamp among the metadata of the collection."""
        collection = self._live()
        # Settings of the graph that old versions kept there are in the configuration now, and refused here.
        said = {name: value for name, value in (collection.metadata or {}).items() if not name.startswith("hnsw:")}
        with reported(self._target):
            collection.modify(metadata={**said, STAMP: json.dumps(stamp.to_dict())})

    def digests(self, ids: Sequence[str]) -> dict[str, str]:
        """The digests of those documents that are stored."""
        return {
            identifier: metadata["digest"]
            for identifier, metadata in self._get(ids, "metadatas").items()
            if metadata and "digest" in metadata
        }

    def write(self, records: Sequence[Record]) -> None:
        """Insert or replace, durable once this returns; writing the same records twice changes nothing.

        Raises:
            StoreError: If a record cannot be stored; names its id.
        """
        rows = dict(zip((record.id for record in records), checked(records, self.dimension()), strict=True))
        collection = self._live()
        with reported(self._target):
            for batch in batches(records, min(MOST_RECORDS, self._open().get_max_batch_size())):
                collection.upsert(
                    ids=[record.id for record in batch],
                    embeddings=np.stack([rows[record.id] for record in batch]),
                    documents=[record.text for record in batch],
                    metadatas=[_as_metadata(record) for record in batch],
                )

    def delete(self, ids: Iterable[str]) -> None:
        """Remove those that are there."""
        # Chroma refuses the empty id, which no document has.
        names = [identifier for identifier in dict.fromkeys(ids) if identifier]
        collection = self._live()
        with reported(self._target):
            for start in range(0, len(names), MOST_RECORDS):
                collection.delete(ids=names[start : start + MOST_RECORDS])

    def count(self) -> int:
        """Documents stored."""
        collection = self._live()
        with reported(self._target):
            return collection.count()

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        """(len(ids), n) float32 as stored now.

        Raises:
            StoreError: If an id is not there.
        """
        return in_order(ids, self._get(ids, "embeddings"), self._target)

    def search(self, queries: np.ndarray, k: int) -> list[list[Found]]:
        """The k best documents of each prepared query (Q, n), best first; a score is 1 - distance in the space ip.

        In a collection of another space, a score is minus the distance, so that the best are first there too.
        """
        collection = self._live()
        offset = 1.0 if self.metric() in ("ip", "cosine") else 0.0
        if not len(queries):
            return []
        with reported(self._target):
            answer = collection.query(
                query_embeddings=np.asarray(queries, np.float32), n_results=k, include=["distances"]
            )
        return [
            [Found(identifier, offset - distance) for identifier, distance in zip(*one, strict=True)]
            for one in zip(answer["ids"], answer["distances"], strict=True)
        ]

    def close(self) -> None:
        """Release the folder or the connection; further use is an error."""
        if self._client is not None:
            # chromadb leaves the two sessions of a client of a server to the garbage collector.
            parts = [self._client, getattr(self._client, "_admin_client", None)] if self._folder is None else []
            sessions = [getattr(getattr(part, "_server", None), "_session", None) for part in parts]
            self._client.close()
            self._client = None
            for session in filter(None, sessions):
                session.close()
        self._closed = True

    def _open(self) -> Any:
        if self._closed:
            raise StoreError(f"{self._target}: this store is closed")
        if self._client is None:
            import chromadb
            from chromadb.config import Settings

            with reported(self._target):
                settings = Settings(anonymized_telemetry=False)
                if self._folder is not None:
                    self._client = chromadb.PersistentClient(self._folder, settings=settings)
                else:
                    at = urlsplit(self._location)
                    secure = at.scheme == "https"
                    token = os.environ.get("CHROMA_API_KEY")
                    self._client = chromadb.HttpClient(
                        host=at.hostname or "localhost",
                        port=at.port or (443 if secure else 8000),
                        ssl=secure,
                        headers={"x-chroma-token": token} if token else None,
                        settings=settings,
                    )
        return self._client

    def _found(self, client: Any) -> Any | None:
        from chromadb.errors import NotFoundError

        with suppress(NotFoundError):
            return client.get_collection(self._collection, embedding_function=None)
        return None

    def _live(self) -> Any:
        client = self._open()
        with reported(self._target):
            collection = self._found(client)
        if collection is None:
            raise StoreError(f"{self._target} does not exist; export to it first")
        return collection

    def _get(self, ids: Sequence[str], what: str) -> dict[str, Any]:
        """One part of those documents that are there, by id."""
        names = [identifier for identifier in dict.fromkeys(ids) if identifier]
        collection = self._live()
        found: dict[str, Any] = {}
        with reported(self._target):
            for start in range(0, len(names), MOST_RECORDS):
                part = collection.get(ids=names[start : start + MOST_RECORDS], include=[what])
                found.update(zip(part["ids"], part[what], strict=True))
        return found


def _as_metadata(record: Record) -> dict[str, str | float]:
    return {
        "norm": float(record.norm),
        "title": record.title,
        "metadata": as_json(record),
        "digest": record.digest,
    }


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        ipaddress.IPv4Address(name)
        return True
    return False
