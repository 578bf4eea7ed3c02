from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import pytrec_eval
from sentence_transformers.sentence_transformer.modules import Normalize

from offsphere.data import load_collection
from offsphere.encoders import open_encoder
from offsphere.errors import ConfigError, DataError, UsageError
from offsphere.evaluation import (
    MEASURES,
    PRETRAINED,
    norm_record,
    per_query,
    rank,
    read_query_values,
    read_results,
    read_trec,
    score_under,
)
from offsphere.evaluation.compare_runs import compare_runs
from offsphere.evaluation.embedding import embed
from offsphere.evaluation.models import evaluate_models
from offsphere.evaluation.parts import slug
from offsphere.modules import LearnedSimilarity
from offsphere.similarity import FIXED, NAMES, Similarity

SIMILARITIES = {name: Similarity.parse(name) for name in NAMES}


def test_an_encoder_on_collections(encoder, save, make, tmp_path, values):
    """Rows, run files and values per query agree with each other and with ranking by hand."""
    folders, source, out = [make("one"), make("two", 1)], save(encoder), tmp_path / "out"
    asked = ["cosine", "dot", "gamma_q=0.2,gamma_d=0.9"]
    rows = evaluate_models(
        [str(source)], list(map(str, folders)), asked, measures=("nDCG@10", "RR@10"), out=out
    ).results
    assert read_results(out / "results.csv") == rows and len(rows) == 2 * 3 * 2
    assert [row.scored_as for row in rows[::2]] == asked * 2
    assert {(row.model, row.similarity, row.seed, row.split) for row in rows} == {
        (str(source), PRETRAINED, None, "test")
    }
    found = values(rows)
    for folder in folders:
        collection = load_collection(folder, "test")
        ours = embed(encoder, collection)
        for name in asked:
            run = read_trec(out / "runs" / f"{name}-{collection.name}.trec")
            assert run == rank(ours, Similarity.parse(name)).run()
            for measure, by_query in per_query(run, collection.qrels, ["nDCG@10", "RR@10"]).items():
                assert found[collection.name, name, measure] == pytest.approx(fmean(by_query.values()), abs=1e-12)
    assert len(set(found.values())) > 6
    assert len(read_query_values(out / "per_query.parquet")) == 2 * 2 * 12
    assert len(list((out / "runs").iterdir())) == 2 * 3


def test_own_is_what_the_model_declares(static, save, make, evaluated, values):
    data = [str(make("one"))]
    static.similarity_fn_name = "dot"
    source = str(save(static))
    own = evaluated(source, data)
    assert {row.scored_as for row in own} == {"dot"}
    assert values(own) == values(evaluated(source, data, ["dot"]))
    assert {(row.gamma_q, row.gamma_d) for row in own} == {(0, 0)}


def test_a_model_that_ends_with_normalize_is_ranked_by_cosine(static, save, make, evaluated, values):
    """Whatever it stores; its raw embeddings are there for the others."""
    data, plain = [str(make("one"))], save(static)
    static.append(Normalize())
    static.similarity_fn_name = "dot"
    source = str(save(static, "normalised"))
    assert {row.scored_as for row in evaluated(source, data)} == {"cosine"}
    similarities = ["cosine", "dot"]
    found = values(evaluated(source, data, similarities))
    assert found == values(evaluated(str(plain), data, similarities))
    assert found["one", "cosine", "nDCG@10"] != found["one", "dot", "nDCG@10"]


def test_a_model_that_declares_nothing_needs_a_similarity(static, make, monkeypatch, evaluated):
    """T-A2. sentence-transformers stores cosine when it saves such a model, so this one is not saved."""
    data = [str(make("one"))]
    monkeypatch.setattr("offsphere.evaluation.models.open_encoder", lambda *args, **settings: static)
    for similarities in (["own"], ["cosine", "own"]):
        with pytest.raises(
            UsageError, match=r"does not say which similarity .* --similarity cosine or --similarity dot"
        ):
            evaluate_models(["m"], data, similarities)
    assert len(evaluated("m", data, ["dot", "cosine"])) == 2 * len(MEASURES)


