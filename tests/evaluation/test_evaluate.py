from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest

from offsphere.evaluation import (
    MEASURES,
    norm_record,
    per_query,
    rank,
)
from offsphere.evaluation.evaluate import Subject, evaluate
from offsphere.similarity import NAMES, Similarity

SIMILARITIES = {name: Similarity.parse(name) for name in NAMES}


def values(rows) -> dict[tuple[str, str, str], float]:
    return {(row.dataset, row.scored_as, row.measure): row.value for row in rows}


@pytest.fixture(scope="module")
def embedded(embed):
    random = np.random.default_rng(0)
    qrels = {f"q{i}": {f"d{j}": 1 for j in random.choice(200, 5, replace=False)} for i in range(20)}
    documents = random.normal(size=(200, 8)) * 4.0 ** random.uniform(-1, 1, (200, 1))
    return embed(random.normal(size=(20, 8)) * 3, documents, qrels=qrels)


def test_every_row_is_its_ranking_measured(embedded):
    subject = Subject("m", "a, b", "qnorm", SIMILARITIES["qnorm"], 42)
    measured = evaluate(embedded, subject, SIMILARITIES)
    assert len(measured.results) == len(NAMES) * len(MEASURES)
    for row in measured.results:
        by_query = per_query(
            rank(embedded, SIMILARITIES[row.scored_as]).run(), embedded.collection.qrels, [row.measure]
        )
        assert row.value == pytest.approx(fmean(by_query[row.measure].values()), abs=1e-12)
        assert (row.model, row.training_data, row.similarity, row.seed) == ("m", "a, b", "qnorm", 42)
        assert (row.gamma_q, row.gamma_d, row.dataset, row.split, row.n_queries) == (1, 0, "made", "test", 20)
    found = values(measured.results)
    for measure in MEASURES:
        assert found["made", "cosine", measure] == found["made", "dnorm", measure]
        assert found["made", "dot", measure] == found["made", "qnorm", measure]
    assert len({found["made", name, "nDCG@10"] for name in NAMES}) == 3


def test_values_per_query_are_those_of_its_own_similarity(embedded):
    """Also when it was not asked for, and when another similarity is called the same."""
    learned = Similarity(0.9, 0.1, learned=True)
    subject = Subject("m", "", "learnable", learned, 0)
    expected = per_query(rank(embedded, learned).run(), embedded.collection.qrels, ["nDCG@10"])["nDCG@10"]
    for scored_as in ({"cosine": SIMILARITIES["cosine"]}, SIMILARITIES):
        measured = evaluate(embedded, subject, scored_as, ("nDCG@10",))
        assert {row.query_id: row.value for row in measured.query_values} == expected
        assert {row.similarity for row in measured.query_values} == {"learnable"}
        own = values(measured.results)["made", "learnable", "nDCG@10"]
        assert own == pytest.approx(fmean(expected.values()))
        assert {row.scored_as for row in measured.results} == {*scored_as, "learnable"}
    assert values(measured.results)["made", "learnable", "nDCG@10"] != pytest.approx(
        fmean(per_query(rank(embedded, SIMILARITIES["learnable"]).run(), embedded.collection.qrels)["nDCG@10"].values())
    )


def test_lengths_are_recorded(embedded):
    measured = evaluate(embedded, Subject("m", "", "dot", SIMILARITIES["dot"], 0), {})
    assert measured.norms == norm_record(embedded)
