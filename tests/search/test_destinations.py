from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from offsphere.errors import ConfigError, StoreError
from offsphere.search.destinations import DESTINATIONS, NONE, POSITIVE, destination, explain, refuse
from offsphere.search.stores import KINDS
from offsphere.similarity import Similarity

PAGE = Path(__file__).parents[2] / "docs" / "destinations.md"
NAMES = [row.name for row in DESTINATIONS]


def cells(row) -> list[str]:
    sources = ", ".join(row.sources)
    return [
        row.title, f"`{row.name}`", row.metric, row.score, row.undo, row.keeps_length, row.lost, row.alternative,
        sources,
    ]  # fmt: skip


def tables() -> list[list[list[str]]]:
    """The cells of each table of the page, without its head."""
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.M)
    split = [
        [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()] for block in blocks
    ]
    return [[[cell.replace("\\|", "|") for cell in row] for row in rows[2:]] for rows in split]


def test_the_page_shows_this_table() -> None:
    exported, others = tables()
    expected = [cells(row) for row in DESTINATIONS]
    lines = "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in expected)
    assert exported + others == expected, f"the page should hold these rows:\n{lines}"
    assert len(exported) == len(KINDS)


def test_every_kind_of_store_has_a_row_that_keeps_length() -> None:
    assert {row.name for row in DESTINATIONS if row.exported} == set(KINDS)
    assert all(row.keeps == "yes" and not row.alternative for row in DESTINATIONS if row.exported)


def test_names_are_distinct_and_every_row_rests_on_something() -> None:
    assert len(set(NAMES)) == len(NAMES) > 20
    for row in DESTINATIONS:
        assert row.sources and all(row.sources), row.name
        assert bool(row.condition) == (row.keeps == "only with"), row.name
        assert (row.keeps == "yes") == (not row.alternative), row.name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("similarity", ["cosine", "dot", "qnorm", "dnorm", "learnable"])
def test_length_is_refused_exactly_where_it_would_be_lost(name: str, similarity: str) -> None:
    parsed = Similarity.parse(similarity)
    row = destination(name)
    if row.keeps == "no" and similarity in ("dot", "qnorm", "learnable"):
        with pytest.raises(StoreError) as error:
            refuse(name, parsed)
        assert row.title in str(error.value) and row.alternative in str(error.value)
        assert row.sources[0] in str(error.value)
    else:
        refuse(name, parsed)


@pytest.mark.parametrize("gamma_d", [0.9, 1.1, -0.5])
def test_any_exponent_but_one_needs_length(gamma_d: float) -> None:
    with pytest.raises(StoreError, match=re.escape(f"ranks by |d|^{1 - gamma_d:.4g}")):
        refuse("ollama", Similarity(1.0, gamma_d))


def test_a_target_is_its_kind() -> None:
    assert destination("milvus:folder/file.db#documents").title == "Milvus, IP"
    with pytest.raises(StoreError, match="Ollama"):
        refuse("ollama:http://localhost:11434", Similarity.parse("dot"))


def test_unknown_destinations_are_left_to_whoever_opens_them() -> None:
    refuse("milvis:file.db", Similarity.parse("dot"))
    with pytest.raises(ConfigError, match=r"unknown destination 'milvis:file.db'; did you mean milvus\?"):
        explain("milvis:file.db", Similarity.parse("dot"))


