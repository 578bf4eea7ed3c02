"""Public benchmarks by name, such as ``beir/scifact``: from a local folder, or from where they are published."""

from __future__ import annotations

from offsphere.data.benchmarks.catalogue import (
    CATALOGUE,
    Benchmark,
    category_of,
    expand,
    find_benchmark,
    suggestion,
)
from offsphere.data.benchmarks.load import FOLDER_VARIABLE, load_benchmark, load_benchmark_pairs

__all__ = [
    "CATALOGUE",
    "FOLDER_VARIABLE",
    "Benchmark",
    "category_of",
    "expand",
    "find_benchmark",
    "load_benchmark",
    "load_benchmark_pairs",
    "suggestion",
]
