from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offsphere.data import Collection
from offsphere.errors import ConfigError, DataError


def collection(queries: int = 20, documents: int = 60, relevant: int = 3) -> Collection:
    """Query i is judged on documents i, i+1, ...: the first of them not relevant."""
    return Collection(
        name="made",
        split="test",
        documents={f"d{number}": f"text {number}" for number in range(documents)},
        queries={f"q{number}": f"question {number}" for number in range(queries)},
        qrels={
            f"q{number}": {f"d{(number + step) % documents}": step for step in range(relevant + 1)}
            for number in range(queries)
        },
        excluded={f"q{number}": frozenset({f"d{number + 10}"}) for number in range(queries)},
        notes=("made here",),
    )


def reordered(original: Collection) -> Collection:
    return replace(
        original,
        documents=dict(reversed(original.documents.items())),
        queries=dict(reversed(original.queries.items())),
        qrels={query: dict(reversed(grades.items())) for query, grades in reversed(original.qrels.items())},
        excluded=dict(reversed(original.excluded.items())),
    )


@given(
    max_queries=st.none() | st.integers(1, 30), max_documents=st.none() | st.integers(0, 80), seed=st.integers(0, 50)
)
def test_a_sample_keeps_what_its_queries_need(max_queries, max_documents, seed):
    whole = collection()
    part = whole.sample(max_queries, max_documents, seed)
    assert len(part.queries) == min(20, max_queries or 20)
    needed = {d for query in part.queries for d, grade in whole.qrels[query].items() if grade > 0}
    assert needed <= part.documents.keys()
    assert len(part.documents) == (60 if max_documents is None else min(60, max(max_documents, len(needed))))
    assert part.documents.items() <= whole.documents.items()
    assert part.queries.items() <= whole.queries.items()
    for query, grades in part.qrels.items():
        assert grades == {d: grade for d, grade in whole.qrels[query].items() if d in part.documents}
    assert part.excluded == {query: whole.excluded[query] for query in part.queries}


def test_a_sample_does_not_depend_on_the_order_of_the_files():
    assert reordered(collection()).sample(5, 30, seed=3) == collection().sample(5, 30, seed=3)


def test_samples_of_other_seeds_differ_and_larger_ones_hold_smaller_ones():
    drawn = [frozenset(collection().sample(5, None, seed).queries) for seed in range(5)]
    assert len(set(drawn)) > 1
    assert drawn[0] < collection().sample(9, None, seed=0).queries.keys()


def test_a_sample_says_so_and_the_whole_does_not():
    assert collection().sample(None, None) == collection().sample(20, 60) == collection()
    assert collection().sample(2, 10, seed=7).notes == (
        "made here",
        "a sample of 2 of 20 queries and 10 of 60 documents (seed 7)",
    )


def test_a_sample_without_queries_is_an_error():
    with pytest.raises(ConfigError, match="at least one query, found max_queries 0"):
        collection().sample(0, 10)


def test_the_fingerprint_is_of_the_content():
    whole = collection()
    same = [reordered(whole), replace(whole, name="other", split="dev", notes=(), licence="MIT")]
    changed = [
        replace(whole, documents=whole.documents | {"d0": "other"}),
        replace(whole, documents=whole.documents | {"d60": ""}),
        replace(whole, queries=whole.queries | {"q0": "other"}),
        replace(whole, qrels=whole.qrels | {"q0": {"d0": 1}}),
        replace(whole, excluded={}),
        replace(whole, exclude_self=True),
    ]
    assert {part.fingerprint() for part in same} == {whole.fingerprint()}
    assert len({part.fingerprint() for part in [whole, *changed]}) == 1 + len(changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": {}}, "made: query 'q0' needs both a text in queries and judgements in qrels"),
        ({"qrels": {}}, "made: query 'q0' needs both"),
        ({"qrels": {"q0": {"d0": 0}}}, "made: query 'q0' has no positive judgement; leave it out"),
        ({"qrels": {"q0": {"d9": 1}}}, "made: query 'q0' judges document 'd9', which is not there"),
    ],
)
def test_parts_that_do_not_belong_together_are_errors(change, message):
    with pytest.raises(DataError, match=message):
        replace(collection(queries=1, documents=2, relevant=1), **change)


def test_prompts_that_the_user_gave_replace_those_of_the_collection():
    prompted = replace(collection(), prompts={"query": "Q: ", "document": "D: "})
    assert prompted.without_prompts({"query": "other"}).prompts == {"document": "D: "}
    assert prompted.without_prompts({}) == prompted
