from __future__ import annotations

import copy
import logging
import math

import pytest
import torch

from offsphere.errors import ConfigError
from offsphere.losses import InfoNCELoss, KnownPositives, auto_scale, info_nce
from offsphere.modules import LEARNED_PARAMETERS, LearnedSimilarity
from offsphere.similarity import NAMES, Similarity, norms

DOT = Similarity.parse("dot")


def features(model, *columns: list[str]):
    return [model.preprocess(column) for column in columns]


def test_forward_is_info_nce_on_the_raw_embeddings(encoder, sentences):
    texts = sentences(15, 0)
    columns = texts[:5], texts[5:10], texts[10:]
    queries, *documents = (torch.from_numpy(encoder.encode(column)) for column in columns)
    encoder.eval()
    for similarity in NAMES[:4]:
        loss = InfoNCELoss(encoder, similarity, scale=0.5)(features(encoder, *columns))
        expected = info_nce(queries, torch.cat(documents), Similarity.parse(similarity), 0.5)
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-6)


def test_the_same_text_is_never_a_negative(encoder):
    """Whatever the padding of its column: 'iron' beside a long text, alone, and as a positive twice."""
    encoder.eval()
    columns = (
        ["why iron", "what rust", "how sand"],
        ["iron", "rust is the salt of the sea", "iron"],
        ["sand is stone", "iron", "sea"],
    )
    loss = InfoNCELoss(encoder, "dot", scale=0.1)
    got = loss(features(encoder, *columns))
    documents = [text for column in columns[1:] for text in column]
    same = [[m != b and text == columns[1][b] for m, text in enumerate(documents)] for b in range(3)]
    assert loss.masked_negatives == sum(map(sum, same)) == 4
    embedded = [torch.from_numpy(encoder.encode(texts)) for texts in (columns[0], documents)]
    torch.testing.assert_close(got.detach(), info_nce(*embedded, DOT, 0.1, torch.tensor(same)), rtol=1e-5, atol=1e-6)
    assert abs(got.item() - info_nce(*embedded, DOT, 0.1).item()) > 1e-3  # the mask decides something


def test_masked_negatives_are_counted_over_batches(static):
    loss = InfoNCELoss(static)
    for _ in range(2):
        loss(features(static, ["iron", "rust"], ["sea", "sea"]))
    assert loss.masked_negatives == 4


def test_two_positives_of_one_query_text(static):
    loss = InfoNCELoss(static)
    loss(features(static, ["why rust", "why rust", "how"], ["iron", "water", "wind"]))
    assert loss.masked_negatives == 2


def test_keys_in_the_label_column_decide(static):
    """Different texts with one key are one document; the judgements mask what the batch does not show."""
    columns = features(static, ["iron", "rust", "sea"], ["salt", "sand", "moon"], ["bird", "fish", "star"])
    labels = torch.tensor([[7, 0, 3], [8, 1, 0], [9, 2, 4]])
    loss = InfoNCELoss(static)
    loss(columns, labels)
    assert loss.masked_negatives == 1  # query 7 against the negative of row 1, its own positive
    judged = InfoNCELoss(static, known_positives=KnownPositives([(8, 0), (9, 3), (1, 1), (9, 2)], n_documents=5))
    judged(columns, labels)
    assert judged.masked_negatives == 1 + 2 + 1  # (8, 0) stands in two columns


def test_labels_that_are_no_keys(static):
    columns = features(static, ["iron", "rust"], ["sea", "sea"])
    loss = InfoNCELoss(static)
    loss(columns, torch.tensor([0.5, 1.0]))  # a score column is left aside
    loss(columns, torch.tensor([[0, 1, 2], [1, 1, 1]]))
    assert loss.masked_negatives == 4
    judged = InfoNCELoss(static, known_positives=KnownPositives([(0, 0)], 1))
    for labels in (None, torch.tensor([0.5, 1.0])):
        with pytest.raises(ConfigError, match=r"known_positives needs a column 'label'.*2 in all"):
            judged(columns, labels)


