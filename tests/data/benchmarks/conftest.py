from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Before anything imports ir_datasets, which reads it once: no test sees what the user downloaded.
HOME = tempfile.TemporaryDirectory(prefix="ir_datasets-")  # removed when the process ends
os.environ["IR_DATASETS_HOME"] = HOME.name
os.environ["IR_DATASETS_DL_TRIES"] = "1"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that OFFSPHERE_BENCHMARKS names; the caches of datasets are elsewhere."""
    import datasets

    monkeypatch.setenv("OFFSPHERE_BENCHMARKS", str(tmp_path / "benchmarks"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    (tmp_path / "benchmarks").mkdir()
    return tmp_path / "benchmarks"


@pytest.fixture
def repository() -> Callable[[Path, dict[str, dict[str, list[dict[str, Any]]]]], Path]:
    """Writes a copy of a repository of the hub, configuration to split to rows: Parquet and the README of it."""
    from datasets import Dataset

    def write(folder: Path, configurations: dict[str, dict[str, list[dict[str, Any]]]]) -> Path:
        lines = ["---", "configs:"]
        for configuration, splits in configurations.items():
            lines += [f"- config_name: {configuration}", "  data_files:"]
            for split, rows in splits.items():
                file = folder / configuration / f"{split}-00000-of-00001.parquet"
                file.parent.mkdir(parents=True, exist_ok=True)
                Dataset.from_list(rows).to_parquet(file)
                lines += [f"  - split: {split}", f"    path: {configuration}/{split}-*"]
        (folder / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")
        return folder

    return write
