from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from offsphere.data.scored_pairs import ScoredPairs, load_scored_pairs
from offsphere.encoders import encode
from offsphere.errors import DataError, EncoderError
from offsphere.evaluation import PRETRAINED, Result, read_query_values, read_results
from offsphere.evaluation.evaluate import Subject, evaluate
from offsphere.evaluation.models import evaluate_models
from offsphere.evaluation.sts import correlations, embed_pairs, evaluate_pairs
from offsphere.report.tables import print_results
from offsphere.similarity import Similarity

ROOT = Path(__file__).parents[2]
STSB = ROOT / "datasets" / "stsb"
ORDERS = ("Spearman", "Pearson", "Spearman(b,a)", "Pearson(b,a)")
SYMMETRIC, ONE_SIDED = ("cosine", "dot", "learnable"), ("qnorm", "dnorm")
SIMILARITIES = {name: Similarity.parse(name) for name in (*SYMMETRIC, *ONE_SIDED)}


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def pairs(sentences, tmp_path) -> Path:
    """A folder ``mine`` with 40 scored pairs of known words in test.jsonl; some scores tie."""
    texts, random = sentences(80, 0), np.random.default_rng(0)
    rows = [
        {"sentence1": a, "sentence2": b, "score": round(float(score), 1)}
        for a, b, score in zip(texts[:40], texts[40:], random.uniform(0, 5, 40), strict=True)
    ]
    return write(tmp_path / "mine" / "test.jsonl", rows).parent


def values(rows: list[Result]) -> dict[tuple[str, str], float]:
    return {(row.scored_as, row.measure): row.value for row in rows}


def slow_pearson(x, y):
    x, y = x - x.mean(), y - y.mean()
    return (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum())


def slow_ranks(x):
    """The mean of the places that equal values share."""
    return np.array([((x < one).sum() + (x <= one).sum() + 1) / 2 for one in x])


def slow_score(q, d, gamma_q, gamma_d):
    return float(q @ d) / np.sqrt(q @ q) ** gamma_q / np.sqrt(d @ d) ** gamma_d


def test_every_number_by_the_definition(encoder, pairs):
    """Cosines and lengths by hand in float64, pair by pair, in both orders."""
    scored = load_scored_pairs(pairs, "test")
    rows = values(evaluate_pairs(embed_pairs(encoder, scored), Subject("m", "", PRETRAINED, SIMILARITIES["dot"], None),
                                 SIMILARITIES))  # fmt: skip
    assert rows.keys() == {(name, measure) for name in SIMILARITIES for measure in ORDERS}
    first, second = (encode(encoder, texts, "query").astype(np.float64) for texts in (scored.first, scored.second))
    human = np.array(scored.scores)
    assert len(set(scored.scores)) < len(scored.scores)  # a canary: tied human scores are among them
    for name, similarity in SIMILARITIES.items():
        for order, (queries, documents) in (("", (first, second)), ("(b,a)", (second, first))):
            scores = np.array([slow_score(q, d, *similarity.gammas) for q, d in zip(queries, documents, strict=True)])
            assert rows[name, f"Pearson{order}"] == pytest.approx(slow_pearson(scores, human), abs=1e-6)
            expected = slow_pearson(slow_ranks(scores), slow_ranks(human))
            assert rows[name, f"Spearman{order}"] == pytest.approx(expected, abs=1e-6)


def test_the_order_matters_to_one_sided_similarities_only(static, save, pairs, evaluated):
    found = values(evaluated(str(save(static)), [str(pairs)], list(SIMILARITIES)[:2] + list(ONE_SIDED)))
    for measure in ("Spearman", "Pearson"):
        for name in ("cosine", "dot"):
            assert found[name, measure] == found[name, f"{measure}(b,a)"]
        for name in ONE_SIDED:
            assert abs(found[name, measure] - found[name, f"{measure}(b,a)"]) > 0.01
        # Removing the length of one side only: what qnorm does to the query, dnorm does to it in the other order.
        assert found["qnorm", measure] == pytest.approx(found["dnorm", f"{measure}(b,a)"], abs=1e-9)


def test_rows_are_typed_and_read_back(static, save, pairs, tmp_path, evaluated):
    """T-64: the same record whatever the similarity, one number each; beside a collection too."""
    source, out = str(save(static)), tmp_path / "out"
    rows = evaluated(source, [str(pairs)], ["cosine", "qnorm"], out=out)
    assert read_results(out / "results.csv") == rows and len(rows) == 8
    assert read_query_values(out / "per_query.parquet") == []
    for row in rows:
        assert type(row.value) is float and -1 <= row.value <= 1
        assert (row.dataset, row.split, row.n_queries, row.similarity) == ("mine", "test", 40, PRETRAINED)
    assert evaluated(source, [str(pairs)], ["cosine", "qnorm"]) == rows


def test_pairs_and_collections_together(static, save, pairs, tmp_path):
    xquad, source, told = str(ROOT / "datasets" / "xquad_en"), str(save(static)), Told()
    rows = evaluate_models(
        [source], [str(pairs), xquad], ["dot"], measures=("RR@10",), out=tmp_path, progress=told
    ).results
    assert [(row.dataset, row.measure) for row in rows] == [*(("mine", one) for one in ORDERS), ("xquad_en", "RR@10")]
    assert told.done == [1, 2]
    assert [file.name for file in (tmp_path / "runs").iterdir()] == ["dot-xquad_en.trec"]
    console = Console(file=io.StringIO(), width=120, color_system=None)
    print_results(console, rows)
    text = console.file.getvalue()
    assert "pairs" in text and "queries" in text and "(b,a)" in text and "RR@10" in text
    assert all(f"{100 * row.value:.1f}" in text for row in rows)