def test_auto_is_measured_on_the_first_batch_and_kept(static, sentences, caplog):
    texts = sentences(16, 0)
    caplog.set_level(logging.INFO, "offsphere")
    loss = InfoNCELoss(static, "dot", scale="auto")
    assert loss.telemetry() == {"gamma_q": 0, "gamma_d": 0, "scale": None}
    loss(features(static, texts[:4], texts[4:8]))
    expected = auto_scale(DOT, norms(static.encode(texts[:4])), norms(static.encode(texts[4:8])))
    assert loss.telemetry()["scale"] == pytest.approx(expected, rel=1e-5)
    measured = loss.fixed_scale
    loss(features(static, texts[8:12], texts[12:]))
    assert loss.fixed_scale == measured
    assert loss.get_config_dict() == {"similarity": "dot", "scale": measured}
    assert [record.message for record in caplog.records] == [f"scale auto: {expected:.4g} for dot"]


def test_gammas_and_scale_of_the_model_are_used(static, sentences):
    texts = sentences(8, 0)
    static.append(LearnedSimilarity(Similarity(0.3, 0.8, learned=True), scale=7.0))
    loss = InfoNCELoss(static, "learnable")
    assert loss.telemetry() == pytest.approx({"gamma_q": 0.3, "gamma_d": 0.8, "scale": 7.0})
    embedded = [torch.from_numpy(static.encode(side)) for side in (texts[:4], texts[4:])]
    expected = info_nce(*embedded, Similarity(0.3, 0.8), 7.0)
    torch.testing.assert_close(loss(features(static, texts[:4], texts[4:])).detach(), expected, rtol=1e-5, atol=1e-6)

    wrapped = torch.nn.Module()  # as DistributedDataParallel does
    wrapped.module = static
    loss.model = wrapped
    assert loss.learned is static[1]


@pytest.mark.parametrize("given", [99.0, 7.01, "auto"])
def test_a_scale_that_the_model_would_overrule_is_an_error(static, given):
    """T-C2: nothing that the user gave is changed without a word."""
    static.append(LearnedSimilarity(Similarity.parse("learnable"), scale=7.0))
    for similarity in ("learnable", None):
        with pytest.raises(ConfigError, match=rf"scale {given!r} is given, .* carries 7, .*leave scale out"):
            InfoNCELoss(static, similarity, given)
    for agreed in (7.0, 7, None):  # as a training hands on what it made the module with
        assert InfoNCELoss(static, "learnable", agreed).telemetry()["scale"] == pytest.approx(7.0)
    static[1].norm["log_scale"].data.fill_(math.log(31.0))  # as trained
    with pytest.raises(ConfigError, match=r"scale 7\.0 is given, .* carries 31, "):
        InfoNCELoss(static, "learnable", 7.0)


@pytest.mark.parametrize("carried", [Similarity.parse("learnable"), Similarity(0.3, 0.8)])
def test_a_similarity_that_the_model_would_overrule_is_an_error(static, carried):
    static.append(LearnedSimilarity(carried, learn_scale=True))
    for given in ("cosine", "dot", {"gamma_q": 0.3, "gamma_d": 0.7}):
        with pytest.raises(ConfigError, match=rf"carries {carried}, .*leave similarity out"):
            InfoNCELoss(static, given)
    for agreed in (carried, None):
        assert InfoNCELoss(static, agreed).similarity.name == carried.name


def test_without_a_word_the_similarity_is_cosine(static):
    assert InfoNCELoss(static).similarity.name == "cosine"


@pytest.mark.parametrize(("given", "kept"), [(99.0, 99.0), (1e-3, 1e-3), (None, 20.0)])
def test_a_scale_is_kept_where_the_model_has_none(static, given, kept):
    loss = InfoNCELoss(static, "dot", given)
    loss(features(static, ["iron", "rust"], ["sea", "sand"]))
    assert loss.telemetry()["scale"] == kept


@pytest.mark.parametrize("scale", [0, -1, math.nan, math.inf, "twenty"])
def test_a_scale_that_is_none(static, scale):
    with pytest.raises(ConfigError, match="scale must be a positive number or 'auto'"):
        InfoNCELoss(static, scale=scale)


def test_requests_that_cannot_be_met(static):
    with pytest.raises(ConfigError, match=r"model\.append\(LearnedSimilarity"):
        InfoNCELoss(static, "learnable")
    with pytest.raises(ConfigError, match="unknown similarity 'l2'"):
        InfoNCELoss(static, "l2")
    with pytest.raises(ConfigError, match="found 1 column"):
        InfoNCELoss(static)(features(static, ["iron"]))


