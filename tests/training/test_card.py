from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from offsphere.config import CompareConfig
from offsphere.evaluation.results import Result
from offsphere.similarity import NAMES, Similarity
from offsphere.training.card import model_card
from offsphere.training.plan import Plan
from offsphere.training.run_folder import Finished

LEARNED = Similarity(0.3125, 0.6875, learned=True)
CUSTOM = Similarity(0.2, 0.9)
MEASURES = ("nDCG@10", "R@100", "RR@10")
DATASETS = {"home": 120, "away": 7}


def similarity_of(name: str) -> Similarity:
    return LEARNED if name == "learnable" else Similarity.parse(name)


def rows(similarity: Similarity) -> list[Result]:
    """Every measure under every similarity; each value names its own place."""
    return [
        Result(
            *("org/encoder", "nq", similarity.name, *similarity.gammas, scored_as, 42, dataset, "test", measure),
            value=(100 * NAMES.index(scored_as) + 10 * i + j) / 1000
            if scored_as in NAMES
            else (900 + 10 * i + j) / 1000,
            n_queries=n_queries,
        )
        for scored_as in dict.fromkeys((*NAMES, similarity.name))
        for i, (dataset, n_queries) in enumerate(DATASETS.items())
        for j, measure in enumerate(MEASURES)
    ]


@pytest.fixture
def card(plan: Plan) -> Callable[..., str]:
    def make(similarity: Similarity, model: str = "org/encoder", collapse: str | None = None) -> str:
        config = CompareConfig(model=model, train=["data/nq", "data/med"], eval=["data/nq"], out=Path("run"))
        trained = {"scale": 12.345678, "best_step": 6, "validation": 0.5, "collapse": collapse}
        finished = Finished("x", similarity, similarity.name, 42, **trained)
        return model_card(finished, rows(similarity), config, plan)

    return make


def section(card: str, title: str) -> str:
    return re.split(r"^## ", card.split(f"## {title}\n")[1], flags=re.MULTILINE)[0]


def table(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(
    ("similarity", "formula", "meaning"),
    [
        ("cosine", "(q . d) / (|q|^1 |d|^1)", "only the angle counts"),
        ("dot", "(q . d) / (|q|^0 |d|^0)", "both lengths count"),
        ("qnorm", "(q . d) / (|q|^1 |d|^0)", "the document's length counts and the query's does not"),
        ("dnorm", "(q . d) / (|q|^0 |d|^1)", "the query's length counts and the document's does not"),
        ("learnable", "(q . d) / (|q|^0.3125 |d|^0.6875)", "part of each length counts"),
        ("gamma_q=0.2,gamma_d=0.9", "(q . d) / (|q|^0.2 |d|^0.9)", "part of each length counts"),
    ],
)
def test_the_formula_has_the_exponents_of_this_model(
    card: Callable[..., str], similarity: str, formula: str, meaning: str
) -> None:
    text = card(similarity_of(similarity))
    assert f"s(q, d) = {formula}\n" in text
    assert f"so {meaning}" in text


def test_a_collapse_is_named(card: Callable[..., str]) -> None:
    assert "Warning" not in card(similarity_of("dot"))
    assert "**Warning:** it ranks by length." in card(similarity_of("dot"), collapse="it ranks by length")


@pytest.mark.parametrize("name", NAMES)
def test_results_are_those_ranked_by_its_own_similarity(card: Callable[..., str], name: str) -> None:
    found = table(section(card(similarity_of(name)), "Results"))
    assert found[0] == ["dataset", "queries", *MEASURES]
    own = 10 * NAMES.index(name)
    assert found[2:] == [
        ["home", "120", *(f"{own + j / 10:.1f}" for j in range(3))],
        ["away", "7", *(f"{own + 1 + j / 10:.1f}" for j in range(3))],
    ]


def test_settings_are_those_of_the_training(card: Callable[..., str]) -> None:
    found = dict(row for row in table(section(card(LEARNED), "Training")) if len(row) == 2)
    assert found["start"] == "org/encoder (pretrained)"
    assert found["pairs"] == "data/nq, data/med"
    assert found["similarity"] == "learnable: gamma_q 0.3125, gamma_d 0.6875"
    assert found["scale (inverse temperature)"] == "12.35"
    assert found["seed"] == "42"
    assert found["steps"].startswith("8, weights of step 6 kept")
    assert "batches of 12" in found["loss"]
    assert found["learning rate"] == "0.02, cosine"


@pytest.mark.parametrize(
    ("name", "metric"), [("cosine", "cosine"), ("dnorm", "cosine"), ("dot", "dot"), ("qnorm", "dot")]
)
def test_the_metric_to_choose_ranks_as_the_model_does(card: Callable[..., str], name: str, metric: str) -> None:
    text = section(card(similarity_of(name)), "In a vector database")
    if metric == "cosine":
        assert "Choose **cosine**" in text
        assert "vector_cosine_ops" in text
        assert "vector_ip_ops" not in text
    else:
        assert "Store raw embeddings under the metric **inner product**" in text
        assert "vector_ip_ops" in text
        assert "throws the documents' length away" in text
        assert "vector_cosine_ops" not in text


@pytest.mark.parametrize("similarity", [LEARNED, CUSTOM])
def test_with_exponents_of_its_own_documents_are_stored_as_encoded(
    card: Callable[..., str], similarity: Similarity
) -> None:
    text = section(card(similarity), "In a vector database")
    assert f"d / |d|^{similarity.gammas[1]:g}, under the metric **inner product**" in text


@pytest.mark.parametrize("similarity", [*(similarity_of(name) for name in NAMES), CUSTOM], ids=str)
def test_the_code_is_python_and_imports_offsphere_where_the_model_needs_it(
    card: Callable[..., str], similarity: Similarity
) -> None:
    usage = section(card(similarity), "Use")
    (code,) = re.findall(r"```python\n(.*?)```", usage, flags=re.DOTALL)
    imported = {node.module for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)}
    assert ("offsphere" in imported) == (similarity in (LEARNED, CUSTOM))
    assert "normalize_embeddings=True" in usage


@pytest.mark.parametrize(
    ("model", "base"),
    [
        ("org/encoder", "org/encoder"),
        ("package:wordllama", None),
        ("encoder", None),
        ("./models/mine", None),
        ("runs/first/model", None),
        ("/models/mine", None),
        ("FOLDER/mine", None),
    ],
)
def test_the_front_matter_names_the_base_model_where_the_hub_has_it(
    card: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, base: str | None
) -> None:
    (tmp_path / "FOLDER" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    text = card(Similarity.parse("qnorm"), model)
    assert text.startswith("---\n")
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["library_name"] == "sentence-transformers"
    assert front["pipeline_tag"] == "sentence-similarity"
    assert {"offsphere", "qnorm"} <= set(front["tags"])
    assert front.get("base_model") == base
    assert f"# {model} trained with qnorm" in text
