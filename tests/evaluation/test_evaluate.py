from __future__ import annotations

import json
from statistics import fmean

import numpy as np
import pytest
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
)
from offsphere.evaluation.embedding import embed
from offsphere.evaluation.evaluate import Subject, evaluate, evaluate_encoder
from offsphere.modules import LearnedSimilarity
from offsphere.similarity import NAMES, Similarity

SIMILARITIES = {name: Similarity.parse(name) for name in NAMES}


@pytest.fixture
def make(tmp_path, sentences):
    """Writes a collection of 60 documents and 12 queries, each relevant to three documents."""

    def make(name: str, seed: int = 0, settings: str = ""):
        texts, random = sentences(72, seed), np.random.default_rng(seed)
        folder = tmp_path / name
        (folder / "qrels").mkdir(parents=True)
        for file, first, part in (("corpus", "d", texts[:60]), ("queries", "q", texts[60:])):
            rows = "".join(json.dumps({"_id": f"{first}{i}", "text": text}) + "\n" for i, text in enumerate(part))
            (folder / f"{file}.jsonl").write_text(rows, encoding="utf-8")
        qrels = "".join(f"q{i}\td{j}\t1\n" for i in range(12) for j in random.choice(60, 3, replace=False))
        (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + qrels, encoding="utf-8")
        if settings:
            (folder / "collection.yaml").write_text(settings, encoding="utf-8")
        return folder

    return make


def values(rows) -> dict[tuple[str, str, str], float]:
    return {(row.dataset, row.scored_as, row.measure): row.value for row in rows}


# From embeddings


@pytest.fixture(scope="module")
def embedded(embed):
    random = np.random.default_rng(0)
    qrels = {f"q{i}": {f"d{j}": 1 for j in random.choice(200, 5, replace=False)} for i in range(20)}
    documents = random.normal(size=(200, 8)) * 4.0 ** random.uniform(-1, 1, (200, 1))
    return embed(random.normal(size=(20, 8)) * 3, documents, qrels=qrels)


def test_every_row_is_its_ranking_measured(embedded):
    subject = Subject("m", "a, b", "qnorm", SIMILARITIES["qnorm"], 42)
    measured = evaluate(embedded, subject, SIMILARITIES)
    assert len(measured.results) == len(NAMES) * len(MEASURES)
    for row in measured.results:
        by_query = per_query(
            rank(embedded, SIMILARITIES[row.scored_as]).run(), embedded.collection.qrels, [row.measure]
        )
        assert row.value == pytest.approx(fmean(by_query[row.measure].values()), abs=1e-12)
        assert (row.model, row.training_data, row.similarity, row.seed) == ("m", "a, b", "qnorm", 42)
        assert (row.gamma_q, row.gamma_d, row.dataset, row.split, row.n_queries) == (1, 0, "made", "test", 20)
    found = values(measured.results)
    for measure in MEASURES:
        assert found["made", "cosine", measure] == found["made", "dnorm", measure]
        assert found["made", "dot", measure] == found["made", "qnorm", measure]
    assert len({found["made", name, "nDCG@10"] for name in NAMES}) == 3


def test_values_per_query_are_those_of_its_own_similarity(embedded):
    """Also when it was not asked for, and when another similarity is called the same."""
    learned = Similarity(0.9, 0.1, learned=True)
    subject = Subject("m", "", "learnable", learned, 0)
    expected = per_query(rank(embedded, learned).run(), embedded.collection.qrels, ["nDCG@10"])["nDCG@10"]
    for scored_as in ({"cosine": SIMILARITIES["cosine"]}, SIMILARITIES):
        measured = evaluate(embedded, subject, scored_as, ("nDCG@10",))
        assert {row.query_id: row.value for row in measured.query_values} == expected
        assert {row.similarity for row in measured.query_values} == {"learnable"}
        own = values(measured.results)["made", "learnable", "nDCG@10"]
        assert own == pytest.approx(fmean(expected.values()))
        assert {row.scored_as for row in measured.results} == {*scored_as, "learnable"}
    assert values(measured.results)["made", "learnable", "nDCG@10"] != pytest.approx(
        fmean(per_query(rank(embedded, SIMILARITIES["learnable"]).run(), embedded.collection.qrels)["nDCG@10"].values())
    )


def test_lengths_are_recorded(embedded):
    measured = evaluate(embedded, Subject("m", "", "dot", SIMILARITIES["dot"], 0), {})
    assert measured.norms == norm_record(embedded)


# From an encoder


def test_an_encoder_on_collections(encoder, save, make, tmp_path):
    """Rows, run files and values per query agree with each other and with ranking by hand."""
    folders, source, out = [make("one"), make("two", 1)], save(encoder), tmp_path / "out"
    asked = ["cosine", "dot", "gamma_q=0.2,gamma_d=0.9"]
    rows = evaluate_encoder(str(source), list(map(str, folders)), asked, measures=("nDCG@10", "RR@10"), out=out)
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


