from __future__ import annotations

import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

DATASETS = Path(__file__).parents[2] / "datasets"
NASTY_ID = "<script>window.hacked=1</script>\"'/☃🙂"
NASTY_TITLE = "<img src=x onerror=\"window.hacked=1\"> zeppelin 'title' & more"
NASTY_TEXT = "\"><script>window.hacked=1</script> the zeppelin's engine </li></ol> & 'quotes'"
LONG_TEXT = "a long story about a zeppelin that never ends " * 4000


@dataclass(frozen=True)
class Answer:
    """What came back over HTTP."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Site:
    """A running server."""

    url: str

    def ask(
        self,
        path: str,
        values: dict[str, Any] | None = None,
        body: Any = None,
        headers: dict[str, str] | None = None,
        method: str | None = None,
    ) -> Answer:
        url = f"{self.url}{path}" + (f"?{urllib.parse.urlencode(values)}" if values else "")
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = {} if data is None else {"Content-Type": "application/json"}
        request = urllib.request.Request(url, data, kind | (headers or {}), method=method)
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return Answer(response.status, response.headers, response.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers, error.read())


@contextmanager
def running(app: Any, port: int = 0) -> Iterator[Site]:
    """A real uvicorn in a thread."""
    import uvicorn

    config = uvicorn.Config(app, port=port, log_level="error", ws="none")
    listener = config.bind_socket()
    listener.listen()  # requests wait until the thread is ready
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield Site(f"http://127.0.0.1:{listener.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def documents() -> list[Any]:
    """150 real paragraphs, and some that try to break a page."""
    from offsphere.data.documents import Document, read_documents

    return [
        *islice(read_documents(DATASETS / "xquad_en"), 150),
        Document(NASTY_ID, NASTY_TITLE, NASTY_TEXT, {"kind": "nasty"}),
        Document("long", "", LONG_TEXT, {"kind": "nasty"}),
        Document("empty", "", "", {"kind": "nasty"}),
    ]


@pytest.fixture(scope="session")
def index(documents: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Those documents under qnorm, so that length counts in full."""
    from offsphere.search.index import Index

    made = Index.create(tmp_path_factory.mktemp("web") / "index", "package:wordllama", similarity="qnorm")
    made.add(documents)
    return made


@pytest.fixture(scope="session")
def explorer(index: Any) -> Any:
    from offsphere.web.explorer import Explorer

    return Explorer(index)


@pytest.fixture(scope="session")
def serving() -> Callable[..., Any]:
    """Serves an explorer: ``with serving(explorer, token) as site``."""
    from offsphere.web.app import create_app

    return lambda explorer, token=None, port=0: running(create_app(explorer, token), port)


@pytest.fixture(scope="session")
def site(explorer: Any, serving: Callable[..., Any]) -> Iterator[Site]:
    with serving(explorer) as started:
        yield started


@pytest.fixture(scope="session")
def empty_explorer(index: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from offsphere.search.index import Index
    from offsphere.web.explorer import Explorer

    return Explorer(Index.create(tmp_path_factory.mktemp("web") / "none", "package:wordllama", similarity="dot"))
