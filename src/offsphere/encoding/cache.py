"""Embeddings by the text they are of, for whoever needs the same ones again: another collection, or an evaluation."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offsphere.encoders import Side, model_fingerprint
from offsphere.encoding.batches import TOKENS, forward, tokenise
from offsphere.errors import EmbeddingsError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

ASKED_AT_ONCE = 500
ENVIRONMENT = "OFFSPHERE_CACHE"
"""Names the folder of the cache for every command that has no flag for it, and for ``encode``."""


@dataclass(frozen=True)
class Encoded:
    """Texts as a model made vectors of them.

    Attributes:
        embeddings: (T, n) float32, raw; zero for a text without a visible character.
        read: (T,) tokens read of each text.
        lost: (T,) tokens that the length limit cut off.
        seconds: That the model took.
    """

    embeddings: np.ndarray
    read: np.ndarray
    lost: np.ndarray
    seconds: float = 0.0


class TextCache:
    """A file of embeddings by text, for one model, side, prompt, length limit and precision.

    The file is a SQLite database, so that several processes can use it, and a process that is killed leaves it whole.
    A row that is damaged is not used. Embeddings are those of the batch in which a text was first seen; another batch
    may give others in the last digits.

    Args:
        folder: Of the files; made if need be.
        fingerprint: Of the model, its length limit included (see ``encoders.model_fingerprint``).
        side: ``query`` or ``document``.
        prompt: What stands before each text.
        precision: Of the computation.
    """

    def __init__(self, folder: Path, fingerprint: str, side: Side, prompt: str, precision: str = "float32"):
        made = json.dumps([fingerprint, side, prompt, precision]).encode()
        self.path = folder.expanduser() / f"{hashlib.sha256(made).hexdigest()[:32]}.sqlite"
        self._lock = threading.Lock()  # the thread that reads ahead asks while another one stores
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._rows = sqlite3.connect(self.path, timeout=60, check_same_thread=False)
            with self._rows:
                self._rows.execute(
                    "CREATE TABLE IF NOT EXISTS texts (hash BLOB PRIMARY KEY, read INTEGER, lost INTEGER, "
                    "crc INTEGER, vector BLOB)"
                )
        except (OSError, sqlite3.Error) as error:
            raise self._failed("open", error) from error

    def get(self, texts: Sequence[str]) -> dict[str, tuple[np.ndarray, int, int]]:
        """What is known of these texts: (n,) float32, tokens read, tokens lost.

        Raises:
            EmbeddingsError: If the file cannot be read.
        """
        by_hash = {_hash(text): text for text in texts}
        asked, found = list(by_hash), {}
        for start in range(0, len(asked), ASKED_AT_ONCE):
            some = asked[start : start + ASKED_AT_ONCE]
            marks = ",".join("?" * len(some))
            try:
                with self._lock:
                    rows = self._rows.execute(
                        f"SELECT hash, read, lost, crc, vector FROM texts WHERE hash IN ({marks})", some
                    ).fetchall()
            except sqlite3.Error as error:
                raise self._failed("read", error) from error
            for text_hash, read, lost, crc, vector in rows:
                if zlib.crc32(vector) == crc:
                    found[by_hash[text_hash]] = np.frombuffer(vector, "<f4"), read, lost
        return found

    def put(self, texts: Sequence[str], encoded: Encoded) -> None:
        """Keep what was encoded, in one step.

        Raises:
            EmbeddingsError: If the file cannot be written, such as on a full disk; what it had before stays.
        """
        vectors = [row.tobytes() for row in np.ascontiguousarray(encoded.embeddings, "<f4")]
        counts = zip(encoded.read.tolist(), encoded.lost.tolist(), strict=True)
        rows = [
            (_hash(text), read, lost, zlib.crc32(vector), vector)
            for text, (read, lost), vector in zip(texts, counts, vectors, strict=True)
        ]
        try:
            with self._lock, self._rows:
                self._rows.executemany("INSERT OR REPLACE INTO texts VALUES (?, ?, ?, ?, ?)", rows)
        except sqlite3.Error as error:
            raise self._failed("write", error) from error

    def close(self) -> None:
        """Let go of the file."""
        self._rows.close()

    def _failed(self, what: str, error: Exception) -> EmbeddingsError:
        return EmbeddingsError(
            f"cannot {what} the cache {self.path}: {error}. Delete the file if it is damaged, make room if the disk is "
            "full, or do without --cache"
        )


def cache_at_hand() -> Path | None:
    """The folder that the environment names; None where it names none."""
    named = os.environ.get(ENVIRONMENT)
    return Path(named) if named else None


def encode_cached(
    model: SentenceTransformer,
    texts: Sequence[str],
    side: Side,
    *,
    prompt: str | None = None,
    cache: Path | None = None,
    tokens: int = TOKENS,
) -> np.ndarray:
    """Raw embeddings (len(texts), n) in float32, each text encoded once, and not at all where the cache has it.

    Args:
        model: The encoder, its Normalize modules taken off where length matters.
        texts: Any order.
        side: ``query`` or ``document``.
        prompt: Replaces the model's own prompt of that side.
        cache: Folder of the cache; None for none.
        tokens: Most tokens of a batch.

    Raises:
        EmbeddingsError: If the cache cannot be read or written.
    """
    from offsphere.packed import packed_input

    stands_before = (model.prompts.get(side) or "") if prompt is None else prompt
    different = list(dict.fromkeys(texts))
    kept = TextCache(cache, model_fingerprint(model), side, stands_before) if cache else None
    try:
        known = {text: vector for text, (vector, _, _) in kept.get(different).items()} if kept else {}
        new = [text for text in different if text not in known]
        tokenised = tokenise(model, new, side, stands_before, tokens)
        with packed_input(model):
            encoded = Encoded(forward(model, tokenised, side), tokenised.read, tokenised.lost)
        if kept and new:
            kept.put(new, encoded)
    finally:
        if kept:
            kept.close()
    known |= dict(zip(new, encoded.embeddings, strict=True))
    dimension = encoded.embeddings.shape[1]
    return np.stack([known[text] for text in texts]) if texts else np.zeros((0, dimension), np.float32)


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]