class Told:
    def __init__(self):
        self.done = []

    def say(self, text: str) -> None:
        pass

    def start(self, what: str, total: int):
        return self.done.append


def test_prompts_reach_their_sides(static, save, pairs, evaluated):
    """With one prompt a side even cosine is no longer symmetric."""
    source = str(save(static))
    found = values(evaluated(source, [str(pairs)], ["cosine"], prompts={"query": "iron rust star "}))
    assert found["cosine", "Spearman"] != found["cosine", "Spearman(b,a)"]


def test_correlations_at_their_limits():
    human = [0.0, 1.0, 2.5, 5.0]
    assert correlations(np.array([0.0, 1.0, 2.5, 5.0]) * 3 - 1, human) == pytest.approx({"Spearman": 1, "Pearson": 1})
    cubed = correlations(-(np.array(human) ** 3), human)
    assert cubed["Spearman"] == pytest.approx(-1) and -1 < cubed["Pearson"] < -0.8
    with pytest.raises(EncoderError, match="every pair gets the same score"):
        correlations(np.ones(4), human)
    with pytest.raises(EncoderError, match="NaN or infinite"):
        correlations(np.array([0, 1, np.nan, 2]), human)
    for flat in ([1.0, 1.0], [1.0]):
        with pytest.raises(DataError, match="two pairs or more with different scores"):
            correlations(np.arange(len(flat)), flat)


def test_what_cannot_be_evaluated_says_why(static, save, tmp_path):
    source = str(save(static))
    row = {"sentence1": "iron", "sentence2": "rust"}
    bad = {
        r"pairs\.jsonl: no column score": [row, row],
        r"pairs\.jsonl:2: score must be a number, found 'high'": [row | {"score": 1}, row | {"score": "high"}],
        r"pairs\.jsonl:1: score must be a number, found nan": [row | {"score": float("nan")}],
        r"pairs\.jsonl: a correlation needs two pairs": [row | {"score": 1}],
        r"pairs\.jsonl:2: sentence2 is missing": [row | {"score": 1}, {"sentence1": "iron", "score": 2}],
    }
    for says, rows in bad.items():
        with pytest.raises(DataError, match=says):
            evaluate_models([source], [str(write(tmp_path / "pairs.jsonl", rows))], ["dot"])
    alike = [row | {"score": 1}, row | {"score": 2}]
    with pytest.raises(EncoderError, match=r"encoder on .*, scored as dot: every pair gets the same score"):
        evaluate_models([source], [str(write(tmp_path / "pairs.jsonl", alike))], ["dot"])


def test_what_scored_pairs_are(tmp_path, pairs):
    assert load_scored_pairs(ROOT / "datasets" / "xquad_en") is None
    assert load_scored_pairs(write(tmp_path / "pairs.jsonl", [{"query": "a", "positive": "b"}])) is None
    assert load_scored_pairs(tmp_path / "nowhere") is None
    assert isinstance(load_scored_pairs(pairs / "test.jsonl", "dev"), ScoredPairs)  # a file has no splits
    with pytest.raises(DataError, match="no split 'dev'; these scored pairs have test"):
        load_scored_pairs(pairs, "dev")
    found = load_scored_pairs(STSB, "dev")
    assert (found.name, found.split, len(found)) == ("stsb", "dev", 375)


def test_real_pairs(evaluated):
    """package:wordllama on stsb: cosine is well above chance, and one-sided similarities depend on the order."""
    rows = evaluated("package:wordllama", [str(STSB)], ["cosine", "dot", "qnorm", "dnorm"])
    found = values(rows)
    assert {row.n_queries for row in rows} == {375}
    assert 0.6 < found["cosine", "Spearman"] == found["cosine", "Spearman(b,a)"]
    assert found["dot", "Spearman"] == found["dot", "Spearman(b,a)"] < found["cosine", "Spearman"]
    for name in ONE_SIDED:
        assert abs(found[name, "Spearman"] - found[name, "Spearman(b,a)"]) > 1e-3


def test_one_evaluation_leaves_nothing_behind_for_the_next(static, transformer, save, pairs, evaluated):
    """T-F1: two models in either order, each by its own similarity, give what each gives alone."""
    static.similarity_fn_name, transformer.similarity_fn_name = "dot", "cosine"
    models = {"dot": str(save(static, "static")), "cosine": str(save(transformer, "transformer"))}
    forward = {name: evaluated(source, [str(pairs)]) for name, source in models.items()}
    backward = {name: evaluated(source, [str(pairs)]) for name, source in reversed(models.items())}
    assert forward == backward
    for name, rows in forward.items():
        assert {row.scored_as for row in rows} == {name}


def test_one_set_of_embeddings_serves_subjects_in_any_order(static, pairs, embed):
    """T-F1, also for rankings."""
    random = np.random.default_rng(0)
    qrels = {f"q{i}": {f"d{j}": 1 for j in random.choice(50, 5, replace=False)} for i in range(10)}
    collection = embed(random.normal(size=(10, 4)), 4.0 ** random.normal(size=(50, 1)) * random.normal(size=(50, 4)),
                       qrels=qrels)  # fmt: skip
    sentences = embed_pairs(static, load_scored_pairs(pairs, "test"))
    found = []
    for name in ("dot", "cosine", "dot"):
        subject, scored_as = Subject("m", "", PRETRAINED, SIMILARITIES[name], None), {name: SIMILARITIES[name]}
        found.append(
            [*evaluate_pairs(sentences, subject, scored_as), *evaluate(collection, subject, scored_as).results]
        )
    assert found[0] == found[2]
    for dot, cosine in zip(found[0], found[1], strict=True):
        assert dot.value != cosine.value or dot.measure in ("R@100", "RR@10")
