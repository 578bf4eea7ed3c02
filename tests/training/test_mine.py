"""Mining against a slow reference in float64 that shares nothing with it but the encoder."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer.modules import Normalize

from offsphere.data import load_collection, load_pairs
from offsphere.data.fingerprint import text_id
from offsphere.data.jsonl import read_jsonl
from offsphere.encoders import encode
from offsphere.errors import ConfigError, DataError, EncoderError, UsageError
from offsphere.losses import known_positive_mask
from offsphere.modules import LearnedSimilarity
from offsphere.progress import Silent
from offsphere.similarity import Similarity
from offsphere.training import mine as mining
from offsphere.training import mining_sources
from offsphere.training.batches import training_dataset
from offsphere.training.compare import compare
from offsphere.training.hard_negatives import Rule
from offsphere.training.mine import mine

GAMMAS = {"cosine": (1, 1), "dot": (0, 0), "qnorm": (1, 0), "dnorm": (0, 1), "learnable": (0.3, 0.6)}
PROMPTS = {"query": "query : ", "document": "passage : "}
RULES = {
    "top": Rule(negatives=3, first=1, last=20),
    "deep": Rule(negatives=2, first=5, last=12, margin=0.3),
    "relative": Rule(negatives=2, first=1, last=40, relative_margin=0.2, max_score=3.0),
    "all": Rule(negatives=2, first=2, last=60, margin=0.1, relative_margin=0.05, max_score=8.0),
    "beyond the corpus": Rule(negatives=1, first=3, last=500, margin=0.5),
}


def write_world(folder: Path, texts: list[str], settings: dict[str, Any] | None = None) -> Path:
    """A collection of 90 documents whose positives are drawn at random, with everything that mining must look out for.

    Queries 0 and 1 have the same text and one positive each; query 2 has two; d05 is the text of query 5 in capitals;
    the positive of query 6 has two copies of other spelling; d80 and d81 are copies of d79; d82 is empty; query 7
    judges one document irrelevant and excludes another.
    """
    documents = {f"d{number:02}": text for number, text in enumerate(texts[:90])}
    queries = {f"q{number}": text for number, text in enumerate(texts[90:102])}
    queries["q1"] = queries["q0"].upper()
    qrels = {query: {f"d{10 + number * 3}": 1} for number, query in enumerate(queries)}
    qrels["q2"]["d70"] = 2
    qrels["q7"]["d71"] = 0
    documents["d05"] = queries["q5"].upper()
    documents["d90"] = documents["d28"].upper()
    documents["d03"] = "  ".join(documents["d28"].split())
    documents["d80"], documents["d81"], documents["d82"] = documents["d79"].title(), documents["d79"], ""
    (folder / "qrels").mkdir(parents=True)
    for name, texts_of in (("corpus", documents), ("queries", queries)):
        lines = (json.dumps({"_id": one, "text": text}) + "\n" for one, text in texts_of.items())
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    judged = (f"{query}\t{document}\t{grade}\n" for query, one in qrels.items() for document, grade in one.items())
    (folder / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(judged), encoding="utf-8")
    said = {"excluded": {"q7": ["d72"]}, **(settings or {})}
    (folder / "collection.yaml").write_text(json.dumps(said), encoding="utf-8")
    return folder


@pytest.fixture
def world(tmp_path: Path, sentences: Callable[..., list[str]]) -> Path:
    return write_world(tmp_path / "world", sentences(102, seed=5))


@pytest.fixture
def plain(static, save) -> str:
    """An encoder that declares no similarity, in the file as well, where sentence-transformers writes cosine."""
    folder = save(static, "plain")
    file = folder / "config_sentence_transformers.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"similarity_fn_name": None}), encoding="utf-8")
    return str(folder)


def rows_of(path: Path) -> list[list[str]]:
    return [list(row.values()) for _, row in read_jsonl(path)]


def same(text: str) -> str:
    return " ".join(text.lower().split())


def reference(
    model, folder: Path, similarity: str, rule: Rule, prompts: dict[str, str] | None = None
) -> tuple[list[list[str]], Counter[str], list[float]]:
    """The rows, what was skipped and the scores of the positives, one document and one float64 at a time."""
    collection = load_collection(folder, "train")
    gamma_q, gamma_d = GAMMAS[similarity]
    prompts = prompts or {}

    def vector(text: str, side: str) -> list[float]:
        return encode(model, [text], side, prompt=prompts.get(side)).astype(np.float64)[0].tolist()

    def score(q: list[float], d: list[float]) -> float:
        product = math.fsum(a * b for a, b in zip(q, d, strict=True))
        if product == 0.0:
            return 0.0
        return float(np.float32(product / (math.hypot(*q) ** gamma_q * math.hypot(*d) ** gamma_d)))

    groups: dict[str, list[str]] = {}
    for identifier in sorted(collection.documents, reverse=True):
        if collection.documents[identifier]:
            groups.setdefault(same(collection.documents[identifier]), []).append(identifier)
    vectors = {key: vector(collection.documents[ids[0]], "document") for key, ids in groups.items()}
    rows, skipped, own_scores = [], Counter(), []
    for query, grades in collection.qrels.items():
        text = collection.queries[query]
        twins = [other for other in collection.queries if same(collection.queries[other]) == same(text)]
        relevant = {d for twin in twins for d, grade in collection.qrels[twin].items() if grade > 0}
        relevant_texts = {same(collection.documents[d]) for d in relevant}
        excluded = {same(collection.documents[d]) for twin in twins for d in collection.excluded.get(twin, ())}
        q = vector(text, "query")
        scores = {key: score(q, d) for key, d in vectors.items()}
        never = relevant_texts | excluded | {same(text)}
        ranked = sorted((key for key in groups if key not in never), key=lambda key: groups[key][0], reverse=True)
        ranked = sorted(ranked, key=lambda key: -scores[key])[: rule.last]
        lowest = scores[ranked[-1]] if len(ranked) == rule.last else -math.inf
        spread = float(np.std([scores[key] for key in ranked]))
        for positive in (d for d, grade in grades.items() if grade > 0):
            own = score(q, vector(collection.documents[positive], "document"))
            own_scores.append(own)
            for key in (key for key in groups if key in never and scores[key] >= lowest):
                if key in relevant_texts:
                    judged = sum(one in relevant for one in groups[key])
                    skipped["known to be relevant"] += judged
                    skipped["text of a relevant document"] += len(groups[key]) - judged
                elif key in excluded:
                    skipped["excluded by the collection"] += len(groups[key])
                else:
                    skipped["text of the query"] += len(groups[key])
            skipped["text of a better candidate"] += sum(len(groups[key]) - 1 for key in ranked)
            left = []
            for key in ranked[rule.first - 1 :]:
                if rule.margin is not None and scores[key] > own - rule.margin * spread:
                    skipped["margin"] += 1
                elif rule.relative_margin is not None and scores[key] > own - rule.relative_margin * abs(own):
                    skipped["relative margin"] += 1
                elif rule.max_score is not None and scores[key] > rule.max_score:
                    skipped["maximal score"] += 1
                else:
                    left.append(collection.documents[groups[key][0]])
            if len(left) >= rule.negatives:
                rows.append([text, collection.documents[positive], *left[: rule.negatives]])
    return rows, skipped, own_scores


@pytest.mark.parametrize("similarity", GAMMAS)
@pytest.mark.parametrize("prompted", [False, True])
def test_the_file_is_what_a_slow_reference_finds(static, save, tmp_path, sentences, similarity, prompted):
    folder = write_world(tmp_path / "world", sentences(102, seed=5), {"prompts": PROMPTS} if prompted else None)
    model = static
    if similarity == "learnable":
        model.append(LearnedSimilarity(Similarity(*GAMMAS["learnable"], learned=True), 1.0, False))
    source = str(save(model))
    signs, skips = set(), Counter()
    for name, rule in RULES.items():
        asked = None if similarity == "learnable" else similarity
        expected, skipped, own = reference(model, folder, similarity, rule, PROMPTS if prompted else None)
        if not expected:
            with pytest.raises(DataError, match="none of 13 pairs"):
                mine(source, [str(folder)], tmp_path / "hard.jsonl", rule, similarity=asked)
            continue
        mined = mine(source, [str(folder)], tmp_path / "hard.jsonl", rule, similarity=asked, pairs_at_once=5)
        assert rows_of(mined.out) == expected, name
        assert +mined.tally.skipped == +skipped, name
        assert (mined.tally.pairs, mined.tally.kept) == (13, len(expected))
        signs |= {math.copysign(1, one) for one in own}
        skips += skipped
    assert prompted or signs == {1, -1}  # or the margins were only tried on one side of 0; a prompt adds to all scores
    assert all(skips[reason] for reason in (*mining_sources.REASONS, mining.DUPLICATE, "margin", "relative margin"))


def test_similarities_mine_different_negatives(plain, world, tmp_path):
    """Or the reference would not show that the model's own similarity is the one that counts."""
    found = {}
    for name in ("cosine", "dot", "qnorm", "dnorm"):
        found[name] = rows_of(mine(plain, [str(world)], tmp_path / "hard.jsonl", RULES["top"], similarity=name).out)
    assert found["cosine"] != found["dot"]
    assert found["cosine"] == found["dnorm"] and found["dot"] == found["qnorm"]  # one gamma_d, one ranking


