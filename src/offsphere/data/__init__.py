"""Retrieval collections and training pairs, checked where they enter: one file per format."""

from __future__ import annotations

from offsphere.data.beir import available_splits, load_collection
from offsphere.data.collection import Collection
from offsphere.data.pairs import TrainingPairs, load_pairs

__all__ = ["Collection", "TrainingPairs", "available_splits", "load_collection", "load_pairs"]
