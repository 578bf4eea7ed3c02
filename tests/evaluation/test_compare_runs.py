from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from offsphere.data import load_collection
from offsphere.errors import ConfigError, DataError, UsageError
from offsphere.evaluation import per_query, read_trec
from offsphere.evaluation.compare_runs import RunDifference, compare_runs, compare_values, paired_effect
from offsphere.evaluation.models import evaluate_models
from offsphere.evaluation.run_files import find_systems

XQUAD = Path(__file__).parents[2] / "datasets" / "xquad_en"


def write_collection(folder: Path, queries: int = 8, settings: str = "") -> Path:
    """A collection of as many documents as queries, ``dI`` relevant to ``qI``."""
    (folder / "qrels").mkdir(parents=True)
    for file, first in (("corpus", "d"), ("queries", "q")):
        rows = "".join(json.dumps({"_id": f"{first}{i}", "text": f"text {i}"}) + "\n" for i in range(queries))
        (folder / f"{file}.jsonl").write_text(rows, encoding="utf-8")
    qrels = "".join(f"q{i}\td{i}\t1\n" for i in range(queries))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + qrels, encoding="utf-8")
    if settings:
        (folder / "collection.yaml").write_text(settings, encoding="utf-8")
    return folder


def write_run(path: Path, run: dict[str, list[str]]) -> Path:
    """A run file with the documents of each query, best first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{query} Q0 {document} {place} {9 - place} x\n"
        for query, documents in run.items()
        for place, document in enumerate(documents)
    ]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def right(*numbers: int) -> dict[str, list[str]]:
    return {f"q{i}": [f"d{i}"] for i in numbers}


def wrong(*numbers: int) -> dict[str, list[str]]:
    return {f"q{i}": [f"d{(i + 1) % 8}", f"d{i}"] for i in numbers}


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    return write_collection(tmp_path / "one")


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    """A baseline that is right on three queries of eight, and a system that is right on five others or the same."""
    return [
        write_run(tmp_path / "base.trec", right(0, 1, 2) | wrong(3, 4, 5, 6, 7)),
        write_run(tmp_path / "other.trec", right(2, 3, 4, 5, 6) | wrong(0, 1, 7)),
    ]


def only(comparison, scope: str) -> RunDifference:
    (found,) = [difference for difference in comparison.differences if difference.scope == scope]
    return found


# The numbers


def test_every_number_by_hand(collection, pair):
    """Values 1 and 1/2 of RR; the randomisation is exact for eight queries."""
    comparison = compare_runs(pair, [str(collection)], measure="RR")
    assert (comparison.baseline, comparison.systems) == ("base", ("base", "other"))
    found = only(comparison, "one")
    base = np.array([1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.5])
    other = np.array([0.5, 0.5, 1, 1, 1, 1, 1, 0.5])
    differences = other - base
    assert (found.wins, found.ties, found.losses) == (4, 2, 2)
    assert (found.value, found.baseline, found.difference) == pytest.approx((other.mean(), base.mean(), 0.125))
    signs = np.array([*product((1, -1), repeat=8)])
    assert found.p == pytest.approx(np.mean(np.abs(signs @ differences) >= differences.sum() - 1e-12))
    assert found.p_t == pytest.approx(stats.ttest_rel(other, base).pvalue)
    assert found.effect == pytest.approx(differences.mean() / differences.std(ddof=1))
    low, high = stats.bootstrap(
        (differences,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(1)
    ).confidence_interval
    assert (found.low, found.high) == (pytest.approx(low, abs=0.03), pytest.approx(high, abs=0.03))
    assert found.p_holm == found.p
    assert (found.n_queries, comparison.measure, comparison.split) == (8, "RR", "test")
    assert {(score.n_queries, score.answered, score.tied) for score in comparison.scores} == {(8, 8, 0)}
    assert comparison.notes == ()


def random_values(seed: int, datasets: dict[str, int], systems: list[str], lift: float = 0.0):
    random = np.random.default_rng(seed)
    return {
        name: {
            system: dict(zip(map(str, range(size)), random.random(size) + lift * i, strict=True))
            for i, system in enumerate(systems)
        }
        for name, size in datasets.items()
    }


def test_macro_means_weigh_datasets_alike_and_holm_spans_systems_and_datasets():
    """T-F4: the level is corrected for all that is tested."""
    datasets, systems = {"big": 300, "small": 20, "tiny": 10}, ["base", "a", "b"]
    values = random_values(0, datasets, systems, 0.1)
    scopes = {"all": tuple(datasets), "little": ("small", "tiny"), **{name: (name,) for name in datasets}}
    comparison = compare_values(values, systems, scopes, measure="RR", split="test")
    means = {name: {s: fmean(by_query.values()) for s, by_query in of.items()} for name, of in values.items()}
    for scope, names in scopes.items():
        for system in systems:
            assert comparison.means[scope][system] == pytest.approx(fmean(means[name][system] for name in names))
    of_datasets = [found for found in comparison.differences if found.scope in datasets]
    assert len(of_datasets) == 6
    assert [found.p_holm for found in of_datasets] == pytest.approx(slow_holm([found.p for found in of_datasets]))
    for scope in ("all", "little"):
        group = [found for found in comparison.differences if found.scope == scope]
        assert [found.p_holm for found in group] == pytest.approx(slow_holm([found.p for found in group]))
        effects = [paired_effect(array(values[name], "a") - array(values[name], "base")) for name in scopes[scope]]
        assert group[0].effect == pytest.approx(fmean(effects))
        assert group[0].n_queries == sum(datasets[name] for name in scopes[scope])
        assert sum((group[0].wins, group[0].ties, group[0].losses)) == group[0].n_queries


def array(of_systems, system):
    return np.array([*of_systems[system].values()])


def slow_holm(p_values):
    """Each p is multiplied by the number of hypotheses that are left, and never falls below an earlier one."""
    ordered = sorted(p_values)
    adjusted = [min(1.0, (len(ordered) - i) * p) for i, p in enumerate(ordered)]
    return [max(adjusted[: ordered.index(p) + 1]) for p in p_values]


def test_the_same_seed_gives_the_same_comparison_and_another_one_does_not():
    values, scopes = random_values(3, {"x": 40}, ["base", "a"]), {"x": ("x",)}
    one, two, other = (
        compare_values(values, ["base", "a"], scopes, measure="RR", split="t", seed=s) for s in (0, 0, 1)
    )
    assert one == two
    assert only(one, "x").p != only(other, "x").p and only(one, "x").low != only(other, "x").low


def test_swapping_the_systems_turns_the_signs():
    values, scopes = random_values(3, {"x": 40}, ["a", "b"]), {"x": ("x",)}
    one = only(compare_values(values, ["a", "b"], scopes, measure="RR", split="t"), "x")
    two = only(compare_values(values, ["b", "a"], scopes, measure="RR", split="t"), "x")
    assert (one.wins, one.ties, one.losses) == (two.losses, two.ties, two.wins)
    assert (one.difference, one.effect, one.low, one.high) == pytest.approx(
        (-two.difference, -two.effect, -two.high, -two.low)
    )
    assert (one.p, one.p_t) == pytest.approx((two.p, two.p_t))


def test_false_positives_are_as_rare_as_the_level_says():
    """300 comparisons without a difference: at 5 % about 15 are found; 31 would have a chance of 1 in 10,000."""
    random = np.random.default_rng(0)
    skewed = random.random((300, 30)) ** 4  # values per query are far from normal
    found = {"p": 0, "p_t": 0, "interval": 0}
    for base in skewed:
        other = np.where(random.random(30) < 0.5, base, base[random.permutation(30)])
        swap = random.random(30) < 0.5  # under the null hypothesis it is a coin that says which is whose
        base, other = np.where(swap, other, base), np.where(swap, base, other)
        values = {"x": {name: dict(enumerate(each.tolist())) for name, each in (("base", base), ("a", other))}}
        one = only(compare_values(values, ["base", "a"], {"x": ("x",)}, measure="RR", split="t"), "x")
        found["p"] += one.p < 0.05
        found["p_t"] += one.p_t < 0.05
        found["interval"] += not one.low <= 0 <= one.high
    assert 3 <= found["p"] <= 30
    assert found["p_t"] <= 30
    assert found["interval"] <= 40  # a percentile interval of 30 queries is somewhat short


def test_a_real_difference_is_found():
    values = random_values(1, {"x": 100}, ["base", "a"], 0.3)
    found = only(compare_values(values, ["base", "a"], {"x": ("x",)}, measure="RR", split="t"), "x")
    assert found.p < 0.001 and found.p_t < 0.001 and found.low > 0.1 and found.effect > 0.5


@pytest.mark.parametrize(
    ("differences", "effect"),
    [([0, 0, 0], 0.0), ([0.0], 0.0), ([0.5], None), ([0.25, 0.25], None), ([1, 0], 0.5 / np.sqrt(0.5))],
)
def test_effect_at_its_limits(differences, effect):
    assert paired_effect(np.array(differences, dtype=np.float64)) == (None if effect is None else pytest.approx(effect))


def test_a_run_against_itself_differs_by_nothing(collection, pair, tmp_path):
    same = write_run(tmp_path / "same.trec", right(0, 1, 2) | wrong(3, 4, 5, 6, 7))
    found = only(compare_runs([pair[0], same], [str(collection)]), "one")
    assert (found.difference, found.low, found.high, found.p, found.p_t, found.effect) == (0, 0, 0, 1, 1, 0)
    assert (found.wins, found.ties, found.losses) == (0, 8, 0)


# Queries and documents that do not match


def test_unequal_query_sets_are_refused_unless_missing_ones_count_zero(collection, pair, tmp_path):
    """T-G4, and T-F4: the counts say what does not match."""
    part = write_run(tmp_path / "part.trec", right(2, 3, 4))
    with pytest.raises(
        DataError, match=r"one: .* of 8 judged ones base 8, part 3; only some answer 'q0'.*--unanswered"
    ):
        compare_runs([pair[0], part], [str(collection)])
    comparison = compare_runs([pair[0], part], [str(collection)], unanswered_as_zero=True)
    assert only(comparison, "one").value == pytest.approx(3 / 8)
    assert comparison.scores[1].answered == 3 and comparison.scores[1].n_queries == 8
    assert comparison.notes == ("one, part: judged queries without an answer, which count 0: 5",)


def test_queries_that_no_run_answers_count_zero_and_are_said(collection, tmp_path):
    runs = [write_run(tmp_path / "a.trec", right(0, 1)), write_run(tmp_path / "b.trec", wrong(0, 1))]
    comparison = compare_runs(runs, [str(collection)])
    assert [score.value for score in comparison.scores] == pytest.approx([2 / 8, 2 / 8 / np.log2(3)])
    assert comparison.notes[0] == "one: judged queries that no run answers: 6 of 8"


def test_queries_and_documents_that_the_collection_does_not_know_are_said(collection, pair, tmp_path):
    more = {"q0": ["gone", "d0"], **right(*range(1, 8)), "q99": ["d0"]}
    comparison = compare_runs([pair[0], write_run(tmp_path / "more.trec", more)], [str(collection)], measure="RR")
    assert comparison.notes == (
        "one, more: queries without judgements, left out: 1",
        "one, more: documents that the collection does not have, which keep their rank: 1",
    )
    assert comparison.scores[1].value == pytest.approx((0.5 + 7) / 8)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ({f"q{i}": [f"{i}"] for i in range(8)}, r"bad\.trec: no document of the run is in one: .*'0'.*'d0'"),
        ({f"{i}": [f"d{i}"] for i in range(8)}, r"bad\.trec: no query of the run is judged"),
        ({}, r"bad\.trec: the run file is empty"),
        ({"q0": ["d1", "d1"]}, r"bad\.trec:2: document 'd1' comes twice"),
    ],
)
def test_a_run_of_another_collection_or_with_duplicates_is_refused(collection, pair, tmp_path, run, says):
    """T-I3 and T-G6, also where missing queries count 0."""
    bad = write_run(tmp_path / "bad.trec", run)
    with pytest.raises(DataError, match=says):
        compare_runs([pair[0], bad], [str(collection)], unanswered_as_zero=True)


def test_what_a_collection_excludes_is_taken_out_of_every_run(tmp_path, pair):
    settings = "excluded:\n  q3: [d4]\n"
    folder = write_collection(tmp_path / "excluding", settings=settings)
    comparison = compare_runs(pair, [str(folder)], measure="RR")
    assert [score.excluded for score in comparison.scores] == [1, 0]
    assert comparison.values["excluding"]["base"]["q3"] == 1.0
    assert comparison.notes == ("excluding, base: documents that the collection excludes for their query, left out: 1",)


@pytest.mark.parametrize(("settings", "value"), [("exclude_self: true\n", 1.0), ("", 0.5)])
def test_the_self_match_is_taken_out_of_every_run(tmp_path, settings, value):
    """Row 79: queries are documents, each found first for itself; a run is read by the same rule as one is made."""
    folder = write_collection(tmp_path / "papers", settings=settings)
    rows = "".join(json.dumps({"_id": f"d{i}", "text": f"text {i}"}) + "\n" for i in range(8))
    (folder / "queries.jsonl").write_text(rows, encoding="utf-8")
    qrels = "".join(f"d{i}\td{(i + 1) % 8}\t1\n" for i in range(8))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + qrels, encoding="utf-8")
    found = {f"d{i}": [f"d{i}", f"d{(i + 1) % 8}"] for i in range(8)}
    without = {query: documents[1:] for query, documents in found.items()}
    runs = [write_run(tmp_path / "all.trec", found), write_run(tmp_path / "three.trec", without | take(found, 3))]
    comparison = compare_runs(runs, [str(folder)], measure="RR")
    first, second = comparison.scores
    assert first.value == value and second.value == (5 + 3 * value) / 8
    excluded = (8, 3) if settings else (0, 0)
    assert (first.excluded, second.excluded) == excluded
    assert comparison.notes == tuple(
        f"papers, {name}: documents that the collection excludes for their query, left out: {number}"
        for name, number in zip(("all", "three"), excluded, strict=True)
        if number
    )


def take(run: dict[str, list[str]], number: int) -> dict[str, list[str]]:
    return dict(list(run.items())[:number])


def test_ties_are_counted_and_averaged(collection, tmp_path, pair):
    """T-G1: the value of trec_eval and the average stand beside each other."""
    tied = tmp_path / "tied.trec"
    tied.write_text("".join(f"q{i} Q0 d{j} 1 1.0 x\n" for i in range(8) for j in (i, (i + 1) % 8)), encoding="utf-8")
    score = compare_runs([pair[0], tied], [str(collection)], measure="RR").scores[1]
    assert (score.tied, score.tie_averaged, score.value) == (8, pytest.approx(0.75), pytest.approx((7 * 0.5 + 1) / 8))


# Which file is whose


@pytest.fixture
def two(tmp_path: Path) -> tuple[list[str], Path]:
    """Two collections and a folder with runs of two systems on each, and of a collection that is not asked for."""
    data = [str(write_collection(tmp_path / name)) for name in ("one", "two")]
    for system, collection in product(("cosine", "dot-seed1"), ("one", "two", "three")):
        write_run(tmp_path / "out" / "runs" / f"{system}-{collection}.trec", right(*range(8)))
    return data, tmp_path / "out"


def test_a_folder_stands_for_its_runs_of_these_collections(two):
    data, folder = two
    for given in (folder, folder / "runs"):
        comparison = compare_runs([given], data, categories={"both": ["one", "two"], "first": ["one"]})
        assert comparison.systems == ("cosine", "dot-seed1")
        assert dict(comparison.scopes) == {
            "all": ("one", "two"), "both": ("one", "two"), "first": ("one",), "one": ("one",), "two": ("two",),
        }  # fmt: skip
    assert compare_runs([folder], data[:1]).scopes.keys() == {"one"}


def test_the_first_one_given_is_the_baseline(two):
    data, folder = two
    files = [folder / "runs" / f"dot-seed1-{name}.trec" for name in ("one", "two")]
    assert compare_runs([*files, folder], data).systems == ("dot-seed1", "cosine")


def test_a_collection_may_be_the_end_of_another_ones_name(tmp_path):
    for name in ("a-x-en.trec", "b-x-en.trec", "a-en.trec", "b-en.trec"):
        write_run(tmp_path / name, right(0))
    found = find_systems([tmp_path], ["en", "x-en"])
    assert {s.name: {c: f.name for c, f in s.files.items()} for s in found} == {
        "a": {"x-en": "a-x-en.trec", "en": "a-en.trec"},
        "b": {"x-en": "b-x-en.trec", "en": "b-en.trec"},
    }


def test_systems_of_one_name_are_told_apart_by_their_folders(tmp_path):
    for folder in ("m/runs", "n"):
        write_run(tmp_path / folder / "dot-one.trec", right(0))
    found = find_systems([tmp_path / "m", tmp_path / "n"], ["one"])
    assert [system.name for system in found] == [f"{tmp_path}/m/dot", f"{tmp_path}/n/dot"]


def test_runs_that_cannot_be_compared(two, tmp_path):
    data, folder = two
    lone = folder / "runs" / "cosine-one.trec"
    with pytest.raises(UsageError, match="needs two systems or more, found cosine"):
        compare_runs([lone, lone], data[:1])
    with pytest.raises(DataError, match=r"no run of cosine on two; expected cosine-two\.trec"):
        compare_runs([lone, folder / "runs" / "dot-seed1-two.trec"], data)
    stray = write_run(tmp_path / "stray.trec", right(0))
    with pytest.raises(DataError, match=r"stray\.trec: cannot tell which collection .* -one\.trec, -two\.trec"):
        compare_runs([stray, lone], data)
    with pytest.raises(DataError, match="no such run file or folder"):
        compare_runs([lone, tmp_path / "nowhere.trec"], data)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no run file of one, two; expected SYSTEM-one\.trec"):
        compare_runs([tmp_path / "empty"], data)
    twin = write_run(tmp_path / "dot.trec", right(0)), write_run(tmp_path / "dot-one.trec", right(0))
    with pytest.raises(DataError, match="is also a run of dot on one"):
        compare_runs(twin, data[:1])


def test_names_that_do_not_fit(two):
    data, folder = two
    with pytest.raises(ConfigError, match="'both' names 'three', which is not in --data; expected one, two"):
        compare_runs([folder], data, categories={"both": ["one", "three"]})
    with pytest.raises(ConfigError, match="'one' names two of"):
        compare_runs([folder], data, categories={"one": ["two"]})
    with pytest.raises(ConfigError, match="'all' names two of"):
        compare_runs([folder], data, categories={"all": ["two"]})
    with pytest.raises(ConfigError, match="each of its collections once"):
        compare_runs([folder], data, categories={"both": ["one", "one"]})
    with pytest.raises(ConfigError, match="'one' names two of"):
        compare_runs([folder], [data[0], data[0]])
    with pytest.raises(ConfigError, match="did you mean nDCG@10"):
        compare_runs([folder], data, measure="nDGC@10")


# Real runs


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Callable[[str], dict[str, float]]]:
    """Run files of package:wordllama under cosine and dot on xquad_en, and their values by per_query."""
    out = tmp_path_factory.mktemp("real")
    evaluate_models(["package:wordllama"], [str(XQUAD)], ["cosine", "dot"], out=out)
    qrels = load_collection(XQUAD).qrels

    def values(name: str) -> dict[str, float]:
        return per_query(read_trec(out / "runs" / f"{name}-xquad_en.trec"), qrels, ["nDCG@10"])["nDCG@10"]

    return out, values


def test_real_runs(real):
    out, values = real
    comparison = compare_runs([out], [str(XQUAD)])
    found = only(comparison, "xquad_en")
    cosine, dot = (np.array([*values(name).values()]) for name in ("cosine", "dot"))
    assert (found.system, comparison.baseline, found.n_queries) == ("dot", "cosine", 1190)
    assert found.difference == pytest.approx(dot.mean() - cosine.mean()) and found.difference != 0
    assert (found.wins, found.losses) == (int((dot > cosine + 1e-9).sum()), int((dot < cosine - 1e-9).sum()))
    assert found.p_t == pytest.approx(stats.ttest_rel(dot, cosine).pvalue)
    scipy_p = stats.permutation_test(
        (dot, cosine),
        lambda a, b, axis: (a - b).mean(axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=500,
        batch=100,
        rng=np.random.default_rng(0),
    ).pvalue
    assert found.p == pytest.approx(scipy_p, abs=0.08)
    assert found.low <= found.difference <= found.high
    assert json.loads(json.dumps(comparison.to_dict()))["baseline"] == "cosine"