def test_a_normalize_module_does_not_take_the_length_away(plain, static, save, world, tmp_path):
    static.append(Normalize())
    unit = str(save(static, "unit"))
    own = mine(unit, [str(world)], tmp_path / "own.jsonl", RULES["top"])
    assert own.similarity.name == "cosine"
    dot = mine(unit, [str(world)], tmp_path / "dot.jsonl", RULES["top"], similarity="dot")
    raw = mine(plain, [str(world)], tmp_path / "raw.jsonl", RULES["top"], similarity="dot")
    assert rows_of(dot.out) == rows_of(raw.out) != rows_of(own.out)


def test_lengths_beyond_half_precision_change_nothing(plain, static, save, world, tmp_path):
    small = mine(plain, [str(world)], tmp_path / "small.jsonl", RULES["deep"], similarity="dot")
    with torch.no_grad():
        static[0].embedding.weight *= 2.0**40  # half precision ends at 65,504, scores are then about 1e24
    large = mine(str(save(static, "large")), [str(world)], tmp_path / "large.jsonl", RULES["deep"], similarity="dot")
    assert large.out.read_bytes() == small.out.read_bytes()
    assert large.tally == small.tally


@pytest.mark.parametrize("sample", ["top", "random"])
def test_the_file_depends_on_the_seed_and_on_nothing_else(plain, world, tmp_path, sample):
    rule = Rule(negatives=2, first=2, last=30, sample=sample, seed=4)
    files = []
    for number, changed in enumerate(({}, {"pairs_at_once": 1}, {"pairs_at_once": 7}, {"batch_size": 3})):
        mined = mine(plain, [str(world)], tmp_path / f"{number}.jsonl", rule, similarity="dot", **changed)
        files.append((mined.out.read_bytes(), mined.tally))
    corpus = world / "corpus.jsonl"
    corpus.write_text("".join(reversed(corpus.read_text(encoding="utf-8").splitlines(keepends=True))), encoding="utf-8")
    mined = mine(plain, [str(world)], tmp_path / "reversed.jsonl", rule, similarity="dot")
    files.append((mined.out.read_bytes(), mined.tally))
    assert all(one == files[0] for one in files)
    other = mine(plain, [str(world)], tmp_path / "other.jsonl", replace(rule, seed=5), similarity="dot")
    assert (other.out.read_bytes() == files[0][0]) == (sample == "top")