def test_cosine_at_scale_20_is_multiple_negatives_ranking_loss(encoder, sentences):
    """Parity with the peer, in loss and in gradients."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    encoder.eval().double()
    texts = sentences(24, 0)
    columns = texts[:8], texts[8:16], texts[16:]
    results = []
    for loss in (InfoNCELoss(encoder, "cosine", 20.0), MultipleNegativesRankingLoss(encoder, scale=20.0)):
        encoder.zero_grad()
        value = loss(features(encoder, *columns), None)
        value.backward()
        results.append((value.item(), {n: p.grad.clone() for n, p in encoder.named_parameters() if p.grad is not None}))
    (ours, our_gradients), (theirs, their_gradients) = results
    assert ours == pytest.approx(theirs, rel=1e-9)
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in our_gradients.items():
        torch.testing.assert_close(gradient, their_gradients[name], rtol=1e-7, atol=1e-9)


# In a script of the user's own


def train(model, loss, texts, folder, **settings):
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    half = len(texts) // 2
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=8,
        dataloader_pin_memory=False,
        learning_rate=1e-3,
        weight_decay=0.5,
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    dataset = Dataset.from_dict({"query": texts[:half], "positive": texts[half:]})
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=dataset, loss=loss)
    trainer.train()
    return trainer


@pytest.mark.parametrize("similarity", NAMES[:4])
def test_trains_in_a_plain_trainer(encoder, sentences, tmp_path, similarity):
    before = {name: value.clone() for name, value in encoder.named_parameters()}
    trainer = train(encoder, InfoNCELoss(encoder, similarity, "auto"), sentences(48, 0), tmp_path)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 3 and all(map(math.isfinite, losses))
    assert any((value != before[name]).any() for name, value in encoder.named_parameters())


@pytest.mark.parametrize("learn_scale", [False, True])
@pytest.mark.parametrize("own_rate", [False, True])
def test_learned_scalars_move_at_their_own_rate_without_weight_decay(
    encoder, sentences, tmp_path, learn_scale, own_rate
):
    encoder.append(LearnedSimilarity(Similarity.parse("learnable"), scale=1.0, learn_scale=learn_scale))
    learned = encoder[-1]
    loss = InfoNCELoss(encoder, "learnable")
    settings = {"learning_rate_mapping": {LEARNED_PARAMETERS: 0.05}} if own_rate else {}
    trainer = train(encoder, loss, sentences(48, 0), tmp_path, lr_scheduler_type="constant", **settings)

    groups = trainer.optimizer.param_groups
    group_of = {id(parameter): group for group in groups for parameter in group["params"]}
    for parameter in learned.parameters():
        if parameter.requires_grad:
            group = group_of[id(parameter)]
            assert group["weight_decay"] == 0 and group["lr"] == (0.05 if own_rate else 1e-3)
    weights = [value for name, value in encoder[0].named_parameters() if value.dim() == 2]
    assert {group_of[id(weight)]["weight_decay"] for weight in weights} == {0.5}  # the others do decay
    assert {group_of[id(weight)]["lr"] for weight in weights} == {1e-3}

    moved = {name: value.item() for name, value in learned.norm.items()}
    assert moved["gamma_q"] != 0 and moved["gamma_d"] != 0
    assert (moved["log_scale"] != 0) == learn_scale
    assert loss.telemetry()["gamma_d"] == pytest.approx(1 / (1 + math.exp(-moved["gamma_d"])))
    if own_rate:  # three steps of Adam at this rate, not at that of the weights
        assert 0.01 < max(abs(moved["gamma_q"]), abs(moved["gamma_d"])) <= 0.16


def test_training_is_deterministic(static, sentences, tmp_path):
    results = []
    for attempt in range(2):
        model = copy.deepcopy(static)
        model.append(LearnedSimilarity(Similarity.parse("learnable")))
        train(model, InfoNCELoss(model, "learnable"), sentences(48, 0), tmp_path / str(attempt), seed=3)
        results.append(model.state_dict())
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name])
