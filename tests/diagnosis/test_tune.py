from __future__ import annotations

import json

import numpy as np
import pytest

from offsphere.data import load_collection
from offsphere.diagnosis.tune import GAMMAS, choose_gamma, tune
from offsphere.encoders import declared_similarity, encode, open_encoder, save_encoder
from offsphere.errors import ConfigError, DataError, EncoderError, UsageError
from offsphere.evaluation import per_query, rank
from offsphere.evaluation.embedding import embed
from offsphere.similarity import Similarity

GRID = list(GAMMAS)


def values_with_top(top: float, height: float, n_queries: int = 300, seed: int = 0, noise: float = 0.2) -> np.ndarray:
    """Values whose mean over queries falls from its top at one gamma by ``height`` a unit; queries differ as well."""
    random = np.random.default_rng(seed)
    queries = random.uniform(0.2, 0.8, (n_queries, 1)) + 0.02 * random.normal(size=(n_queries, len(GRID)))
    return queries + noise * random.normal(size=(n_queries, 1)) - height * np.abs(np.array(GRID) - top)


def test_the_grid_has_41_steps_and_holds_the_simple_exponents():
    assert len(GRID) == 41
    assert {-0.5, 0.0, 1.0, 1.5} <= set(GRID)


@pytest.mark.parametrize("own", [1.0, 0.0, 0.5])
@pytest.mark.parametrize("top", [0.0, 1.0, 0.5])
def test_a_clear_top_is_found_and_its_gain_lies_in_the_interval(own, top):
    found = choose_gamma(values_with_top(top, 0.3), GRID, own, 1000)
    assert found.gamma_d == pytest.approx(top, abs=0.051)
    true_gain = 0.3 * abs(own - top)
    assert found.low - 0.005 <= true_gain <= found.high + 0.005
    assert (found.p < 0.05) == (own != top)
    assert set(np.round(found.fold_gammas, 6)) <= set(np.round(GRID, 6))
    assert found.n_queries, found.n_documents == (300, 1000)


