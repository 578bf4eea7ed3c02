"""Write the prepared embeddings of documents to vector databases, and prove that they arrived as they were sent."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from offsphere.data.documents import Document
from offsphere.errors import ConfigError, StoreError
from offsphere.progress import Progress, Silent
from offsphere.search.causes import SAME, relative_errors, vector_causes
from offsphere.search.destinations import refuse
from offsphere.search.sources import Batch, Source
from offsphere.search.stores import open_store
from offsphere.search.stores.store import Record, Stamp, Store
from offsphere.search.table import digest_of
from offsphere.similarity import norms

AT_ONCE = 1024
READ_BACK = 64


@dataclass(frozen=True)
class Exported:
    """What one destination holds now.

    Attributes:
        target: As the user named it.
        written: Documents that were new or had changed.
        kept: Documents that were stored already.
        empty: Documents without text, which are left out.
        stored: Documents that the destination counts.
        extra: Of these, how many the export did not name.
        read_back: Vectors that were read back and compared.
        largest_error: The largest distance of one from what was sent, as a share of its length.
    """

    target: str
    written: int
    kept: int
    empty: int
    stored: int
    extra: int
    read_back: int
    largest_error: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def export(
    source: Source,
    targets: Sequence[str],
    *,
    adopt: bool = False,
    at_once: int = AT_ONCE,
    progress: Progress | None = None,
) -> list[Exported]:
    """Write d / |d|^gamma_d of every document to each destination, and read a sample back.

    A document whose title, text and metadata are stored already is neither encoded nor written again, so that the same
    call goes on where another one stopped. Documents that the source no longer has are left where they are.

    A document without text is never an answer, and under the inner product its zero vector would come before every
    negative score. It is left out, and what was stored of it before is deleted.

    Args:
        source: The documents.
        targets: See ``open_store``.
        adopt: Write into a collection that carries no stamp of ours. It gets one if it holds nothing else afterwards.
        at_once: Documents encoded and written at a time; all of them are durable before the next.
        progress: Told what happens.

    Raises:
        ConfigError: If no target is given, or one is given twice or is unknown.
        StoreError: If a destination loses length, holds another model's vectors, cannot hold a document, or does not
            give back what was sent.
    """
    progress = progress or Silent()
    if not targets or len(set(targets)) < len(targets):
        raise ConfigError(f"give each destination once, found {list(targets)}")
    for target in targets:
        refuse(target, source.stamp.similarity)
    with ExitStack() as stack:
        stores = [stack.enter_context(closing(open_store(target))) for target in targets]
        uploads = [
            _Upload(target, store, source, adopt, progress) for target, store in zip(targets, stores, strict=True)
        ]
        sample, position = _sample(len(source)), 0
        before = f", each behind {source.stamp.prompt!r}" if source.stamp.prompt else ""
        progress.say(f"{len(source):,} documents{before}, to {', '.join(targets)}")
        done = progress.start("export", len(source))
        for batch in source.batches(at_once):
            count = len(batch.documents)
            _write(batch, uploads, source.stamp, [row for row in range(count) if position + row in sample])
            position += count
            done(position)
        return [upload.finish(position) for upload in uploads]


class _Upload:
    """One destination while it is written to."""

    def __init__(self, target: str, store: Store, source: Source, adopt: bool, progress: Progress):
        self.target, self.store, self.source, self.progress = target, store, source, progress
        self.written = self.empty = self.read = 0
        self.error = 0.0
        self.ours = True
        if store.exists() or not _create(store, source):
            self.ours = _check_existing(target, store, source, adopt, progress)

    def missing(self, documents: Sequence[Document]) -> set[int]:
        """The rows that are not stored as they are. Without a stamp nobody knows what a stored vector is of."""
        if not self.ours:
            return set(range(len(documents)))
        stored = self.store.digests([document.id for document in documents])
        return {row for row, document in enumerate(documents) if stored.get(document.id) != digest_of(document)}

    def leave_out(self, ids: Sequence[str]) -> None:
        """Count documents without text, and delete what is stored of them."""
        self.empty += len(ids)
        if stored := ids if not self.ours else list(self.store.digests(ids)):
            self.store.delete(stored)

    def write(self, records: Sequence[Record], raw: np.ndarray) -> None:
        """Write records, and read the first ones back at once: a destination that changes vectors is found here."""
        self.store.write(records)
        first = self.written == 0
        self.written += len(records)
        if first:
            self.read_back([record.id for record in records[:READ_BACK]], raw[:READ_BACK])

    def read_back(self, ids: Sequence[str], raw: np.ndarray) -> None:
        """Compare stored vectors with the embeddings that they were made of.

        Raises:
            StoreError: If they are not what was sent, with the cause.
        """
        similarity = self.source.stamp.similarity
        stored = self.store.vectors(ids)
        errors = relative_errors(similarity.prepare_document(raw), stored)
        self.read += len(ids)
        self.error = max(self.error, float(errors.max(initial=0.0)))
        if self.error > SAME:
            causes = "; ".join(cause.sentence for cause in vector_causes(raw, stored, similarity))
            raise StoreError(
                f"{self.target} does not hold what was sent: document {ids[int(errors.argmax())]!r} is off by "
                f"{errors.max():.1%} of its length; {causes}\n"
                "Nothing more was written. Delete this collection, and export to one that keeps vectors as they are."
            )

    def finish(self, documents: int) -> Exported:
        """What is there now.

        Args:
            documents: Of the source.

        Raises:
            StoreError: If documents are gone.
        """
        stored, expected = self.store.count(), documents - self.empty
        if not self.ours:
            self._sign(stored - expected)
        if stored < expected:
            raise StoreError(
                f"{self.target} counts {stored:,} documents after an export of {expected:,}; type the same command "
                "again, and look for another process that deletes"
            )
        kept, extra = expected - self.written, stored - expected
        return Exported(self.target, self.written, kept, self.empty, stored, extra, self.read, self.error)

    def _sign(self, others: int) -> None:
        """Make an adopted collection ours, once every vector in it is."""
        if others == 0:
            self.store.sign(self.source.stamp)
        elif others > 0:
            self.progress.say(
                f"note: {self.target} gets no stamp, as {others:,} of its documents are not in this export and nobody "
                "can say which model their vectors are of; the next export needs --adopt again, and writes everything"
            )


def _write(batch: Batch, uploads: Sequence[_Upload], stamp: Stamp, sample: Sequence[int]) -> None:
    """Encode once what any destination lacks, write to each what it lacks, and read the sampled rows back from all."""
    documents = batch.documents
    empty = {row for row, document in enumerate(documents) if not document.passage}
    for upload in uploads if empty else ():
        upload.leave_out([documents[row].id for row in empty])
    missing = [upload.missing(documents) for upload in uploads]
    rows = sorted(set(sample).union(*missing) - empty)
    if not rows:
        return
    raw = batch.embed(rows)
    prepared, lengths = stamp.similarity.prepare_document(raw), norms(raw)
    records = [
        Record(one.id, vector, float(length), one.title, one.text, one.metadata)
        for one, vector, length in zip((documents[row] for row in rows), prepared, lengths, strict=True)
    ]
    sampled = [place for place, row in enumerate(rows) if row in set(sample)]
    for upload, lacking in zip(uploads, missing, strict=True):
        places = [place for place, row in enumerate(rows) if row in lacking]
        if places:
            upload.write([records[place] for place in places], raw[places])
        if sampled:
            upload.read_back([records[place].id for place in sampled], raw[sampled])


def _create(store: Store, source: Source) -> bool:
    """Whether this process made the collection; False where another one made it at the same moment."""
    try:
        store.create(source.dimension, source.stamp)
    except StoreError:
        if not store.exists() or store.stamp() is None:
            raise
        return False
    return True


def _check_existing(target: str, store: Store, source: Source, adopt: bool, progress: Progress) -> bool:
    """Whether the collection that is there carries our stamp; an error where it is not for these vectors."""
    found = f"{target} exists already, "
    if (metric := store.metric()) not in ("ip", "none"):
        raise StoreError(
            f"{found}and compares by {metric}; expected the inner product (ip), under which the prepared vectors rank "
            "as the model does. Export to a new collection, or delete this one first"
        )
    if (dimension := store.dimension()) != source.dimension:
        raise StoreError(
            f"{found}with {dimension} dimensions, and this model gives {source.dimension}. Export to a new collection, "
            "or delete this one first"
        )
    stamp = store.stamp()
    if stamp is None:
        if not adopt:
            raise StoreError(
                f"{found}and carries no stamp of offsphere: nobody can say which model its {store.count():,} vectors "
                "are of. Export to a new collection, or write into this one with --adopt"
            )
        progress.say(f"note: {target} carries no stamp: every document is written, whatever is stored there")
        return False
    if differences := stamp_differences(stamp, source.stamp):
        raise StoreError(
            f"{found}but holds other vectors: {'; '.join(differences)}. Export to a new collection, or repeat the "
            "settings that it was made with"
        )
    return True


def stamp_differences(stored: Stamp, expected: Stamp) -> list[str]:
    """What a stamp says and should not, with the flag that repeats it; empty where both mean the same vectors."""
    found = []
    if stored.similarity.gammas != expected.similarity.gammas:
        theirs, ours = stored.similarity, expected.similarity
        flag = "gamma_q={!r},gamma_d={!r}".format(*theirs.gammas) if theirs.learned else theirs.name
        found.append(f"prepared for {theirs!r}, expected {ours!r} (--similarity {flag})")
    if stored.fingerprint != expected.fingerprint:
        found.append(
            f"written by the model {stored.fingerprint}, expected {expected.fingerprint} (other weights, tokenizer or "
            "--max-length)"
        )
    if stored.prompt != expected.prompt:
        found.append(
            f"document prompt {stored.prompt!r}, expected {expected.prompt!r} (--document-prompt {stored.prompt!r})"
        )
    return found


def _sample(count: int) -> set[int]:
    """Positions to read back at the end, spread at random over all documents; the same in every run."""
    chosen = np.random.default_rng(0).choice(count, min(READ_BACK, count), replace=False)
    return set(chosen.tolist())
