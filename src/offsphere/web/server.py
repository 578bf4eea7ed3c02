"""Serve one index over HTTP, on loopback unless there is a token."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from offsphere.errors import ConfigError, UsageError
from offsphere.web.guard import is_loopback

if TYPE_CHECKING:
    from offsphere.search.index import Index

SECONDS_TO_END = 3
"""What requests in progress have left after Ctrl-C."""


def serve(
    open_index: Callable[[], Index],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    ready: Callable[[str], None],
) -> None:
    """Answer requests until Ctrl-C.

    Args:
        open_index: Opens the index, once the address is ours; it may take a while to load a model.
        host: Name or address to listen on; other than loopback only with a token.
        port: 0 takes a free one.
        token: What requests must carry as ``Authorization: Bearer``.
        ready: Called once with the URL, when requests are answered.

    Raises:
        UsageError: If anybody on the network could ask, the address cannot be used, or fastapi is missing.
        ConfigError: If no header can carry the token.
    """
    _check_access(host, token)
    try:
        import uvicorn

        from offsphere.web.app import create_app
    except ImportError as error:
        raise UsageError("the server needs fastapi and uvicorn; type: pip install 'offsphere[serve]'") from error
    from offsphere.web.explorer import Explorer

    with _bound(host, port) as listener:
        app = create_app(Explorer(open_index()), token)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=SECONDS_TO_END,
            ws="none",
        )
        listener.listen(config.backlog)
        ready(_url(listener, host))
        uvicorn.Server(config).run(sockets=[listener])


def _check_access(host: str, token: str | None) -> None:
    """Refuse to be open to the network without a token."""
    if token is not None and (not token.isascii() or not token.isprintable() or token.split() != [token]):
        raise ConfigError("a token is one or more ASCII letters, digits and signs without spaces")
    if token is None and not is_loopback(host):
        raise UsageError(
            f"everyone who reaches {host} could use this index; give --token TOKEN (or set OFFSPHERE_TOKEN), or leave "
            "--host at 127.0.0.1"
        )


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has the address but does not answer yet, so that nobody waits while the model loads."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host} port {port}: {error}; give another --port, or --port 0 for a free one"
        ) from error
    return listener


def _url(listener: socket.socket, host: str) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}/"
