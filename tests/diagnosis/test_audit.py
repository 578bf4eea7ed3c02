from __future__ import annotations

import numpy as np
import pytest

from offsphere.diagnosis.audit import audit, has_unit_length

TEXTS = {"query": ["the sea", "ice"], "document": ["the sun and the moon", "", "xyz", "salt water"]}
EMBEDDINGS = {
    "query": np.array([[3.0, 4.0], [6.0, 8.0]], np.float32),
    "document": np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 2.0]], np.float32),
}
COUNTS = {"query": np.array([2, 1]), "document": np.array([5, 0, 1, 2])}


def run(**changed):
    given = {
        "texts": TEXTS,
        "embeddings": EMBEDDINGS,
        "counts": COUNTS,
        "prompts": {"query": "", "document": ""},
        "normalize_modules": [],
        "declared_similarity": "cosine",
        "max_length": None,
    } | changed
    return audit(**given)


def test_texts_and_vectors_without_content_are_told_apart():
    found = run()
    assert (found.document.texts, found.document.empty, found.document.zero) == (4, 1, 1)
    assert (found.query.empty, found.query.zero, found.query.largest) == (0, 0, 10.0)
    assert any("1 of 4 document texts are empty" in finding for finding in found.findings)
    assert any("1 document texts have a zero embedding" in finding for finding in found.findings)


def test_a_clean_encoder_has_nothing_to_find():
    texts = {"query": ["a", "b"], "document": ["c", "d"]}
    embeddings = {side: np.array([[1.0, 0.0], [0.0, 2.0]]) for side in texts}
    counts = dict.fromkeys(texts, np.array([1, 1]))
    assert run(texts=texts, embeddings=embeddings, counts=counts, max_length=1).findings == []


def test_cuts_are_counted_in_texts_and_in_tokens():
    found = run(max_length=2)
    assert (found.document.cut, found.document.tokens_lost) == (0.25, pytest.approx(3 / 8))
    assert found.query.cut == 0
    assert any(
        "25% of the document texts are cut at 2 tokens (38% of all tokens lost)" in one for one in found.findings
    )
    assert run().document.cut == 0


def test_normalize_modules_unit_lengths_and_undeclared_similarities_are_named():
    unit = EMBEDDINGS | {"document": np.array([[1.0, 0], [0, 1.0], [0.6, 0.8], [1.0, 0]])}
    found = run(embeddings=unit, normalize_modules=[2], declared_similarity=None)
    assert (found.document.unit_length, found.query.unit_length) == (True, False)
    joined = " ".join(found.findings)
    assert "Normalize module (position 2)" in joined
    assert "every document embedding has the same length" in joined
    assert "does not say which similarity" in joined


@pytest.mark.parametrize(("query", "document"), [("query: ", ""), ("", "passage: ")])
def test_a_prompt_on_one_side_only_is_asked_about(query, document):
    found = run(prompts={"query": query, "document": document})
    assert any("is that meant?" in finding for finding in found.findings)
    both = run(prompts={"query": "query: ", "document": "passage: "})
    assert not any("is that meant?" in finding for finding in both.findings)
    assert both.document.prompt == "passage: "


def test_lengths_that_float16_cannot_square_are_found():
    with np.errstate(over="ignore"):
        assert np.isinf(np.float16(260.0) ** 2)
        assert not np.isinf(np.float16(250.0) ** 2)
    embeddings = {
        "query": np.array([[250.0, 0], [1.0, 0]]),
        "document": np.array([[260.0, 0], [0, 250], [0, 1], [0, 2]]),
    }
    found = run(embeddings=embeddings)
    assert (found.query.float16_overflow, found.document.float16_overflow) == (0.0, 0.25)
    assert any("25.0% of the document embeddings are so long (up to 260)" in finding for finding in found.findings)
    scores = run(embeddings=embeddings | {"query": np.array([[252.0, 0], [1.0, 0]])})
    assert scores.query.float16_overflow == 0.5  # its square fits, its product with the longest document does not


@pytest.mark.parametrize(
    ("lengths", "unit"), [([1, 1.0001, 0], True), ([1, 1.01], False), ([0, 0], True), ([], True), ([3.0], True)]
)
def test_unit_length_leaves_zeros_out(lengths, unit):
    assert has_unit_length(np.array(lengths, dtype=np.float64)) == unit
