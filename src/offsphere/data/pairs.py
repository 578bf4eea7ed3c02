"""Training pairs: a query, a document that answers it and, where the source has them, hard negatives."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from offsphere.data.beir import LAYOUT, is_collection, load_collection
from offsphere.data.collection import Collection
from offsphere.data.fingerprint import digest, text_id
from offsphere.data.huggingface import is_saved_dataset, read_hub, read_saved
from offsphere.data.records import read_id, read_text
from offsphere.data.rows import FILES, Row, file_rows
from offsphere.errors import ConfigError, DataError

QUERY_NAMES = ("query", "anchor")
COLUMNS = "query (or anchor), positive, and as many of negative, negative_1, negative_2, ... as there are"
_NEGATIVE = re.compile(r"negative(?:_([0-9]+))?")


@dataclass(frozen=True)
class TrainingPairs:
    """Rows of (query, positive, negatives). Ids begin with the name of their source, so sources never collide.

    Attributes:
        name: What results call the training data.
        queries: One text a row.
        positives: One relevant text a row.
        negatives: One list for each negative column, each as long as ``queries``.
        query_ids: One id a row; a query with several positives has several rows.
        positive_ids: One id a row.
        negative_ids: Like ``negatives``.
        relevant: Query id to the ids of every document known to be relevant to it, in whatever row.
        notes: One sentence for each thing that a reader of the results must know about the data.

    Raises:
        DataError: If the lists differ in length, or an id stands for two texts.
    """

    name: str
    queries: list[str]
    positives: list[str]
    negatives: list[list[str]]
    query_ids: list[str]
    positive_ids: list[str]
    negative_ids: list[list[str]]
    relevant: dict[str, frozenset[str]]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        columns = [self.queries, self.positives, self.query_ids, self.positive_ids, *self.negatives, *self.negative_ids]
        if len({len(column) for column in columns}) > 1 or len(self.negatives) != len(self.negative_ids):
            raise DataError(f"{self.name}: every column must have as many ids and texts as there are queries")
        _check_ids(self.query_ids, self.queries)
        _check_ids(
            chain(self.positive_ids, *self.negative_ids),
            chain(self.positives, *self.negatives),
        )

    def __len__(self) -> int:
        return len(self.queries)

    def sample(self, number: int, seed: int = 0) -> TrainingPairs:
        """That many rows drawn at random without repetition, in their order; all of them where there are fewer.

        Raises:
            ConfigError: If no row is asked for.
        """
        if number < 1:
            raise ConfigError(f"a sample needs at least one row, found {number}")
        if number >= len(self):
            return self
        return self._take(sorted(np.random.default_rng(seed).permutation(len(self))[:number].tolist()))

    def split_off(self, part: float, seed: int = 0) -> tuple[TrainingPairs, TrainingPairs]:
        """(train, held out), with every row of a query on one side.

        Args:
            part: The share of the queries to hold out if a float, their number if an int.
            seed: Of the draw, which depends on the query ids and not on the order of the rows.

        Raises:
            ConfigError: If one side would be empty.
        """
        ids = sorted(set(self.query_ids))
        number = round(part * len(ids)) if isinstance(part, float) else part
        if not 0 < number < len(ids):
            raise ConfigError(
                f"holding out {part} of the {len(ids)} queries of {self.name} leaves one side empty; give a share "
                f"between 0 and 1 such as 0.1, or a number from 1 to {len(ids) - 1}"
            )
        drawn = {ids[place] for place in np.random.default_rng(seed).permutation(len(ids))[:number]}
        held_out = [query in drawn for query in self.query_ids]
        return (
            self._take([row for row, held in enumerate(held_out) if not held]),
            self._take([row for row, held in enumerate(held_out) if held]),
        )

    def fingerprint(self) -> str:
        """A SHA-256 of ids, texts and known relevance. The order of the rows counts, since training follows it."""
        rows = zip(
            *(self.query_ids, self.queries, self.positive_ids, self.positives),
            *(*self.negative_ids, *self.negatives),
            strict=True,
        )
        relevant = ((query, sorted(documents)) for query, documents in sorted(self.relevant.items()))
        return digest(chain(rows, ["relevant"], relevant))

    @staticmethod
    def concatenate(parts: Sequence[TrainingPairs]) -> TrainingPairs:
        """The rows of all parts, one after the other.

        Raises:
            DataError: If there is no part, the parts differ in their number of negatives, or share ids but not texts.
        """
        if not parts:
            raise DataError("no training pairs to concatenate; name at least one source")
        if len(parts) == 1:
            return parts[0]
        if len({len(part.negatives) for part in parts}) > 1:
            found = ", ".join(f"{part.name} has {len(part.negatives)}" for part in parts)
            raise DataError(f"all sources need the same number of negative columns, but {found}; train on them apart")
        relevant: defaultdict[str, frozenset[str]] = defaultdict(frozenset)
        for query, documents in chain.from_iterable(part.relevant.items() for part in parts):
            relevant[query] |= documents
        return TrainingPairs(
            name="+".join(dict.fromkeys(part.name for part in parts)),
            queries=list(chain.from_iterable(part.queries for part in parts)),
            positives=list(chain.from_iterable(part.positives for part in parts)),
            negatives=_stack([part.negatives for part in parts]),
            query_ids=list(chain.from_iterable(part.query_ids for part in parts)),
            positive_ids=list(chain.from_iterable(part.positive_ids for part in parts)),
            negative_ids=[
                list(chain(*columns)) for columns in zip(*(part.negative_ids for part in parts), strict=True)
            ],
            relevant=dict(relevant),
            notes=tuple(f"{part.name}: {note}" for part in parts for note in part.notes),
        )

    def as_collection(self, split: str) -> Collection:
        """The pairs as queries to rank their own positives and negatives for; known relevance beyond them is left out.

        Args:
            split: What the collection calls itself.
        """
        ids, texts = chain(self.positive_ids, *self.negative_ids), chain(self.positives, *self.negatives)
        documents = dict(zip(ids, texts, strict=True))
        queries = dict(zip(self.query_ids, self.queries, strict=True))
        qrels = {query: {d: 1 for d in sorted(self.relevant[query]) if d in documents} for query in queries}
        return Collection(self.name, split, documents, queries, qrels)

    def _take(self, rows: list[int]) -> TrainingPairs:
        query_ids = [self.query_ids[row] for row in rows]
        return TrainingPairs(
            name=self.name,
            queries=[self.queries[row] for row in rows],
            positives=[self.positives[row] for row in rows],
            negatives=[[column[row] for row in rows] for column in self.negatives],
            query_ids=query_ids,
            positive_ids=[self.positive_ids[row] for row in rows],
            negative_ids=[[column[row] for row in rows] for column in self.negative_ids],
            relevant={query: self.relevant[query] for query in query_ids},
            notes=self.notes,
        )


def load_pairs(source: str | Path, split: str = "train") -> TrainingPairs:
    """Training pairs from a collection, a file of rows, or a Hugging Face dataset.

    Of a collection every positive judgement of the split is a pair. A file (.jsonl, .csv, .tsv, each also with .gz,
    or .parquet) and a dataset have the columns query (or anchor), positive and any number of negatives; a column such
    as ``positive_id`` gives ids, without it the same text has the same id. Rows with an empty text are left out, and
    the notes say how many.

    Args:
        source: A path, or a dataset's name as ``owner/name`` or ``owner/name:config``.
        split: Of a collection or dataset; a file has no splits.

    Raises:
        DataError: If the source does not exist, is malformed, or has other columns.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if is_collection(path):
            return pairs_of(load_collection(path, split))
        if is_saved_dataset(path):
            return _from_rows(path.resolve().name, read_saved(path, split), path)
        raise DataError(f"no training pairs in this folder; {LAYOUT}, or what Dataset.save_to_disk wrote", path)
    form = path.name.removesuffix(".gz")
    if path.is_file() or form.endswith(FILES):
        return _from_rows(form.rsplit(".", 1)[0], file_rows(path), path)
    return _from_rows(str(source), read_hub(str(source), split), str(source))


