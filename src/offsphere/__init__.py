"""offsphere: which embeddings to normalise, and how to keep the ranking that follows from it.

The names below are imported on first use, so that ``import offsphere`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "Collection": "offsphere.data",
    "InfoNCELoss": "offsphere.losses",
    "OffsphereError": "offsphere.errors",
    "Similarity": "offsphere.similarity",
    "info_nce": "offsphere.losses",
    "load_collection": "offsphere.data",
    "load_pairs": "offsphere.data",
    "norms": "offsphere.similarity",
    "open_encoder": "offsphere.encoders",
}

__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'offsphere' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
