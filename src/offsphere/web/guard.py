"""What stands before the application: who may ask, how much they may send, and what a browser may do with the page."""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_LIMIT = 2 * 2**20
"""Bytes of a request body."""
PUBLIC = ("/", "/docs", "/healthz")
"""Open without a token: none of them says anything about the index."""
PAGE = "/page/"
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def is_loopback(host: str) -> bool:
    """Whether this name or address can be reached from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware that answers in place of the application where a request may not pass.

    With a token, everything but the page's own files wants it. Without one the server is bound to loopback, and the
    danger is a web page that the user has open elsewhere: its requests come under another host name (DNS rebinding)
    or from another origin, and both are refused.

    Args:
        app: The application.
        token: What ``Authorization: Bearer`` must carry; None on loopback.
    """

    def __init__(self, app: App, token: str | None = None):
        self._app = app
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it with a status and a reason in JSON."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if refused := self._refusal(scope, headers):
            await _answer(with_headers, *refused)
            return
        body = await _read(receive)
        if body is None:
            await _answer(
                with_headers, 413, f"the body is larger than {BODY_LIMIT:,} bytes; send fewer or shorter texts"
            )
            return
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> MutableMapping[str, Any]:
            return unread.pop() if unread else await receive()

        await self._app(scope, replay, with_headers)

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        if self._token is not None:
            if scope["path"] in PUBLIC or scope["path"].startswith(PAGE):
                return None
            scheme, _, given = headers.get("authorization", "").partition(" ")
            if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._token):
                return None
            return 401, "this server wants its token; send the header `Authorization: Bearer TOKEN`"
        host = headers.get("host", "")
        if not is_loopback(_hostname(host)):
            return 421, (
                f"this server answers as localhost or 127.0.0.1 only, and was asked as {host!r}; "
                "start it with --token to use it under another name"
            )
        origin = headers.get("origin")
        elsewhere = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return 403, f"pages from {origin} may not use this server"
        if elsewhere and headers.get("sec-fetch-mode") != "navigate":
            return 403, "pages from other sites may not use this server"
        return None


def _hostname(host: str) -> str:
    """The name in a Host header, without port and brackets; empty where it makes no sense."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


async def _read(receive: Receive) -> bytes | None:
    """The body, or None where it is too large.

    A body somewhat too large is read to its end and dropped, because a client still sending would not see the answer.
    """
    parts: list[bytes] = []
    size, more = 0, True
    while more and size <= 8 * BODY_LIMIT:
        message = await receive()
        part = message.get("body", b"")
        size += len(part)
        if size <= BODY_LIMIT:
            parts.append(part)
        more = message["type"] == "http.request" and message.get("more_body", False)
    return b"".join(parts) if size <= BODY_LIMIT else None


async def _answer(send: Send, status: int, detail: str) -> None:
    headers = [(b"content-type", b"application/json")]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"detail": detail}).encode()})