@pytest.mark.parametrize("sample", ["top", "random"])
@pytest.mark.parametrize("seed", range(3))
def test_training_would_mask_none_of_the_negatives(plain, sentences, tmp_path, sample, seed):
    """What the loss knows to be a positive never comes out of mining, and negatives of a pair are different texts."""
    folder = write_world(tmp_path / "world", sentences(102, seed=seed))
    rule = Rule(negatives=8, first=1, last=60, sample=sample)
    mined = load_pairs(mine(plain, [str(folder)], tmp_path / "hard.jsonl", rule, similarity="dot").out)
    known: dict[str, set[str]] = {}
    before = load_pairs(folder)
    for query, positive in zip(before.queries, before.positives, strict=True):
        known.setdefault(f"hard/{text_id(query)}", set()).add(f"hard/{text_id(positive)}")
    relevant = {query: frozenset(known[query]) for query in mined.relevant}

    def own_masked(pairs) -> int:
        dataset, positives = training_dataset(replace(pairs, relevant=relevant))
        keys = torch.tensor(dataset["label"][:])
        mask = known_positive_mask(keys[:, 0], keys[:, 1:].T.reshape(-1), positives)
        size = len(pairs)
        return sum(int(mask[row, row + size * column]) for row in range(size) for column in range(1, 9))

    assert len(mined) == 13 and own_masked(mined) == 0
    for row in zip(mined.positives, *mined.negatives, strict=True):
        assert len({same(text) for text in row}) == 9
    spoilt = [mined.positives, *mined.negatives[1:]], [mined.positive_ids, *mined.negative_ids[1:]]
    assert own_masked(replace(mined, negatives=spoilt[0], negative_ids=spoilt[1])) == 13


