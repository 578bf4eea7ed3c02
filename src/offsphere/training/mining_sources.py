"""What is mined: training pairs, the documents to find negatives in, and which of them a query must never get."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from offsphere.data import TrainingPairs, load_collection, load_pairs
from offsphere.data.beir import is_collection
from offsphere.data.documents import read_documents, read_prompts
from offsphere.data.fingerprint import digest
from offsphere.data.pairs import pairs_of
from offsphere.errors import DataError

REASONS = (
    "known to be relevant",
    "text of a relevant document",
    "excluded by the collection",
    "text of the query",
)
"""Why a query must not get a document, whatever its score."""

Ids = dict[str, set[str]]


def same_text(text: str) -> str:
    """What two texts share that count as one: case is folded, and white space is one space."""
    return " ".join(text.split()).casefold()


@dataclass(frozen=True)
class Source:
    """Training pairs, with their own documents.

    Attributes:
        pairs: As training reads them.
        documents: Id, as in its file, to text: the corpus of a collection, or all positives of other pairs.
        excluded: Query (as ``same_text``) to the ids of documents that are never ranked for it.
        prompts: Of the collection, by side.
    """

    pairs: TrainingPairs
    documents: dict[str, str]
    excluded: Ids
    prompts: dict[str, str]

    @cached_property
    def relevant(self) -> Ids:
        """Query (as ``same_text``) to the ids of all documents known to be relevant to it."""
        ids: Ids = defaultdict(set)
        prefix = f"{self.pairs.name}/"
        texts = dict(zip(self.pairs.query_ids, map(same_text, self.pairs.queries), strict=True))
        for query, documents in self.pairs.relevant.items():
            if query in texts:
                ids[texts[query]].update(one.removeprefix(prefix) for one in documents)
        return ids


def load_source(source: str, split: str, given: Iterable[str] = ()) -> Source:
    """Training pairs with the documents that they come with.

    Args:
        source: A collection, or whatever else ``load_pairs`` reads.
        split: Of a collection or dataset.
        given: Sides whose prompt the user gave, which then comes before the collection's.

    Raises:
        DataError: If it does not exist or is malformed.
    """
    folder = Path(source).expanduser()
    if not (folder.is_dir() and is_collection(folder)):
        pairs = load_pairs(source, split)
        ids = (identifier.removeprefix(f"{pairs.name}/") for identifier in pairs.positive_ids)
        return Source(pairs, dict(zip(ids, pairs.positives, strict=True)), {}, {})
    collection = load_collection(folder, split).without_prompts(given)
    excluded: Ids = defaultdict(set)
    for query, text in collection.queries.items():
        excluded[same_text(text)] |= collection.excluded.get(query, frozenset())
        if collection.exclude_self:
            excluded[same_text(text)].add(query)
    return Source(pairs_of(collection), collection.documents, excluded, collection.prompts)


class Corpus:
    """The different texts among some documents. Documents of one text (see ``same_text``) are one candidate.

    Neither the order of the documents nor a copy of one changes what is mined: the candidate stands for the document
    with the last id, and candidates are in the order of ids, descending, in which trec_eval settles ties.

    Args:
        name: What the summary calls it.
        documents: Id to text.
        prompt: What stands before a document; the model's own where None.

    Attributes:
        texts: D texts, the candidates.
        copies: (D,) how many documents have each.
        rows: Document id to candidate.
        by_text: Text, as ``same_text``, to candidate.
        empty: Documents without text, which are no candidates.

    Raises:
        DataError: If no document has text.
    """

    def __init__(self, name: str, documents: Mapping[str, str], prompt: str | None):
        self.name, self.prompt = name, prompt
        self.documents = documents
        self.texts: list[str] = []
        self.rows: dict[str, int] = {}
        self.by_text: dict[str, int] = {}
        for identifier in sorted(documents, reverse=True):
            text = documents[identifier]
            if key := same_text(text):
                row = self.rows[identifier] = self.by_text.setdefault(key, len(self.texts))
                if row == len(self.texts):
                    self.texts.append(text)
        if not self.texts:
            raise DataError("no document has text; there is nothing to mine from", name)
        self.copies = np.bincount(list(self.rows.values()), minlength=len(self.texts))
        self.empty = len(documents) - len(self.rows)

    def to_dict(self) -> dict[str, str | int]:
        """What the summary says about it."""
        return {
            "name": self.name,
            "documents": len(self.documents),
            "different_texts": len(self.texts),
            "without_text": self.empty,
            "fingerprint": digest(sorted(self.documents.items())),
        }


def load_corpus(source: str, given: Iterable[str] = ()) -> Corpus:
    """The documents of a collection folder or a file (see ``read_documents``).

    Args:
        source: Where they are.
        given: Sides whose prompt the user gave.

    Raises:
        DataError: If it does not exist or is malformed.
    """
    prompt = None if "document" in given else read_prompts(source).get("document")
    return Corpus(source, {one.id: one.passage for one in read_documents(source)}, prompt)


class Forbidden:
    """The candidates that each query must not get.

    A candidate is forbidden to a query where one of its documents has the id or the text of a document that is known to
    be relevant to the same query text, in whatever row or source; where the collection excludes it for the query; or
    where it is the query's own text.

    Args:
        queries: Different texts.
        corpus: What is mined from.
        sources: Those whose ids mean documents of this corpus.
        known_texts: Query to the texts of its positives, both as ``same_text``, from all sources.
    """

    def __init__(
        self, queries: Sequence[str], corpus: Corpus, sources: Sequence[Source], known_texts: Mapping[str, set[str]]
    ):
        found: list[tuple[int, int, list[int]]] = []
        for number, query in enumerate(map(same_text, queries)):
            relevant = {one for source in sources for one in source.relevant.get(query, ())}
            excluded = {one for source in sources for one in source.excluded.get(query, ())}
            known = Counter(corpus.rows[one] for one in relevant if one in corpus.rows)
            texts = {corpus.by_text[text] for text in known_texts.get(query, ()) if text in corpus.by_text}
            counts: dict[int, list[int]] = {}
            if query in corpus.by_text:
                counts[corpus.by_text[query]] = [0, 0, 0, 1]
            counts |= {corpus.rows[one]: [0, 0, 1, 0] for one in excluded if one in corpus.rows}
            counts = {row: [count * int(corpus.copies[row]) for count in why] for row, why in counts.items()}
            counts |= {row: [known[row], int(corpus.copies[row]) - known[row], 0, 0] for row in texts | set(known)}
            found += [(number, row, counts[row]) for row in sorted(counts)]
        self._size = len(corpus.texts)
        self._codes = np.array([number * self._size + row for number, row, _ in found], np.int64)
        self._counts = np.array([counts for *_, counts in found], np.int64).reshape(-1, len(REASONS))

    def of(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(places in ``queries``, candidates), for these queries' numbers: the pairs that no ranking may hold."""
        starts = np.searchsorted(self._codes, queries * self._size)
        ends = np.searchsorted(self._codes, (queries + 1) * self._size)
        codes = [self._codes[start:end] for start, end in zip(starts, ends, strict=True)]
        return np.repeat(np.arange(len(queries)), ends - starts), np.concatenate([*codes, self._codes[:0]]) % self._size

    def documents(self, queries: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """(P, reasons) how many documents each of these forbidden (query, candidate) pairs stands for, by reason."""
        return self._counts[np.searchsorted(self._codes, queries * self._size + candidates)]


def known_texts(sources: Iterable[Source]) -> Ids:
    """Query to the texts of all documents known to be relevant to it, both as ``same_text``."""
    texts: Ids = defaultdict(set)
    for source in sources:
        for query, positive in zip(source.pairs.queries, source.pairs.positives, strict=True):
            texts[same_text(query)].add(same_text(positive))
    return texts
