from __future__ import annotations

import json
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import pytrec_eval
from sentence_transformers.sentence_transformer.modules import Normalize

from offsphere.data import load_collection
from offsphere.encoders import model_fingerprint, open_encoder
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


def evaluated(source, data, similarities=("own",), **settings):
    return evaluate_models([source], data, similarities, **settings).results


def values(rows) -> dict[tuple[str, str, str], float]:
    return {(row.dataset, row.scored_as, row.measure): row.value for row in rows}


def test_an_encoder_on_collections(encoder, save, make, tmp_path):
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


def test_own_is_what_the_model_declares(static, save, make):
    data = [str(make("one"))]
    static.similarity_fn_name = "dot"
    source = str(save(static))
    own = evaluated(source, data)
    assert {row.scored_as for row in own} == {"dot"}
    assert values(own) == values(evaluated(source, data, ["dot"]))
    assert {(row.gamma_q, row.gamma_d) for row in own} == {(0, 0)}


def test_a_model_that_ends_with_normalize_is_ranked_by_cosine(static, save, make):
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


def test_a_model_that_declares_nothing_needs_a_similarity(static, make, monkeypatch):
    """T-A2. sentence-transformers stores cosine when it saves such a model, so this one is not saved."""
    data = [str(make("one"))]
    monkeypatch.setattr("offsphere.evaluation.models.open_encoder", lambda *args, **settings: static)
    for similarities in (["own"], ["cosine", "own"]):
        with pytest.raises(
            UsageError, match=r"does not say which similarity .* --similarity cosine or --similarity dot"
        ):
            evaluate_models(["m"], data, similarities)
    assert len(evaluated("m", data, ["dot", "cosine"])) == 2 * len(MEASURES)


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
        rows = evaluated(source, [str(folder)], [name], out=out)
        assert {(row.scored_as, row.gamma_q, row.gamma_d) for row in rows} == {("learnable", *gammas.gammas)}
        assert read_trec(out / "runs" / "learnable-one.trec") == expected
        ndcg = per_query(expected, ours.collection.qrels)["nDCG@10"]
        assert values(rows)["one", "learnable", "nDCG@10"] == pytest.approx(fmean(ndcg.values()))


def test_learnable_asked_of_a_model_without_gammas(static, save, make):
    with pytest.raises(UsageError, match="carries no learned gammas"):
        evaluate_models([str(save(static))], [str(make("one"))], ["learnable"])


def test_prompts_and_limits_reach_the_encoder(static, save, make):
    data, source = [str(make("one"))], str(save(static))
    plain = values(evaluated(source, data, ["dot"]))
    assert values(evaluated(source, data, ["dot"], max_length=2)) != plain
    assert values(evaluated(source, data, ["dot"], prompts={"document": "iron rust star "})) != plain
    assert values(evaluated(source, data, ["dot"], max_length=100, prompts={})) == plain


def test_a_folder_with_a_space_in_its_name(static, save, make, tmp_path):
    out = tmp_path / "out"
    evaluate_models([str(save(static))], [str(make("my questions"))], ["dot"], out=out)
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


def test_evaluation_is_deterministic(encoder, save, make):
    source, data = str(save(encoder)), [str(make("one"))]
    assert evaluated(source, data, ["dot", "cosine"]) == evaluated(source, data, ["dot", "cosine"])


# What counts


def test_the_similarity_is_the_checkpoints_and_another_one_is_said(static, save, make):
    """T-A1 and T-A2."""
    static.similarity_fn_name = "dot"
    source, data, told = str(save(static)), [str(make("one"))], Told()
    assert {row.scored_as for row in evaluated(source, data, progress=told)} == {"dot"} and told.lines == []
    evaluated(source, data, ["own", "cosine"], progress=told)
    assert told.lines == [f"{source} declares dot; ranked as cosine because --similarity asks for it"]


def test_the_self_match_is_left_out_where_declared_and_refilled(static, save, make):
    """T-H1 and T-H2: 60 documents, of which a query gets 59 others; equal ids mean nothing elsewhere (T-H3)."""
    runs = {}
    for name, settings in (("declared", "exclude_self: true\n"), ("plain", "")):
        folder, told = make(name, settings=settings), Told()
        for file in ("queries.jsonl", "qrels/test.tsv"):
            text = (folder / file).read_text(encoding="utf-8")
            (folder / file).write_text(text.replace('"q', '"d').replace("\nq", "\nd"), encoding="utf-8")
        evaluated(str(save(static)), [str(folder)], out=folder / "out", progress=told)
        runs[name] = read_trec(folder / "out" / "runs" / f"cosine-{name}.trec")
        assert ("declared: never ranked: a document with the id of the query" in told.lines) == (name == "declared")
        described = json.loads((folder / "out" / "environment.json").read_text(encoding="utf-8"))
        assert described["datasets"][name]["exclude_self"] == (name == "declared")
    assert {len(found) for found in runs["declared"].values()} == {59}
    assert all(query not in found for query, found in runs["declared"].items())
    assert {len(found) for found in runs["plain"].values()} == {60}


