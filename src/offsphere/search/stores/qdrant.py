"""Qdrant: a server, or a shard in a folder served by Qdrant's embedded engine.

Both paths share everything but the calls themselves. The embedded engine is Qdrant's own storage and search code, and
every test runs on it. The server path is tested as far as the requests that qdrant-client builds; no server runs in
the tests. The in-process imitation inside qdrant-client is not used: it treats vectors otherwise than a server does.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from offsphere.errors import StoreError
from offsphere.search.stores.changes import replaced
from offsphere.search.stores.engines import MOST_RECORDS, as_json, batches, in_order, reported
from offsphere.search.stores.store import Found, Record, Stamp, checked

METRICS = {"Dot": "ip", "Cosine": "cosine", "Euclid": "l2"}
STAMP = "offsphere"
"""The key of the stamp in a server's collection metadata; with ``.json`` the file beside an embedded shard."""

IDS = uuid.uuid5(uuid.NAMESPACE_DNS, "offsphere")
"""Points are named by integers or UUIDs; a document's point is the UUID that its id has below this one."""

MOST_QUERIES = 256

PointId = int | str | uuid.UUID


@dataclass(frozen=True)
class _Vectors:
    """The one kind of vectors that a collection has: its name ("" where it has none), dimension and distance."""

    name: str
    dimension: int
    distance: str


@dataclass(frozen=True)
class _Point:
    id: str
    payload: dict[str, Any]
    vector: list[float] = field(default_factory=list)
    score: float = 0.0


class _Engine(Protocol):
    """The calls in which a server and the embedded engine differ."""

    def exists(self) -> bool: ...
    def create(self, dimension: int, stamp: dict[str, Any]) -> None: ...
    def vectors(self) -> dict[str, tuple[int, str]]: ...
    def stamp(self) -> dict[str, Any] | None: ...
    def sign(self, stamp: dict[str, Any]) -> None: ...
    def upsert(self, points: list[_Point], name: str) -> None: ...
    def retrieve(self, ids: list[PointId], fields: list[str], name: str | None) -> list[_Point]: ...
    def delete(self, ids: list[PointId]) -> None: ...
    def count(self) -> int: ...
    def query(self, queries: list[list[float]], k: int, name: str) -> list[list[_Point]]: ...
    def close(self) -> None: ...


