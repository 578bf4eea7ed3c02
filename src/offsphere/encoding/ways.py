"""Where encoding runs: in this process, or in several of this machine. ``encoding.cluster`` has the third one, Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import active_children, current_process, get_context
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from offsphere.diagnosis.subject import open_bare
from offsphere.encoders import Precision, Side, computing_in, model_fingerprint
from offsphere.encoding.batches import Tokenised, ahead, forward, tokenise
from offsphere.encoding.cache import Encoded
from offsphere.encoding.int8 import INT8, int8_layers
from offsphere.errors import EmbeddingsError, UsageError

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from sentence_transformers import SentenceTransformer

AHEAD = 2
"""Shards that wait for each worker, so that none of them waits for this process."""
GUARD = (
    "each worker first runs your script again, which must be a file: put what it does under "
    '`if __name__ == "__main__":`, or give one worker'
)


@dataclass(frozen=True)
class Job:
    """A shard to be encoded: what the model gets of it, and how the rest comes about.

    Attributes:
        number: Of the shard.
        ids: Of its texts.
        texts: Those that go through the model, different from each other.
        rows: (N,) where each text of the shard stands in ``texts``; -1 if it is empty or known.
        known: By row: embedding, tokens read, tokens lost.
        empty: Texts without a visible character.
    """

    number: int
    ids: list[str]
    texts: list[str]
    rows: np.ndarray
    known: dict[int, tuple[np.ndarray, int, int]]
    empty: int

    def assemble(self, encoded: Encoded, dimension: int) -> Encoded:
        """All texts of the shard, in their order, from what the model gave; (N, dimension)."""
        embeddings = np.zeros((len(self.ids), dimension), np.float32)
        read, lost = np.zeros((2, len(self.ids)), np.int64)
        new = np.flatnonzero(self.rows >= 0)
        if len(new):
            at = self.rows[new]
            embeddings[new], read[new], lost[new] = encoded.embeddings[at], encoded.read[at], encoded.lost[at]
        for row, (vector, tokens_read, tokens_lost) in self.known.items():
            embeddings[row], read[row], lost[row] = vector, tokens_read, tokens_lost
        return Encoded(embeddings, read, lost, encoded.seconds)


@dataclass(frozen=True)
class Settings:
    """What opens the same encoder elsewhere, and what it is asked to do.

    Attributes:
        source: As for ``open_encoder``, from any working directory.
        fingerprint: What it must have.
        max_length: Tokens kept of each text.
        side: Of the texts.
        prompt: What stands before each.
        tokens: Most tokens of a batch.
        precision: ``float32``, ``bf16``, ``fp16`` or ``int8``.
        device: Where to compute.
    """

    source: str
    fingerprint: str
    max_length: int | None
    side: Side
    prompt: str
    tokens: int
    precision: str
    device: str | None


class Way(Protocol):
    """Encodes jobs."""

    def encoded(self, jobs: Iterator[Job]) -> Iterator[tuple[Job, Encoded]]:
        """Each job with the embeddings of its texts, as they get ready."""


class Here:
    """In this process; the next shard is read and tokenised while the model works on one.

    Args:
        model: The encoder.
        settings: See ``Settings``.
    """

    def __init__(self, model: SentenceTransformer, settings: Settings):
        self._model, self._settings = model, settings

    def encoded(self, jobs: Iterator[Job]) -> Iterator[tuple[Job, Encoded]]:
        """See ``Way``."""
        settings = self._settings
        tokenised = (
            (job, tokenise(self._model, job.texts, settings.side, settings.prompt, settings.tokens)) for job in jobs
        )
        with computing(self._model, settings.precision):
            for job, shard in ahead(tokenised):
                yield job, _timed(self._model, shard, settings.side)


class Processes:
    """In so many processes, each with the encoder and an equal share of the processors.

    Args:
        settings: See ``Settings``.
        workers: How many.
    """

    def __init__(self, settings: Settings, workers: int):
        self._settings, self._workers = settings, workers

    def encoded(self, jobs: Iterator[Job]) -> Iterator[tuple[Job, Encoded]]:
        """See ``Way``.

        Raises:
            EmbeddingsError: If one of the processes was killed.
            UsageError: If one ended by itself, which it does before it takes any work.
        """
        threads = max(1, (os.cpu_count() or 1) // self._workers)
        pool = ProcessPoolExecutor(self._workers, get_context("spawn"), set_threads, (threads,))
        running: dict[Future[Encoded], Job] = {}
        others = set(active_children())
        workers: set[BaseProcess] = set()
        try:
            for job in jobs:
                running[pool.submit(encode_texts, self._settings, job.texts)] = job
                workers.update(active_children())
                if len(running) >= self._workers * AHEAD:
                    yield from self._finished(running)
            while running:
                yield from self._finished(running)
        except BrokenProcessPool:  # from a result, or from handing out more work after one was killed
            pool.shutdown()  # until all have ended: one that was killed has a negative exit code
            if any((one.exitcode or 0) > 0 for one in workers - others):
                raise UsageError(f"a worker process could not begin (its error stands above): {GUARD}") from None
            raise EmbeddingsError(
                "one of the worker processes was killed, perhaps for want of memory: each holds the encoder; give "
                "fewer --workers. Finished shards stay, and the same command goes on from there"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)

    def _finished(self, running: dict[Future[Encoded], Job]) -> Iterator[tuple[Job, Encoded]]:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            yield running.pop(future), future.result()


def check_guard() -> None:
    """Refuse to start processes in one that is itself being started and has only come to run the user's script.

    Raises:
        UsageError: If this is such a process, with what the script lacks.
    """
    if getattr(current_process(), "_inheriting", False):  # how multiprocessing itself finds it out, only later
        raise UsageError(f"a worker process cannot start workers of its own; {GUARD}")


def encode_texts(settings: Settings, texts: list[str]) -> Encoded:
    """The embeddings of texts, from an encoder that this process opens once."""
    model = _opened(settings)
    tokenised = tokenise(model, texts, settings.side, settings.prompt, settings.tokens)
    with computing(model, settings.precision):
        return _timed(model, tokenised, settings.side)


@contextmanager
def computing(model: SentenceTransformer, precision: str) -> Iterator[None]:
    """Inside, the model computes without padding where that is exact, and in that precision (see ``Settings``)."""
    from offsphere.packed import packed_input

    with packed_input(model):
        with int8_layers(model) if precision == INT8 else computing_in(model, cast("Precision", precision)):
            yield


@cache
def _opened(settings: Settings) -> SentenceTransformer:
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = open_bare(settings.source, settings.max_length, None, settings.device).model
    found = model_fingerprint(model)
    if found != settings.fingerprint:
        raise EmbeddingsError(
            f"a worker opened {settings.source} and found another model (fingerprint {found}) than the command did "
            f"({settings.fingerprint}); give every machine the same files"
        )
    return model


def _timed(model: SentenceTransformer, tokenised: Tokenised, side: Side) -> Encoded:
    began = time.perf_counter()
    embeddings = forward(model, tokenised, side)
    return Encoded(embeddings, tokenised.read, tokenised.lost, time.perf_counter() - began)


def set_threads(threads: int) -> None:
    """Threads of a product in this process."""
    import torch

    torch.set_num_threads(threads)
