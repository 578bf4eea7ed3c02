from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import qdrant_edge as edge

from offsphere.errors import StoreError
from offsphere.search.stores import Record, Stamp
from offsphere.search.stores.qdrant import QdrantStore
from offsphere.similarity import Similarity, norms

STAMP = Stamp(Similarity.parse("dot"), "0123456789abcdef0123456789abcdef", "passage: ")


def vectors(count: int, seed: int = 0, dimension: int = 8) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.normal(size=(count, dimension)) * np.exp(random.normal(size=(count, 1)))).astype(np.float32)


def records(rows: np.ndarray, **fields: Any) -> list[Record]:
    return [Record(f"d{i}", row, float(norms(row)), **fields) for i, row in enumerate(rows)]


def filled(folder: Path, count: int = 20) -> QdrantStore:
    store = QdrantStore(str(folder), "documents")
    store.create(8, STAMP)
    store.write(records(vectors(count), title="A title", text="A text", metadata={"year": 1969}))
    return store


def by_hand(folder: Path, kind: Any, points: list[Any] = ()) -> QdrantStore:
    folder = folder / "by_hand"
    folder.mkdir()
    shard = edge.EdgeShard.create(str(folder), edge.EdgeConfig(vectors=kind))
    shard.update(edge.UpdateOperation.upsert_points(list(points)))
    shard.close()
    return QdrantStore(str(folder.parent), "by_hand")


@pytest.mark.parametrize(
    ("distance", "metric"), [("Dot", "ip"), ("Cosine", "cosine"), ("Euclid", "l2"), ("Manhattan", "manhattan")]
)
def test_the_metric_is_the_live_shards(tmp_path: Path, distance: str, metric: str) -> None:
    store = by_hand(tmp_path, edge.EdgeVectorParams(size=5, distance=getattr(edge.Distance, distance)))
    assert (store.metric(), store.dimension(), store.stamp()) == (metric, 5, None)
    store.close()


def test_cosine_would_have_stored_other_vectors(tmp_path: Path) -> None:
    rows = vectors(6)
    points = [edge.Point(i, row.tolist(), {}) for i, row in enumerate(rows)]
    cosine = by_hand(tmp_path, edge.EdgeVectorParams(size=8, distance=edge.Distance.Cosine), points)
    ids = [str(i) for i in range(6)]  # points made by hand are known by their own ids
    assert np.allclose(norms(cosine.vectors(ids)), 1, atol=1e-5)
    cosine.close()
    ours = filled(tmp_path / "ours", 6)
    assert np.array_equal(ours.vectors([f"d{i}" for i in range(6)]), rows)
    assert norms(rows).std() > 0.5
    ours.close()


def test_points_made_by_hand_are_found_by_integer_and_by_uuid(tmp_path: Path) -> None:
    rows, name = vectors(2), str(uuid.uuid4())
    points = [edge.Point(7, rows[0].tolist(), {}), edge.Point(name, rows[1].tolist(), {"text": "no id here"})]
    store = by_hand(tmp_path, edge.EdgeVectorParams(size=8, distance=edge.Distance.Dot), points)
    assert {found.id for found in store.search(rows[:1], 5)[0]} == {"7", name}
    assert np.array_equal(store.vectors([name, "7"]), rows[::-1])
    assert store.digests(["7", name]) == {}
    with pytest.raises(StoreError, match="holds no document '8', 'nobody'"):
        store.vectors(["7", "8", "nobody"])
    store.close()


def test_one_named_vector_is_enough_and_two_are_refused(tmp_path: Path) -> None:
    kind = edge.EdgeVectorParams(size=8, distance=edge.Distance.Dot)
    store = by_hand(tmp_path, {"text": kind})
    rows = vectors(3)
    store.write(records(rows))
    assert np.array_equal(store.vectors(["d0", "d1", "d2"]), rows)
    assert store.search(rows[:1], 1)[0][0].score == pytest.approx((rows @ rows[0]).max(), rel=1e-5)
    store.close()
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(StoreError, match="one kind of dense vectors, found 'image', 'text'"):
        by_hand(other, {"text": kind, "image": kind}).metric()


def test_the_payload_keeps_what_the_vector_may_have_lost(tmp_path: Path) -> None:
    store = QdrantStore(str(tmp_path), "documents")
    store.create(8, STAMP)
    raw = vectors(1)[0]
    unit = Similarity.parse("cosine").prepare_document(raw[None])[0]
    metadata = {"year": 1969, "tags": ["é", None], "deep": {"a.b": 1.5}}
    record = Record("a/b 😀", unit, float(norms(raw)), "Title", "Text", metadata)
    store.write([record])
    store.close()
    shard = edge.EdgeShard.load(str(tmp_path / "documents"))
    [point], _ = shard.scroll(edge.ScrollRequest(limit=5, with_payload=True, with_vector=True))
    shard.close()
    assert point.payload == {
        "id": "a/b 😀",
        "title": "Title",
        "text": "Text",
        "metadata": metadata,
        "norm": pytest.approx(float(norms(raw))),
        "digest": record.digest,
    }


