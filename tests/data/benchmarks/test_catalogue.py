from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from offsphere.data import load_collection
from offsphere.data.benchmarks import CATALOGUE, category_of, expand, find_benchmark, suggestion
from offsphere.errors import DataError


def test_every_family_is_whole():
    assert Counter(one.category for one in CATALOGUE.values()) == {
        "in-domain": 3, "BEIR": 13 + 12, "BRIGHT": 12, "BRIGHT long": 8, "multi-hop": 4, "NanoBEIR": 13, "STS": 2,
    }  # fmt: skip
    assert len({one.slug for one in CATALOGUE.values()}) == len(CATALOGUE)


def test_sizes_and_names_are_those_of_ir_datasets():
    """Its metadata counts the published files; the paper's table agrees wherever it has the set."""
    ir_datasets = pytest.importorskip("ir_datasets")
    counted = json.loads((Path(ir_datasets.__file__).parent / "etc" / "metadata.json").read_text(encoding="utf-8"))

    def documents(identifier: str) -> int:
        found = counted[identifier]["docs"]
        return documents(found["_ref"]) if "_ref" in found else found["count"]

    checked = 0
    for one in CATALOGUE.values():
        kind, _, identifier = one.source.partition(":")
        if kind == "ir_datasets":
            assert identifier in ir_datasets.registry._registered
            assert (counted[identifier]["queries"]["count"], documents(identifier)) == (one.queries, one.documents)
            checked += 1
    assert checked > 60


def test_the_self_match_rule_is_declared_for_arguana_and_quora_alone():
    """T-H1: the rule is in the record of the data set, and nowhere else (T-H3)."""
    declared = {name for name, one in CATALOGUE.items() if one.exclude_self}
    assert declared == {"beir/arguana", "beir/quora", "nanobeir/arguana", "nanobeir/quora"}


def test_bright_has_a_prompt_a_task():
    for name, one in CATALOGUE.items():
        assert one.query_prompt.startswith("Represent this ") == name.startswith("bright"), name
    assert CATALOGUE["bright/aops"].query_prompt == "Represent this Math problem for searching relevant examples: "


def test_families_stand_for_their_members(tmp_path, monkeypatch):
    assert len(expand("bright")) == 12 and all(name.startswith("bright/") for name in expand("bright"))
    assert len(expand("beir/cqadupstack")) == 12 and len(expand("beir")) == 25
    assert expand("trec-dl") == ["trec-dl/2019", "trec-dl/2020"]
    assert expand("beir/scifact") == ["beir/scifact"] and expand("datasets/mine") == ["datasets/mine"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bright").mkdir()
    assert expand("bright") == ["bright"]  # a folder here is what it is called


def test_a_folder_comes_before_a_benchmark_of_the_same_name(tmp_path, monkeypatch):
    assert find_benchmark("beir/scifact").queries == 300
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beir" / "scifact").mkdir(parents=True)
    assert find_benchmark("beir/scifact") is None and find_benchmark(tmp_path) is None


def test_categories_go_by_the_name_in_results():
    assert category_of("beir-cqadupstack-android") == "BEIR" and category_of("multihop-hotpotqa") == "multi-hop"
    assert category_of("scifact") is None


def test_what_looks_like_a_benchmark_gets_a_suggestion():
    assert "did you mean beir/scifact" in suggestion("beir/scifacts")
    assert suggestion("trec-dl/21") == "trec-dl has 2019, 2020" or "trec-dl/2020" in suggestion("trec-dl/21")
    assert "msmarco/dev" in suggestion("beir/msmarco")  # one set under one name
    assert "beir/scifact, nanobeir/scifact" in suggestion("scifact")
    assert suggestion("data/mine") == ""
    with pytest.raises(DataError, match="neither a folder here nor a benchmark; did you mean bright/biology"):
        load_collection("bright/biologie")
