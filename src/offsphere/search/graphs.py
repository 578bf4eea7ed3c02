"""HNSW graphs that find candidates for the largest inner product, in three kinds that fail on different collections.

===============  ==================================================  ===============================================
method           edges join documents that are near by                fails where
===============  ==================================================  ===============================================
inner-product    their inner product                                  a few long documents are everybody's neighbour
reduction        Euclidean distance after one more dimension,         lengths vary smoothly: one coordinate outweighs
                 sqrt(M^2 - |d|^2), M the greatest length             the others, and neighbours share only a length
direction        their angle                                          length decides the answer more than the angle
===============  ==================================================  ===============================================

What a graph proposes is scored anew, so that scores are exact and all of one meaning. Sources: HNSW, arXiv 1603.09320;
its inner-product graph, Morozov and Babenko, NeurIPS 2018; the reduction, Bachrach et al., RecSys 2014. The graphs
themselves are FAISS's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from offsphere.errors import ConfigError, UsageError
from offsphere.similarity import Similarity, norms

DIRECTION = Similarity.parse("cosine")
BLOCK = 2_000  # documents inserted between two reports of progress; the graph depends on it
VALUES_AT_ONCE = 2**22  # 32 MB of float64
LONGEST_OVERFLOW = 1_000
"""Documents longer than M that the reduction scores one by one before it is built again with a greater M."""

Report = Callable[[int], None]


def _unseen(done: int) -> None:
    """Progress that nobody watches."""


def load_faiss() -> ModuleType:
    """The FAISS library.

    Raises:
        UsageError: If it is not installed, with what to type.
    """
    try:
        import faiss
    except ImportError as error:
        raise UsageError("approximate search needs FAISS; type: pip install 'offsphere[faiss]'") from error
    return faiss


class Graph(ABC):
    """An HNSW graph over prepared documents, with rows numbered as they were added.

    One thread (``OMP_NUM_THREADS=1``) builds the same graph every time; several insert in an order of their own.

    Args:
        dimension: n of the documents.
        neighbours: Edges of a document (M of HNSW; twice as many on the lowest layer).
        construction: Candidates looked at when a document is inserted (efConstruction).

    Attributes:
        documents: (D, n) float32 as they were added; it may be a view that the next ``add`` makes invalid.
    """

    method: ClassVar[str]
    metric: ClassVar[str]
    documents: np.ndarray

    def __init__(self, dimension: int, neighbours: int = 32, construction: int = 200):
        self.dimension = dimension
        self.neighbours = neighbours
        self.construction = construction
        self._index = self._empty()
        self.documents = np.empty((0, dimension), np.float32)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, queries: np.ndarray, k: int, ef: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best of each query's candidates, best first; of equal scores the lower row comes first.

        Args:
            queries: (Q, n) float32, prepared.
            k: Length of the lists.
            ef: See ``candidates``.

        Returns:
            Rows (Q, k) int64, -1 where there is none, and scores (Q, k) float32, -inf where there is none: inner
            products in float64, rounded once.
        """
        candidates = self.candidates(queries, k, ef)
        rows = np.full((len(queries), k), -1, np.int64)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        step = max(1, VALUES_AT_ONCE // (candidates.shape[1] * self.dimension))
        for start in range(0, len(queries), step):
            block = slice(start, start + step)
            found = candidates[block]
            vectors = self.documents[found].astype(np.float64)  # -1 takes the last row, which does not count
            products = (vectors @ queries[block].astype(np.float64)[:, :, None])[..., 0].astype(np.float32)
            products[found < 0] = -np.inf
            order = np.lexsort((found, -products), axis=-1)[:, :k]
            rows[block, : order.shape[1]] = np.take_along_axis(found, order, axis=1)
            scores[block, : order.shape[1]] = np.take_along_axis(products, order, axis=1)
        return rows, scores

    @abstractmethod
    def add(self, documents: np.ndarray, report: Report = _unseen) -> None:
        """Insert prepared documents (D, n) float32 behind those that are there; ``report`` counts them."""

    @abstractmethod
    def candidates(self, queries: np.ndarray, k: int, ef: int) -> np.ndarray:
        """(Q, c) int64 rows among which the k best are sought, none twice in a line, -1 where there is none.

        Args:
            queries: (Q, n) float32, prepared.
            k: How many documents are wanted.
            ef: Candidates that the walk keeps (efSearch), at least k.
        """

    def write(self, folder: Path) -> None:
        """Put all that ``read`` needs, except the settings, into a folder."""
        load_faiss().write_index(self._index, str(folder / "graph.faiss"))

    def read(self, folder: Path, settings: dict[str, Any]) -> None:
        """Take over what ``write`` put there; ``settings`` are those of the graph that wrote it."""
        self._index = load_faiss().read_index(str(folder / "graph.faiss"))

    @property
    def settings(self) -> dict[str, Any]:
        """Plain values that describe the graph."""
        return {
            "method": self.method,
            "dimension": self.dimension,
            "neighbours": self.neighbours,
            "construction": self.construction,
        }

    def _empty(self) -> Any:
        faiss = load_faiss()
        extra = self.metric == "METRIC_L2"
        index = faiss.IndexHNSWFlat(self.dimension + extra, self.neighbours, getattr(faiss, self.metric))
        index.hnsw.efConstruction = self.construction
        return index

    def _insert(self, count: int, vectors: Callable[[slice], np.ndarray], report: Report) -> None:
        """Insert block after block, so that progress shows and an interruption is heard."""
        for start in range(0, count, BLOCK):
            block = slice(start, min(start + BLOCK, count))
            self._index.add(np.ascontiguousarray(vectors(block), np.float32))
            report(block.stop)

    def _walk(self, vectors: np.ndarray, count: int, ef: int) -> np.ndarray:
        parameters = load_faiss().SearchParametersHNSW(efSearch=ef)
        _, rows = self._index.search(np.ascontiguousarray(vectors, np.float32), count, params=parameters)
        return rows

    def _stored(self) -> np.ndarray:
        """(D, n) or (D, n + 1) float32: a view of the vectors inside the graph."""
        faiss = load_faiss()
        storage = faiss.downcast_index(self._index.storage)
        return faiss.rev_swig_ptr(storage.get_xb(), len(self) * self._index.d).reshape(len(self), self._index.d)


class InnerProductGraph(Graph):
    """Documents joined by their plain inner product."""

    method = "inner-product"
    metric = "METRIC_INNER_PRODUCT"

    def read(self, folder: Path, settings: dict[str, Any]) -> None:
        """See ``Graph.read``."""
        super().read(folder, settings)
        self.documents = self._stored()

    def add(self, documents: np.ndarray, report: Report = _unseen) -> None:
        """See ``Graph.add``."""
        self._insert(len(documents), documents.__getitem__, report)
        self.documents = self._stored()

    def candidates(self, queries: np.ndarray, k: int, ef: int) -> np.ndarray:
        """See ``Graph.candidates``: the graph's own order is that of the score, so 2k make good its rounding."""
        return self._walk(queries, min(ef, 2 * k), ef)


class ReductionGraph(Graph):
    """Documents as (d, sqrt(M^2 - |d|^2)) and queries as (q, 0): the nearest has the largest inner product.

    |q - d|^2 is then |q|^2 + M^2 - 2 q.d. M is the greatest length of the first documents. A later one that is longer
    is inserted as (d, 0), which ranks it too low, and is therefore scored for every query beside the graph; once there
    are more than ``LONGEST_OVERFLOW`` of them the graph is built again with a greater M. Either way none is lost.
    """

    method = "reduction"
    metric = "METRIC_L2"
    bound = 0.0
    overflow = np.empty(0, np.int64)

    @property
    def settings(self) -> dict[str, Any]:
        """Plain values that describe the graph, with M and the rows longer than M."""
        return super().settings | {"bound": self.bound, "overflow": self.overflow.tolist()}

    def read(self, folder: Path, settings: dict[str, Any]) -> None:
        """See ``Graph.read``."""
        super().read(folder, settings)
        self.documents = self._stored()[:, : self.dimension]
        self.bound = float(settings["bound"])
        self.overflow = np.array(settings["overflow"], np.int64)

    def add(self, documents: np.ndarray, report: Report = _unseen) -> None:
        """See ``Graph.add``."""
        lengths = norms(documents).astype(np.float64)
        if not len(self):
            self.bound = float(lengths.max(initial=0.0))
        longer = np.flatnonzero(lengths > self.bound) + len(self)
        if len(self.overflow) + len(longer) > LONGEST_OVERFLOW:
            before = len(self)
            everything = np.concatenate((self.documents, documents))
            self._index, self.overflow = self._empty(), self.overflow[:0]
            self.add(everything, lambda done: report(max(0, done - before)))
            return
        last = np.sqrt(np.maximum((self.bound - lengths) * (self.bound + lengths), 0.0))[:, None]
        self._insert(len(documents), lambda block: np.hstack((documents[block], last[block])), report)
        self.documents = self._stored()[:, : self.dimension]
        self.overflow = np.concatenate((self.overflow, longer))

    def candidates(self, queries: np.ndarray, k: int, ef: int) -> np.ndarray:
        """See ``Graph.candidates``: all that the walk kept, since distances near M^2 round away small differences."""
        # The ranking does not depend on the length of the query; as long as M, the least of it is lost to rounding.
        scaled = DIRECTION.prepare_query(queries) * np.float32(self.bound)
        rows = self._walk(np.pad(scaled, ((0, 0), (0, 1))), ef, ef)
        if not len(self.overflow):
            return rows
        rows[np.isin(rows, self.overflow)] = -1
        return np.hstack((rows, np.broadcast_to(self.overflow, (len(rows), len(self.overflow)))))


class DirectionGraph(Graph):
    """Documents joined by their angle; the score, length included, chooses among all that the walk kept."""

    method = "direction"
    metric = "METRIC_INNER_PRODUCT"

    def write(self, folder: Path) -> None:
        """See ``Graph.write``."""
        super().write(folder)
        np.save(folder / "documents.npy", self.documents)

    def read(self, folder: Path, settings: dict[str, Any]) -> None:
        """See ``Graph.read``."""
        super().read(folder, settings)
        self.documents = np.load(folder / "documents.npy", mmap_mode="r")

    def add(self, documents: np.ndarray, report: Report = _unseen) -> None:
        """See ``Graph.add``."""
        self._insert(len(documents), lambda block: DIRECTION.prepare_document(documents[block]), report)
        self.documents = np.concatenate((self.documents, documents)) if len(self.documents) else documents

    def candidates(self, queries: np.ndarray, k: int, ef: int) -> np.ndarray:
        """See ``Graph.candidates``."""
        return self._walk(queries, ef, ef)


KINDS: dict[str, type[Graph]] = {kind.method: kind for kind in (InnerProductGraph, ReductionGraph, DirectionGraph)}


def new_graph(method: str, dimension: int, neighbours: int = 32, construction: int = 200) -> Graph:
    """An empty graph of that kind; see ``Graph`` for its settings.

    Raises:
        ConfigError: If there is no such kind, or a setting is out of range.
    """
    if method not in KINDS:
        raise ConfigError(f"unknown method {method!r} of approximate search; expected one of {', '.join(KINDS)}")
    if neighbours < 2 or construction < 1:
        raise ConfigError(
            f"a graph needs at least 2 neighbours and a construction of 1, found {neighbours} and {construction}"
        )
    return KINDS[method](dimension, neighbours, construction)