def test_a_copy_of_the_positive_is_the_best_candidate_and_is_skipped(plain, tmp_path, monkeypatch):
    """In another order of its words the query has the vector of both, so that no other document can come before."""
    folder = tmp_path / "planted"
    texts = ["Sea  TIDE moon", "sea tide moon", "iron rust", "sea stone", "bee honey"]
    (folder / "qrels").mkdir(parents=True)
    lines = (json.dumps({"_id": f"d{number}", "text": text}) + "\n" for number, text in enumerate(texts))
    (folder / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": "moon tide sea"}) + "\n", encoding="utf-8")
    (folder / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\nq\td1\t1\n", encoding="utf-8")
    rule = Rule(first=1, last=2)
    mined = mine(plain, [str(folder)], tmp_path / "hard.jsonl", rule, similarity="cosine")
    ((_, positive, negative),) = rows_of(mined.out)
    assert positive == "sea tide moon" and same(negative) != same(positive)
    assert mined.tally.skipped["known to be relevant"] == mined.tally.skipped["text of a relevant document"] == 1
    monkeypatch.setattr(mining_sources, "same_text", lambda text: text)
    mined = mine(plain, [str(folder)], tmp_path / "hard.jsonl", rule, similarity="cosine")
    assert rows_of(mined.out) == [["moon tide sea", "sea tide moon", "Sea  TIDE moon"]]
    assert mined.tally.skipped["text of a relevant document"] == 0


def test_pairs_are_mined_from_all_their_positives(plain, tmp_path, sentences):
    texts = sentences(60, seed=9)
    rows = [{"query": texts[n], "positive": texts[30 + n], "negative": texts[0]} for n in range(30)]
    rows.append({"query": texts[0], "positive": texts[31], "negative": texts[0]})
    source = tmp_path / "pairs.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    said: list[str] = []

    class Heard(Silent):
        def say(self, text: str) -> None:
            said.append(text)

    rule = Rule(negatives=28, first=1, last=28)
    mined = mine(plain, [str(source)], tmp_path / "hard.jsonl", rule, similarity="dot", progress=Heard())
    found = rows_of(mined.out)
    assert len(found) == 31 and all(set(row[2:]) <= set(texts[30:]) for row in found)
    assert set(found[0][2:]) == set(found[30][2:]) == set(texts[30:]) - {texts[30], texts[31]}
    assert any("its 1 columns of negatives are left out" in line for line in said)


@pytest.mark.parametrize("exclude_self", [True, False])
def test_a_document_with_the_id_of_its_query(plain, tmp_path, exclude_self):
    """It has another text, as a query of ArguAna is an argument of the corpus; only the collection can say so."""
    folder = tmp_path / "arguments"
    queries = {"a": "moon tide sea", "b": "rust iron salt", "c": "honey bee sun"}
    documents = {one: f"{text} the" for one, text in queries.items()}  # nearer than anything else
    documents |= {"d": "wind sand", "e": "cold ice", "f": "song bird"}
    (folder / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", documents), ("queries", queries)):
        lines = (json.dumps({"_id": one, "text": text}) + "\n" for one, text in texts.items())
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    judged = "".join(f"{query}\t{document}\t1\n" for query, document in zip("abc", "def", strict=True))
    (folder / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged, encoding="utf-8")
    (folder / "collection.yaml").write_text(json.dumps({"exclude_self": exclude_self}), encoding="utf-8")
    rule = Rule(negatives=1, first=1, last=1)
    mined = mine(plain, [str(folder)], tmp_path / "hard.jsonl", rule, similarity="cosine")
    own = [negative == documents[query] for query, (*_, negative) in zip(queries, rows_of(mined.out), strict=True)]
    assert own == [not exclude_self] * 3
    assert mined.tally.skipped["excluded by the collection"] == (3 if exclude_self else 0)
    assert mined.tally.skipped["text of the query"] == 0


def test_another_corpus_is_known_by_id_and_by_text(plain, world, tmp_path):
    """Its documents have the ids of the qrels, and some of them another text."""
    documents = [{"_id": "d10", "text": "sea salt song"}, {"_id": "new", "text": "Honey bee"}]
    collection = load_collection(world, "train")
    documents.append({"_id": "copy", "text": collection.documents["d40"].upper()})
    corpus = tmp_path / "more.jsonl"
    corpus.write_text("".join(json.dumps(one) + "\n" for one in documents), encoding="utf-8")
    rule = Rule(negatives=3, first=1, last=5, keep_short=True)
    mined = mine(plain, [str(world)], tmp_path / "hard.jsonl", rule, corpus=str(corpus), similarity="dot")
    found: dict[tuple[str, str], set[str]] = {}
    for query, positive, negative in rows_of(mined.out):
        found.setdefault((query, positive), set()).add(negative)
    everything = {one["text"] for one in documents}
    assert len(found) == mined.tally.kept == 13
    queries, qrels = collection.queries, collection.qrels
    for query, grades in qrels.items():
        for document in (one for one, grade in grades.items() if grade > 0):
            missing = everything - found[queries[query], collection.documents[document]]
            expected = {"q0": {"sea salt song"}, "q1": {"sea salt song"}, "q10": {documents[2]["text"]}}
            assert missing == expected.get(query, set())
    assert mined.tally.short == 3
    assert mined.to_dict()["corpora"][0]["documents"] == 3


def test_short_pairs_are_dropped_or_keep_what_they_have(plain, world, tmp_path):
    rule = Rule(negatives=4, first=1, last=6, margin=0.5)
    dropped = mine(plain, [str(world)], tmp_path / "dropped.jsonl", rule, similarity="dot")
    kept = mine(plain, [str(world)], tmp_path / "kept.jsonl", replace(rule, keep_short=True), similarity="dot")
    tally = dropped.tally
    assert tally.short > 0 and tally.without > 0 and 0 < tally.kept
    assert tally.pairs == tally.kept + tally.short + tally.without == 13
    assert dropped.to_dict()["dropped"] == tally.short + tally.without
    assert (kept.tally.kept, kept.tally.short, kept.tally.without) == (
        tally.kept + tally.short,
        tally.short,
        tally.without,
    )
    whole = rows_of(dropped.out)
    single = rows_of(kept.out)
    assert len(single) == kept.tally.negatives > 4 * len(whole)
    assert [[*row[:2], one] for row in whole for one in row[2:]] == [
        row for row in single if row[:2] in [one[:2] for one in whole]
    ]
    assert len(load_pairs(kept.out)) == len(single)


def test_two_sources_know_the_positives_of_each_other(plain, world, tmp_path):
    collection = load_collection(world, "train")
    extra = {"query": collection.queries["q3"].upper(), "positive": collection.documents["d50"]}
    source = tmp_path / "extra.jsonl"
    more = [extra, {"query": "hot wind", "positive": "cold ice"}, {"query": "star", "positive": "night song"}]
    source.write_text("".join(json.dumps(row) + "\n" for row in more), encoding="utf-8")
    rule = Rule(negatives=1, first=1, last=100, keep_short=True)
    alone = mine(plain, [str(world)], tmp_path / "alone.jsonl", replace(rule, negatives=90), similarity="dot")
    both = mine(
        plain, [str(world), str(source)], tmp_path / "both.jsonl", replace(rule, negatives=90), similarity="dot"
    )
    wrong = [collection.queries["q3"], collection.documents["d19"], extra["positive"]]
    assert wrong in rows_of(alone.out) and wrong not in rows_of(both.out)
    assert both.tally.pairs == 16
    assert [one["name"] for one in both.to_dict()["sources"]] == ["world", "extra"]


@pytest.mark.parametrize("name", ["hard.jsonl", "hard.parquet"])
def test_the_file_trains(static_encoder, home, settings, tmp_path, name):
    mined = mine(
        str(static_encoder), [str(home)], tmp_path / name, Rule(negatives=2, first=1, last=20), similarity="dot"
    )
    pairs = load_pairs(mined.out)
    assert len(pairs) == 48 and len(pairs.negatives) == 2
    assert json.loads(mined.summary.read_text(encoding="utf-8")) == mined.to_dict()
    assert {path.name for path in tmp_path.iterdir()} == {name, "hard.mining.json"}
    out = tmp_path / "run"
    compare(settings(out, train=[str(mined.out)], steps=2, evaluations=1, seeds=[0], similarities=["cosine", "dot"]))
    assert (out / "results.csv").is_file()


def test_the_summary_says_how_it_was_made(plain, world, tmp_path):
    mined = mine(
        plain, [str(world)], tmp_path / "hard.jsonl", RULES["all"], similarity="qnorm", prompts={"query": "query : "}
    )
    said = json.loads((tmp_path / "hard.mining.json").read_text(encoding="utf-8"))
    assert said == mined.to_dict()
    assert len(said["fingerprint"]) == 32
    assert said["similarity"] == {"name": "qnorm", "gamma_q": 1.0, "gamma_d": 0.0}
    assert said["settings"]["margin"] == 0.1 and said["settings"]["last"] == 60
    assert said["sources"][0]["query_prompt"] == "query : " and said["corpora"][0]["prompt"] == ""
    assert (said["corpora"][0]["documents"], said["corpora"][0]["without_text"]) == (91, 1)
    assert said["pairs"] == said["kept"] + said["dropped"]


class _Stops(Silent):
    """Ctrl-C in the middle of mining."""

    def start(self, what: str, total: int) -> Callable[[int], None]:
        def done(number: int) -> None:
            if what.startswith("mine") and number > 5:
                raise KeyboardInterrupt

        return done


def test_stopping_leaves_what_was_there(plain, world, tmp_path):
    out = tmp_path / "out" / "hard.jsonl"
    with pytest.raises(KeyboardInterrupt):
        mine(plain, [str(world)], out, RULES["top"], similarity="dot", pairs_at_once=4, progress=_Stops())
    assert list(out.parent.iterdir()) == []
    mine(plain, [str(world)], out, RULES["top"], similarity="dot")
    before = {path: path.read_bytes() for path in out.parent.iterdir()}
    assert len(before) == 2
    with pytest.raises(KeyboardInterrupt):
        mine(plain, [str(world)], out, RULES["deep"], similarity="dot", pairs_at_once=4, progress=_Stops())
    with pytest.raises(DataError, match=r"none of 13 pairs has a negative left in the ranks 200-300 .*widen --range"):
        mine(plain, [str(world)], out, Rule(first=200, last=300), similarity="dot")
    assert {path: path.read_bytes() for path in out.parent.iterdir()} == before


def test_what_cannot_be_mined_is_named(plain, static, save, world, tmp_path):
    out = tmp_path / "hard.jsonl"
    with pytest.raises(UsageError, match="does not say which similarity"):
        mine(plain, [str(world)], out)
    with pytest.raises(ConfigError, match="unknown similarity 'euclid'"):
        mine(plain, [str(world)], out, similarity="euclid")
    with pytest.raises(ConfigError, match=r"ends in \.jsonl or \.parquet"):
        mine(plain, [str(world)], tmp_path / "hard.csv", similarity="dot")
    with pytest.raises(ConfigError, match="train is missing"):
        mine(plain, [], out, similarity="dot")
    with pytest.raises(DataError, match="no split 'dev'"):
        mine(plain, [str(world)], out, similarity="dot", split="dev")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"query": "sea", "positive": "tide"}\n', encoding="utf-8")
    for source, target in (
        (pairs, pairs),
        (world, world / "corpus.jsonl"),
        (pairs, tmp_path / "a" / ".." / pairs.name),
    ):
        (tmp_path / "a").mkdir(exist_ok=True)
        before = target.read_bytes()
        with pytest.raises(UsageError, match="is an input, or lies in the folder of one"):
            mine(plain, [str(source)], target, similarity="dot")
        assert target.read_bytes() == before
    with pytest.raises(DataError, match="1 known to be relevant"):
        mine(plain, [str(pairs)], out, Rule(first=1), similarity="dot")
    with torch.no_grad():
        static[0].embedding.weight[:] = math.nan
    with pytest.raises(EncoderError, match="NaN or infinite"):
        mine(str(save(static, "broken")), [str(world)], out, similarity="dot")
    assert not out.exists() and not list(tmp_path.glob(".*"))
