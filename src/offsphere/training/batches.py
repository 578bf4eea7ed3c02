"""Training pairs as the dataset that the trainer reads, with integer keys for what must not be a negative."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datasets import Dataset

from offsphere.losses import KnownPositives

if TYPE_CHECKING:
    from offsphere.data import TrainingPairs


def training_dataset(pairs: TrainingPairs) -> tuple[Dataset, KnownPositives]:
    """A dataset with columns query, positive, negative_1..n and label, and the known positives by the same keys.

    ``label`` holds the keys of the row's texts, query first. Equal texts get equal keys whatever their ids are, so the
    loss sees both the same id and the same text, and a judgement of one covers the other.

    Args:
        pairs: What to train on.
    """
    query_keys = _keys_of_texts(pairs.query_ids, pairs.queries)
    document_ids = [*pairs.positive_ids, *(i for column in pairs.negative_ids for i in column)]
    document_texts = [*pairs.positives, *(text for column in pairs.negatives for text in column)]
    document_keys = _keys_of_texts(document_ids, document_texts)
    known = (
        (query_keys[query], document_keys[document])
        for query, documents in pairs.relevant.items()
        if query in query_keys
        for document in documents
        if document in document_keys
    )
    labels = zip(
        (query_keys[i] for i in pairs.query_ids),
        (document_keys[i] for i in pairs.positive_ids),
        *((document_keys[i] for i in column) for column in pairs.negative_ids),
        strict=True,
    )
    columns = {"query": pairs.queries, "positive": pairs.positives}
    columns |= {f"negative_{number}": column for number, column in enumerate(pairs.negatives, 1)}
    dataset = Dataset.from_dict(columns | {"label": [list(row) for row in labels]})
    return dataset, KnownPositives(known, n_documents=len(document_ids))


def _keys_of_texts(ids: list[str], texts: list[str]) -> dict[str, int]:
    """An integer for each id; ids of the same text share it."""
    by_text: dict[str, int] = {}
    return {i: by_text.setdefault(text, len(by_text)) for i, text in zip(ids, texts, strict=True)}
