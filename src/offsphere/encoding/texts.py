"""The texts of one side of a source, in shards, and what identifies each shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from offsphere.data.documents import QUERIES, Document, parse_queries, read_documents, required_file
from offsphere.data.fingerprint import digest
from offsphere.encoders import Side
from offsphere.errors import DataError

SAMPLE = 256


@dataclass(frozen=True)
class Plan:
    """What a source holds now.

    Attributes:
        shards: The hash of each shard, see ``shard_hash``.
        count: Texts.
        ids: ids.txt: one id a line, in the order of the source.
    """

    shards: list[str]
    count: int
    ids: bytes


class Texts:
    """The corpus, or the queries, of a source; read anew each time.

    Args:
        source: A collection folder, or a file of documents (see ``read_documents``).
        side: ``document`` for the corpus, ``query`` for the texts of queries.jsonl.
    """

    def __init__(self, source: str | Path, side: Side):
        self.source, self.side = source, side

    def __iter__(self) -> Iterator[Document]:
        if self.side == "document":
            yield from read_documents(self.source)
            return
        path = Path(self.source).expanduser()
        if path.is_file():
            raise DataError("a file has documents only; for queries give a collection folder with queries.jsonl", path)
        yield from parse_queries(required_file(path, QUERIES))

    def shards(self, size: int) -> Iterator[list[Document]]:
        """All of them, in order, so many at a time."""
        every = iter(self)
        while some := list(islice(every, size)):
            yield some

    def plan(self, size: int) -> Plan:
        """What there is, after reading to the end.

        Raises:
            DataError: If something is malformed, or an id holds a line feed, which ids.txt cannot hold.
        """
        hashes, ids, count = [], [], 0
        for some in self.shards(size):
            hashes.append(shard_hash([(one.id, one.passage) for one in some]))
            count += len(some)
            for one in some:
                if "\n" in one.id:
                    raise DataError(f"the id {one.id!r} holds a line feed, and ids.txt has one id a line", self.source)
            ids.append("".join(f"{one.id}\n" for one in some).encode())
        return Plan(hashes, count, b"".join(ids))

    def sample(self, count: int = SAMPLE, seed: int = 0) -> list[str]:
        """Texts drawn at random in one pass, each as likely as any other; fewer if there are no more."""
        random = np.random.default_rng(seed)
        drawn: list[str] = []
        for number, one in enumerate(document for document in self if document.passage):
            if number < count:
                drawn.append(one.passage)
            elif (place := int(random.integers(number + 1))) < count:
                drawn[place] = one.passage
        return drawn


def shard_hash(texts: Sequence[tuple[str, str]]) -> str:
    """What identifies the content of a shard: the SHA-256 of its ids and texts, in order."""
    return digest(texts)
