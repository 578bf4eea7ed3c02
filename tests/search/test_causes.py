"""Each slip, made on purpose, is named; right vectors give no cause."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offsphere.search.causes import COSINE, length_law, numbers, vector_causes
from offsphere.search.other_encodings import Encoding
from offsphere.similarity import Similarity, norms

DOT = Similarity.parse("dot")


@pytest.fixture(scope="module")
def raw() -> np.ndarray:
    random = np.random.default_rng(0)
    return (random.normal(size=(60, 32)) * random.lognormal(0, 0.5, (60, 1))).astype(np.float32)


def names(raw: np.ndarray, stored: np.ndarray, similarity: Similarity, encodings: list[Encoding] | None = None):
    return [cause.name for cause in vector_causes(raw, stored.astype(np.float32), similarity, encodings or [])]


@pytest.mark.parametrize("name", ["cosine", "dot", "qnorm", "dnorm", "gamma_q=0.3,gamma_d=0.4"])
def test_what_should_be_stored_has_no_cause(raw, name):
    similarity = Similarity.parse(name)
    prepared = similarity.prepare_document(raw)
    assert names(raw, prepared, similarity) == names(raw, prepared + 3e-5 * norms(prepared).min(), similarity) == []
    noise = np.random.default_rng(7).normal(size=raw.shape) * norms(prepared)[:, None] / np.sqrt(32)
    assert names(raw, prepared + 5e-4 * noise, similarity) == []
    assert names(raw, prepared.astype(np.float16), similarity) == ["quantised"]


def test_empty_documents_are_zero_on_both_sides(raw):
    with_empty = raw.copy()
    with_empty[3] = 0
    assert names(with_empty, with_empty, DOT) == []
    assert names(with_empty, COSINE.prepare_document(with_empty), DOT) == ["normalised"]


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_normalised_on_upload(raw, gamma):
    similarity = Similarity(1.0, gamma)
    (cause,) = vector_causes(raw, COSINE.prepare_document(raw), similarity)
    assert cause.name == "normalised" and f"under gamma_d {gamma:g}" in cause.sentence


@given(st.floats(-0.5, 1.5), st.floats(-0.5, 1.5))
def test_another_gamma_is_estimated(wanted, stored):
    random = np.random.default_rng(1)
    raw = (random.normal(size=(40, 8)) * random.lognormal(0, 0.4, (40, 1))).astype(np.float32)
    seen = Similarity(0.0, stored).prepare_document(raw)
    assert length_law(raw, seen).gamma == pytest.approx(stored, abs=1e-4)
    found = vector_causes(raw, seen, Similarity(0.0, wanted))
    if abs(wanted - stored) > 0.02 and abs(stored - 1) > 0.02:
        (cause,) = found
        assert cause.name == "gamma" and f"gamma_d {round(length_law(raw, seen).gamma, 2) + 0.0:.2f}" in cause.sentence
    if wanted == stored:
        assert found == []


def test_raw_vectors_in_place_of_unit_ones(raw):
    (cause,) = vector_causes(raw, raw, COSINE)
    assert cause.name == "gamma" and "raw embeddings" in cause.sentence


def test_a_constant_factor(raw):
    (cause,) = vector_causes(raw, raw * 3, DOT)
    assert cause.name == "scaled" and "3 times" in cause.sentence


def test_equal_lengths_say_nothing_about_gamma(raw):
    unit = COSINE.prepare_document(raw)
    assert np.isnan(length_law(unit, unit).gamma)
    assert names(unit, unit, DOT) == []


def int8_rows(vectors: np.ndarray) -> np.ndarray:
    step = np.abs(vectors).max(axis=1, keepdims=True) / 127
    return np.rint(vectors / step) * step


def int8_columns(vectors: np.ndarray) -> np.ndarray:
    low, high = vectors.min(axis=0), vectors.max(axis=0)
    return low + np.rint((vectors - low) / (high - low) * 255) / 255 * (high - low)


def bfloat16(vectors: np.ndarray) -> np.ndarray:
    return (vectors.view(np.uint32) & 0xFFFF0000).view(np.float32)


def binary(vectors: np.ndarray) -> np.ndarray:
    return np.where(vectors > 0, 1.0, -1.0)


@pytest.mark.parametrize(
    ("quantise", "kind"), [(int8_rows, "int8"), (int8_columns, "int8"), (bfloat16, "bfloat16"), (binary, "binary")]
)
def test_quantised(raw, quantise, kind):
    seen = quantise(raw).astype(np.float32)
    assert numbers(seen) == kind
    (cause,) = vector_causes(raw, seen, DOT)
    assert cause.name == "quantised" and kind in cause.sentence


@given(st.integers(0, 50), st.sampled_from([16, 64, 384]))
def test_ordinary_vectors_are_not_taken_for_quantised(seed, dimension):
    assert numbers(np.random.default_rng(seed).normal(size=(20, dimension)).astype(np.float32)) is None


def test_vectors_under_wrong_ids(raw):
    assert names(raw, np.roll(raw, 1, axis=0), DOT) == ["ids"]


def test_another_model(raw):
    assert names(raw, np.random.default_rng(9).normal(size=raw.shape), DOT) == ["model"]


def test_the_first_encoding_that_fits_is_named_even_if_it_covers_only_the_first_documents(raw):
    other = np.random.default_rng(2).normal(size=raw.shape).astype(np.float32)
    wrong = Encoding("pooling", "cls pooling", lambda: np.random.default_rng(3).normal(size=raw[:20].shape))
    right = Encoding("prompt", "without the prompt", lambda: other[:20])
    (cause,) = vector_causes(raw, other, DOT, [wrong, right])
    assert cause.name == "prompt" and cause.sentence.startswith("without the prompt")


def test_encodings_are_not_computed_where_directions_agree(raw):
    def fail() -> np.ndarray:
        raise AssertionError("not needed")

    assert names(raw, COSINE.prepare_document(raw), DOT, [Encoding("prompt", "", fail)]) == ["normalised"]


def test_a_rotation_is_no_other_text(raw):
    noise = np.random.default_rng(4).normal(size=raw.shape) * norms(raw)[:, None] * 0.05
    assert names(raw, raw + noise, DOT) == ["distorted"]


def test_a_slip_that_leaves_half_of_the_documents_right_is_named(raw):
    seen = raw.copy()
    seen[::2] = np.random.default_rng(8).normal(size=(30, 32))
    untitled = Encoding("title", "without titles", lambda: seen)
    assert names(raw, seen, DOT, [untitled]) == ["title"]
    assert names(raw, seen, DOT) == ["changed"]


def test_a_few_documents_from_elsewhere(raw):
    seen = raw.copy()
    seen[:5] = np.random.default_rng(5).normal(size=(5, 32))
    (cause,) = vector_causes(raw, seen, DOT)
    assert cause.name == "changed" and "5 of 60" in cause.sentence


def test_the_first_dimensions_only(raw):
    (cause,) = vector_causes(raw, raw[:, :8], DOT)
    assert cause.name == "dimension" and "the first 8" in cause.sentence
    (cause,) = vector_causes(raw, np.random.default_rng(6).normal(size=(60, 8)), DOT)
    assert cause.name == "dimension" and "another model" in cause.sentence