def test_learned_gammas_are_those_of_the_model(static, save, make, tmp_path, evaluated, values):
    """By either name, in the rows and in the run files; not the 0.5 that learning starts from."""
    folder, learned = make("one"), Similarity(0.9, 0.1, learned=True)
    ours = embed(static, load_collection(folder, "test"))
    static.append(LearnedSimilarity(learned))
    source = str(save(static))
    gammas = open_encoder(source)[-1].similarity.detached()
    expected = rank(ours, gammas).run()
    assert list(expected["q0"]) != list(rank(ours, SIMILARITIES["learnable"]).run()["q0"])
    for name in ("own", "learnable"):
        out = tmp_path / name
        rows = evaluated(source, [str(folder)], [name], out=out)
        assert {(row.scored_as, row.gamma_q, row.gamma_d) for row in rows} == {("learnable", *gammas.gammas)}
        assert read_trec(out / "runs" / "learnable-one.trec") == expected
        ndcg = per_query(expected, ours.collection.qrels)["nDCG@10"]
        assert values(rows)["one", "learnable", "nDCG@10"] == pytest.approx(fmean(ndcg.values()))


def test_learnable_asked_of_a_model_without_gammas(static, save, make):
    with pytest.raises(UsageError, match="carries no learned gammas"):
        evaluate_models([str(save(static))], [str(make("one"))], ["learnable"])


def test_a_folder_with_a_space_in_its_name(static, save, make, tmp_path):
    out = tmp_path / "out"
    evaluate_models([str(save(static))], [str(make("my questions"))], ["dot"], out=out)
    assert len(read_trec(out / "runs" / "dot-my questions.trec")) == 12


def test_progress_and_notes_are_told(static, save, make, listener):
    folder = make("one")
    with (folder / "qrels" / "test.tsv").open("a", encoding="utf-8") as file:
        file.write("q0\tgone\t1\n")
    source, told = str(save(static)), listener()
    evaluate_models([source], [str(folder), str(make("two", 1))], ["dot"], progress=told)
    assert told.steps == [(f"evaluate {source}", 2), 1, 2]
    declared, note = told.lines
    assert declared == f"{source} declares cosine; ranked as dot because --similarity asks for it"
    assert note.startswith("note: one: ") and "gone" in note
    with pytest.raises(DataError, match="gone"):
        evaluate_models([source], [str(folder)], ["dot"], strict=True)


def test_what_is_unknown_is_refused_before_anything_is_encoded(static, save, make, monkeypatch):
    """T-F3, for evaluation."""
    monkeypatch.setattr("offsphere.evaluation.models.embed", None)
    source, data = str(save(static)), [str(make("one"))]
    with pytest.raises(ConfigError, match="unknown similarity 'l2'"):
        evaluate_models([source], data, ["l2"])
    with pytest.raises(ConfigError, match="unknown measure 'nDCG@ten'"):
        evaluate_models([source], data, ["dot"], measures=("nDCG@ten",))
    with pytest.raises(DataError, match="no split 'dev'"):
        evaluate_models([source], data, ["dot"], split="dev")


def test_evaluation_is_deterministic(encoder, save, make, evaluated):
    source, data = str(save(encoder)), [str(make("one"))]
    assert evaluated(source, data, ["dot", "cosine"]) == evaluated(source, data, ["dot", "cosine"])


def test_the_similarity_is_the_checkpoints_and_another_one_is_said(static, save, make, evaluated, listener):
    """T-A1 and T-A2."""
    static.similarity_fn_name = "dot"
    source, data, told = str(save(static)), [str(make("one"))], listener()
    assert {row.scored_as for row in evaluated(source, data, progress=told)} == {"dot"} and told.lines == []
    evaluated(source, data, ["own", "cosine"], progress=told)
    assert told.lines == [f"{source} declares dot; ranked as cosine because --similarity asks for it"]


def test_missing_documents_are_counted_beside_their_ceiling(static, save, make, evaluated, values):
    """T-G8: as trec_eval counts them, what that can reach at most, and the value over documents that exist."""
    folder = make("one")
    with (folder / "qrels" / "test.tsv").open("a", encoding="utf-8") as file:
        file.write("q0\tgone\t1\nq1\tlost\t1\nq1\tgone\t0\n")
    out = folder / "out"
    found = values(evaluated(str(save(static)), [str(folder)], ["dot"], measures=("R@100", "nDCG@10"), out=out))
    run, collection = read_trec(out / "runs" / "dot-one.trec"), load_collection(folder)
    assert found["one", "dot", "R@100"] == 1.0  # of what exists everything is among 100
    every = {query: dict(grades) for query, grades in collection.qrels.items()}
    every["q0"]["gone"] = every["q1"]["lost"] = 1
    expected = per_query(run, every, ["R@100", "nDCG@10"])
    for measure in ("R@100", "nDCG@10"):
        value = found["one", "dot", f"{measure}(all judged)"]
        assert value == pytest.approx(fmean(expected[measure].values()))
        assert value <= found["one", "dot", f"{measure}(ceiling)"] < 1
    assert found["one", "dot", "R@100(all judged)"] == found["one", "dot", "R@100(ceiling)"]