def test_golden_value_of_the_self_match_rule(static, save, tmp_path):
    """T-H1 and row 82: with the rule the relevant document is first; without it each query finds itself first."""
    words = "iron rust water moon sea tide salt bee dance honey sun light leaf green ice cold".split()
    table, vocabulary = static[0].embedding.weight.data, static.tokenizer.get_vocab()
    table[:] = 0
    for i, word in enumerate(words):  # two and two are near each other, and at right angles to all others
        table[vocabulary[word], i // 2 * 2] = 1.0 if i % 2 == 0 else 0.9
        table[vocabulary[word], i] += 0.5 * (i % 2)
    source, names = str(save(static)), ["cosine", "dot"]
    texts = "".join(json.dumps({"_id": str(i), "text": word}) + "\n" for i, word in enumerate(words))
    qrels = "".join(f"{i}\t{i + 1 - i % 2 * 2}\t1\n" for i in range(len(words)))
    folders = {}
    for kind, settings, expected in (("ruled", "exclude_self: true\n", 1.0), ("plain", "", 1 / np.log2(3))):
        folder = folders[kind] = tmp_path / kind / "made"
        (folder / "qrels").mkdir(parents=True)
        (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + qrels)
        for file, content in (("corpus.jsonl", texts), ("queries.jsonl", texts), ("collection.yaml", settings)):
            (folder / file).write_text(content)
        rows = evaluated(source, [str(folder)], names, measures=("nDCG@10",), out=folder.parent)
        assert values(rows) == {("made", name, "nDCG@10"): pytest.approx(expected, abs=1e-15) for name in names}
        compared = compare_runs([folder.parent], [str(folder)])
        assert compared.means["made"] == dict.fromkeys(names, pytest.approx(expected, abs=1e-15))
        assert [score.excluded for score in compared.scores] == [0, 0]
    later = compare_runs([folders["plain"].parent], [str(folders["ruled"])])
    assert later.means["made"] == dict.fromkeys(names, 1.0)
    assert [score.excluded for score in later.scores] == [16, 16]


def test_exclusions_of_single_queries_are_said_and_kept(static, save, make):
    """T-H4, and row 85: the results say what was excluded."""
    folder, told = make("one", settings="excluded: {q0: [d1, d2], q3: [d4]}\n"), Told()
    evaluated(str(save(static)), [str(folder)], out=folder / "out", progress=told)
    assert "one: never ranked: 3 documents that it excludes for single queries" in told.lines
    run = read_trec(folder / "out" / "runs" / "cosine-one.trec")
    assert not run["q0"].keys() & {"d1", "d2"} and len(run["q0"]) == 58 and len(run["q1"]) == 60
    assert json.loads((folder / "out" / "environment.json").read_text())["datasets"]["one"]["excluded"] == 3


def test_missing_documents_are_counted_beside_their_ceiling(static, save, make):
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


def test_trec_eval_on_the_written_run_file_gives_the_same(encoder, save, make):
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


def test_the_prompts_in_force_are_told(static, save, make):
    """Row 92: once a model, and once more where data has its own; not a word where there is none."""
    plain, own, same = (
        make("plain"),
        make("own", 1, "prompts: {query: 'why : '}\n"),
        make("same", 2, "prompts: {query: 'query : '}\n"),
    )
    data = [str(one) for one in (plain, own, same)]
    without, told = str(save(static, "without")), Told()
    evaluated(without, [str(plain)], progress=told)
    assert told.lines == []
    evaluated(without, [str(own)], progress=told)
    assert told.lines == ["own: its own query prompt 'why : ' (2 tokens)"]
    static.prompts |= {"query": "query : "}
    source, told = str(save(static)), Told()
    evaluated(source, data, progress=told)
    assert told.lines == [
        f"{source}: query prompt 'query : ' (2 tokens), no document prompt",
        "own: its own query prompt 'why : ' (2 tokens), in place of the model's 'query : '",
    ]
    told = Told()
    evaluated(source, data, prompts={"query": "the : ", "document": "passage : "}, progress=told)
    assert told.lines == [f"{source}: query prompt 'the : ' (2 tokens), document prompt 'passage : ' (2 tokens)"]


def test_results_say_the_prompt_and_its_tokens(static, transformer, save, make, tmp_path):
    """Row 93: of each side, data set and model; what a prompt counts depends on the tokenizer."""
    static.prompts |= {"query": "query : "}
    one, two = str(save(static, "static")), str(save(transformer, "transformer"))
    own = make("own", settings="prompts: {query: 'why moonlight : '}\n")
    pairs = tmp_path / "pairs" / "test.jsonl"
    pairs.parent.mkdir()
    rows = [{"sentence1": "iron rust", "sentence2": text, "score": i} for i, text in enumerate(("sea", "moon rust"))]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data, out = [str(make("plain", 1)), str(own), str(pairs)], tmp_path / "out"

    def recorded():
        evaluate_models([one, two], data, ["cosine"], out=out)
        described = json.loads((out / "environment.json").read_text(encoding="utf-8"))["datasets"]
        return {name: of["models"] for name, of in described.items()}

    def force(query: str, tokens: int):
        return {"prompts": {"query": query, "document": ""}, "prompt_tokens": {"query": tokens, "document": 0}}

    models_own = {one: force("query : ", 2), two: force("", 0)}
    expected = {
        "plain": models_own,
        "own": {one: force("why moonlight : ", 3), two: force("why moonlight : ", 8)},
        "pairs": models_own,
    }
    assert recorded() == expected
    assert recorded() == expected  # also where all of it was finished before


# Going on


@pytest.fixture
def encoded(monkeypatch):
    """The collections that were encoded, in order."""
    names = []

    def counted(model, collection, *arguments, **settings):
        names.append(collection.name)
        return embed(model, collection, *arguments, **settings)

    monkeypatch.setattr("offsphere.evaluation.models.embed", counted)
    return names


def test_finished_data_sets_are_kept(static, save, make, tmp_path, encoded):
    source, out = str(save(static)), tmp_path / "out"
    one, two, three = (str(make(name, seed)) for seed, name in enumerate(("one", "two", "three")))
    first = evaluated(source, [one, two], ["cosine", "dot"], out=out)
    told = Told()
    again = evaluate_models([source], [one, two, three], ["cosine", "dot"], out=out, progress=told)
    assert encoded == ["one", "two", "three"]
    assert again.results[: len(first)] == first and "one: finished before, kept" in told.lines
    assert read_results(out / "results.csv") == again.results
    fresh = evaluate_models([source], [one, two, three], ["cosine", "dot"])
    assert fresh.results == again.results and fresh.comparisons == again.comparisons and fresh.points == again.points


def test_what_was_interrupted_or_changed_is_done_again(static, save, make, tmp_path, encoded, monkeypatch):
    source, out, one, two = str(save(static)), tmp_path / "out", make("one"), make("two", 1)
    with monkeypatch.context() as patch:  # ends between the run files and the end of the second data set
        patch.setattr("offsphere.evaluation.models.write_trec", stop_at("cosine-two"))
        with pytest.raises(KeyboardInterrupt):
            evaluated(source, [str(one), str(two)], ["cosine", "dot"], out=out)
    assert not (out / "results.csv").exists()
    expected = evaluated(source, [str(one), str(two)], ["cosine", "dot"], out=out)
    assert encoded == ["one", "two", "two"]
    run = out / "runs" / "dot-one.trec"
    run.write_text(run.read_text(encoding="utf-8") + "q0 Q0 d999 101 0.1 x\n", encoding="utf-8")
    assert evaluated(source, [str(one), str(two)], ["cosine", "dot"], out=out) == expected
    assert encoded[3:] == ["one"] and "d999" not in run.read_text(encoding="utf-8")
    with (one / "corpus.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"_id": "new", "text": "iron"}) + "\n")
    evaluated(source, [str(one), str(two)], ["cosine", "dot"], out=out)
    evaluated(source, [str(one), str(two)], ["cosine", "dot"], max_length=3, out=out)
    evaluated(source, [str(one), str(two)], ["cosine"], max_length=3, out=out)
    assert encoded[4:] == ["one", "one", "two", "one", "two"]


def stop_at(tag):
    from offsphere.evaluation import write_trec

    def write(ranking, path, name):
        if name == tag:
            raise KeyboardInterrupt
        write_trec(ranking, path, name)

    return write


def test_a_limit_changes_what_identifies_the_embeddings(encoder, save):
    source = str(save(encoder))
    limits = {model_fingerprint(open_encoder(source, max_length=limit)) for limit in (None, 3, 4)}
    assert len(limits) == 3


# Several models, and what is made of them


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


def test_a_benchmark_by_name_and_its_task_prompt(static, save, make, tmp_path, monkeypatch):
    monkeypatch.setenv("OFFSPHERE_BENCHMARKS", str(tmp_path / "home"))
    (tmp_path / "home" / "bright").mkdir(parents=True)
    make("biology").rename(tmp_path / "home" / "bright" / "biology")
    source, out = str(save(static)), tmp_path / "out"
    plain, prompted = (
        evaluated(source, ["bright/biology"], ["dot"], task_prompts=asked, out=out) for asked in (False, True)
    )
    assert {row.dataset for row in plain} == {"bright-biology"} and values(plain) != values(prompted)
    described = json.loads((out / "environment.json").read_text(encoding="utf-8"))
    assert described["datasets"]["bright-biology"]["prompts"]["query"].startswith("Represent this biology post")
    assert described["command"] and described["versions"]["offsphere"]
    assert described["models"][source]["similarities"] == {"dot": {"gamma_q": 0.0, "gamma_d": 0.0}}
    own = evaluated(source, ["bright/biology"], ["dot"], task_prompts=True, prompts={"query": "query: "})
    assert values(own) not in (values(plain), values(prompted))  # a prompt that was given comes first
