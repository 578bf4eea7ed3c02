from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from offsphere.data import Collection, load_collection
from offsphere.evaluation import MEASURES, per_query, rank
from offsphere.evaluation.embedding import embed
from offsphere.evaluation.ranking import EmbeddedCollection
from offsphere.losses import InfoNCELoss
from offsphere.modules import LearnedSimilarity
from offsphere.similarity import NAMES, Similarity
from offsphere.training.validation import AS_COSINE, MEASURE, Validation, describe_lengths, describe_temperatures


@pytest.fixture
def other_model(static_encoder: Path) -> SentenceTransformer:
    """The same encoder with other lengths and directions."""
    model = SentenceTransformer(str(static_encoder), device="cpu")
    with torch.no_grad():
        table = model[0].embedding.weight
        table += torch.randn(table.shape, generator=torch.Generator().manual_seed(4)) * table.norm(dim=1).mean()
    return model


@pytest.fixture
def collections(dev: Collection, away: Path) -> list[Collection]:
    return [dev, load_collection(away)]


def expected(model: SentenceTransformer, collections: list[Collection], similarity: Similarity) -> float:
    """The mean over collections of the mean over queries, from the ranking under the similarity itself."""
    values = []
    for collection in collections:
        ranking = rank(embed(model, collection), similarity)
        values.append(fmean(per_query(ranking.run(), collection.qrels, MEASURES)[MEASURE].values()))
    return fmean(values)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_evaluation(
    static_model: SentenceTransformer, collections: list[Collection], name: str
) -> None:
    similarity = Similarity.parse(name)
    if similarity.learned:
        static_model.append(LearnedSimilarity(similarity))
    metrics = Validation(collections, InfoNCELoss(static_model, similarity, 20.0), 16)(static_model)
    assert metrics[MEASURE] == expected(static_model, collections, similarity)
    assert metrics[AS_COSINE] == expected(static_model, collections, Similarity.parse("cosine"))
    assert (metrics["gamma_q"], metrics["gamma_d"]) == similarity.gammas
    assert metrics["scale"] == pytest.approx(20.0)


def test_own_and_cosine_are_not_the_same_number_twice(
    static_model: SentenceTransformer, collections: list[Collection]
) -> None:
    metrics = Validation(collections, InfoNCELoss(static_model, "dot"), 16)(static_model)
    assert metrics[MEASURE] != metrics[AS_COSINE]


def test_gammas_are_read_when_it_is_called(static_model: SentenceTransformer, collections: list[Collection]) -> None:
    static_model.append(LearnedSimilarity(Similarity.parse("learnable")))
    validation = Validation(collections, InfoNCELoss(static_model, "learnable"), 16)
    before = validation(static_model)
    with torch.no_grad():
        static_model[1].norm["gamma_d"].fill_(-30.0)
    after = validation(static_model)
    assert after["gamma_d"] < 1e-12 < before["gamma_d"] == 0.5
    assert after[MEASURE] == expected(static_model, collections, Similarity.parse("dot"))


def test_it_remembers_no_model(
    static_model: SentenceTransformer, other_model: SentenceTransformer, collections: list[Collection]
) -> None:
    """A model is judged the same whichever model was judged before it."""

    def judge(*models: SentenceTransformer) -> list[dict[str, object]]:
        validation = Validation(collections, InfoNCELoss(static_model, "dot", 20.0), 16)
        return [validation(model) for model in models]

    first, second = judge(static_model, other_model)
    assert first[MEASURE] != second[MEASURE]
    assert judge(other_model, static_model) == [second, first]
    assert judge(static_model, static_model) == [first, first]


def test_a_normalised_copy_of_a_model_does_not_leak_into_its_embeddings(
    static_model: SentenceTransformer, collections: list[Collection]
) -> None:
    static_model.similarity_fn_name = "cosine"
    declared = Validation(collections, InfoNCELoss(static_model, "dot", 20.0), 16)(static_model)
    static_model.similarity_fn_name = "dot"
    assert Validation(collections, InfoNCELoss(static_model, "dot", 20.0), 16)(static_model) == declared


def test_prompts_of_the_model_count(static_model: SentenceTransformer, collections: list[Collection]) -> None:
    validation = Validation(collections, InfoNCELoss(static_model, "dot", 20.0), 16)
    before = validation(static_model)
    static_model.prompts["query"] = "ask : "
    after = validation(static_model)
    assert after["query_norm_mean"] != before["query_norm_mean"]
    assert after["document_norm_mean"] == before["document_norm_mean"]