def test_trec_eval_on_the_written_run_file_gives_the_same(encoder, save, make, evaluated):
    """Also where a similarity's own scores were put in place of those that ranked."""
    folder, source = make("one"), str(save(encoder))
    rows = evaluated(source, [str(folder)], list(FIXED), measures=("nDCG@10",), out=folder / "out")
    qrels = load_collection(folder).qrels
    for row in rows:
        run = read_trec(folder / "out" / "runs" / f"{row.scored_as}-one.trec")
        theirs = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut_10"}).evaluate(run)
        assert fmean(one["ndcg_cut_10"] for one in theirs.values()) == pytest.approx(row.value, abs=1e-9)


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_same_values_for_any_batch_size_and_order_of_corpus_and_queries(encoder, make, batch_size):
    """Also where documents with one text tie, which the order of ids decides."""
    collection = load_collection(make("one"))
    copies = {f"copy of {document}": text for document, text in [*collection.documents.items()][::2]}
    collection = replace(collection, documents=collection.documents | copies)
    expected = score_under(embed(encoder, collection), SIMILARITIES)
    random = np.random.default_rng(batch_size)

    def shuffled(texts):
        return {key: texts[key] for key in random.permutation([*texts]).tolist()}

    moved = replace(
        collection,
        documents=shuffled(collection.documents),
        queries=shuffled(collection.queries),
        qrels=shuffled(collection.qrels),
    )
    assert list(moved.documents) != list(collection.documents)
    found = score_under(embed(encoder, moved, batch_size=batch_size), SIMILARITIES)
    assert found.values == expected.values
    for name in SIMILARITIES:
        runs = [{q: list(scores) for q, scores in table.rankings[name].run().items()} for table in (expected, found)]
        assert runs[0] == runs[1]


def test_a_cross_table_of_models_and_similarities(static, transformer, save, make, tmp_path, encoded):
    """One encoding pass a model and data set; tests are those of compare-runs on the run files."""
    sources, out = [str(save(static, "static")), str(save(transformer, "transformer"))], tmp_path / "out"
    data = [str(make(name, seed)) for seed, name in enumerate(("one", "two", "three", "four"))]
    found = evaluate_models(sources, data, ["cosine", "dot", "qnorm"], out=out)
    assert encoded == ["one", "two", "three", "four"] * 2
    assert [row.model for row in found.results] == [source for source in sources for _ in range(4 * 3 * 3)]
    names = {f"{slug(source)}.{name}" for source in sources for name in ("cosine", "dot", "qnorm")}
    assert {file.name for file in (out / "runs").iterdir()} == {
        f"{name}-{one}.trec" for name in names for one in ("one", "two", "three", "four")
    }
    apart = compare_runs([out], data)
    for source in sources:
        comparison = found.comparisons[source]
        assert (comparison.baseline, comparison.systems) == ("cosine", ("cosine", "dot", "qnorm"))
        for scope in ("all", "two"):
            for name in comparison.systems:
                value = apart.means[scope][f"{slug(source)}.{name}"]
                assert comparison.means[scope][name] == pytest.approx(value, abs=1e-12)
        dot, qnorm = ([one for one in comparison.differences if one.system == name] for name in ("dot", "qnorm"))
        assert [replace(one, system="dot", p_holm=0) for one in qnorm] == [replace(one, p_holm=0) for one in dot]
    assert len(found.points) == 2 * 2 * 4 and {one.similarity for one in found.points} == {"dot", "qnorm"}
    effect = norm_record(embed(static, load_collection(data[0])))["cohens_d"]
    assert found.points[0].cohens_d == effect


def test_one_similarity_compares_nothing(static, save, make):
    found = evaluate_models([str(save(static))], [str(make("one"))], ["own", "cosine"])
    assert found.comparisons == {} and found.points == []


def test_names_that_would_overwrite_each_other_are_refused(static, save, make, tmp_path):
    source, one = str(save(static)), make("one")
    with pytest.raises(ConfigError, match="two encoders would be called"):
        evaluate_models([source, f"{source}/"], [str(one)])
    other = tmp_path / "elsewhere" / "one"
    other.parent.mkdir()
    other.symlink_to(one)
    with pytest.raises(ConfigError, match="two data sets are called 'one'"):
        evaluate_models([source], [str(one), str(other)])
