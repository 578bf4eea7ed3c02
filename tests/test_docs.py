"""Every command and script that README and docs show, run as shown; trainings are only made smaller."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
SMALLER = (
    "--steps 2 --seeds 0 --max-pairs 300 --max-queries 20 --max-documents 150 --validation-queries 10 "
    "--validation-documents 100"
)


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def commands(text: str) -> list[str]:
    return [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        arguments, cwd=folder, env=os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done


def run_shell(command: str, folder: Path) -> None:
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        run(["make", "--dry-run", *words[1:]], ROOT)
    elif words[:2] == ["pip", "install"]:
        extras = re.findall(r"\[(.*?)\]", words[-1])
        declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert {one for group in extras for one in group.split(",")} <= declared.keys()
    else:
        assert words[0] in ("offsphere", "torchrun"), f"the docs show a command that no test can run: {command}"
        trains = {"compare", "train"} & set(words)
        run(words + (shlex.split(SMALLER) if trains else []), folder)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_shows_runs(page: Path, tmp_path: Path) -> None:
    (tmp_path / "datasets").symlink_to(ROOT / "datasets")
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    if page.name == "formats.md":  # its script reads the run that the guide makes
        data = "--train datasets/nq_qed --eval datasets/xquad_en"
        run_shell(f"offsphere compare --model package:wordllama {data} --out runs/first", tmp_path)
    for number, (language, text) in enumerate(blocks(page)):
        if language == "bash":
            for command in commands(text):
                run_shell(command, tmp_path)
        elif language == "python":
            script = tmp_path / f"block{number}.py"
            script.write_text(text, encoding="utf-8")
            run([sys.executable, str(script)], tmp_path)


def test_there_is_something_to_run() -> None:
    found = [language for page in PAGES for language, _ in blocks(page)]
    assert found.count("bash") >= 4
    assert found.count("python") >= 3


def test_a_failing_command_would_be_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no split"):
        run_shell(
            f"offsphere evaluate --model package:wordllama --data {ROOT}/datasets/xquad_en --split nope", tmp_path
        )


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
