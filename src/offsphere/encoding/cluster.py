"""Encoding and exact search on a Ray cluster: shards go out as tasks, and come back bit for bit as from one process.

A task has no effect but its result, so Ray may run it again wherever a machine or a process was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from offsphere.encoding.cache import Encoded
from offsphere.encoding.embeddings import Embeddings, open_embeddings
from offsphere.encoding.ways import AHEAD, Job, Settings, encode_texts, set_threads
from offsphere.errors import EmbeddingsError, OffsphereError, UsageError
from offsphere.evaluation.ranking import Ranking, excluded_pairs
from offsphere.search.exact import ExactSearch
from offsphere.search.vectors import first
from offsphere.similarity import Similarity

if TYPE_CHECKING:
    from offsphere.data import Collection

RETRIES = 5
"""Times that a task is run again when its process or machine is lost."""


class Cluster:
    """On every processor of the Ray cluster at hand (RAY_ADDRESS, or one that runs here), or else of this machine.

    Every machine needs offsphere, and the model under the same name.

    Args:
        settings: See ``Settings``.
        processors: Of each task.
    """

    def __init__(self, settings: Settings, processors: int = 1):
        self._settings, self._processors = settings, processors

    def encoded(self, jobs: Iterator[Job]) -> Iterator[tuple[Job, Encoded]]:
        """See ``ways.Way``."""
        settings, processors = self._settings, self._processors

        def task(texts: list[str]) -> Encoded:
            set_threads(processors)
            return encode_texts(settings, texts)

        graphics = 1 if (settings.device or "").startswith("cuda") else 0
        yield from _spread(task, ((job, job.texts) for job in jobs), processors, graphics)


def rank_on_ray(
    queries: Embeddings, documents: Embeddings, collection: Collection, similarity: Similarity, k: int = 100
) -> Ranking:
    """The ranking of ``evaluation.rank`` from embeddings on disk: every shard is searched where a processor is free.

    Args:
        queries: Of the collection's queries, and perhaps of others.
        documents: Of the collection's corpus, at a place that every machine can read.
        collection: Whose exclusions count.
        similarity: What to rank under.
        k: Length of the list.

    Raises:
        EmbeddingsError: If they are not of this collection, or a shard is damaged.
    """
    raw = queries.of(collection.queries)
    prepared = similarity.prepare_query(raw.astype(np.float64))
    if len(documents.rows_of(collection.documents)) != len(documents):
        raise EmbeddingsError(
            f"{documents.storage.name} has more documents than {collection.name}; encode the collection"
        )
    # Positions ascend as ids descend, so that the lower one wins a tie.
    order = np.array(sorted(range(len(documents)), key=documents.ids.__getitem__, reverse=True), np.int64)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    ordered_ids = [documents.ids[row] for row in order]
    rows, excluded = excluded_pairs(collection, ordered_ids)
    address, gamma_d = documents.storage.name, similarity.gammas[1]

    def task(number: int) -> tuple[np.ndarray, np.ndarray]:
        return _search_shard(address, number, prepared, gamma_d, k, place, (rows, excluded))

    positions = np.full((len(prepared), k), -1, np.int64)
    scores = np.full((len(prepared), k), -np.inf, np.float32)
    for _, (found, best) in _spread(task, ((number, number) for number in documents.manifest.shards), 1):
        positions, scores = first(np.hstack([positions, found]), np.hstack([scores, best]), k)
    return Ranking(list(collection.queries), ordered_ids, positions, scores)


def _search_shard(
    address: str,
    number: int,
    prepared: np.ndarray,
    gamma_d: float,
    k: int,
    place: np.ndarray,
    excluded: tuple[np.ndarray, np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """The k best of one shard, as positions in the order of ties."""
    documents = open_embeddings(address)
    shard = documents.manifest.shards[number]
    mine = place[shard.start : shard.stop]
    order = np.argsort(mine)
    row = np.full(len(place), -1, np.int64)
    row[mine] = np.arange(len(mine))
    here = row[excluded[1]]
    pairs = excluded[0][here >= 0], here[here >= 0]
    search = ExactSearch(documents.shard(number), gamma_d=gamma_d, order=order)
    rows, scores = search.search(prepared, k, pairs)
    return np.where(rows >= 0, mine[rows], -1), scores


def _spread(
    task: Callable[[Any], Any], asked: Iterator[tuple[Any, Any]], processors: int, graphics: int = 0
) -> Iterator[tuple[Any, Any]]:
    """What each key was asked with, and its answer, as they get ready; only a few wait at a time."""
    ray = _ray()
    remote = ray.remote(num_cpus=processors, num_gpus=graphics, max_retries=RETRIES)(task)
    there = ray.cluster_resources()
    most = AHEAD * max(1, int(there.get("GPU" if graphics else "CPU", 1)) // (graphics or processors))
    running: dict[Any, Any] = {}

    def finished() -> Iterator[tuple[Any, Any]]:
        for reference in ray.wait(list(running))[0]:
            key = running.pop(reference)
            try:
                yield key, ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                raise cause if isinstance(cause, OffsphereError) else error from None
            except ray.exceptions.WorkerCrashedError as error:
                raise EmbeddingsError(
                    f"a worker was lost {RETRIES + 1} times at the same shard, perhaps for want of memory: {error}"
                ) from None

    for key, argument in asked:
        running[remote.remote(argument)] = key
        if len(running) >= most:
            yield from finished()
    while running:
        yield from finished()


def _ray() -> Any:
    """Ray, connected."""
    try:
        import ray
    except ImportError:
        raise UsageError("--ray needs Ray; type: pip install 'offsphere[ray]'") from None
    if not ray.is_initialized():
        try:
            ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(f"no Ray cluster can be reached or started: {error}") from error
    return ray