def test_whole_numbers_that_would_be_rounded_are_refused(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    store.write(records(vectors(1), metadata={"least": -(2**63), "most": 2**64 - 1}))
    with pytest.raises(StoreError, match="'d0' hold 18446744073709551616, which Qdrant would round"):
        store.write(records(vectors(1), metadata={"deep": [{"most": 2**64}]}))
    store.close()


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a\\b"])
def test_names_that_would_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="cannot name a Qdrant collection"):
        QdrantStore(str(tmp_path), name)


def test_a_shard_belongs_to_one_store_at_a_time(tmp_path: Path) -> None:
    store = filled(tmp_path)
    second = QdrantStore(str(tmp_path), "documents")
    with pytest.raises(StoreError, match="is open elsewhere; close that"):
        second.count()
    store.close()
    assert second.count() == 20
    second.close()
    with pytest.raises(StoreError, match="closed"):
        second.count()


def test_several_collections_share_a_folder(tmp_path: Path) -> None:
    stores = [QdrantStore(str(tmp_path), name) for name in ("one", "zwei é 😀")]
    for number, store in enumerate(stores, 1):
        store.create(8, STAMP)
        store.write(records(vectors(number)))
    assert [store.count() for store in stores] == [1, 2]
    for store in stores:
        store.close()


def test_a_collection_without_its_stamp_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = QdrantStore(str(tmp_path), "documents")
    with monkeypatch.context() as stopped:
        stopped.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
        with pytest.raises(StoreError, match="no space left"):
            store.create(8, STAMP)
    assert not store.exists()
    store.create(8, STAMP)
    assert store.stamp() == STAMP
    store.close()


class Routes(BaseHTTPRequestHandler):
    """The REST routes that the store uses, in front of the embedded engine; no server of Qdrant.

    Requests are read with the models that qdrant-client is generated from, which refuse what the API does not know.
    """

    folder: ClassVar[Path]
    keeps_metadata: ClassVar[bool] = True
    open: ClassVar[dict[str, Any]] = {}
    about: ClassVar[dict[str, Any]] = {}
    keys: ClassVar[set[str | None]] = set()

    def do_GET(self) -> None:
        self.answer()

    do_PUT = do_POST = do_PATCH = do_DELETE = do_GET

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.keys.add(self.headers.get("api-key"))
        _, _, name, *rest = map(unquote, urlsplit(self.path).path.split("/"))
        if rest != ["exists"] and self.command != "PUT" and name not in self.open:
            return self.send(404, {"status": {"error": f"Not found: Collection `{name}` doesn't exist!"}})
        result = getattr(self, "_".join([self.command.lower(), *rest]))(name, body)
        self.send(200, {"result": result, "status": "ok", "time": 0.0})

    def send(self, status: int, content: dict[str, Any]) -> None:
        text = json.dumps(content, default=str).encode()  # the engine's ids are UUID objects
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def get_exists(self, name: str, _: bytes) -> Any:
        return {"exists": name in self.open}

    def put(self, name: str, body: bytes) -> Any:
        from qdrant_client.models import CreateCollection

        asked = CreateCollection.model_validate_json(body)
        distance = getattr(edge.Distance, asked.vectors.distance.value)
        at = self.folder / name
        at.mkdir()
        kind = edge.EdgeVectorParams(size=asked.vectors.size, distance=distance)
        self.open[name] = edge.EdgeShard.create(str(at), edge.EdgeConfig(vectors=kind))
        self.about[name] = (asked.vectors, asked.metadata if self.keeps_metadata else None)
        return True

    def patch(self, name: str, body: bytes) -> Any:
        from qdrant_client.models import UpdateCollection

        kind, metadata = self.about[name]
        self.about[name] = (kind, {**(metadata or {}), **UpdateCollection.model_validate_json(body).metadata})
        return True

    def get(self, name: str, _: bytes) -> Any:
        kind, metadata = self.about[name]
        optimizers = {
            "deleted_threshold": 0.2, "vacuum_min_vector_number": 1000, "default_segment_number": 0,
            "flush_interval_sec": 5, "indexing_threshold": 10000,
        }  # fmt: skip
        config = {
            "params": {"vectors": kind.model_dump(mode="json", exclude_none=True)},
            "hnsw_config": {"m": 16, "ef_construct": 100, "full_scan_threshold": 10000},
            "optimizer_config": optimizers,
            "metadata": metadata,
        }
        return {
            "status": "green", "optimizer_status": "ok", "segments_count": 1, "payload_schema": {}, "config": config
        }  # fmt: skip

    def put_points(self, name: str, body: bytes) -> Any:
        from qdrant_client.models import PointsList

        points = [edge.Point(p.id, p.vector, p.payload) for p in PointsList.model_validate_json(body).points]
        self.open[name].update(edge.UpdateOperation.upsert_points(points))
        return {"operation_id": 0, "status": "completed"}

    def post_points(self, name: str, body: bytes) -> Any:
        from qdrant_client.models import PointRequest

        asked = PointRequest.model_validate_json(body)
        found = self.open[name].retrieve(asked.ids, with_payload=asked.with_payload, with_vector=asked.with_vector)
        return [{"id": p.id, "payload": p.payload, "vector": p.vector} for p in found]

    def post_points_delete(self, name: str, body: bytes) -> Any:
        from qdrant_client.models import PointIdsList

        points = PointIdsList.model_validate_json(body).points
        self.open[name].update(edge.UpdateOperation.delete_points(points))
        return {"operation_id": 0, "status": "completed"}

    def post_points_count(self, name: str, body: bytes) -> Any:
        from qdrant_client.models import CountRequest

        assert CountRequest.model_validate_json(body).exact
        return {"count": self.open[name].count(edge.CountRequest(exact=True))}

    def post_points_query_batch(self, name: str, body: bytes) -> Any:
        from qdrant_client.models import QueryRequestBatch

        asked = QueryRequestBatch.model_validate_json(body).searches
        requests = [
            edge.QueryRequest(
                limit=one.limit, query=edge.Query.Nearest(one.query.nearest), with_payload=one.with_payload
            )
            for one in asked
        ]
        answers = self.open[name].query_batch(edge.QueryBatchRequest(requests))
        return [
            {"points": [{"id": p.id, "version": 0, "score": p.score, "payload": p.payload} for p in one]}
            for one in answers
        ]