class TestLengths:
    def test_mean_and_variation_are_over_all_collections(self, dev: Collection, away: Path) -> None:
        random = np.random.default_rng(0)
        embedded = [
            EmbeddedCollection(
                one,
                random.normal(size=(len(one.queries), 8)).astype(np.float32),
                random.normal(size=(len(one.documents), 8)).astype(np.float32),
            )
            for one in (dev, load_collection(away))
        ]
        found = describe_lengths(embedded)
        for side, attribute in (("query", "queries"), ("document", "documents")):
            vectors = [row for one in embedded for row in getattr(one, attribute).astype(float)]
            lengths = [math.sqrt(sum(x * x for x in row)) for row in vectors]
            mean = fmean(lengths)
            deviation = math.sqrt(sum((length - mean) ** 2 for length in lengths) / (len(lengths) - 1))
            assert found[f"{side}_norm_mean"] == pytest.approx(mean, rel=1e-6)
            assert found[f"{side}_norm_cv"] == pytest.approx(deviation / mean, rel=1e-5)

    def test_an_empty_text_has_no_length(self, dev: Collection) -> None:
        """T-I2: its zero vector would pull the mean down and the variation up."""
        random = np.random.default_rng(0)
        full = EmbeddedCollection(
            dev,
            random.normal(size=(len(dev.queries), 8)).astype(np.float32),
            random.normal(size=(len(dev.documents), 8)).astype(np.float32),
        )
        texts = {f"empty{number}": "" for number in range(5)}
        nothing = Collection("empty", "dev", texts, texts, {one: {one: 1} for one in texts})
        empty = EmbeddedCollection(nothing, *np.zeros((2, 5, 8), np.float32))
        assert describe_lengths([full, empty]) == describe_lengths([full])
        assert min(describe_lengths([full]).values()) > 0, "canary"

    def test_the_variation_has_no_unit_and_none_where_all_is_zero(self, dev: Collection) -> None:
        queries, documents = (np.eye(len(ids), 200, dtype=np.float32) for ids in (dev.queries, dev.documents))
        queries[0] *= 3
        reference, double, zero = (
            describe_lengths([EmbeddedCollection(dev, queries * factor, documents * factor)]) for factor in (1, 2, 0)
        )
        assert double["query_norm_mean"] == pytest.approx(2 * reference["query_norm_mean"])
        assert double["query_norm_cv"] == pytest.approx(reference["query_norm_cv"])
        assert reference["query_norm_cv"] > 0 == reference["document_norm_cv"]
        assert all(map(math.isnan, zero.values()))


class TestTemperatures:
    """Row 32: what the length of a query does to the softmax."""

    @pytest.mark.parametrize("gamma_q", [0.0, 0.25, 1.0])
    def test_each_query_has_the_one_that_its_logits_show(self, dev: Collection, gamma_q: float) -> None:
        similarity, scale = Similarity(gamma_q, 1.0), 20.0
        queries = np.zeros((len(dev.queries), 4), np.float32)
        queries[1:, 0] = np.geomspace(0.1, 10, len(queries) - 1)  # the first has no length
        documents = np.tile(np.eye(4, dtype=np.float32)[0], (len(dev.documents), 1))
        found = describe_temperatures([EmbeddedCollection(dev, queries, documents)], similarity, scale)
        cosines = 1.0  # all on one line, so a logit is the cosine over the temperature
        logits = scale * similarity.scores(queries[1:].astype(float), documents[:1].astype(float))[:, 0]
        slow = sorted(cosines / logit for logit in logits.tolist())
        for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9)):
            assert found[f"temperature_{name}"] == pytest.approx(np.quantile(slow, share), rel=1e-6)
        assert (found["temperature_p10"] < found["temperature_p90"]) == (gamma_q < 1), "canary"

    def test_none_without_a_scale_or_a_length(self, dev: Collection) -> None:
        queries, documents = (np.ones((len(ids), 4), np.float32) for ids in (dev.queries, dev.documents))
        for scale, factor in ((None, 1), (20.0, 0)):
            embedded = [EmbeddedCollection(dev, queries * np.float32(factor), documents)]
            assert set(describe_temperatures(embedded, Similarity.parse("dot"), scale).values()) == {None}
