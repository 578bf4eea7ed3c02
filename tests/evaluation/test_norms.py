from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from offsphere.evaluation import norm_record

QRELS = {"q0": {"d0": 2, "d1": 1, "d2": 0}, "q1": {"d1": 1}}


def test_numbers_by_hand(embed):
    embedded = embed([[3.0, 4.0], [0.0, 7.0]], [[3.0, 0], [5.0, 0], [1.0, 0], [0, 2.0], [0, 3.0]], qrels=QRELS)
    record = norm_record(embedded)
    assert json.loads(json.dumps(record)) == record
    assert record["dataset"] == "made"
    assert (record["relevant_mean"], record["irrelevant_mean"]) == (4.0, 2.0)
    assert record["cohens_d"] == pytest.approx(2 / np.sqrt((1 * 2 + 2 * 1) / 3))
    assert record["query_mean"] == 6.0 and record["query_cv"] == pytest.approx(np.sqrt(2) / 6)
    assert record["document_mean"] == pytest.approx(2.8)
    assert record["document_cv"] == pytest.approx(np.std([3, 5, 1, 2, 3], ddof=1) / 2.8)
    assert len(record["edges"]) == 41 and len(record["relevant"]) == len(record["irrelevant"]) == 40
    assert (sum(record["relevant"]), sum(record["irrelevant"])) == (2, 3)
    assert record["relevant"][-1] == 1 and record["irrelevant"][0] == 1


def test_empty_documents_enter_no_statistic(embed):
    texts = {"d0": "text", "d1": "", "d2": "text", "d3": "text", "d4": ""}  # d1 is relevant, d4 is not
    record = norm_record(embed([[1.0], [1.0]], [[3.0], [900.0], [1.0], [2.0], [1000.0]], qrels=QRELS, texts=texts))
    assert record["document_mean"] == 2.0 and record["edges"][-1] == 3.0
    assert (record["relevant_mean"], record["irrelevant_mean"]) == (3.0, 1.5)
    assert (sum(record["relevant"]), sum(record["irrelevant"])) == (1, 2)


def test_empty_queries_enter_no_statistic(embed):
    embedded = embed([[3.0], [0.0], [5.0], [900.0]], [[1.0], [2.0]])
    texts = {"q0": "text", "q1": "", "q2": "text", "q3": " "}
    record = norm_record(replace(embedded, collection=replace(embedded.collection, queries=texts)))
    assert record["query_mean"] == 4.0 and record["query_cv"] == pytest.approx(np.sqrt(2) / 4)
    assert norm_record(embedded)["query_mean"] == 227.0, "canary"
    texts = dict.fromkeys(texts, "")
    record = norm_record(replace(embedded, collection=replace(embedded.collection, queries=texts)))
    assert (record["query_mean"], record["query_cv"]) == (None, None)


def test_undefined_numbers_are_none(embed):
    record = norm_record(embed([[1.0]], [[1.0]]))
    undefined = ("irrelevant_mean", "cohens_d", "query_cv", "document_cv")
    assert [record[name] for name in undefined] == [None] * 4
    assert record["relevant_mean"] == 1.0


def test_unit_vectors_have_a_histogram(embed):
    rng = np.random.default_rng(0)
    documents = rng.normal(size=(50, 8)).astype(np.float32)
    unit = documents / np.sqrt((documents**2).sum(1, keepdims=True))
    record = norm_record(embed(unit[:2], unit, qrels=QRELS))
    assert sum(record["relevant"]) + sum(record["irrelevant"]) == 50
    assert record["document_cv"] < 1e-6
