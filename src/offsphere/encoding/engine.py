"""Encode the texts of a collection into a folder, shard by shard, so that it can be stopped anywhere and goes on.

The source is read twice: once to check it, to write its ids and to hash its shards, and once to encode those that are
not there yet. Only the texts of a few shards are ever in memory.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import numpy as np

from offsphere.data.documents import read_prompts
from offsphere.diagnosis.subject import Encoder, open_bare
from offsphere.encoders import Precision, Side, check_precision, encode, model_fingerprint, token_limit
from offsphere.encoding.batches import TOKENS
from offsphere.encoding.cache import Encoded, TextCache
from offsphere.encoding.int8 import INT8, check_fidelity
from offsphere.encoding.manifest import IDS, Finished, Manifest, read_manifest, refuse_differences
from offsphere.encoding.prompts import Prompts, prompts_in_force
from offsphere.encoding.storage import Storage, checksum, open_storage
from offsphere.encoding.texts import Plan, Texts, shard_hash
from offsphere.encoding.ways import Here, Job, Processes, Settings, Way, check_guard
from offsphere.errors import ConfigError, DataError, EmbeddingsError, EncoderError
from offsphere.progress import Progress, Silent
from offsphere.search.manifest import locate

SHARD_SIZE = 4096
SECONDS_BETWEEN_LINES = 30.0


@dataclass(frozen=True)
class Done:
    """What encoding one side did.

    Attributes:
        place: Where the embeddings are.
        manifest: How they were made.
        kept: Shards that were finished before.
        damaged: Shards whose rows were not those of their checksum, and which were encoded again.
        encoded: Texts that went through the model.
        cached: Texts that the cache knew.
        seconds: In all, model and source open.
    """

    place: str
    manifest: Manifest
    kept: int
    damaged: list[int]
    encoded: int
    cached: int
    seconds: float


def encode_collection(
    model: str,
    source: str | Path,
    out: str | Path,
    *,
    sides: Sequence[Side] = ("document",),
    max_length: int | None = None,
    prompts: Mapping[str, str] | None = None,
    tokens: int = TOKENS,
    workers: int = 1,
    shard_size: int | None = None,
    precision: str = "float32",
    max_norm_error: float = 0.01,
    cache: Path | None = None,
    ray: bool = False,
    device: str | None = None,
    progress: Progress | None = None,
) -> list[Done]:
    """Embeddings of a collection on disk, one folder a side: ``out`` itself, or one in it for each of two sides.

    What is finished there is left alone, if it was made alike of the same texts.

    Args:
        model: The encoder (see ``open_encoder``).
        source: A collection folder, or a file of documents (see ``read_documents``).
        out: A folder, or an fsspec address such as ``s3://bucket/name``.
        sides: ``query`` for the texts of queries.jsonl, ``document`` for the corpus.
        max_length: Tokens kept of each text.
        prompts: By side, in place of the collection's and the model's own.
        tokens: Most tokens of a batch, padding included.
        workers: Processes of this machine. A script that asks for several calls this under
            ``if __name__ == "__main__":``, because each of them runs the script again.
        shard_size: Texts of a shard; 4096, or what the folder has, if None.
        precision: Of the computation; what is stored is float32.
        max_norm_error: With int8: the largest mean error of a length, as a share, that is accepted.
        cache: A folder where embeddings are kept by their text, for other runs; None for none.
        ray: Encode on the Ray cluster at hand, or on one that is started here.
        device: Where to compute.
        progress: Told what happens.

    Raises:
        DataError: If the source is malformed, with file and line.
        EncoderError: If the model cannot be opened, an embedding is not finite, or int8 is too far from float32.
        EmbeddingsError: If the folder has something else, or cannot be written to.
        UsageError: If a setting makes no sense, or a worker cannot run the script that called this.
    """
    progress = progress or Silent()
    if workers > 1:
        check_guard()
    if min(tokens, workers, shard_size or 1) < 1:
        raise ConfigError(f"tokens, workers and shard size are at least 1; found {tokens}, {workers} and {shard_size}")
    if precision not in (*get_args(Precision), INT8):
        raise ConfigError(f"--precision is one of {', '.join((*get_args(Precision), INT8))}; found {precision!r}")
    encoder = open_bare(model, max_length, {**read_prompts(source), **(prompts or {})}, device)
    if precision != INT8:
        check_precision(encoder.model.device.type, precision)
    done = []
    for side in sides:
        began = time.perf_counter()
        storage = open_storage(out if len(sides) == 1 else f"{out}/{side}")
        texts = Texts(source, side)
        with storage.writing():
            made = read_manifest(storage)
            size = shard_size or (made.shard_size if made else SHARD_SIZE)
            plan = texts.plan(size)
            manifest = _manifest(encoder, str(source), side, plan, size, precision)
            progress.say(_described(manifest, model, source))
            if precision == INT8:
                fidelity = check_fidelity(encoder.model, texts.sample(), side, manifest.prompts[side], max_norm_error)
                progress.say(f"int8 against float32 on {fidelity.texts} of these texts: {fidelity}")
                manifest = replace(manifest, fidelity=fidelity.to_dict())
            settings = Settings(
                manifest.model,
                manifest.fingerprint,
                max_length,
                side,
                manifest.prompts[side],
                tokens,
                precision,
                device,
            )
            run = _Run(storage, manifest, plan, texts, progress)
            kept = TextCache(cache, settings.fingerprint, side, settings.prompt, precision) if cache else None
            try:
                run.go(_way(encoder, settings, workers, ray), kept)
            finally:
                if kept:
                    kept.close()
        seconds = time.perf_counter() - began
        done.append(Done(storage.name, run.manifest, run.kept, run.damaged, run.encoded, run.cached, seconds))
    return done


class _Run:
    """One side on its way to disk. The manifest is written after every shard, and says what is there."""

    def __init__(self, storage: Storage, manifest: Manifest, plan: Plan, texts: Texts, progress: Progress):
        self._storage, self._plan, self._texts, self._progress = storage, plan, texts, progress
        self.manifest = manifest
        self.kept = self.encoded = self.cached = 0
        self.damaged: list[int] = []

    def go(self, way: Way, cache: TextCache | None) -> None:
        """Encode what is not there yet."""
        self._resume()
        todo = {number for number in range(len(self._plan.shards)) if number not in self.manifest.shards}
        texts = sum(self._length(number) for number in todo)
        self._progress.say(
            f"{self._storage.name}: {self._plan.count:,} {self._texts.side} texts in shards of "
            f"{self.manifest.shard_size:,}; {self.kept} of {len(self._plan.shards)} finished"
            + (f", {len(self.damaged)} damaged and encoded again" if self.damaged else "")
            + f"; {texts:,} texts to encode"
        )
        show = self._progress.start(f"encode {self._texts.side} texts", max(1, texts))
        began = said = time.perf_counter()
        finished = 0
        for job, encoded in way.encoded(self._jobs(todo, cache)):
            self._store(job, encoded, cache)
            finished += len(job.ids)
            show(finished)
            now = time.perf_counter()
            if now - said >= SECONDS_BETWEEN_LINES and finished < texts:
                rate, said = finished / (now - began), now
                left = _duration((texts - finished) / rate)
                self._progress.say(f"{finished:,} of {texts:,} texts, {rate:,.1f} a second, about {left} left")

    def _resume(self) -> None:
        """Take over the shards that are there, whole, and of the same texts; begin the folder if there is none."""
        made = read_manifest(self._storage)
        kept = {}
        if made is not None:
            refuse_differences(self._storage, made, self.manifest)
            for number, shard in made.shards.items():
                if number >= len(self._plan.shards) or shard.texts != self._plan.shards[number]:
                    continue
                rows = self._storage.read_rows(number, shard.start, shard.stop, made.dimension)
                if rows is not None and checksum(rows) == shard.checksum:
                    kept[number] = shard
                else:
                    self.damaged.append(number)
        self.kept = len(kept)
        self.manifest = replace(self.manifest, shards=kept)
        with self._writing("the beginning"):
            self._storage.write(IDS, self._plan.ids)
            self.manifest.write(self._storage)
            self._storage.prepare((self.manifest.count, self.manifest.dimension))

    def _jobs(self, todo: set[int], cache: TextCache | None) -> Iterator[Job]:
        """The shards to be encoded; a text that comes twice in one, or that the cache knows, goes by the model."""
        for number, documents in enumerate(self._texts.shards(self.manifest.shard_size)):
            if number not in todo:
                continue
            if shard_hash([(one.id, one.passage) for one in documents]) != self._plan.shards[number]:
                raise DataError("it changed while it was encoded; type the same command again", self._texts.source)
            texts = [one.passage for one in documents]
            filled = list(dict.fromkeys(text for text in texts if text.strip()))
            known = cache.get(filled) if cache else {}
            place = {text: row for row, text in enumerate(text for text in filled if text not in known)}
            yield Job(
                number,
                [one.id for one in documents],
                list(place),
                np.array([place.get(text, -1) for text in texts]),
                {row: known[text] for row, text in enumerate(texts) if text in known},
                sum(not text.strip() for text in texts),
            )

    def _store(self, job: Job, encoded: Encoded, cache: TextCache | None) -> None:
        shard = job.assemble(encoded, self.manifest.dimension)
        broken = np.flatnonzero(~np.isfinite(shard.embeddings).all(axis=1))
        if len(broken):
            raise EncoderError(
                f"{len(broken)} of {len(job.ids)} embeddings are NaN or infinite, such as that of "
                f"{job.ids[broken[0]]!r}; encode in float32, and look for a diverged training"
            )
        start = job.number * self.manifest.shard_size
        finished = Finished(
            number=job.number,
            start=start,
            stop=start + len(job.ids),
            texts=self._plan.shards[job.number],
            checksum=checksum(shard.embeddings),
            empty=job.empty,
            cut=int((shard.lost > 0).sum()),
            tokens=int(shard.read.sum()),
            tokens_lost=int(shard.lost.sum()),
            encoded=len(job.texts),
            seconds=round(encoded.seconds, 3),
            finished_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )
        after = replace(self.manifest, shards={**self.manifest.shards, job.number: finished})
        with self._writing(f"shard {job.number}"):
            self._storage.write_rows(job.number, start, shard.embeddings)
            after.write(self._storage)
        self.manifest = after
        self.encoded += len(job.texts)
        self.cached += len(job.known)
        if cache and job.texts:
            cache.put(job.texts, encoded)

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EmbeddingsError(
                f"cannot write {what} to {self._storage.name}: {error.strerror or error}. {len(self.manifest.shards)} "
                f"of {len(self._plan.shards)} shards are stored and stay; make room, and the same command goes on"
            ) from error

    def _length(self, number: int) -> int:
        size = self.manifest.shard_size
        return min(size, self.manifest.count - number * size)


def _manifest(encoder: Encoder, source: str, side: Side, plan: Plan, shard_size: int, precision: str) -> Manifest:
    model = encoder.model
    prompts = prompts_in_force(model, sides=[side])
    return Manifest(
        model=locate(encoder.source),
        fingerprint=model_fingerprint(model),
        similarity=encoder.declared.to_dict() if encoder.declared else None,
        side=side,
        prompts=prompts.texts,
        prompt_tokens=prompts.tokens,
        max_length=token_limit(model),
        precision=precision,
        dimension=model.get_embedding_dimension() or encode(model, ["dimension"], side).shape[1],
        shard_size=shard_size,
        source=locate(source),
        count=plan.count,
        ids=hashlib.sha256(plan.ids).hexdigest(),
    )


def _described(manifest: Manifest, model: str, source: str | Path) -> str:
    prompts = Prompts(manifest.prompts, manifest.prompt_tokens)
    cut = f"texts cut at {manifest.max_length} tokens" if manifest.max_length else "texts of any length"
    return f"{model} on {source}: {prompts}, {cut}, computed in {manifest.precision}"


def _way(encoder: Encoder, settings: Settings, workers: int, ray: bool) -> Way:
    if ray:
        from offsphere.encoding.cluster import Cluster

        return Cluster(settings)
    return Here(encoder.model, settings) if workers == 1 else Processes(settings, workers)


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
