from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offsphere.data import TrainingPairs, load_collection, load_pairs
from offsphere.losses import known_positive_mask
from offsphere.training.batches import training_dataset


def make_pairs(rows: Sequence[tuple[str, ...]], relevant: dict[str, set[str]] | None = None) -> TrainingPairs:
    """Rows of ``id=text`` cells: query, positive, negatives."""
    ids, texts = ([[cell.split("=")[part] for cell in row] for row in rows] for part in (0, 1))
    queries, positives, *negatives = (list(column) for column in zip(*texts, strict=True))
    query_ids, positive_ids, *negative_ids = (list(column) for column in zip(*ids, strict=True))
    judged: dict[str, set[str]] = {}
    for query, positive in zip(query_ids, positive_ids, strict=True):
        judged.setdefault(query, set()).add(positive)
    known = {query: frozenset(judged[query] | (relevant or {}).get(query, set())) for query in judged}
    return TrainingPairs("made", queries, positives, negatives, query_ids, positive_ids, negative_ids, known)


def masked(pairs: TrainingPairs) -> set[tuple[str, str]]:
    """(query text, document text) of all that is never a negative when all rows are one batch."""
    dataset, known = training_dataset(pairs)
    labels = torch.tensor(dataset["label"])
    mask = known_positive_mask(labels[:, 0], labels[:, 1:].T.reshape(-1), known)
    documents = [*pairs.positives, *(text for column in pairs.negatives for text in column)]
    return {(pairs.queries[row], documents[column]) for row, column in mask.nonzero().tolist()}


def test_columns_and_rows_are_those_of_the_pairs() -> None:
    pairs = make_pairs([("q1=a", "d1=A", "d2=B", "d3=C"), ("q2=b", "d2=B", "d4=D", "d1=A")])
    dataset, _ = training_dataset(pairs)
    assert dataset.column_names == ["query", "positive", "negative_1", "negative_2", "label"]
    assert dataset["query"][:] == ["a", "b"]
    assert dataset["positive"][:] == ["A", "B"]
    assert dataset["negative_1"][:] == ["B", "D"]
    assert dataset["negative_2"][:] == ["C", "A"]
    (query_1, a, b, c), (query_2, b_again, d, a_again) = dataset["label"][:]
    assert (a, b) == (a_again, b_again)
    assert len({a, b, c, d}) == 4
    assert query_1 != query_2


def test_without_negatives_there_are_two_columns() -> None:
    dataset, _ = training_dataset(make_pairs([("q1=a", "d1=A")]))
    assert dataset.column_names == ["query", "positive", "label"]


def test_a_known_positive_of_another_row_is_never_a_negative() -> None:
    rows = [("q1=a", "d1=A"), ("q2=b", "d2=B"), ("q3=c", "d3=C")]
    assert masked(make_pairs(rows)) == set()
    assert masked(make_pairs(rows, {"q1": {"d3"}})) == {("a", "C")}


def test_a_hard_negative_that_is_judged_relevant_is_masked() -> None:
    assert masked(make_pairs([("q1=a", "d1=A", "d9=X"), ("q2=b", "d2=B", "d8=Y")], {"q2": {"d9"}})) == {("b", "X")}


def test_a_judgement_of_a_document_covers_its_double_under_another_id() -> None:
    rows = [("q1=a", "d1=A"), ("q2=b", "d2=B"), ("q3=c", "d3=B")]
    assert masked(make_pairs(rows)) == {("b", "B"), ("c", "B")}
    assert masked(make_pairs(rows, {"q1": {"d2"}})) == {("a", "B"), ("b", "B"), ("c", "B")}


def test_the_same_question_under_two_ids_is_one_query() -> None:
    assert masked(make_pairs([("q1=a", "d1=A"), ("q2=a", "d2=B")])) == {("a", "A"), ("a", "B")}


def test_judgements_of_documents_that_no_row_has_are_left_out() -> None:
    _, known = training_dataset(make_pairs([("q1=a", "d1=A")], {"q1": {"elsewhere"}}))
    assert len(known.codes) == 1


def test_sources_that_share_a_text_share_its_key() -> None:
    first, second = make_pairs([("x/q1=a", "x/d1=A")]), make_pairs([("y/q1=b", "y/d1=A")])
    assert masked(TrainingPairs.concatenate([first, second])) == {("a", "A"), ("b", "A")}


def test_sources_that_share_ids_but_not_texts_stay_apart(home: Path, away: Path) -> None:
    """Both collections have a q0 and a d0; ids get the name of their source in front."""
    pairs = TrainingPairs.concatenate([load_pairs(home), load_pairs(away, "test")])
    dataset, known = training_dataset(pairs)
    assert len(known.codes) == len(pairs)
    keys = [row[1] for row in dataset["label"]]
    assert len(set(keys)) == len(set(pairs.positives))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12), st.data())
def test_the_mask_is_that_of_a_plain_reading_of_texts(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    """A pair is masked where the texts are judged together anywhere; ids 0-5 stand for the texts 0-2."""
    pairs = make_pairs([(f"q{q}=question {q % 3}", f"d{d}=passage {d % 3}") for q, d in rows])
    extra = {
        query: frozenset(data.draw(st.sets(st.sampled_from([f"d{d}" for d in range(6)])))) for query in pairs.relevant
    }
    pairs = TrainingPairs(**(vars(pairs) | {"relevant": {q: ids | extra[q] for q, ids in pairs.relevant.items()}}))
    text = dict(zip(pairs.query_ids + pairs.positive_ids, pairs.queries + pairs.positives, strict=True))
    judged = {(text[q], text[d]) for q, documents in pairs.relevant.items() for d in documents if d in text}
    expected = {
        (query, positive)
        for i, query in enumerate(pairs.queries)
        for j, positive in enumerate(pairs.positives)
        if i != j and (query, positive) in judged
    }
    assert masked(pairs) == expected


@pytest.mark.parametrize("name", ["nq_qed", "hotpotqa"])
def test_every_row_of_a_real_collection_has_its_own_positive_among_the_known(name: str) -> None:
    folder = Path(__file__).parents[2] / "datasets" / name
    pairs = load_pairs(folder).sample(300)
    dataset, known = training_dataset(pairs)
    assert dataset.num_rows == len(pairs)
    codes = {query * known.n_documents + positive for query, positive, *_ in dataset["label"]}
    assert codes <= set(known.codes.tolist())
    assert max(key for row in dataset["label"] for key in row[1:]) < known.n_documents
    collection = load_collection(folder, "train")
    assert set(pairs.queries) <= set(collection.queries.values())