def pairs_of(collection: Collection) -> TrainingPairs:
    """A pair for every positive judgement of a collection; its ids are those of the collection after ``NAME/``.

    Raises:
        DataError: If every pair has an empty text.
    """
    prefix = f"{collection.name}/"
    judged = [(q, d) for q, grades in collection.qrels.items() for d, grade in grades.items() if grade > 0]
    pairs = [(q, d) for q, d in judged if collection.queries[q] and collection.documents[d]]
    if not pairs:
        raise DataError(f"every pair of split {collection.split!r} has an empty text", collection.path)
    empty = len(judged) - len(pairs)
    return TrainingPairs(
        name=collection.name,
        queries=[collection.queries[q] for q, _ in pairs],
        positives=[collection.documents[d] for _, d in pairs],
        negatives=[],
        query_ids=[prefix + q for q, _ in pairs],
        positive_ids=[prefix + d for _, d in pairs],
        negative_ids=[],
        relevant=_relevant((prefix + q, prefix + d) for q, d in judged),
        notes=collection.notes + ((_left_out(empty, "an empty query or document"),) if empty else ()),
    )


def _from_rows(name: str, rows: Iterator[Row], where: Path | str) -> TrainingPairs:
    """Pairs from rows of any format: ``where`` and a row's number locate it in messages."""
    first = next(rows, None)
    if first is None:
        raise DataError(f"no rows; expected the columns {COLUMNS}", where)
    columns = _choose_columns(first[1], where)
    id_columns = [f"{column}_id" if f"{column}_id" in first[1] else None for column in columns]
    kept: list[list[str]] = []
    kept_ids: list[list[str]] = []
    left_out: Counter[str] = Counter()
    for number, row in chain([first], rows):
        texts = [read_text(row, column, where, number) for column in columns]
        if not all(texts):
            left_out["an empty negative" if all(texts[:2]) else "an empty query or positive"] += 1
            continue
        ids = [read_id(row, c, where, number) if c else text_id(t) for c, t in zip(id_columns, texts, strict=True)]
        kept.append(texts)
        kept_ids.append([f"{name}/{identifier}" for identifier in ids])
    if not kept:
        raise DataError("every row has an empty text", where)
    queries, positives, *negatives = map(list, zip(*kept, strict=True))
    query_ids, positive_ids, *negative_ids = map(list, zip(*kept_ids, strict=True))
    return TrainingPairs(
        name=name,
        queries=queries,
        positives=positives,
        negatives=negatives,
        query_ids=query_ids,
        positive_ids=positive_ids,
        negative_ids=negative_ids,
        relevant=_relevant(zip(query_ids, positive_ids, strict=True)),
        notes=tuple(_left_out(number, why) for why, number in left_out.items()),
    )