class QdrantStore:
    """A Qdrant collection of distance Dot, in which a point's payload keeps the id, the text and the raw norm.

    The metadata of a document are payload as they are, so that Qdrant can filter by them. A collection made by hand
    may hold points whose own id, an integer or a UUID, is the document's.

    Searches use the engine's defaults, as any client's would. The embedded engine scans every vector, exactly, until
    somebody calls its ``optimize``.

    Args:
        location: ``http://host:6333`` or ``https://...`` (the key for it in the variable QDRANT_API_KEY), or a folder.
        collection: Its name; in a folder, the folder below it in which the shard lies.

    Raises:
        StoreError: If the collection's name cannot be used.
    """

    kind = "qdrant"

    def __init__(self, location: str, collection: str) -> None:
        self._target = f"qdrant:{location}#{collection}"
        if not collection or "/" in collection or "\\" in collection or collection.startswith("."):
            raise StoreError(
                f"{collection!r} cannot name a Qdrant collection: it must not be empty, start with a dot, or hold "
                f"a slash; type a name such as qdrant:{location}#documents"
            )
        served = location.startswith(("http://", "https://"))
        self._engine: _Engine = _Server(location, collection) if served else _Shard(Path(location), collection)

    def exists(self) -> bool:
        """Whether the collection is there."""
        with reported(self._target):
            return self._engine.exists()

    def create(self, dimension: int, stamp: Stamp) -> None:
        """Make an empty collection of distance Dot.

        Raises:
            StoreError: If it is there already, or the server keeps no metadata of collections.
        """
        if self.exists():
            raise StoreError(f"{self._target} exists already; name another collection")
        with reported(self._target):
            self._engine.create(dimension, stamp.to_dict())
            if self._engine.stamp() is None:
                raise StoreError(
                    f"{self._target}: this server keeps no metadata of collections, so that nobody could tell which "
                    "model filled it; upgrade Qdrant, delete the empty collection and export again"
                )

    def metric(self) -> str:
        """``ip`` for Dot, ``cosine`` and ``l2`` for Cosine and Euclid, else Qdrant's own word."""
        distance = self._vectors().distance
        return METRICS.get(distance, distance.lower())

    def dimension(self) -> int:
        """Of the live collection's vectors."""
        return self._vectors().dimension

    def stamp(self) -> Stamp | None:
        """Which model wrote the live collection; None where nobody said so."""
        with reported(self._target):
            stored = self._engine.stamp()
            return None if stored is None else Stamp.from_dict(stored)

    def sign(self, stamp: Stamp) -> None:
        """Note the stamp beside what the collection's metadata say."""
        with reported(self._target):
            self._engine.sign(stamp.to_dict())

    def digests(self, ids: Sequence[str]) -> dict[str, str]:
        """The digests of those documents that are stored."""
        with reported(self._target):
            points = (point for some in _some(ids) for point in self._engine.retrieve(some, ["id", "digest"], None))
            return {point.payload["id"]: point.payload["digest"] for point in points}

    def write(self, records: Sequence[Record]) -> None:
        """Insert or replace, durable once this returns; writing the same records twice changes nothing.

        Raises:
            StoreError: If a record cannot be stored; names its id.
        """
        vectors = self._vectors()
        rows = checked(records, vectors.dimension).tolist()
        points = {record.id: _as_point(record, row, self._target) for record, row in zip(records, rows, strict=True)}
        with reported(self._target):
            for batch in batches(records):
                self._engine.upsert([points[record.id] for record in batch], vectors.name)

    def delete(self, ids: Iterable[str]) -> None:
        """Remove those that are there."""
        with reported(self._target):
            for some in _some(list(ids)):
                self._engine.delete(some)

    def count(self) -> int:
        """Documents stored."""
        with reported(self._target):
            return self._engine.count()

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        """(len(ids), n) float32 as stored now.

        Raises:
            StoreError: If an id is not there.
        """
        name = self._vectors().name
        found: dict[str, list[float]] = {}
        with reported(self._target):
            for some in _some(ids):
                for point in self._engine.retrieve(some, ["id"], name):
                    found[point.payload["id"]] = point.vector
            own = {_own_id(identifier) for identifier in ids if identifier not in found} - {None}
            for point in self._engine.retrieve([i for i in own if i is not None], [], name) if own else []:
                found[point.id] = point.vector
        return in_order(ids, found, self._target)

    def search(self, queries: np.ndarray, k: int) -> list[list[Found]]:
        """The k best documents of each prepared query (Q, n), best first; a score is the inner product itself."""
        name = self._vectors().name
        answers: list[list[Found]] = []
        with reported(self._target):
            for start in range(0, len(queries), MOST_QUERIES):
                some = np.asarray(queries[start : start + MOST_QUERIES], np.float32).tolist()
                for points in self._engine.query(some, k, name):
                    answers.append([Found(point.payload.get("id", point.id), point.score) for point in points])
        return answers

    def close(self) -> None:
        """Release files and connections; further use is an error."""
        self._engine.close()

    def _vectors(self) -> _Vectors:
        with reported(self._target):
            kinds = self._engine.vectors()
        if len(kinds) != 1:
            names = ", ".join(map(repr, sorted(kinds))) or "none"
            raise StoreError(
                f"{self._target} must hold one kind of dense vectors, found {names}; name another collection"
            )
        [(name, (dimension, distance))] = kinds.items()
        return _Vectors(name, dimension, distance)


