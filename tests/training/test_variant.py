"""One training: what it learns, what it keeps, what it writes down, and that only the similarity makes a difference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer

from offsphere.cached_inputs import cached_input
from offsphere.data import Collection, TrainingPairs
from offsphere.errors import TrainingError
from offsphere.losses import InfoNCELoss
from offsphere.modules import learned_similarity
from offsphere.similarity import FIXED, NAMES, Similarity
from offsphere.training.batches import training_dataset
from offsphere.training.plan import Plan
from offsphere.training.trainer import Telemetry
from offsphere.training.validation import MEASURE, Validation
from offsphere.training.variant import Trained, Variant, training_arguments

Train = Callable[..., Trained]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[float]], list[dict[str, torch.Tensor]]]:
    """Makes validation give these values in turn, and keeps the weights that each one saw."""

    def script(values: list[float]) -> list[dict[str, torch.Tensor]]:
        seen: list[dict[str, torch.Tensor]] = []

        class Scripted(Validation):
            def __call__(self, model: SentenceTransformer, *args: Any, **kwargs: Any) -> dict[str, Any]:
                seen.append({name: value.detach().clone() for name, value in model.named_parameters()})
                return super().__call__(model, *args, **kwargs) | {MEASURE: values[len(seen) - 1]}

        monkeypatch.setattr("offsphere.training.variant.Validation", Scripted)
        return seen

    return script


def state(model: SentenceTransformer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class TestBestCheckpoint:
    VALUES = (0.1, 0.2, 0.9, 0.3, 0.4)  # before training, then after steps 2, 4, 6 and 8

    @pytest.mark.parametrize("similarity", ["qnorm", "learnable"])
    def test_the_weights_of_the_best_validation_are_kept(
        self,
        static_model: SentenceTransformer,
        train: Train,
        scripted: Callable[[list[float]], list[dict[str, torch.Tensor]]],
        similarity: str,
    ) -> None:
        seen = scripted(list(self.VALUES))
        trained = train(static_model, similarity)
        assert len(seen) == 5
        assert not same(seen[2], seen[4]), "the last steps moved the weights"
        assert same(state(static_model), seen[2])
        assert (trained.best_step, trained.validation) == (4, 0.9)
        assert not static_model.training

    def test_learned_gammas_and_scale_are_those_of_the_best_step(
        self,
        static_model: SentenceTransformer,
        train: Train,
        scripted: Callable[[list[float]], list[dict[str, torch.Tensor]]],
    ) -> None:
        seen = scripted(list(self.VALUES))
        trained = train(static_model, "learnable", learn_scale=True)
        best, last = seen[2], seen[4]
        for side, gamma in zip(("gamma_q", "gamma_d"), trained.similarity.gammas, strict=True):
            assert gamma == best[f"1.norm.{side}"].sigmoid().item() != last[f"1.norm.{side}"].sigmoid().item()
        assert trained.scale == best["1.norm.log_scale"].exp().item() != last["1.norm.log_scale"].exp().item()
        assert trained.similarity.learned

    def test_real_values_agree_with_the_model_that_is_kept(
        self, static_model: SentenceTransformer, train: Train, dev: Collection, log: Callable[[str], list[dict]]
    ) -> None:
        """A rate far too high makes the last steps worse than the first."""
        constant = {"learning_rate": 10.0, "schedule": "constant_with_warmup"}
        trained = train(static_model, "dot", **constant, steps=16, evaluate_every=1)
        values = {line["step"]: line[MEASURE] for line in log("validation") if line["step"] > 0}
        assert values[trained.best_step] == max(values.values()) == trained.validation
        assert values[16] < trained.validation
        again = Validation([dev], InfoNCELoss(static_model, "dot"), 16)(static_model)
        assert again[MEASURE] == trained.validation

    def test_without_a_dev_collection_the_last_weights_stay(
        self, static_model: SentenceTransformer, train: Train, log: Callable[[str], list[dict]]
    ) -> None:
        trained = train(static_model, dev=[])
        assert (trained.best_step, trained.validation) == (8, None)
        assert log("validation") == []
        assert len(log("train")) == 8

    def test_a_checkpoint_that_cannot_be_read_is_an_error(
        self, static_model: SentenceTransformer, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The trainer of transformers would log it and go on with the last weights."""
        monkeypatch.setattr("offsphere.training.trainer.save_file", lambda tensors, path: path.write_bytes(b"damaged"))
        with pytest.raises(Exception, match=r"(?i)header"):
            train(static_model)