@pytest.fixture
def routes(tmp_path: Path) -> Iterator[tuple[str, type[Routes]]]:
    class Here(Routes):
        folder = tmp_path
        open: ClassVar[dict[str, Any]] = {}
        about: ClassVar[dict[str, Any]] = {}
        keys: ClassVar[set[str | None]] = set()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Here)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Here
    server.shutdown()
    thread.join()
    server.server_close()
    for shard in Here.open.values():
        shard.close()


def test_requests_to_a_server_do_what_the_embedded_engine_does(routes: tuple[str, type[Routes]]) -> None:
    url, _ = routes
    store = QdrantStore(url, "täst é")
    assert not store.exists()
    with pytest.raises(StoreError, match="'täst é' does not exist on this server; export"):
        store.metric()
    store.create(8, STAMP)
    assert (store.exists(), store.metric(), store.dimension(), store.stamp()) == (True, "ip", 8, STAMP)
    with pytest.raises(StoreError, match="exists already"):
        store.create(8, STAMP)
    rows = vectors(2100)
    documents = records(rows, text="x" * 10_000, metadata={"year": 1969})  # 21 MB, more than one request
    store.write(documents)
    store.write(documents[:3])
    assert store.count() == 2100
    ids = [record.id for record in documents]
    assert np.array_equal(store.vectors(ids[::-1]), rows[::-1])
    assert store.digests([*ids[:2], "nobody"]) == {record.id: record.digest for record in documents[:2]}
    queries = vectors(300, seed=1)
    exact = queries @ rows.T
    for answer, scores in zip(store.search(queries, 10), exact, strict=True):
        assert [found.id for found in answer] == [f"d{i}" for i in np.argsort(-scores)[:10]]
        assert np.allclose([found.score for found in answer], np.sort(scores)[::-1][:10], rtol=1e-4)
    store.delete(["d0", "nobody"])
    assert store.count() == 2099
    other = replace(STAMP, prompt="")
    store.sign(other)
    assert store.stamp() == other
    store.close()


def test_a_server_that_drops_the_stamp_is_refused(routes: tuple[str, type[Routes]]) -> None:
    url, served = routes
    served.keeps_metadata = False
    with pytest.raises(StoreError, match="keeps no metadata of collections"):
        QdrantStore(url, "documents").create(8, STAMP)


@pytest.mark.filterwarnings("ignore:Api key is used with an insecure connection:UserWarning")
def test_the_key_comes_from_the_environment(routes: tuple[str, type[Routes]], monkeypatch: pytest.MonkeyPatch) -> None:
    url, served = routes
    monkeypatch.setenv("QDRANT_API_KEY", "secret")
    QdrantStore(url, "documents").exists()
    assert served.keys == {"secret"}


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(StoreError, match=r"qdrant:http://127\.0\.0\.1:9#documents: .*refused"):
        QdrantStore("http://127.0.0.1:9", "documents").count()
