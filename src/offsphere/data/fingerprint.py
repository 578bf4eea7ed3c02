"""What identifies data: a hash of its content, whatever file, compression or machine it came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable


def digest(records: Iterable[object]) -> str:
    """The SHA-256, in hexadecimal, of records that JSON can hold; their order counts."""
    content = hashlib.sha256()
    for record in records:
        content.update(json.dumps(record).encode() + b"\n")
    return content.hexdigest()


def text_id(text: str) -> str:
    """An id made from the text itself: the same text always has the same id."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
