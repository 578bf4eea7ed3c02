from __future__ import annotations

import numpy as np
import pytest

from offsphere.errors import ConfigError
from offsphere.evaluation.compare_runs import compare_runs, compare_values
from offsphere.evaluation.scopes import arrays_of, collection_name, scopes_of, units_of

CQA = [f"beir-cqadupstack-{one}" for one in ("android", "english", "gaming")]


def test_benchmarks_have_the_categories_of_the_paper():
    names = ["beir-scifact", "bright-biology", "mine", "beir-nq", "bright-pony", "msmarco-dev", "trec-dl-2019"]
    found = scopes_of(names)
    assert list(found) == ["all", "BEIR", "BRIGHT", "in-domain", *names]
    assert found["BEIR"] == ("beir-scifact", "beir-nq") and found["in-domain"] == ("msmarco-dev", "trec-dl-2019")


def test_a_category_that_is_everything_or_one_set_says_nothing_new():
    assert list(scopes_of(["beir-scifact", "beir-nq"])) == ["all", "beir-scifact", "beir-nq"]
    assert list(scopes_of(["beir-scifact", "mine"])) == ["all", "beir-scifact", "mine"]
    assert list(scopes_of(["beir-scifact"])) == ["beir-scifact"]


def test_categories_that_are_given_come_beside_and_may_replace():
    names = ["beir-scifact", "beir-nq", "mine"]
    assert scopes_of(names, {"BEIR": ["mine"]})["BEIR"] == ("mine",)
    with pytest.raises(ConfigError, match="names 'nope', which is not in --data"):
        scopes_of(names, {"some": ["nope"]})


def test_the_parts_of_cqadupstack_count_as_one():
    """As in BEIR's own mean: their mean is one of its values, with every query in the intervals."""
    random = np.random.default_rng(0)
    names = [*CQA, "beir-nq"]
    arrays = {name: random.random((2, n)) for name, n in zip(names, (5, 70, 20, 30), strict=True)}
    values = {
        name: {system: {f"q{i}": v for i, v in enumerate(array[s])} for s, system in enumerate("ab")}
        for name, array in arrays.items()
    }
    assert units_of(names) == 2
    expected = [(np.mean([arrays[one][s].mean() for one in CQA]) + arrays["beir-nq"][s].mean()) / 2 for s in (0, 1)]
    comparison = compare_values(values, "ab", scopes_of(names), measure="nDCG@10", split="test")
    assert [comparison.means["all"][system] for system in "ab"] == pytest.approx(expected)
    whole = next(found for found in comparison.differences if found.scope == "all")
    assert whole.difference == pytest.approx(expected[1] - expected[0]) and whole.n_queries == 125
    assert whole.low < whole.difference < whole.high
    (first, second) = arrays_of(names, arrays)
    assert first.shape == (2, 95) and second is arrays["beir-nq"]


def test_names_of_benchmarks_and_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert collection_name("beir/scifact") == "beir-scifact"
    (tmp_path / "mine").mkdir()
    assert collection_name("mine") == "mine"
    (tmp_path / "mine" / "collection.yaml").write_text("name: yours")
    assert collection_name("mine") == "yours"


def test_runs_of_benchmarks_are_compared_by_their_names(make, tmp_path, monkeypatch):
    """The mean of each category comes by itself."""
    monkeypatch.setenv("OFFSPHERE_BENCHMARKS", str(tmp_path))
    names = ["beir/scifact", "beir/nfcorpus", "bright/pony"]
    runs = tmp_path / "runs"
    runs.mkdir()
    for seed, name in enumerate(names):
        make(name, seed)
        for system, first in (("a", 0), ("b", 5)):
            lines = [f"q{q} Q0 d{(first + q + d) % 60} 1 {-d} x" for q in range(12) for d in range(20)]
            (runs / f"{system}-{name.replace('/', '-')}.trec").write_text("\n".join(lines) + "\n", encoding="utf-8")
    comparison = compare_runs([runs], names)
    assert list(comparison.scopes) == ["all", "BEIR", *(name.replace("/", "-") for name in names)]
    of = comparison.means
    assert of["BEIR"]["b"] == pytest.approx((of["beir-scifact"]["b"] + of["beir-nfcorpus"]["b"]) / 2)
    assert any("not the published size" in note for note in comparison.notes)
    assert compare_runs([runs], ["bright/pony"]).means["bright-pony"] == of["bright-pony"]