@pytest.mark.parametrize("own", [1.0, 0.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_flat_curve_keeps_what_the_model_has(own, seed):
    found = choose_gamma(values_with_top(0.4, 0.0, seed=seed), GRID, own, 1000)
    assert found.gamma_d == own
    assert found.p > 0.05
    assert found.low <= 0 <= found.high
    assert f"keep gamma_d {own:g}" in found.sentence


def test_the_reported_gain_is_honest_where_the_top_of_the_curve_is_noise():
    """With 41 independent columns of noise the best one looks good on the queries that chose it, and nowhere else."""
    random = np.random.default_rng(1)
    values = random.normal(0.5, 0.2, (60, len(GRID)))
    found = choose_gamma(values, GRID, 1.0, 1000)
    flattered = dict(found.curve)[found.best_gamma_d] - found.own_value
    assert flattered > 0.03
    assert found.gain < flattered / 2
    assert found.gamma_d in (0.0, 1.0)


def test_within_noise_of_the_best_the_simple_exponent_is_taken():
    found = choose_gamma(values_with_top(0.05, 0.3), GRID, 1.0, 1000)
    assert found.gamma_d in (0.0, 0.05)
    nearly = choose_gamma(values_with_top(0.05, 0.01, noise=0.3), GRID, 0.5, 1000)
    assert nearly.gamma_d in (0.0, 1.0)


def test_the_choice_is_the_same_every_time_and_is_json():
    first, second = (choose_gamma(values_with_top(0.5, 0.1), GRID, 1.0, 10) for _ in range(2))
    assert first == second
    assert json.loads(json.dumps(first.to_dict(), allow_nan=False))["gamma_d"] == first.gamma_d


@pytest.mark.parametrize("folds", [0, 1, 31])
def test_folds_must_fit_the_queries(folds):
    with pytest.raises(ConfigError, match="folds must be between 2"):
        choose_gamma(values_with_top(0.5, 0.1, n_queries=30), GRID, 1.0, 10, folds=folds)


@pytest.fixture
def planted(static):
    """A model and texts in which the longest embedding among those with the query's word is the relevant one.

    A document is a word four times, then some of another word that blurs its direction, or twice as many of a word
    without a vector, which shorten the mean and leave the direction pure: cosine prefers those, and is wrong.
    """
    words = ["iron", "rust", "water", "moon", "sea", "tide", "salt", "bee"]
    index, table = static.tokenizer.get_vocab(), static[0].embedding.weight.data
    table[:] = 0
    for place, word in enumerate(words):
        table[index[word], place] = 1.0
    drawn = np.random.default_rng(0).integers(0, 4, (len(words), 6))
    drawn[:, 0] = 0  # every word has a relevant document
    documents, queries, qrels = {}, {}, {}
    for place, word in enumerate(words):
        for copy, empty in enumerate(drawn[place]):
            other = words[(place + 1 + copy) % len(words)]
            documents[f"{word}{copy}"] = " ".join([word] * 4 + [other] * (4 - empty) + ["night"] * 2 * empty)
        for number in range(4):
            queries[f"{word}{number}?"] = " ".join([word] * 3 + [words[(place + number) % len(words)]])
            qrels[f"{word}{number}?"] = {f"{word}{copy}": 1 for copy in np.flatnonzero(drawn[place] == 0)}
    return static, documents, queries, qrels


def save_as(model, folder, similarity: str):
    save_encoder(model, folder, Similarity.parse(similarity), "# a card\n")
    return folder


def measured(folder, collection, gamma_d=None) -> float:
    """nDCG@10 of a saved model as it is, or under another gamma_d."""
    model = open_encoder(folder, device="cpu")
    similarity = declared_similarity(model) if gamma_d is None else Similarity(1.0, gamma_d)
    assert similarity is not None
    values = per_query(rank(embed(model, collection), similarity).run(), collection.qrels, ("nDCG@10",))["nDCG@10"]
    return float(np.mean(list(values.values())))


def test_a_planted_signal_is_found_written_and_ranks_as_promised(planted, write_collection, tmp_path):
    model, documents, queries, qrels = planted
    data = write_collection(documents, queries, qrels)
    source = save_as(model, tmp_path / "cosine", "cosine")
    found = tune(str(source), str(data), split="test", device="cpu", out=tmp_path / "tuned")
    collection = load_collection(data, "test")
    assert found.own_gamma_d == 1.0
    assert found.gamma_d < 0.5
    assert found.low > 0
    assert found.p < 0.05
    true_gain = measured(source, collection, found.gamma_d) - measured(source, collection)
    assert found.low <= true_gain <= found.high
    assert measured(tmp_path / "tuned", collection) == pytest.approx(found.value, abs=1e-9)
    assert found.own_value == pytest.approx(measured(source, collection), abs=1e-9)
    card = (tmp_path / "tuned" / "README.md").read_text(encoding="utf-8")
    assert card.startswith("# a card\n")
    assert found.sentence in card


@pytest.mark.parametrize(("start", "gammas", "end"), [("cosine", [0.0], "dot"), ("dnorm", [0.0], "dot")])
def test_a_whole_exponent_is_saved_as_a_name_that_needs_no_offsphere(
    planted, write_collection, tmp_path, start, gammas, end
):
    model, documents, queries, qrels = planted
    data = write_collection(documents, queries, qrels)
    source = save_as(model, tmp_path / "model", start)
    found = tune(str(source), str(data), split="test", gammas=gammas, device="cpu", out=source)  # in place
    assert found.gamma_d == 0.0
    assert "offsphere" not in (source / "modules.json").read_text()
    assert open_encoder(source, device="cpu").similarity_fn_name == end


def test_another_exponent_travels_in_the_model_and_can_be_tuned_again(planted, write_collection, tmp_path, monkeypatch):
    model, documents, queries, qrels = planted
    data = write_collection(documents, queries, qrels)
    source = save_as(model, tmp_path / "model", "cosine")
    raw = encode(open_encoder(source, device="cpu"), list(documents.values()), "document")
    # Without the simple ones within reach the best of the grid is taken.
    monkeypatch.setattr("offsphere.diagnosis.tune._choose", lambda values, gammas, *rest: gammas.index(0.35))
    tune(str(source), str(data), split="test", gammas=[0.35], device="cpu", out=tmp_path / "tuned")
    tuned = open_encoder(tmp_path / "tuned", device="cpu")
    assert declared_similarity(tuned) == Similarity(1.0, 0.35)
    given = tuned.encode_document(list(documents.values()))
    np.testing.assert_allclose(given, Similarity(1.0, 0.35).prepare_document(raw), rtol=1e-5)
    monkeypatch.setattr("offsphere.diagnosis.tune._choose", lambda values, gammas, *rest: gammas.index(0.0))
    again = tune(str(tmp_path / "tuned"), str(data), split="test", device="cpu", out=tmp_path / "again")
    assert again.own_gamma_d == 0.35
    np.testing.assert_allclose(
        open_encoder(tmp_path / "again", device="cpu").encode_document(list(documents.values())), raw, rtol=1e-5
    )


def test_a_model_that_says_nothing_needs_a_similarity(static, small, save):
    folder, data = save(static), str(small(30, 60))
    config = json.loads((folder / "config_sentence_transformers.json").read_text())
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config | {"similarity_fn_name": None}))
    with pytest.raises(UsageError, match="--similarity cosine"):
        tune(str(folder), data, split="test", device="cpu")
    assert tune(str(folder), data, split="test", similarity="dot", device="cpu").own_gamma_d == 0.0


@pytest.mark.parametrize(
    ("n_queries", "n_documents", "qrels"),
    [
        (19, 60, None),
        (30, 1, None),
        (30, 5, {f"q{i}": {f"d{j}": 1 for j in range(5)} for i in range(30)}),
    ],
    ids=["few queries", "one document", "all relevant"],
)
def test_nothing_to_choose_between_is_an_error(static, small, save, n_queries, n_documents, qrels):
    data = small(n_queries, n_documents, **({"qrels": qrels} if qrels else {}))
    with pytest.raises(DataError, match=r"not enough data: made \(test\) has \d+ queries"):
        tune(str(save(static)), str(data), split="test", similarity="cosine", device="cpu")


def test_nothing_relevant_is_an_error(static, small, save):
    data = small(30, 40, qrels={f"q{i}": {f"d{i}": 0} for i in range(30)})
    with pytest.raises(DataError, match="no query has a positive judgement"):
        tune(str(save(static)), str(data), split="test", similarity="cosine", device="cpu")


def test_broken_embeddings_are_an_error(static, small, save):
    static[0].embedding.weight.data[5:] = float("nan")
    with pytest.raises(EncoderError, match="NaN or infinite"):
        tune(str(save(static)), str(small(30, 40)), split="test", similarity="cosine", device="cpu")


def test_settings_are_checked_before_any_work():
    with pytest.raises(ConfigError, match="finite"):
        tune("nowhere", "nowhere", gammas=[0.1, float("nan")])
    with pytest.raises(ConfigError, match="unknown similarity"):
        tune("nowhere", "nowhere", similarity="cosin")
