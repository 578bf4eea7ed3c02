"""Destinations of embeddings: one file a database, all with the methods of ``store.Store``."""

from __future__ import annotations

import difflib
import importlib
import re

from offsphere.errors import ConfigError
from offsphere.search.stores.store import Found, Record, Stamp, Store

__all__ = ["KINDS", "Found", "Record", "Stamp", "Store", "open_store"]

KINDS: dict[str, tuple[str, str]] = {
    "pgvector": ("PgvectorStore", "pgvector:postgresql://USER@HOST/DATABASE#TABLE"),
    "qdrant": ("QdrantStore", "qdrant:http://HOST:6333#COLLECTION or qdrant:FOLDER#COLLECTION"),
    "milvus": ("MilvusStore", "milvus:http://HOST:19530#COLLECTION or milvus:FILE.db#COLLECTION"),
    "chroma": ("ChromaStore", "chroma:http://HOST:8000#COLLECTION or chroma:FOLDER#COLLECTION"),
    "lancedb": ("LanceStore", "lancedb:FOLDER#TABLE or lancedb:s3://BUCKET/FOLDER#TABLE"),
    "faiss": ("FaissStore", "faiss:FILE.faiss"),
    "parquet": ("ParquetStore", "parquet:FILE.parquet"),
}
"""Per kind, the class in the module of the same name, and how a target is written."""

FILES = ("faiss", "parquet")
SCHEMES = {"pgvector": "", "lancedb": "", "qdrant": "https?", "milvus": "https?", "chroma": "https?"}
"""Which URLs a kind takes, as a regular expression; the others are paths on this machine."""
DEFAULT_NAME = "documents"


def open_store(target: str) -> Store:
    """The store at ``KIND:LOCATION#NAME``; the name of the table or collection is ``documents`` where none is given.

    The last ``#`` begins the name, so that a folder may hold one. A file has no name besides its own.

    Raises:
        ConfigError: If the kind is unknown, the location is missing, or the package for it is not installed.
        StoreError: If the destination cannot be reached.
    """
    kind, _, rest = target.partition(":")
    if kind not in KINDS:
        if kind == "onnx":
            raise ConfigError(
                "a model is no collection: write its graph with `offsphere export-onnx --model M --out FOLDER`"
            )
        near = difflib.get_close_matches(kind.lower(), KINDS, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        known = "\n".join(f"  {form}" for _, form in KINDS.values())
        raise ConfigError(f"unknown destination {target!r}; {guess}Expected one of\n{known}")
    name, form = KINDS[kind]
    location, mark, collection = (rest, "", "") if kind in FILES else _split(rest)
    if not location or (mark and not collection):
        raise ConfigError(f"{target!r} is no complete destination; expected {form}")
    url = re.match(r"(\w+)://", location)
    if url and not re.match(SCHEMES.get(kind, "$"), url[1]):
        raise ConfigError(
            f"{kind} cannot write to {url[0]}..., found {target!r}; expected {form}. On object storage, export to "
            "lancedb:s3://BUCKET/FOLDER#TABLE, or write here and copy the file there"
        )
    module = importlib.import_module(f"offsphere.search.stores.{kind}")
    arguments = (location,) if kind in FILES else (location, collection or DEFAULT_NAME)
    try:
        store: Store = getattr(module, name)(*arguments)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{kind} needs the package {error.name!r}; type: pip install 'offsphere[{kind}]'") from error
    return store


def _split(rest: str) -> tuple[str, str, str]:
    location, mark, collection = rest.rpartition("#")
    return (location, mark, collection) if mark else (rest, "", "")