@pytest.mark.parametrize(
    ("similarity", "stored", "query", "limits"),
    [
        ("cosine", "d / |d|", "q / |q|", "-1 to 1, the cosine"),
        ("dot", "d as the model gives it", "q as the model gives it", "-|q| |d| to |q| |d|, not bounded by 1"),
        ("qnorm", "d as the model gives it", "q / |q|", "-|d| to |d|, not bounded by 1"),
        ("dnorm", "d / |d|", "q as the model gives it", "-|q| to |q|, not bounded by 1"),
        (
            "gamma_q=0.2,gamma_d=0.9", "d / |d|^0.9", "q / |q|^0.2",
            "-|q|^0.8 |d|^0.1 to |q|^0.8 |d|^0.1, not bounded by 1",
        ),
    ],
)  # fmt: skip
def test_an_explanation_says_what_is_stored_and_what_scores_mean(
    similarity: str, stored: str, query: str, limits: str
) -> None:
    parsed = Similarity.parse(similarity)
    explained = explain("chroma:folder#documents", parsed)
    assert (explained.stored, explained.query, explained.range) == (stored, query, limits)
    assert (explained.metric, explained.undo) == ("hnsw space ip", "1 - score")
    assert ("not ranked by" in explained.length) == (parsed.gammas[1] == 1)
    assert "stored beside the vector as norm" in explained.length
    assert all(value in str(explained) for value in explained.to_dict().values())
    # The words are the formulas: evaluate them on vectors.
    random = np.random.default_rng(0)
    q, d = random.normal(size=(2, 1, 5)) * 3
    for text, raw, prepared in ((stored, d, parsed.prepare_document(d)), (query, q, parsed.prepare_query(q))):
        formula = re.sub(r"\|\w\|", "length", text.removesuffix(" as the model gives it")).replace("^", "**")
        said = eval(formula, {}, {"d": raw, "q": raw, "length": np.sqrt((raw**2).sum())})
        assert np.allclose(said, prepared)
    if "cosine" not in limits:
        lengths = {f"|{name}|": str(np.sqrt((raw**2).sum())) for name, raw in (("q", q), ("d", d))}
        most = limits.removesuffix(", not bounded by 1").split(" to ")[1]
        for name, value in lengths.items():
            most = most.replace(name, value)
        assert abs(parsed.scores(q, d)[0, 0]) <= eval(most.replace("^", "**").replace(" ", "*"))


SCORED = [row for row in DESTINATIONS if row.keeps != "no" and ("q . d;" in row.score or row.score == POSITIVE)]
SCORED += [row for row in DESTINATIONS if row.keeps != "no" and re.match(r"(1 - q|-\(q)", row.score)]


def test_most_destinations_that_keep_length_have_a_score_to_undo() -> None:
    others = {row.name for row in DESTINATIONS if row.keeps != "no"} - {row.name for row in SCORED}
    assert others == {"parquet", "vespa-dotproduct", "text-embeddings-inference", "llama.cpp"}


@pytest.mark.parametrize("row", SCORED, ids=lambda row: row.name)
@pytest.mark.parametrize("product", [-7.5, -0.2, 0.0, 0.3, 12.0])
def test_undoing_a_score_gives_the_product_back(row, product: float) -> None:
    if row.score == POSITIVE:
        score = 1 + product if product >= 0 else 1 / (1 - product)
        assert score > 0
        expression = "score - 1 if score >= 1 else 1 - 1 / score"
        assert row.undo == "score - 1 where score >= 1, else 1 - 1 / score"
    else:
        score = eval(re.split("[,;]", row.score)[0].replace("q . d", "product"), {}, {"product": product})
        expression = row.undo
    assert eval(expression, {}, {"score": score}) == pytest.approx(product)


def test_a_loss_is_said_loudly() -> None:
    lost = explain("qdrant-cosine", Similarity.parse("dot"))
    assert lost.length.startswith("LOST: this ranks as cosine, and the model needs |d|; use qdrant")
    assert lost.undo == "cannot be undone: |d| is gone"
    assert explain("qdrant-cosine", Similarity.parse("cosine")).undo == "score is the cosine"
    condition = explain("text-embeddings-inference", Similarity.parse("qnorm")).length
    assert condition == "kept as |d|, only with normalize: false in each request"


def test_a_row_of_the_page_that_differs_would_be_seen() -> None:
    changed = replace(DESTINATIONS[0], lost=NONE + " at all")
    assert cells(changed) not in tables()[0]
