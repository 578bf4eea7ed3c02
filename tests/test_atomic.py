from __future__ import annotations

from pathlib import Path

import pytest

from offsphere.atomic import write_atomically


def test_a_text_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    write_atomically(path, "old")
    replace, seen = Path.replace, []

    def spy(self: Path, target: Path) -> Path:
        seen.append((path.read_text(), self.read_text()))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", spy)
    write_atomically(path, "nöw")
    assert seen == [("old", "nöw")]
    assert path.read_bytes() == "nöw".encode()
    assert [file.name for file in tmp_path.iterdir()] == ["log.jsonl"]
