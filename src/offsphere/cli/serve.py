"""``serve``: an index over HTTP, with a page for people."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offsphere.cli.app import Flag, about, app, err, quiet_libraries

if TYPE_CHECKING:
    from offsphere.search.index import Index


@app.command(epilog="Example: offsphere serve runs/index --port 8000")
def serve(
    index: Annotated[Path, typer.Argument(help="folder of an index")],
    host: Annotated[str, Flag(help="address to listen on; beyond this machine only with a token")] = "127.0.0.1",
    port: Annotated[int, Flag(min=0, max=65535, help="0 takes a free one")] = 8000,
    token: Annotated[
        str | None,
        Flag(
            envvar="OFFSPHERE_TOKEN",
            show_envvar=True,
            help="what requests must carry as Authorization: Bearer TOKEN; other users of this machine can read flags "
            "but not the variable",
        ),
    ] = None,
    model: Annotated[str | None, Flag(help="where the model of the index is now, if it has moved")] = None,
    device: Annotated[str | None, Flag(help=about("device"))] = None,
) -> None:
    """Answer searches over HTTP, and show a page with two rankings side by side and a slider between them."""
    from offsphere.web.server import serve as serve_index

    def open_index() -> Index:
        quiet_libraries()
        from offsphere.search.index import Index

        return Index.open(index, model, device=device)

    def ready(url: str) -> None:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        err.print("a page for people, and an API described at /docs; Ctrl-C stops the server", highlight=False)

    serve_index(open_index, host=host, port=port, token=token, ready=ready)
