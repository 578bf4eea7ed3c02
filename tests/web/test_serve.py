"""``offsphere serve`` as a user types it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offsphere import cli
from offsphere.cli import serve as commands
from offsphere.errors import ConfigError, UsageError
from offsphere.web.server import serve

ROOT = Path(__file__).parents[2]


def never() -> Any:
    raise AssertionError("the index was opened before the address was checked")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org", "192.168.0.7", ""])
def test_beyond_loopback_it_wants_a_token(host: str) -> None:
    with pytest.raises(UsageError, match="--token TOKEN"):
        serve(never, host=host, ready=print)


@pytest.mark.parametrize("token", ["", " ", "two words", "tökén", "line\n"])
def test_a_token_must_fit_a_header(token: str) -> None:
    with pytest.raises(ConfigError, match="ASCII"):
        serve(never, token=token, ready=print)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"cannot listen on 127.0.0.1 port {port}.*--port 0"):
            serve(never, port=port, ready=print)


def test_the_command_refuses_the_network_without_a_token(program) -> None:
    code, said, errors = program("serve", "nowhere", "--host", "0.0.0.0")
    assert (code, said) == (2, "")
    assert "--token TOKEN" in errors and "Traceback" not in errors


def test_a_folder_that_is_no_index_is_named(program, tmp_path: Path) -> None:
    code, said, errors = program("serve", str(tmp_path), "--port", "0")
    assert (code, said) == (1, "")
    assert "offsphere index" in errors


@pytest.fixture
def program(capsys, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """Runs the program here; gives its exit code, what it printed, and its errors."""
    monkeypatch.delenv("OFFSPHERE_TOKEN", raising=False)
    monkeypatch.setattr(commands, "quiet_libraries", lambda: None)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["offsphere", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        printed = capsys.readouterr()
        return int(left.value.code or 0), printed.out, printed.err

    return run


def test_the_command_of_the_docs_serves_until_ctrl_c(index: Any, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "explorer.md").read_text(encoding="utf-8")
    shown = [line for block in re.findall(r"^```console\n(.*?)^```", page, re.M | re.S) for line in block.splitlines()]
    commands = [line.removeprefix("$ ") for line in shown if line.startswith("$ ")]
    assert len(commands) == 1, "docs/explorer.md shows how to start the server, once"
    words = shlex.split(commands[0])
    assert words[:3] == ["offsphere", "serve", "runs/index"]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "index").symlink_to(index.folder)
    process = subprocess.Popen(
        [sys.executable, "-m", "offsphere", *words[1:], "--port", "0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OFFSPHERE_TOKEN": "from-the-environment"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url), process.stderr and process.stderr.read()
        with urllib.request.urlopen(f"{url}healthz") as response:
            assert json.load(response) == {"status": "ok"}
        request = urllib.request.Request(f"{url}index", headers={"Authorization": "Bearer from-the-environment"})
        with urllib.request.urlopen(request) as response:
            assert json.load(response)["documents"] == len(index.ids)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err and "Error" not in err
