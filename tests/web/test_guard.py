"""Who may ask: token, host, origin, size; over a real server."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from offsphere.web.guard import BODY_LIMIT, is_loopback

TOKEN = "open-sesame-9"
CLOSED = ["/index", "/search?query=tide", "/explore?query=tide&gamma_d=0", "/documents?id=long", "/openapi.json"]
OPEN = ["/", "/docs", "/healthz", "/page/explorer.js", "/page/explorer.css", "/page/docs.js"]


@pytest.fixture(scope="module")
def locked(explorer: Any, serving: Callable[..., Any]) -> Iterator[Any]:
    with serving(explorer, TOKEN) as started:
        yield started


@pytest.mark.parametrize("path", OPEN)
def test_page_and_health_are_open(locked: Any, path: str) -> None:
    assert locked.ask(path).status == 200


@pytest.mark.parametrize("path", [*CLOSED, "/page", "/nothing", "//index", "/healthz/x"])
def test_everything_else_wants_the_token(locked: Any, path: str) -> None:
    answer = locked.ask(path)
    assert answer.status == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert "Authorization: Bearer" in answer.json["detail"]


@pytest.mark.parametrize("path", CLOSED)
def test_the_token_opens(locked: Any, path: str) -> None:
    assert locked.ask(path, headers={"Authorization": f"Bearer {TOKEN}"}).status == 200
    assert locked.ask(path, headers={"Authorization": f"bearer  {TOKEN} "}).status == 200


@pytest.mark.parametrize(
    "header", ["", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer", "Bearer \xfc\xff"]
)
def test_another_token_does_not(locked: Any, header: str) -> None:
    assert locked.ask("/index", headers={"Authorization": header}).status == 401
    assert locked.ask("/embed", body={"texts": ["a"], "side": "query"}, headers={"Authorization": header}).status == 401


def test_with_a_token_any_host_name_may_be_used(locked: Any) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Host": "search.example.org"}
    assert locked.ask("/index", headers=headers).status == 200


@pytest.mark.parametrize("path", ["/", "/index", "/healthz", "/page/explorer.js", "/search?query=tide"])
@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "10.0.0.1", "[::2]"]
)
def test_another_host_name_is_refused_on_loopback(site: Any, path: str, host: str) -> None:
    answer = site.ask(path, headers={"Host": host})
    assert answer.status == 421
    assert host in answer.json["detail"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1", "127.0.0.1:8000", "[::1]:8000"])
def test_its_own_names_are_not(site: Any, host: str) -> None:
    assert site.ask("/index", headers={"Host": host}).status == 200


def test_a_page_from_elsewhere_is_refused(site: Any) -> None:
    host = urlsplit(site.url).netloc
    own, other = {"Origin": f"http://{host}"}, {"Origin": "https://evil.example"}
    body = {"texts": ["a"], "side": "query"}
    assert site.ask("/embed", body=body, headers=own).status == 200
    assert site.ask("/embed", body=body, headers=other).status == 403
    assert site.ask("/embed", body=body, headers={"Origin": "null"}).status == 403
    assert site.ask("/embed", body=body, headers={"Origin": "http://localhost:1"}).status == 403
    assert site.ask("/index", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}).status == 403
    assert site.ask("/index", headers={"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}).status == 403
    assert site.ask("/index", headers={"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}).status == 200
    assert site.ask("/", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}).status == 200  # a link


def test_no_other_origin_is_ever_allowed_to_read(site: Any) -> None:
    answer = site.ask("/index", headers={"Origin": site.url})
    assert answer.status == 200
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize("size", [BODY_LIMIT + 1, 3 * BODY_LIMIT])
def test_a_large_body_is_refused(site: Any, size: int) -> None:
    answer = site.ask("/embed", body=b" " * size)
    assert answer.status == 413
    assert "2,097,152 bytes" in answer.json["detail"]


def test_a_large_body_in_chunks_is_refused(site: Any) -> None:
    connection = http.client.HTTPConnection(urlsplit(site.url).netloc, timeout=300)
    chunks = (b" " * 65536 for _ in range(BODY_LIMIT // 65536 + 2))
    connection.request("POST", "/embed", chunks, {"Content-Type": "application/json"}, encode_chunked=True)
    with connection.getresponse() as response:
        assert response.status == 413
    connection.close()


def test_a_body_at_the_limit_is_read(site: Any) -> None:
    body = b'{"texts": ["a"], "side": "query"}'
    assert site.ask("/embed", body=body + b" " * (BODY_LIMIT - len(body))).status == 200


@pytest.mark.parametrize("path", ["/", "/docs", "/index", "/page/explorer.js", "/nothing", "/search"])
def test_every_answer_keeps_a_browser_safe(site: Any, path: str) -> None:
    headers = site.ask(path).headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store"


def test_files_outside_the_page_cannot_be_read(site: Any) -> None:
    for path in ("/page/../app.py", "/page/..%2fapp.py", "/page/%2e%2e/app.py", "/page/"):
        assert site.ask(path).status in (404, 405), path


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("LocalHost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("example.org", False),
        ("192.168.1.1", False),
    ],
)
def test_what_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
