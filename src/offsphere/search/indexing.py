"""Read documents, encode those that are new or have changed, and commit them batch by batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offsphere.data.documents import Document, read_documents
from offsphere.data.shard import Shard
from offsphere.encoders import encode, token_counts, token_limit
from offsphere.errors import DataError, EncoderError
from offsphere.progress import Progress
from offsphere.search.table import DocumentTable, Rows, digest_of, merge_fields

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Source = str | Path | Iterable[Document]
Fields = dict[str, str | None]

WINDOW = 4096
WINDOW_CHARACTERS = 2**24
"""Documents, or characters of them, that are sorted by length and encoded together."""
BATCHES = 4
"""Batches encoded between two looks at the clock."""
COMMIT_SECONDS = 5.0
"""What a killed process loses at most, beside the batches that it is encoding."""


@dataclass(frozen=True)
class Added:
    """What indexing did.

    Attributes:
        new: Documents that were not there.
        changed: Documents that said something else before.
        unchanged: Documents left alone.
        deleted: Documents that no source had any more, where their deletion was asked for.
        empty: Of the new and changed ones, those without text: a zero vector, never an answer.
        cut: Of the new and changed ones, those longer than the encoder reads.
        tokens_lost: Tokens of theirs that it did not read.
    """

    new: int
    changed: int
    unchanged: int
    deleted: int = 0
    empty: int = 0
    cut: int = 0
    tokens_lost: int = 0


@dataclass(frozen=True)
class Plan:
    """What the sources have against what is stored.

    Attributes:
        new: Ids that are not stored.
        changed: Ids whose document says something else than what is stored.
        unchanged: How many documents are as they are stored.
        missing: Stored ids that no source has, or not this shard of it, sorted.
        fields: The metadata fields of all documents, stored and to come, and their kinds; of the other shards as well,
            so that the indexes of all shards have the same ones.
    """

    new: set[str]
    changed: set[str]
    unchanged: int
    missing: list[str]
    fields: Fields


def plan(sources: Sequence[Source], stored: dict[str, str], fields: Fields, shard: Shard) -> Plan:
    """What has to be done, after reading every source to its end.

    Args:
        sources: Collections, files, or documents that can be read twice.
        stored: The digest of every stored document, by id.
        fields: The metadata fields of the stored documents.
        shard: Which of the documents to index.

    Raises:
        DataError: If a source is malformed, or an id comes twice.
    """
    new: set[str] = set()
    changed: set[str] = set()
    seen: dict[str, int] = {}
    fields = dict(fields)
    unchanged = 0
    for number, source in enumerate(sources):
        for document in _read(source):
            if document.id in seen:
                other = _name(sources[seen[document.id]])
                raise DataError(
                    f"the id {document.id!r} occurs twice, in {other} and in {_name(source)}; an index needs every id "
                    "once, so rename one of them"
                )
            seen[document.id] = number
            merge_fields(fields, document.metadata)
            if not shard.holds(document.id):
                continue
            if document.id not in stored:
                new.add(document.id)
            elif stored[document.id] != digest_of(document):
                changed.add(document.id)
            else:
                unchanged += 1
    missing = sorted(one for one in stored if one not in seen or not shard.holds(one))
    return Plan(new, changed, unchanged, missing, fields)


def add_documents(
    table: DocumentTable,
    model: SentenceTransformer,
    sources: Sequence[Source],
    fields: Fields,
    settle: Callable[[Fields], None],
    *,
    batch_size: int,
    delete_missing: bool,
    shard: Shard,
    progress: Progress,
) -> Added:
    """Bring the table up to date with the sources; see ``Index.add``.

    Args:
        table: Where the documents go.
        model: The encoder, with the prompts and the length limit of the index.
        sources: Read twice: once to check and count, once to encode.
        fields: The metadata fields of the stored documents.
        settle: Called with the fields before the first row that has them is written.
        batch_size: Texts in one forward pass.
        delete_missing: Whether to delete what no source has, or not this shard of it.
        shard: Which of the documents to index.
        progress: Told what happens.
    """
    sources = [source if isinstance(source, str | Path | Sequence) else list(source) for source in sources]
    progress.say(f"reading {', '.join(map(_name, sources))}")
    todo = plan(sources, table.digests(), fields, shard)
    deleted = len(todo.missing) if delete_missing else 0
    progress.say(
        f"{len(todo.new)} new documents and {len(todo.changed)} changed ones to encode, {todo.unchanged} unchanged"
        + (f", {deleted} to delete" if delete_missing else "")
        + (f"; in shard {shard}" if shard.count > 1 else "")
    )
    if todo.fields != fields:
        settle(todo.fields)
    pending = todo.new | todo.changed
    empty = cut = lost = 0
    if pending:
        limit = token_limit(model)
        prompt = model.prompts["document"]
        show = progress.start("encode", len(pending))
        done = 0
        for window in _windows(one for source in sources for one in _read(source) if one.id in pending):
            for rows in _encoded(model, window, batch_size):
                _commit(table, rows, todo.new)
                done += len(rows.documents)
                show(done)
            texts = [one.passage for one in window if one.passage]
            empty += len(window) - len(texts)
            if limit is not None:
                over = token_counts(model, [prompt + text for text in texts]) - limit
                cut += int((over > 0).sum())
                lost += int(over.clip(0).sum())
    if delete_missing:
        table.delete(todo.missing)
    table.compact()
    return Added(len(todo.new), len(todo.changed), todo.unchanged, deleted, empty, cut, lost)


def _windows(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Neighbouring documents, bounded in number and in size, the longest first."""
    window: list[Document] = []
    characters = 0
    for document in documents:
        window.append(document)
        characters += len(document.passage)
        if len(window) == WINDOW or characters >= WINDOW_CHARACTERS:
            yield _longest_first(window)
            window, characters = [], 0
    if window:
        yield _longest_first(window)


def _longest_first(documents: list[Document]) -> list[Document]:
    return sorted(documents, key=lambda one: len(one.passage), reverse=True)


def _encoded(model: SentenceTransformer, documents: list[Document], batch_size: int) -> Iterator[Rows]:
    """The documents with their embeddings, in portions of a few seconds' work."""
    started, first = time.monotonic(), 0
    parts: list[np.ndarray] = []
    step = batch_size * BATCHES
    for start in range(0, len(documents), step):
        some = documents[start : start + step]
        parts.append(encode(model, [one.passage for one in some], "document", batch_size=batch_size))
        last = start + len(some)
        if last == len(documents) or time.monotonic() - started >= COMMIT_SECONDS:
            yield Rows(documents[first:last], np.concatenate(parts))
            started, first, parts = time.monotonic(), last, []


def _commit(table: DocumentTable, rows: Rows, new: set[str]) -> None:
    broken = np.flatnonzero(~np.isfinite(rows.embeddings).all(axis=1))
    if len(broken):
        raise EncoderError(
            f"{len(broken)} of {len(rows.documents)} document embeddings are NaN or infinite, such as that of "
            f"{rows.documents[broken[0]].id!r}; encode in float32, and look for a diverged training"
        )
    fresh = np.array([one.id in new for one in rows.documents], dtype=bool)
    for wanted, write in ((fresh, table.append), (~fresh, table.replace)):
        if wanted.any():
            places = np.flatnonzero(wanted).tolist()
            write(Rows([rows.documents[place] for place in places], rows.embeddings[places]))


def _read(source: Source) -> Iterable[Document]:
    return read_documents(source) if isinstance(source, str | Path) else source


def _name(source: Source) -> str:
    return str(source) if isinstance(source, str | Path) else "the given documents"