class TestMatchedConditions:
    @pytest.fixture
    def batches(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """What the loss gets, in order: labels and the texts' tokens."""
        seen: list[Any] = []

        class Recorder(InfoNCELoss):
            def forward(self, sentence_features: Any, labels: torch.Tensor | None = None) -> torch.Tensor:
                columns = list(sentence_features)
                seen.append((labels.tolist(), [column["input_ids"].tolist() for column in columns]))
                return super().forward(columns, labels)

        monkeypatch.setattr("offsphere.training.variant.InfoNCELoss", Recorder)
        return seen

    def run(self, train: Train, batches: list[Any], model: SentenceTransformer, similarity: str, seed: int) -> Any:
        batches.clear()
        train(copy.deepcopy(model), similarity, seed)
        return list(batches)

    def test_every_similarity_of_a_seed_sees_the_same_batches_in_the_same_order(
        self, static_model: SentenceTransformer, train: Train, batches: list[Any]
    ) -> None:
        reference = self.run(train, batches, static_model, "cosine", 3)
        assert len(reference) == 8
        for name in NAMES:
            assert self.run(train, batches, static_model, name, 3) == reference, name
        other = self.run(train, batches, static_model, "cosine", 4)
        assert other != reference

    def test_dropout_is_drawn_from_the_seed(
        self, bert_model: SentenceTransformer, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drawn_from: list[int] = []

        class Recorder(InfoNCELoss):
            def forward(self, *args: Any) -> torch.Tensor:
                drawn_from.append(torch.initial_seed())
                return super().forward(*args)

        monkeypatch.setattr("offsphere.training.variant.InfoNCELoss", Recorder)
        train(bert_model, seed=1337, steps=2, dev=[])
        assert drawn_from == [1337, 1337]

    def test_an_epoch_holds_every_pair_once_and_the_next_one_another_order(
        self, static_model: SentenceTransformer, train: Train, batches: list[Any], pairs: TrainingPairs
    ) -> None:
        labels = [labels for labels, _ in self.run(train, batches, static_model, "cosine", 3)]
        first, second = ([row for batch in half for row in batch] for half in (labels[:4], labels[4:]))
        assert sorted(first) == sorted(second) == sorted(training_dataset(pairs)[0]["label"])
        assert first != second

    def test_prompts_reach_the_features_of_their_side(
        self, static_model: SentenceTransformer, train: Train, batches: list[Any]
    ) -> None:
        static_model.prompts |= {"query": "ask : ", "document": "answer : "}
        vocabulary = static_model.tokenizer.get_vocab()
        for _, (queries, positives) in self.run(train, batches, static_model, "cosine", 3):
            assert queries.count(vocabulary["ask"]) == 12
            assert positives.count(vocabulary["answer"]) == 12
            assert not {vocabulary["ask"]} & set(positives)
            assert queries[:2] == [vocabulary["ask"], vocabulary[":"]]

    @pytest.mark.parametrize("similarity", ["dnorm", "learnable"])
    @pytest.mark.parametrize("encoder", ["static_model", "bert_model"])
    def test_the_same_variant_twice_gives_the_same_weights(
        self, request: pytest.FixtureRequest, train: Train, encoder: str, similarity: str
    ) -> None:
        """Bit for bit; the transformer with its dropout."""
        model = request.getfixturevalue(encoder)
        models = [copy.deepcopy(model) for _ in range(3)]
        for one, seed in zip(models, (1, 1, 2), strict=True):
            train(one, similarity, seed, steps=4)
        first, second, other = map(state, models)
        assert same(first, second)
        assert not same(first, other)

    def test_the_similarity_makes_a_difference(self, static_model: SentenceTransformer, train: Train) -> None:
        models = {name: copy.deepcopy(static_model) for name in FIXED}
        for name, model in models.items():
            train(model, name, dev=[])
        tables = [model[0].embedding.weight for model in models.values()]
        for i, one in enumerate(tables):
            for other in tables[:i]:
                assert not torch.allclose(one, other, rtol=1e-4)

    def test_the_cache_makes_none(self, static_model: SentenceTransformer, train: Train, tmp_path: Path) -> None:
        cached = copy.deepcopy(static_model)
        train(static_model, "learnable")
        with cached_input(cached, None, tmp_path):
            train(cached, "learnable")
        assert same(state(static_model), state(cached))


class TestLearnedParameters:
    @pytest.fixture
    def groups(self, monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, float]]:
        """Weight decay and peak rate of every parameter of the optimiser, by its id."""
        found: dict[int, dict[str, float]] = {}

        class Spy(Telemetry):
            def on_train_begin(self, *args: Any, optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        assert id(parameter) not in found, "no parameter in two groups"
                        found[id(parameter)] = {"decay": group["weight_decay"], "rate": group["initial_lr"]}
                found[0] = {name: optimizer.defaults[name] for name in ("betas", "eps")}

        monkeypatch.setattr("offsphere.training.variant.Telemetry", Spy)
        return found

    def test_they_have_their_own_rate_and_no_weight_decay(
        self, bert_model: SentenceTransformer, train: Train, groups: dict[int, dict[str, float]]
    ) -> None:
        train(bert_model, "learnable", learn_scale=True, weight_decay=0.3, learning_rate=0.001, steps=2)
        for parameter in learned_similarity(bert_model).parameters():
            assert groups[id(parameter)] == {"decay": 0.0, "rate": 0.05}
        dense = bert_model[0].auto_model.encoder.layer[1].output.dense
        assert groups[id(dense.weight)] == {"decay": 0.3, "rate": 0.001}
        assert groups[id(dense.bias)] == {"decay": 0.0, "rate": 0.001}
        assert groups[0] == {"betas": (0.9, 0.98), "eps": 1e-8}

    def test_without_them_no_group_is_asked_for(
        self, static_model: SentenceTransformer, train: Train, groups: dict[int, dict[str, float]]
    ) -> None:
        train(static_model, "dot")
        assert {group["rate"] for key, group in groups.items() if key} == {0.02}

    @pytest.mark.parametrize("name", NAMES)
    def test_gammas_move_only_where_they_are_learned(
        self, static_model: SentenceTransformer, train: Train, name: str
    ) -> None:
        trained = train(static_model, name, scale=7.0)
        learned = name == "learnable"
        assert (learned_similarity(static_model) is not None) == learned
        assert all(gamma != 0.5 for gamma in trained.similarity.gammas)
        assert trained.similarity.learned == learned
        if not learned:
            assert trained.similarity == Similarity.parse(name)
        assert trained.scale == pytest.approx(7.0)

    @pytest.mark.parametrize("name", ["qnorm", "learnable"])
    def test_the_scale_moves_where_it_is_learned(
        self, static_model: SentenceTransformer, train: Train, name: str
    ) -> None:
        trained = train(static_model, name, scale=7.0, learn_scale=True)
        assert abs(trained.scale - 7.0) > 1e-2
        assert trained.scale == learned_similarity(static_model).scale.item()
        assert trained.similarity.learned == (name == "learnable")


def test_training_improves_on_the_untrained_encoder(
    static_model: SentenceTransformer, train: Train, log: Callable[[str], list[dict[str, Any]]]
) -> None:
    trained = train(static_model, "cosine", steps=40, learning_rate=0.1, evaluate_every=10)
    losses = [line["loss"] for line in log("train")]
    assert losses[-1] < 0.5 * losses[0]
    assert trained.validation > log("validation")[0][MEASURE] + 0.05


def test_a_loss_that_is_not_finite_stops_the_training(static_model: SentenceTransformer, train: Train) -> None:
    with torch.no_grad():
        static_model[0].embedding.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"the loss is nan.*--learning-rate"):
        train(static_model, "dot", dev=[])


def test_the_device_of_the_encoder_is_that_of_the_training(static_model: SentenceTransformer, plan: Plan) -> None:
    """It is decided once, when the encoder is opened; the trainer would choose the best one at hand again."""
    given = (plan, 0, Path("nowhere"), static_model, False, False, {})
    assert training_arguments(*given).device == static_model.device == torch.device("cpu")
    static_model.to("meta")
    with pytest.raises(TrainingError, match=r"the encoder is on meta, and the trainer would train on.*leave --device"):
        training_arguments(*given)


def test_names_of_variants() -> None:
    assert Variant(Similarity.parse("dnorm"), 42).name == "dnorm-seed42"
    assert Variant(Similarity(0.2, 0.9), 0).name == "gamma_q=0.2,gamma_d=0.9-seed0"
