"""What a collection should hold by the model, beside what it does hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import numpy as np

from offsphere.data.documents import Document
from offsphere.diagnosis.subject import Encoder
from offsphere.encoders import encode, model_fingerprint
from offsphere.errors import StoreError
from offsphere.progress import Progress
from offsphere.search.causes import Cause, vector_causes
from offsphere.search.exact import ExactSearch
from offsphere.search.export import stamp_differences
from offsphere.search.other_encodings import Encoding, other_encodings
from offsphere.search.stores.store import Found, Stamp, Store
from offsphere.search.table import digest_of
from offsphere.similarity import Similarity

AT_ONCE = 1024
COMPARED = 512  # stored vectors that are read back to find a cause
REENCODED = 64  # of these, how many are encoded in other ways
SHOWN = 5


@dataclass(frozen=True)
class Expected:
    """What the collection should hold."""

    target: str
    encoder: Encoder
    similarity: Similarity
    documents: list[Document]
    prompt: str
    batch_size: int
    progress: Progress

    def embed(self, rows: Sequence[int]) -> np.ndarray:
        """(len(rows), n) raw embeddings of these documents."""
        blocks = []
        done = self.progress.start("encode documents", len(rows))
        for start in range(0, len(rows), AT_ONCE):
            texts = [self.documents[row].passage for row in rows[start : start + AT_ONCE]]
            blocks.append(encode(self.encoder.model, texts, "document", prompt=self.prompt, batch_size=self.batch_size))
            done(min(start + AT_ONCE, len(rows)))
        return np.concatenate(blocks)

    def other_encodings(self, rows: Sequence[int]) -> Iterator[Encoding]:
        """Ways in which a slip may have encoded these documents."""
        documents = [self.documents[row] for row in rows]
        model, texts = self.encoder.model, [document.passage for document in documents]
        if any(document.title for document in documents):
            bare = [document.text for document in documents]
            untitled = Encoding(
                "title",
                "texts were encoded without their titles",
                lambda: encode(model, bare, "document", prompt=self.prompt),
            )
            return chain([untitled], other_encodings(model, texts, "document", self.prompt))
        return other_encodings(model, texts, "document", self.prompt)


@dataclass(frozen=True)
class Reference:
    """What the collection should hold, in (D, n) prepared vectors, and the rows that were encoded for it, raw."""

    prepared: np.ndarray
    rows: np.ndarray
    raw: np.ndarray


def reference(
    store: Store,
    expected: Expected,
    queries: np.ndarray,
    live: Sequence[Sequence[Found]],
    rows: Mapping[str, int],
    missing: Sequence[str],
    k: int,
    sample: int | None,
    random: np.random.Generator,
) -> Reference:
    """Every document encoded, or a sample and all that matters to these queries, with stored vectors for the rest.

    Args:
        store: The live collection.
        expected: What it should hold.
        queries: (Q, n) prepared.
        live: Its answers to them.
        rows: Document id to row.
        missing: Documents that it lacks.
        k: Documents asked for each query.
        sample: How many to encode; None for all.
        random: Draws the sample.
    """
    count = len(expected.documents)
    if sample is None or sample >= count:
        raw = expected.embed(range(count))
        return Reference(expected.similarity.prepare_document(raw), np.arange(count), raw)
    prepared = np.zeros((count, queries.shape[1]), dtype=np.float32)
    lost = {rows[document] for document in missing}
    there = [row for row in range(count) if row not in lost]
    for start in range(0, len(there), AT_ONCE):
        block = there[start : start + AT_ONCE]
        prepared[block] = store.vectors([expected.documents[row].id for row in block])
    chosen = lost | set(random.choice(count, sample, replace=False).tolist())
    chosen |= {rows[found.id] for answered in live for found in answered if found.id in rows}
    chosen |= set(ExactSearch(prepared).search(queries, k)[0].ravel().tolist())
    encoded = sorted(chosen)
    raw = expected.embed(encoded)
    prepared[encoded] = expected.similarity.prepare_document(raw)
    return Reference(prepared, np.array(encoded), raw)


def stored_causes(
    store: Store, expected: Expected, reference: Reference, digests: Mapping[str, str], random: np.random.Generator
) -> list[Cause]:
    """What is wrong with the vectors themselves, from a sample that is read back."""
    ids = [document.id for document in expected.documents]
    there = np.array([place for place, row in enumerate(reference.rows) if ids[row] in digests], dtype=np.int64)
    if len(there) > COMPARED:
        there = random.choice(there, COMPARED, replace=False)
    rows = reference.rows[there]
    stored = store.vectors([ids[row] for row in rows])
    return vector_causes(
        reference.raw[there], stored, expected.similarity, expected.other_encodings(rows[:REENCODED].tolist())
    )


def document_causes(expected: Expected, missing: Sequence[str], digests: Mapping[str, str], extra: int) -> list[Cause]:
    """Documents that are not there, are there too much, or say something else now."""
    causes, total = [], len(expected.documents)
    if missing:
        shown = ", ".join(map(repr, missing[:SHOWN])) + (", ..." if len(missing) > SHOWN else "")
        causes.append(
            Cause("missing", f"{len(missing):,} of {total:,} documents are not stored ({shown}); export again")
        )
    if extra > 0:
        causes.append(
            Cause(
                "extra",
                f"{extra:,} stored documents are not in the data or have no text, and take places in the answers",
            )
        )
    changed = [
        document.id
        for document in expected.documents
        if digests.get(document.id) and digests[document.id] != digest_of(document)
    ]
    if changed:
        found = f"{len(changed):,} of {total:,} documents say something else than when they were stored"
        causes.append(Cause("changed", f"{found} (such as {changed[0]!r}); export again"))
    return causes


def stamp_causes(store: Store, expected: Expected) -> list[Cause]:
    """What the collection says about itself that does not fit the model."""
    stamp = store.stamp()
    if stamp is None:
        return []
    own = Stamp(expected.similarity, model_fingerprint(expected.encoder.model), expected.prompt)
    found = stamp_differences(stamp, own)
    return [Cause("stamp", f"the collection's own stamp: {'; '.join(found)}")] if found else []


def stored_digests(store: Store, ids: Sequence[str]) -> dict[str, str]:
    """The digest of each document that is stored, empty for one that somebody else stored without one."""
    found: dict[str, str] = {}
    with suppress(StoreError):  # a table that somebody else made has no place for digests
        for start in range(0, len(ids), AT_ONCE):
            found |= store.digests(ids[start : start + AT_ONCE])
    if store.count() > len(found):
        others = [document for document in ids if document not in found]
        for start in range(0, len(others), AT_ONCE):
            found |= dict.fromkeys(_that_have_vectors(store, others[start : start + AT_ONCE]), "")
    return found


def _that_have_vectors(store: Store, ids: Sequence[str]) -> list[str]:
    """Those that are stored, found by halves, since a store names only the first that is not."""
    try:
        store.vectors(ids)
    except StoreError:
        if len(ids) == 1:
            return []
        half = len(ids) // 2
        return _that_have_vectors(store, ids[:half]) + _that_have_vectors(store, ids[half:])
    return list(ids)