def _stack(tables: Iterable[list[list[str]]]) -> list[list[str]]:
    """The columns of several tables of one width, each column continued by the next table's."""
    return [list(chain.from_iterable(columns)) for columns in zip(*tables, strict=True)]


def _choose_columns(found: Mapping[str, Any], where: Path | str) -> list[str]:
    query = next((name for name in QUERY_NAMES if name in found), None)
    if query and "positive" in found:
        negatives = [(int(match[1] or 0), name) for name in found if (match := _NEGATIVE.fullmatch(name))]
        return [query, "positive", *(name for _, name in sorted(negatives))]
    listed = ", ".join(found) or "(none)"
    if "sentence1" in found and "sentence2" in found:
        raise DataError(
            f"found the columns {listed}. sentence1 and sentence2 can change places, so this is a symmetric task, "
            f"where cosine is right and one-sided similarities fail; if the first asks and the second answers, "
            f"rename them query and positive",
            where,
        )
    raise DataError(f"found the columns {listed}; expected {COLUMNS}. Rename them", where)


def _relevant(pairs: Iterable[tuple[str, str]]) -> dict[str, frozenset[str]]:
    documents = defaultdict(set)
    for query, document in pairs:
        documents[query].add(document)
    return {query: frozenset(ids) for query, ids in documents.items()}


def _left_out(number: int, why: str) -> str:
    return f"{number} row{'' if number == 1 else 's'} with {why} left out"


def _check_ids(ids: Iterable[str], texts: Iterable[str]) -> None:
    known: dict[str, str] = {}
    for identifier, text in zip(ids, texts, strict=True):
        if known.setdefault(identifier, text) != text:
            raise DataError(
                f"the id {identifier!r} stands for two texts, {known[identifier][:40]!r} and {text[:40]!r}; two "
                f"sources with one name need another file name, or another name in their collection.yaml"
            )