class _Shard:
    """The embedded engine on a folder. A shard belongs to one process at a time."""

    def __init__(self, folder: Path, collection: str) -> None:
        import qdrant_edge

        self._edge = qdrant_edge
        self._folder = folder / collection
        self._shard: Any = None
        self._closed = False

    def exists(self) -> bool:
        return (self._folder / "segments").is_dir()

    def create(self, dimension: int, stamp: dict[str, Any]) -> None:
        # Built under another name: a shard without its stamp is never seen.
        building = self._folder.with_name(f".{self._folder.name}.{os.getpid()}")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        vectors = self._edge.EdgeVectorParams(size=dimension, distance=self._edge.Distance.Dot)
        self._edge.EdgeShard.create(str(building), self._edge.EdgeConfig(vectors=vectors)).close()
        _write_stamp(building, stamp)
        building.rename(self._folder)

    def vectors(self) -> dict[str, tuple[int, str]]:
        self._open()  # the engine writes the file where it is missing
        stored = json.loads((self._folder / "edge_config.json").read_text(encoding="utf-8"))
        return {name: (each["size"], each["distance"]) for name, each in stored["vectors"].items()}

    def stamp(self) -> dict[str, Any] | None:
        path = self._folder / f"{STAMP}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def sign(self, stamp: dict[str, Any]) -> None:
        _write_stamp(self._folder, stamp)

    def upsert(self, points: list[_Point], name: str) -> None:
        written = [
            self._edge.Point(point.id, {name: point.vector} if name else point.vector, point.payload)
            for point in points
        ]
        shard = self._open()
        shard.update(self._edge.UpdateOperation.upsert_points(written))
        shard.flush()

    def retrieve(self, ids: list[PointId], fields: list[str], name: str | None) -> list[_Point]:
        found = self._open().retrieve(ids, with_payload=fields, with_vector=name is not None)
        return [_Point(str(each.id), each.payload or {}, _named(each.vector, name)) for each in found]

    def delete(self, ids: list[PointId]) -> None:
        shard = self._open()
        shard.update(self._edge.UpdateOperation.delete_points(ids))
        shard.flush()

    def count(self) -> int:
        return self._open().count(self._edge.CountRequest(exact=True))

    def query(self, queries: list[list[float]], k: int, name: str) -> list[list[_Point]]:
        requests = [
            self._edge.QueryRequest(
                limit=k, query=self._edge.Query.Nearest(query, using=name or None), with_payload=["id"]
            )
            for query in queries
        ]
        answers = self._open().query_batch(self._edge.QueryBatchRequest(requests))
        return [[_Point(str(each.id), each.payload or {}, score=each.score) for each in one] for one in answers]

    def close(self) -> None:
        self._closed = True
        if self._shard is not None:
            self._shard.close()
            self._shard = None

    def _open(self) -> Any:
        if self._closed:
            raise StoreError("this store is closed")
        if not self.exists():
            raise StoreError(f"{self._folder} holds no Qdrant shard; export to it first")
        if self._shard is None:
            try:
                self._shard = self._edge.EdgeShard.load(str(self._folder))
            except Exception as error:  # the engine has no class of its own for a lock
                if "WouldBlock" in str(error):
                    raise StoreError(f"{self._folder} is open elsewhere; close that and try again") from None
                raise
        return self._shard


