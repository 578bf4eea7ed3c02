"""How benchmarks are published: ir_datasets' own iterators, and the layouts of repositories on the hub.

ir_datasets has the original files of BEIR, NanoBEIR, BRIGHT, MS MARCO and TREC-DL with checksums, one interface for
all, and BRIGHT's exclusions. The others are repositories on the hub, read through ``datasets``, which opens a copy of
a repository in a local folder in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offsphere.data.huggingface import dataset_rows
from offsphere.data.scored_pairs import ScoredPairs
from offsphere.errors import DataError

EXCLUDED = -100
"""The grade by which ir_datasets marks a document that BRIGHT never ranks for a query."""

NOT_APPLICABLE = "N/A"
"""What BRIGHT writes where a query excludes nothing."""


@dataclass
class Raw:
    """Texts and judgements as they are published; every id is a string.

    Attributes:
        documents: Document id to passage.
        queries: Query id to text.
        judgements: Query id to document id to grade.
        excluded: Per query, documents that are never ranked for it.
    """

    documents: dict[str, str] = field(default_factory=dict)
    queries: dict[str, str] = field(default_factory=dict)
    judgements: dict[str, dict[str, int]] = field(default_factory=dict)
    excluded: dict[str, frozenset[str]] = field(default_factory=dict)


def read_ir_datasets(identifier: str, split: str, own: str) -> Raw:
    """A data set of ir_datasets, downloaded on first use.

    Args:
        identifier: As ir_datasets names the split that results are published on.
        split: The split wanted.
        own: What that published split is called.

    Raises:
        DataError: If ir_datasets is not installed, or the data set has no such split.
    """
    try:
        import ir_datasets
    except ImportError:
        raise DataError("benchmarks by name need ir_datasets; type: pip install 'offsphere[benchmarks]'") from None
    if split != own:
        other = f"{identifier.removesuffix(f'/{own}')}/{split}"
        if other not in ir_datasets.registry._registered:
            raise DataError(f"no split {split!r} of {identifier}; leave --split out for the published one")
        identifier = other
    dataset = ir_datasets.load(identifier)
    raw = Raw(
        {str(document.doc_id): _passage(document._asdict()) for document in dataset.docs_iter()},
        {str(query.query_id): query.text for query in dataset.queries_iter()},
    )
    excluded: dict[str, set[str]] = {}
    for judgement in dataset.qrels_iter():
        query, document = str(judgement.query_id), str(judgement.doc_id)
        if judgement.relevance == EXCLUDED:
            excluded.setdefault(query, set()).add(document)
        else:
            raw.judgements.setdefault(query, {})[document] = int(judgement.relevance)
    raw.excluded = {query: frozenset(documents) for query, documents in excluded.items()}
    return raw


def read_hub(source: str, split: str, task: str, *, long: bool = False) -> Raw:
    """A retrieval data set of the Hugging Face hub, or a copy of its repository in a folder.

    Knows three layouts: BEIR's (configurations corpus, queries, and qrels or default), BRIGHT's (documents,
    long_documents and examples, a split a task), and questions with their paragraphs, supporting or not, as HotpotQA,
    2WikiMultiHopQA, MuSiQue and NovelHopQA have them; there every paragraph of every question is a document, as in
    the paper's counts.

    Args:
        source: A name on the hub, or a folder.
        split: Of the queries.
        task: BRIGHT's split.
        long: Whether to take BRIGHT's long documents.

    Raises:
        DataError: If the layout is none of these.
    """
    from datasets import get_dataset_config_names

    configurations = set(get_dataset_config_names(source))
    if configurations >= {"corpus", "queries"}:
        return _beir_on_hub(source, split, "qrels" if "qrels" in configurations else "default")
    if configurations >= {"documents", "examples"}:
        return _bright_on_hub(source, task, long=long)
    return _questions(source, split)


def read_hub_pairs(source: str, split: str) -> ScoredPairs:
    """The columns sentence1, sentence2 and score of a data set of the hub, or a copy of its repository."""
    rows = list(_rows(source, None, split))
    columns = zip(*((row["sentence1"], row["sentence2"], float(row["score"])) for row in rows), strict=True)
    first, second, scores = map(list, columns)
    return ScoredPairs("", split, first, second, scores, Path(source))


def _beir_on_hub(source: str, split: str, judgements: str) -> Raw:
    raw = Raw(
        {str(row["_id"]): _passage(row) for row in _rows(source, "corpus", split)},
        {str(row["_id"]): row["text"] or "" for row in _rows(source, "queries", split)},
    )
    for row in _rows(source, judgements, split):
        # NanoBEIR lists positives only, without a score.
        raw.judgements.setdefault(str(row["query-id"]), {})[str(row["corpus-id"])] = int(row.get("score", 1))
    return raw


def _bright_on_hub(source: str, task: str, *, long: bool) -> Raw:
    documents, gold = ("long_documents", "gold_ids_long") if long else ("documents", "gold_ids")
    raw = Raw({str(row["id"]): row["content"] or "" for row in _rows(source, documents, task)})
    for row in _rows(source, "examples", task):
        query = str(row["id"])
        raw.queries[query] = row["query"]
        raw.judgements[query] = {str(document): 1 for document in row[gold]}
        if excluded := frozenset(map(str, row.get("excluded_ids") or ())) - {NOT_APPLICABLE}:
            raw.excluded[query] = excluded
    return raw


def _questions(source: str, split: str) -> Raw:
    """Every paragraph of a question is a document, and relevant to it where it supports the answer."""
    raw = Raw()
    # The published splits of these sets have no judgements: results are on what the hub calls validation.
    for number, row in enumerate(_rows(source, None, "validation" if split == "test" else split)):
        if row.get("answerable") is False:
            continue
        query = str(row.get("id") or row.get("_id") or number)
        raw.queries[query] = row["question"]
        raw.judgements[query] = {}
        for place, (text, supports) in enumerate(_paragraphs(row)):
            raw.documents[f"{query}-{place}"] = text
            if supports:
                raw.judgements[query][f"{query}-{place}"] = 1
    return raw


def _paragraphs(row: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """The paragraphs of a question, and whether each supports its answer."""
    if "paragraphs" in row:  # MuSiQue
        return [(f"{one['title']} {one['paragraph_text']}", one["is_supporting"]) for one in row["paragraphs"]]
    context = row.get("context")
    if isinstance(context, str):  # NovelHopQA
        return [(context, True)]
    if isinstance(context, Mapping):  # HotpotQA, 2WikiMultiHopQA
        supporting = set(row["supporting_facts"]["title"])
        pairs = zip(context["title"], context["sentences"], strict=True)
        return [(f"{title} {' '.join(sentences)}", title in supporting) for title, sentences in pairs]
    raise DataError(f"found the columns {', '.join(row)}; expected paragraphs or context beside question")


def _rows(source: str, configuration: str | None, split: str) -> Iterator[dict[str, Any]]:
    """The rows of a split, or of the only one there is, or of all where it is divided by the number of hops."""
    from datasets import concatenate_datasets, load_dataset

    parts = load_dataset(source, configuration)
    if split not in parts and len(parts) > 1 and not all(name.startswith("hop_") for name in parts):
        raise DataError(f"no split {split!r}; it has {', '.join(parts)}", source)
    dataset = parts[split] if split in parts else concatenate_datasets(list(parts.values()))
    return (row for _, row in dataset_rows(dataset))


def _passage(row: Mapping[str, Any]) -> str:
    return f"{row.get('title') or ''} {row['text'] or ''}".strip()
