"""Embeddings on disk: raw float32, made once, for whatever similarity and whatever tool comes after."""

from __future__ import annotations

from offsphere.encoding.cache import encode_cached
from offsphere.encoding.embeddings import Embeddings, open_embeddings
from offsphere.encoding.engine import encode_collection

__all__ = ["Embeddings", "encode_cached", "encode_collection", "open_embeddings"]