def test_own_is_what_the_model_declares(static, save, make):
    data = [str(make("one"))]
    static.similarity_fn_name = "dot"
    source = str(save(static))
    own = evaluate_encoder(source, data)
    assert {row.scored_as for row in own} == {"dot"}
    assert values(own) == values(evaluate_encoder(source, data, ["dot"]))
    assert {(row.gamma_q, row.gamma_d) for row in own} == {(0, 0)}


def test_a_model_that_ends_with_normalize_is_ranked_by_cosine(static, save, make):
    """Whatever it stores; its raw embeddings are there for the others."""
    data, plain = [str(make("one"))], save(static)
    static.append(Normalize())
    static.similarity_fn_name = "dot"
    source = str(save(static, "normalised"))
    assert {row.scored_as for row in evaluate_encoder(source, data)} == {"cosine"}
    similarities = ["cosine", "dot"]
    found = values(evaluate_encoder(source, data, similarities))
    assert found == values(evaluate_encoder(str(plain), data, similarities))
    assert found["one", "cosine", "nDCG@10"] != found["one", "dot", "nDCG@10"]


def test_a_model_that_declares_nothing_needs_a_similarity(static, make, monkeypatch):
    """T-A2. sentence-transformers stores cosine when it saves such a model, so this one is not saved."""
    data = [str(make("one"))]
    monkeypatch.setattr("offsphere.evaluation.evaluate.open_encoder", lambda *args, **settings: static)
    for similarities in (["own"], ["cosine", "own"]):
        with pytest.raises(
            UsageError, match=r"does not say which similarity .* --similarity cosine or --similarity dot"
        ):
            evaluate_encoder("m", data, similarities)
    assert len(evaluate_encoder("m", data, ["dot", "cosine"])) == 2 * len(MEASURES)


def test_learned_gammas_are_those_of_the_model(static, save, make, tmp_path):
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
        rows = evaluate_encoder(source, [str(folder)], [name], out=out)
        assert {(row.scored_as, row.gamma_q, row.gamma_d) for row in rows} == {("learnable", *gammas.gammas)}
        assert read_trec(out / "runs" / "learnable-one.trec") == expected
        ndcg = per_query(expected, ours.collection.qrels)["nDCG@10"]
        assert values(rows)["one", "learnable", "nDCG@10"] == pytest.approx(fmean(ndcg.values()))


def test_learnable_asked_of_a_model_without_gammas(static, save, make):
    with pytest.raises(UsageError, match="carries no learned gammas"):
        evaluate_encoder(str(save(static)), [str(make("one"))], ["learnable"])


def test_prompts_and_limits_reach_the_encoder(static, save, make):
    data, source = [str(make("one"))], str(save(static))
    plain = values(evaluate_encoder(source, data, ["dot"]))
    assert values(evaluate_encoder(source, data, ["dot"], max_length=2)) != plain
    assert values(evaluate_encoder(source, data, ["dot"], prompts={"document": "iron rust star "})) != plain
    assert values(evaluate_encoder(source, data, ["dot"], max_length=100, prompts={})) == plain


def test_a_folder_with_a_space_in_its_name(static, save, make, tmp_path):
    out = tmp_path / "out"
    evaluate_encoder(str(save(static)), [str(make("my questions"))], ["dot"], out=out)
    assert len(read_trec(out / "runs" / "dot-my questions.trec")) == 12


class Told:
    def __init__(self):
        self.lines, self.steps = [], []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def start(self, what: str, total: int):
        self.steps.append((what, total))
        return self.steps.append


def test_progress_and_notes_are_told(static, save, make):
    folder = make("one")
    with (folder / "qrels" / "test.tsv").open("a", encoding="utf-8") as file:
        file.write("q0\tgone\t1\n")
    source, told = str(save(static)), Told()
    evaluate_encoder(source, [str(folder), str(make("two", 1))], ["dot"], progress=told)
    assert told.steps == [(f"evaluate {source}", 2), 1, 2]
    assert len(told.lines) == 1 and told.lines[0].startswith("note: one: ") and "gone" in told.lines[0]
    with pytest.raises(DataError, match="gone"):
        evaluate_encoder(source, [str(folder)], ["dot"], strict=True)


def test_what_is_unknown_is_refused_before_anything_is_encoded(static, save, make, monkeypatch):
    monkeypatch.setattr("offsphere.evaluation.evaluate.embed", None)
    source, data = str(save(static)), [str(make("one"))]
    with pytest.raises(ConfigError, match="unknown similarity 'l2'"):
        evaluate_encoder(source, data, ["l2"])
    with pytest.raises(ConfigError, match="unknown measure 'nDCG@ten'"):
        evaluate_encoder(source, data, ["dot"], measures=("nDCG@ten",))
    with pytest.raises(DataError, match="no split 'dev'"):
        evaluate_encoder(source, data, ["dot"], split="dev")


def test_evaluation_is_deterministic(encoder, save, make):
    source, data = str(save(encoder)), [str(make("one"))]
    assert evaluate_encoder(source, data, ["dot", "cosine"]) == evaluate_encoder(source, data, ["dot", "cosine"])
