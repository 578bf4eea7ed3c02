"""Two rankings of one index for the same query, under any gamma_d and by cosine, live for the whole index."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from offsphere.encoders import Side, encode
from offsphere.similarity import Similarity, norms
from offsphere.web.comparison import Comparison, best

if TYPE_CHECKING:
    from offsphere.data.documents import Document
    from offsphere.search.hits import Hit
    from offsphere.search.index import Index

BLOCK = 8192
"""Documents whose products are computed at a time, in float64."""
REMEMBERED = 128 * 2**20
"""Bytes of products kept, so that moving the slider encodes and multiplies nothing."""
SHOWN = 4096
"""Beginnings of texts kept."""
EXCERPT = 400
"""Characters of a text that a ranking shows; the rest is asked for by id."""
BARS = 40
Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Asked:
    """A query and its inner product with every document, from which the scores under any exponents follow.

    Attributes:
        length: Of the query's raw embedding.
        products: (D,) float64 inner products of the raw embeddings.
    """

    length: float
    products: np.ndarray


@dataclass(frozen=True)
class Beginning:
    """What a ranking shows of a document.

    Attributes:
        title: May be empty.
        excerpt: The beginning of the text.
        characters: How long the whole text is.
    """

    title: str
    excerpt: str
    characters: int


@dataclass(frozen=True)
class Row(Beginning):
    """One document of a ranking.

    Attributes:
        id: Of the document.
        rank: Its place in this ranking, from 1.
        other_rank: Its place in the other one, over the whole index.
        score: Under the similarity of this ranking.
        cosine: Of the angle to the query; 0 where the query has no direction.
        angle: The same in degrees.
        length: Of the document's raw embedding.
        longer_than: The share of documents that are shorter, from 0 to 1; those without text do not count.
        why: What lifted or lowered it against the ranking by cosine, in words.
    """

    id: str
    rank: int
    other_rank: int
    score: float
    cosine: float
    angle: float
    length: float
    longer_than: float
    why: str


class Explorer:
    """What the server does with an index; every method may be called from several threads.

    Ids and embeddings are read once: documents added later are seen by a new explorer.

    Args:
        index: An open index.
    """

    def __init__(self, index: Index):
        self.index = index
        self.similarity: Similarity = index.similarity
        empty = index.count() == 0
        self._ids: list[str] = [] if empty else index.ids
        self._embeddings = np.zeros((0, index.manifest.dimension), np.float32) if empty else index.embeddings
        self._lengths = np.concatenate([np.empty(0), *(norms(block) for _, block in self._blocks())])
        self._sorted = np.sort(self._lengths[self._lengths > 0])
        self._asked: OrderedDict[str, Asked] = OrderedDict()
        self._most_asked = max(1, REMEMBERED // max(1, self._lengths.nbytes))
        self._shown: OrderedDict[str, Beginning] = OrderedDict()
        self._model = index.encoder  # opened now, not at the first query
        # A tokenizer changes its own padding while it works, so only one thread may encode at a time.
        self._encoding = threading.Lock()
        self._memory = threading.Lock()

    def describe(self) -> dict[str, Any]:
        """What the index holds: documents, model, similarity, and a histogram of the lengths of its documents.

        The histogram spans all but the outermost thousandth on each side, which is counted in the first and last bar.
        """
        low, high = np.quantile(self._sorted, [0.001, 0.999]) if len(self._sorted) else (0.0, 0.0)
        counts, edges = np.histogram(np.clip(self._sorted, low, high), BARS, (low, high))
        gamma_q, gamma_d = self.similarity.gammas
        return {
            "documents": len(self._ids),
            "without_text": len(self._ids) - len(self._sorted),
            "dimension": self._embeddings.shape[1],
            "model": self.index.manifest.model,
            "similarity": self.similarity.name,
            "gamma_q": gamma_q,
            "gamma_d": gamma_d,
            "lengths": {"counts": counts.tolist(), "edges": edges.tolist()},
        }

    def embed(self, texts: Sequence[str], side: Side) -> tuple[np.ndarray, np.ndarray]:
        """Raw embeddings (len(texts), n) and their lengths (len(texts),), with the prompt that the index uses."""
        with self._encoding:
            embeddings = encode(self._model, texts, side)
        return embeddings, norms(embeddings)

    def search(self, text: str, k: int, similarity: Similarity, where: str | None) -> list[Hit]:
        """The k best documents, as ``Index.search`` finds them; none in an empty index."""
        if not self._ids:
            return []
        with self._encoding:
            return self.index.search(text, k, similarity, where)

    def document(self, id: str) -> Document | None:
        """One document whole; None where the index has no such id."""
        return next(iter(self.index.documents([id])), None)

    def explore(self, text: str, gamma_d: float, k: int) -> tuple[float, list[Row], list[Row]]:
        """The length of the query, its ranking under ``gamma_d``, and its ranking by cosine: the k best of each.

        Ranks and their changes are over the whole index, in the order of ``Index.search``: float32 scores, ties by id
        descending, no documents without text. The query is encoded and multiplied once, whatever gamma_d follows.
        """
        asked = self._ask(text)
        gamma_q, _ = self.similarity.gammas
        # gamma_q multiplies every score alike: with the same one, both rankings are the same numbers at gamma_d 1.
        trained, angular, cosines = (
            self._scores(asked, Similarity(*gammas)) for gammas in ((gamma_q, gamma_d), (gamma_q, 1.0), (1.0, 1.0))
        )
        comparison = Comparison(trained, angular, self._lengths)
        places = [best(scores, min(k, len(self._sorted))).tolist() for scores in (trained, angular)]
        beginnings = self._beginnings([self._ids[place] for place in sorted({*places[0], *places[1]})])
        rows: tuple[list[Row], list[Row]] = ([], [])
        for place in places[0]:
            rank, other, why = comparison.why(place)
            rows[0].append(self._row(place, rank, other, why, trained, cosines, beginnings))
        for place in places[1]:
            other, rank, why = comparison.why(place)
            rows[1].append(self._row(place, rank, other, why, cosines, cosines, beginnings))
        return asked.length, *rows

    def _row(
        self,
        place: int,
        rank: int,
        other_rank: int,
        why: str,
        scores: np.ndarray,
        cosines: np.ndarray,
        beginnings: dict[str, Beginning],
    ) -> Row:
        length, cosine = float(self._lengths[place]), float(np.clip(cosines[place], -1, 1))
        return Row(
            id=self._ids[place],
            rank=rank,
            other_rank=other_rank,
            score=float(scores[place]),
            cosine=cosine,
            angle=float(np.degrees(np.arccos(cosine))),
            length=length,
            longer_than=float(np.searchsorted(self._sorted, length) / len(self._sorted)),
            why=why,
            **vars(beginnings[self._ids[place]]),
        )

    def _ask(self, text: str) -> Asked:
        """The products of this query, from memory if it was asked lately."""
        with self._memory:
            if text in self._asked:
                self._asked.move_to_end(text)
                return self._asked[text]
        embedding, lengths = self.embed([text], "query")
        query = embedding[0].astype(np.float64)
        products = np.empty(len(self._lengths))
        for rows, block in self._blocks():
            products[rows] = block @ query
        asked = Asked(float(lengths[0]), products)
        with self._memory:
            _remember(self._asked, {text: asked}, self._most_asked)
        return asked

    def _blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """The raw embeddings in float64, some rows at a time."""
        for start in range(0, len(self._embeddings), BLOCK):
            rows = slice(start, start + BLOCK)
            yield rows, self._embeddings[rows].astype(np.float64)

    def _scores(self, asked: Asked, similarity: Similarity) -> np.ndarray:
        """(D,) float32 p / (|q|^gamma_q |d|^gamma_d) from the products p and the lengths; -inf for no text."""
        gamma_q, gamma_d = similarity.gammas
        # A vector of one number x is its own length, and becomes x / x^(gamma + 1) = x^-gamma; zero stays zero.
        powers = Similarity(gamma_q + 1.0, gamma_d + 1.0)
        query = powers.prepare_query(np.array([[asked.length]]))
        documents = powers.prepare_document(self._lengths[:, None])
        scores = (asked.products * documents[:, 0] * query[0, 0]).astype(np.float32) + np.float32(0)  # no -0
        scores[self._lengths == 0] = -np.inf
        return scores

    def _beginnings(self, ids: list[str]) -> dict[str, Beginning]:
        """What a ranking shows of these documents, from memory if it was shown lately."""
        with self._memory:
            known = {id: self._shown[id] for id in ids if id in self._shown}
        missing = [id for id in ids if id not in known]
        documents = self.index.documents(missing) if missing else []
        read = {one.id: Beginning(one.title, one.text[:EXCERPT], len(one.text)) for one in documents}
        with self._memory:
            _remember(self._shown, read, SHOWN)
        return known | read


def _remember(kept: OrderedDict[str, Kept], new: dict[str, Kept], most: int) -> None:
    """Add to a memory, and drop the oldest beyond ``most``."""
    kept.update(new)
    while len(kept) > most:
        kept.popitem(last=False)
