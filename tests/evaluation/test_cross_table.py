from __future__ import annotations

import numpy as np
import pytest

from offsphere.errors import ConfigError
from offsphere.evaluation import MEASURES, cross_table, per_query, rank, score_under
from offsphere.similarity import NAMES, Similarity

SIMILARITIES = {name: Similarity.parse(name) for name in NAMES}


@pytest.fixture(scope="module")
def embedded(embed):
    """Lengths from 1/4 to 4, so that length decides as much as the angle."""
    rng = np.random.default_rng(0)
    lengths = 4.0 ** rng.uniform(-1, 1, (300, 1))
    qrels = {f"q{i}": {f"d{j}": 1 for j in rng.choice(300, 5)} for i in range(40)}
    return embed(rng.normal(size=(40, 16)) * 3, rng.normal(size=(300, 16)) * lengths, qrels=qrels)


def test_same_gamma_d_agrees_exactly_and_others_do_not(embedded):
    values = score_under(embedded, SIMILARITIES).values
    assert list(values) == list(NAMES) and list(values["cosine"]) == list(MEASURES)
    assert values["cosine"] == values["dnorm"]
    assert values["dot"] == values["qnorm"]
    assert len({str(values[name]) for name in ("cosine", "dot", "learnable")}) == 3


def test_equals_ranking_under_each_similarity_by_itself(embedded):
    table = score_under(embedded, SIMILARITIES)
    for name, similarity in SIMILARITIES.items():
        alone = rank(embedded, similarity)
        np.testing.assert_array_equal(alone.indices, table.rankings[name].indices)
        assert per_query(alone.run(), embedded.collection.qrels) == table.values[name]
        assert per_query(table.rankings[name].run(), embedded.collection.qrels) == table.values[name]


def test_one_ranking_per_gamma_d(embedded, monkeypatch):
    gammas = []
    monkeypatch.setattr(
        cross_table,
        "rank",
        lambda embedded, similarity, k: gammas.append(similarity.gamma_d) or rank(embedded, similarity, k),
    )
    score_under(embedded, SIMILARITIES)
    assert sorted(gammas) == [0.0, 0.5, 1.0]


def test_the_table_depends_on_no_other_name(embedded):
    together = score_under(embedded, SIMILARITIES).values
    for name in NAMES:
        assert score_under(embedded, {name: SIMILARITIES[name]}).values == {name: together[name]}


def test_unknown_measures_are_found_before_ranking(embedded, monkeypatch):
    monkeypatch.setattr(cross_table, "rank", lambda *_: pytest.fail("ranked first"))
    with pytest.raises(ConfigError, match="did you mean nDCG@10"):
        score_under(embedded, SIMILARITIES, ["nDCG@10", "ndgc@10"])