class _Server:
    """A server, through qdrant-client."""

    def __init__(self, url: str, collection: str) -> None:
        from qdrant_client import QdrantClient, models

        self._models = models
        self._collection = collection
        # Comparing versions would ask the server before anything is wanted of it, and only warn.
        self._client = QdrantClient(url=url, api_key=os.environ.get("QDRANT_API_KEY"), check_compatibility=False)

    def exists(self) -> bool:
        return self._client.collection_exists(self._collection)

    def create(self, dimension: int, stamp: dict[str, Any]) -> None:
        vectors = self._models.VectorParams(size=dimension, distance=self._models.Distance.DOT)
        self._client.create_collection(self._collection, vectors_config=vectors, metadata={STAMP: stamp})

    def vectors(self) -> dict[str, tuple[int, str]]:
        kinds = self._configuration().params.vectors or {}
        named = kinds if isinstance(kinds, dict) else {"": kinds}
        return {name: (each.size, each.distance.value) for name, each in named.items()}

    def stamp(self) -> dict[str, Any] | None:
        return (self._configuration().metadata or {}).get(STAMP)

    def sign(self, stamp: dict[str, Any]) -> None:
        said = self._configuration().metadata or {}
        self._client.update_collection(self._collection, metadata={**said, STAMP: stamp})

    def upsert(self, points: list[_Point], name: str) -> None:
        written = [
            self._models.PointStruct(
                id=point.id, vector={name: point.vector} if name else point.vector, payload=point.payload
            )
            for point in points
        ]
        self._client.upsert(self._collection, written, wait=True)

    def retrieve(self, ids: list[PointId], fields: list[str], name: str | None) -> list[_Point]:
        found = self._client.retrieve(self._collection, ids, with_payload=fields, with_vectors=name is not None)
        return [_Point(str(each.id), each.payload or {}, _named(each.vector, name)) for each in found]

    def delete(self, ids: list[PointId]) -> None:
        self._client.delete(self._collection, self._models.PointIdsList(points=ids), wait=True)

    def count(self) -> int:
        return self._client.count(self._collection, exact=True).count

    def query(self, queries: list[list[float]], k: int, name: str) -> list[list[_Point]]:
        requests = [
            self._models.QueryRequest(query=query, using=name or None, limit=k, with_payload=["id"])
            for query in queries
        ]
        answers = self._client.query_batch_points(self._collection, requests)
        return [[_Point(str(each.id), each.payload or {}, score=each.score) for each in one.points] for one in answers]

    def close(self) -> None:
        self._client.close()

    def _configuration(self) -> Any:
        from qdrant_client.http.exceptions import UnexpectedResponse

        try:
            return self._client.get_collection(self._collection).config
        except UnexpectedResponse as error:
            if error.status_code == 404:
                raise StoreError(f"{self._collection!r} does not exist on this server; export to it first") from None
            raise


def _write_stamp(folder: Path, stamp: dict[str, Any]) -> None:
    with replaced(folder / f"{STAMP}.json") as temporary:
        temporary.write_text(json.dumps(stamp), encoding="utf-8")


def _point_id(identifier: str) -> str:
    return str(uuid.uuid5(IDS, identifier))


def _own_id(identifier: str) -> str | int | None:
    """The id as Qdrant's own, where it is an integer or a UUID."""
    if identifier.isascii() and identifier.isdigit() and int(identifier) < 2**64:
        return int(identifier)
    try:
        return str(uuid.UUID(identifier))
    except ValueError:
        return None


def _some(ids: Sequence[str]) -> Iterator[list[PointId]]:
    """The ids of points for those of documents, as many at a time as one request may ask for."""
    for start in range(0, len(ids), MOST_RECORDS):
        yield [_point_id(identifier) for identifier in ids[start : start + MOST_RECORDS]]


def _as_point(record: Record, vector: list[float], target: str) -> _Point:
    def exact(digits: str) -> int:
        if not -(2**63) <= int(digits) < 2**64:
            raise StoreError(
                f"{target}: the metadata of {record.id!r} hold {digits}, which Qdrant would round; make it a string"
            )
        return int(digits)

    payload = {
        "id": record.id,
        "title": record.title,
        "text": record.text,
        "metadata": json.loads(as_json(record), parse_int=exact),
        "norm": float(record.norm),
        "digest": record.digest,
    }
    return _Point(_point_id(record.id), payload, vector)


def _named(vector: Any, name: str | None) -> list[float]:
    return vector[name] if isinstance(vector, dict) else vector or []
