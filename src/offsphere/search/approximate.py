"""Approximate search that is chosen by measurement on the user's own vectors, and kept only while its promise holds.

No graph is right everywhere: which one finds the largest inner products depends on how norms and directions go together
(see ``search.graphs``). So all are built on a sample and measured against exact search; the fastest that reaches the
asked recall is built on everything and measured again. Where none does, exact search stays.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from offsphere.errors import ConfigError, EncoderError, IndexFolderError
from offsphere.progress import Progress, Silent
from offsphere.search.exact import ExactSearch
from offsphere.search.graphs import KINDS, Graph, new_graph
from offsphere.search.recall import Choice, Measured, Trial, fewest_queries
from offsphere.similarity import Similarity, norms

EF_SEARCH = (16, 32, 64, 128, 256, 512, 1024)
EXACT = "exact"
REAL_QUERIES = "queries"
PERTURBED = "perturbed documents"
PERTURBATION = 0.5  # length of the noise, as a share of the document's
GROWTH = 1.1  # documents now, against those that were measured, from which the promise is measured again
FORMAT = 1
SETTINGS = "settings.json"


class ApproximateIndex:
    """Documents behind the graph that was chosen, or behind exact search; scores are exact either way.

    Searches may run side by side; nothing else may run beside ``add``.

    Args:
        found_by: A graph that holds the documents, or the prepared documents (D, n) float32 for exact search.
        ef_search: Candidates that the walk through the graph keeps; None for exact search.
        choice: What was measured.
        queries: (Q, n) float32, prepared: those that measured it, and will measure it again as it grows.

    Attributes:
        choice: The latest measurement.
        ef_search: As above.
    """

    def __init__(self, found_by: Graph | np.ndarray, ef_search: int | None, choice: Choice, queries: np.ndarray):
        self.ef_search: int | None
        self._found_by: Graph | ExactSearch
        self.choice = choice
        self._queries = queries
        self._answer_with(found_by, ef_search)

    def __len__(self) -> int:
        return len(self._documents)

    @property
    def documents(self) -> np.ndarray:
        """(D, n) float32, prepared; a view that the next ``add`` makes invalid."""
        return self._documents

    @property
    def method(self) -> str:
        """The kind of graph, or ``exact``."""
        return self._found_by.method if isinstance(self._found_by, Graph) else EXACT

    @property
    def settings(self) -> dict[str, Any]:
        """Plain values that describe the index; ``choice`` holds the table of candidates."""
        return {
            "method": self.method,
            "ef_search": self.ef_search,
            "documents": len(self),
            "dimension": self._documents.shape[1],
            "graph": self._found_by.settings if isinstance(self._found_by, Graph) else None,
            "choice": self.choice.to_dict(),
        }

    def search(self, queries: np.ndarray, k: int = 10) -> tuple[np.ndarray, np.ndarray]:
        """The k best documents of each query, best first; of equal scores the lower row comes first.

        The promise is about lists of ``choice.k``; for longer ones efSearch grows in proportion.

        Args:
            queries: (Q, n) prepared.
            k: Length of the lists.

        Returns:
            Rows (Q, k) int64, -1 where there is none, and scores (Q, k) float32, -inf where there is none: inner
            products in float64, rounded once.

        Raises:
            ConfigError: If k is below 1.
            EncoderError: If the queries have another dimension, or are not finite.
        """
        if k < 1:
            raise ConfigError(f"k must be at least 1, found {k}")
        queries = _checked(queries, "queries", self._documents.shape[1])
        if isinstance(self._found_by, ExactSearch):
            return self._found_by.search(queries, k)
        ef = math.ceil((self.ef_search or EF_SEARCH[0]) * max(1.0, k / self.choice.k))
        return self._found_by.search(queries, k, max(k, ef))

    def add(self, documents: np.ndarray, progress: Progress | None = None) -> None:
        """Put prepared documents behind those that are there.

        Once a tenth has come on top of what was measured, the promise is measured again with the same queries:
        efSearch is raised as far as needed, and exact search takes over where that is not enough. An interruption
        leaves the object unfit for use and what was saved as it was: load it again.

        Args:
            documents: (D, n) prepared.
            progress: Where to show how far it is.

        Raises:
            EncoderError: If they have another dimension, or are not finite.
        """
        documents = _checked(documents, "documents", self._documents.shape[1])
        progress = progress or Silent()
        if not len(documents):
            return
        if isinstance(self._found_by, ExactSearch):
            self._answer_with(np.concatenate((self._documents, documents)), None)
            return
        self._found_by.add(documents, progress.start("inserting documents", len(documents)))
        self._answer_with(self._found_by, self.ef_search)
        if self.choice.kept is None or len(self) >= GROWTH * self.choice.kept.documents:
            self._renew_promise(progress)

    def keep_promise(self, trial: Trial, progress: Progress) -> Measured | None:
        """What it reaches with the first efSearch, from the present one on, that keeps the promise; None if none does.

        Both halves of the queries must put the lower bound of their recall above it. A graph that falls short passes
        one look by luck in 5 % of 5 %, since the halves are independent: under 2 % over all values of efSearch.
        """
        for ef_search in (ef for ef in EF_SEARCH if ef >= (self.ef_search or 0)):
            self.ef_search = ef_search
            measured = trial.measure(self.method, ef_search, self.search)
            progress.say(measured.line(trial.k))
            if min(measured.bound, measured.held_out_bound) >= self.choice.promise:
                return measured
        return None

    def save(self, path: Path) -> None:
        """Write a folder that ``load`` reads; an index that was there is replaced in one step, or stays as it was."""
        path.mkdir(parents=True, exist_ok=True)
        parts = Path(tempfile.mkdtemp(dir=path, prefix="parts-"))
        np.save(parts / "queries.npy", self._queries)
        if isinstance(self._found_by, Graph):
            self._found_by.write(parts)
        else:
            np.save(parts / "documents.npy", self._documents)
        fresh = path / f"{SETTINGS}.{os.getpid()}.tmp"
        stored = {"format": FORMAT, "parts": parts.name} | self.settings
        fresh.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
        fresh.replace(path / SETTINGS)  # from here on the new parts count, and the others are left over
        for other in path.glob("parts-*"):
            if other.name != parts.name:
                shutil.rmtree(other, ignore_errors=True)

    @classmethod
    def load(cls, path: Path) -> ApproximateIndex:
        """The index that ``save`` wrote.

        Raises:
            IndexFolderError: If there is none, or parts of it are missing or unreadable.
        """
        again = "Build it again, or delete the folder to search exactly."
        try:
            stored = json.loads((path / SETTINGS).read_text(encoding="utf-8"))
            if stored["format"] != FORMAT:
                raise IndexFolderError(f"{path} has format {stored['format']!r}, this version reads {FORMAT}. {again}")
            parts = path / stored["parts"]
            found_by: Graph | np.ndarray
            if stored["graph"] is None:
                found_by = np.load(parts / "documents.npy", mmap_mode="r")
            else:
                graph = stored["graph"]
                found_by = new_graph(graph["method"], graph["dimension"], graph["neighbours"], graph["construction"])
                found_by.read(parts, graph)
            queries = np.load(parts / "queries.npy")
            index = cls(found_by, stored["ef_search"], Choice.from_dict(stored["choice"]), queries)
            expected = (stored["documents"], stored["dimension"])
        except FileNotFoundError as error:
            raise IndexFolderError(f"{path} holds no approximate index: no {error.filename}. {again}") from error
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise IndexFolderError(f"the approximate index in {path} cannot be read: {error!r}. {again}") from error
        if index.documents.shape != expected:
            raise IndexFolderError(
                f"the approximate index in {path} holds documents of shape {index.documents.shape}, and its settings "
                f"say {expected}. {again}"
            )
        return index

    def _answer_with(self, found_by: Graph | np.ndarray, ef_search: int | None) -> None:
        self._documents = found_by.documents if isinstance(found_by, Graph) else found_by
        self._found_by = found_by if isinstance(found_by, Graph) else ExactSearch(found_by)
        self.ef_search = ef_search

    def _renew_promise(self, progress: Progress) -> None:
        trial = Trial(self._documents, self._queries, self.choice.k)
        kept = self.keep_promise(trial, progress)
        if kept is None:
            self._answer_with(np.array(self._documents), None)
            kept = trial.measure(EXACT, None, self.search)
            reason = f"exact search took over: with {len(self)} documents the graph no longer keeps its promise"
        else:
            reason = f"{kept.line(trial.k)}, measured again as documents came in"
        progress.say(reason)
        self.choice = replace(self.choice, kept=kept, reason=reason)


def choose(
    documents: np.ndarray,
    queries: np.ndarray | None,
    similarity: Similarity,
    recall: float = 0.95,
    k: int = 10,
    *,
    methods: Sequence[str] = tuple(KINDS),
    sample: int = 20_000,
    most_queries: int = 1_000,
    neighbours: int = 32,
    construction: int = 200,
    seed: int = 0,
    progress: Progress | None = None,
) -> ApproximateIndex:
    """The fastest search that keeps the promise of that recall on these vectors; ``choice`` tells what was measured.

    Every method is built on a sample of the documents and searched with the values of ``EF_SEARCH`` in turn, to one
    beyond the first that suffices. One half of the queries chooses: of each method the fastest setting whose recall has
    its lower bound at the asked one. In the order of their speed these are built on all documents, efSearch is raised
    until both halves confirm the recall there (see ``ApproximateIndex.keep_promise``), and the first that is then
    faster than exact search stays.

    The measured recalls are the same for a seed where FAISS runs with one thread (``OMP_NUM_THREADS=1``); between
    methods of nearly the same speed the clock decides.

    Args:
        documents: (D, n) raw embeddings.
        queries: (Q, n) raw embeddings of real queries, zero vectors and repetitions left out of account. None takes
            documents with noise on them in their stead, and says so: documents themselves would find themselves at
            once, which says little about queries, and these are only somewhat better.
        similarity: What to rank under.
        recall: The promised share of the k best documents.
        k: Length of the answers.
        methods: Which graphs to measure.
        sample: Documents that the candidates are built on.
        most_queries: Queries used, drawn at random from more.
        neighbours: See ``Graph``.
        construction: See ``Graph``.
        seed: Of the sample, of the halves, and of the noise.
        progress: Where to say what is measured.

    Raises:
        ConfigError: If a setting is out of range.
        EncoderError: If documents and queries do not fit together, or are not finite.
        UsageError: If FAISS is not installed.
    """
    progress = progress or Silent()
    documents = _checked(documents, "documents")
    if not 0 < recall <= 1 or not 1 <= k <= sample:
        raise ConfigError(
            f"approximate search needs a recall above 0 and up to 1, found {recall}, and a k from 1 to the documents "
            f"in the sample, {sample}, found {k}"
        )
    random = np.random.default_rng(seed)
    source = PERTURBED if queries is None else REAL_QUERIES
    raw = _perturbed(documents, most_queries, random) if queries is None else queries
    asked = _different(_checked(raw, "queries", documents.shape[1]), most_queries, random)
    asked = _single(similarity.prepare_query(asked))
    prepared = _single(similarity.prepare_document(documents))
    choice = Choice(recall, k, len(asked), source, (), (), None, None, "")
    if unfit := _why_unmeasured(len(prepared), choice):
        progress.say(unfit)
        return ApproximateIndex(prepared, None, replace(choice, reason=unfit), asked)

    trial = Trial(prepared, asked, k)
    exact = trial.measure(EXACT, None, ExactSearch(prepared).search)
    progress.say(exact.line(k))
    whole = len(prepared) <= sample
    sampled = prepared if whole else prepared[np.sort(random.choice(len(prepared), sample, replace=False))]
    small = trial if whole else Trial(sampled, asked, k)
    graphs: dict[str, Graph] = {}
    table: list[Measured] = []
    for method in methods:
        graph = _build(method, sampled, neighbours, construction, progress)
        enough = False
        for ef_search in EF_SEARCH:
            index = ApproximateIndex(graph, ef_search, choice, asked)
            table.append(small.measure(method, ef_search, index.search))
            progress.say(table[-1].line(k))
            if enough:
                break
            enough = table[-1].bound >= recall
        if whole:
            graphs[method] = graph
    choice = replace(choice, candidates=tuple(table), decile_norms=small.decile_norms, exact=exact)

    faster = [row for row in by_speed(table, recall) if row.queries_per_second > exact.queries_per_second]
    for row in faster:
        graph = graphs.get(row.method) or _build(row.method, prepared, neighbours, construction, progress)
        index = ApproximateIndex(graph, row.ef_search, choice, asked)
        kept = index.keep_promise(trial, progress)
        if kept is not None and kept.queries_per_second > exact.queries_per_second:
            index.choice = replace(choice, kept=kept, reason=_why_kept(kept, exact, choice))
            progress.say(index.choice.reason)
            return index
    reason = _why_exact(table, faster, choice)
    progress.say(reason)
    return ApproximateIndex(prepared, None, replace(choice, kept=exact, reason=reason), asked)


def by_speed(table: Sequence[Measured], recall: float) -> list[Measured]:
    """Of each method the fastest row whose recall, by the queries that choose, has its lower bound at ``recall``."""
    best: dict[str, Measured] = {}
    for row in sorted(table, key=lambda row: row.queries_per_second, reverse=True):
        if row.bound >= recall:
            best.setdefault(row.method, row)
    return list(best.values())


def _why_unmeasured(documents: int, choice: Choice) -> str:
    if documents < choice.k:
        return f"exact search stays: {documents} documents are fewer than an answer of {choice.k}"
    fewest = 2 * fewest_queries(choice.promise)
    if choice.queries >= fewest:
        return ""
    more = "" if math.isinf(fewest) else f"; it takes {fewest} different ones at least"
    asked = f"a recall@{choice.k} of {choice.promise:g}"
    return f"exact search stays: {choice.queries} {choice.source} cannot prove {asked}{more}"


def _why_kept(kept: Measured, exact: Measured, choice: Choice) -> str:
    times = kept.queries_per_second / exact.queries_per_second
    measured_by = f"by {choice.queries} {choice.source}"
    if choice.source == PERTURBED:
        measured_by += ", for want of queries: measure with real ones before you rely on it"
    return f"{kept.line(choice.k)}, {times:.1f} times as fast as exact search; {measured_by}"


def _why_exact(table: Sequence[Measured], faster: Sequence[Measured], choice: Choice) -> str:
    asked = f"a recall@{choice.k} of {choice.promise:g}"
    if faster:
        return f"exact search stays: over all documents no candidate is faster and reaches {asked}"
    if by_speed(table, choice.promise):
        return f"exact search stays: it is as fast as what reaches {asked}"
    best = max(table, key=lambda row: row.bound, default=None)
    nearest = "" if best is None else f"; the nearest was {best.line(choice.k)}"
    return f"exact search stays: no candidate reached {asked}{nearest}"


def _build(method: str, prepared: np.ndarray, neighbours: int, construction: int, progress: Progress) -> Graph:
    graph = new_graph(method, prepared.shape[1], neighbours, construction)
    graph.add(prepared, progress.start(f"building the {method} graph", len(prepared)))
    return graph


def _perturbed(documents: np.ndarray, most: int, random: np.random.Generator) -> np.ndarray:
    rows = np.sort(random.choice(len(documents), min(most, len(documents)), replace=False))
    chosen = documents[rows].astype(np.float64)
    noise = random.standard_normal(chosen.shape) / math.sqrt(chosen.shape[1])
    return chosen + PERTURBATION * norms(chosen)[:, None] * noise


def _different(queries: np.ndarray, most: int, random: np.random.Generator) -> np.ndarray:
    """Queries in random order, without zero vectors (any answer is right) and repetitions (halves would share them)."""
    return random.permutation(np.unique(queries[norms(queries) > 0], axis=0))[:most]


def _single(vectors: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(vectors, np.float32)


def _checked(vectors: np.ndarray, what: str, dimension: int | None = None) -> np.ndarray:
    """Float32 rows, all finite.

    Raises:
        EncoderError: If they are not (count, dimension), or not finite.
    """
    if vectors.ndim != 2 or vectors.shape[1] != (dimension or vectors.shape[1]):
        raise EncoderError(
            f"{what} have shape {vectors.shape}; expected (count, {dimension or 'dimension'}), one row for each"
        )
    vectors = vectors.astype(np.float32, copy=False)
    broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(broken):
        raise EncoderError(f"{len(broken)} of {len(vectors)} {what} are NaN or infinite, such as row {broken[0]}")
    return vectors
