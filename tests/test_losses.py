from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offsphere.errors import ConfigError, TrainingError
from offsphere.losses import (
    ALPHA,
    InfoNCELoss,
    KnownPositives,
    auto_scale,
    info_nce,
    known_positive_mask,
    resolve_scale,
)
from offsphere.modules import LEARNED_PARAMETERS, LearnedSimilarity
from offsphere.similarity import NAMES, Similarity, norms

ALL = [*map(Similarity.parse, NAMES), Similarity(0.2, 0.9)]
COSINE, DOT = ALL[:2]
DOUBLE = torch.float64


def embeddings(*shape: int, seed: int = 0) -> torch.Tensor:
    """Rows whose lengths differ by up to 4."""
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.normal(size=shape) * 2.0 ** random.uniform(-1, 1, (shape[0], 1)))


def slow_info_nce(queries, documents, similarity, scale, masked=None) -> float:
    """Equation 1 of the paper, one number at a time."""
    gamma_q, gamma_d = similarity.gammas
    total = 0.0
    for i, q in enumerate(queries.tolist()):
        exponentials = []
        for j, d in enumerate(documents.tolist()):
            product = math.fsum(a * b for a, b in zip(q, d, strict=True))
            score = product / (math.hypot(*q) ** gamma_q * math.hypot(*d) ** gamma_d)
            if j == i or masked is None or not masked[i][j]:
                exponentials.append(math.exp(scale * score))
            if j == i:
                positive = exponentials[-1]
        total -= math.log(positive / math.fsum(exponentials))
    return total / len(queries)


# info_nce


@given(
    similarity=st.sampled_from(ALL),
    batch=st.integers(1, 5),
    hard=st.integers(0, 3),
    scale=st.floats(0.1, 10),
    masking=st.sampled_from([None, 0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_equals_the_explicit_loop(similarity, batch, hard, scale, masking, seed):
    queries, documents = embeddings(batch, 4, seed=seed), embeddings(batch * (1 + hard), 4, seed=seed + 1)
    random = np.random.default_rng(seed)
    masked = None if masking is None else torch.from_numpy(random.random((batch, len(documents))) < masking)
    expected = slow_info_nce(queries, documents, similarity, scale, masked)
    assert info_nce(queries, documents, similarity, scale, masked).item() == pytest.approx(
        expected, rel=1e-9, abs=1e-12
    )
    single = info_nce(queries.float(), documents.float(), similarity, scale, masked)
    assert single.dtype == torch.float32 and single.item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("gammas", [(0.0, 0.0), (1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (0.2, 0.9)])
@pytest.mark.parametrize("hard", [0, 1])
def test_gradients_agree_with_finite_differences(gammas, hard):
    queries, documents = embeddings(3, 4).requires_grad_(), embeddings(3 * (1 + hard), 4, seed=1).requires_grad_()
    gamma_q, gamma_d, scale = (torch.tensor(x, dtype=DOUBLE, requires_grad=True) for x in (*gammas, 2.0))
    masked = torch.zeros(3, 3 * (1 + hard), dtype=torch.bool)
    masked[0, 2] = masked[1, 0] = True

    def loss(q, d, gamma_q, gamma_d, scale):
        return info_nce(q, d, Similarity(gamma_q, gamma_d), scale, masked)

    assert torch.autograd.gradcheck(loss, (queries, documents, gamma_q, gamma_d, scale))


def test_a_masked_column_leaves_a_learned_scale_a_finite_gradient():
    """T-C3. The gradient is that of the batch without the column."""
    queries, documents = embeddings(3, 4), embeddings(4, 4, seed=1)
    masked = torch.zeros(3, 4, dtype=torch.bool)
    masked[:, 3] = True
    scale = torch.tensor(5.0, dtype=DOUBLE, requires_grad=True)
    (with_mask,) = torch.autograd.grad(info_nce(queries, documents, COSINE, scale, masked), scale)
    (without,) = torch.autograd.grad(info_nce(queries, documents[:3], COSINE, scale), scale)
    assert torch.isfinite(with_mask) and without != 0
    torch.testing.assert_close(with_mask, without)

    too_early = COSINE.scores(queries, documents).masked_fill(masked, -torch.inf) * scale
    loss = torch.nn.functional.cross_entropy(too_early, torch.arange(3))
    assert torch.isfinite(loss) and torch.isnan(torch.autograd.grad(loss, scale)[0])  # what the order prevents


@pytest.mark.parametrize("similarity", ALL, ids=str)
def test_the_positive_is_never_masked(similarity):
    """T-E4. With everything masked the positive stands alone: probability 1, loss 0."""
    queries, documents = embeddings(3, 4).requires_grad_(), embeddings(6, 4, seed=1)
    everything = torch.ones(3, 6, dtype=torch.bool)
    loss = info_nce(queries, documents, similarity, 3.0, everything)
    assert loss.item() == 0
    assert torch.isfinite(torch.autograd.grad(loss, queries)[0]).all()
    assert everything.all()  # the caller's mask is left alone

    diagonal = torch.zeros(3, 6, dtype=torch.bool)
    diagonal[range(3), range(3)] = True
    plain = info_nce(queries, documents, similarity, 3.0)
    assert info_nce(queries, documents, similarity, 3.0, diagonal).item() == plain.item()
    diagonal[0, 1] = True
    assert info_nce(queries, documents, similarity, 3.0, diagonal).item() < plain.item()  # masks do work


@given(st.sampled_from(ALL), st.integers(0, 2**16))
def test_the_order_of_the_batch_does_not_matter(similarity, seed):
    queries, documents = embeddings(4, 3, seed=seed), embeddings(8, 3, seed=seed + 1)
    order = np.random.default_rng(seed).permutation(4)
    moved = torch.cat([documents[:4][order], documents[4:]])
    expected = info_nce(queries, documents, similarity, 3.0).item()
    assert info_nce(queries[order], moved, similarity, 3.0).item() == pytest.approx(expected, rel=1e-9)


def test_a_batch_of_one():
    query, positive, negative = embeddings(3, 4).split(1)
    assert info_nce(query, positive, DOT).item() == 0
    gap = DOT.pairwise(query, negative) - DOT.pairwise(query, positive)
    with_negative = info_nce(query, torch.cat([positive, negative]), DOT, 0.5)
    torch.testing.assert_close(with_negative, torch.nn.functional.softplus(0.5 * gap)[0])


@pytest.mark.parametrize("similarity", ALL, ids=str)
def test_an_empty_text_trains_on(similarity):
    queries, documents = embeddings(3, 4), embeddings(3, 4, seed=1)
    queries[0], documents[1] = 0, 0
    queries.requires_grad_()
    loss = info_nce(queries, documents, similarity, 1.0)
    assert torch.isfinite(loss) and torch.isfinite(torch.autograd.grad(loss, queries)[0]).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_training(bad):
    queries, documents = embeddings(3, 4), embeddings(3, 4, seed=1)
    queries[1, 2] = bad
    with pytest.raises(TrainingError, match=r"loss is (nan|inf) under Similarity\(gamma_q=0, .*--scale auto"):
        info_nce(queries, documents, DOT)


def test_a_score_beyond_single_precision_stops_the_training():
    huge = torch.full((2, 4), 1e30)
    with pytest.raises(TrainingError, match=r"largest query length 2e\+30"):
        info_nce(huge, huge, DOT)
    assert torch.isfinite(info_nce(huge, huge, COSINE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_embeddings_are_scored_in_single(dtype):
    queries, documents = embeddings(4, 64).to(dtype), embeddings(4, 64, seed=1).to(dtype)
    for similarity in ALL:
        loss = info_nce(queries, documents, similarity, 0.1)
        assert loss.dtype == torch.float32
        expected = info_nce(queries.double(), documents.double(), similarity, 0.1)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


# The scale


@pytest.fixture
def measured():
    """Lengths of 5.0 and 2.4 on average, as of MiniLM, that vary by a fifth."""
    random = np.random.default_rng(0)
    sides = random.normal(size=(2, 200, 64))
    sides /= np.linalg.norm(sides, axis=-1, keepdims=True)
    return sides * random.normal(1, 0.2, (2, 200, 1)) * np.array([5.0, 2.4])[:, None, None]


def spread(similarity: Similarity, scale: float, queries: np.ndarray, documents: np.ndarray) -> float:
    return float((scale * similarity.scores(queries, documents)).std(axis=1).mean())


def test_auto_starts_every_variant_with_the_same_spread(measured):
    queries, documents = measured
    spreads = {s: spread(s, auto_scale(s, norms(queries), norms(documents)), queries, documents) for s in ALL}
    assert max(spreads.values()) < 1.1 * min(spreads.values())
    assert spread(DOT, ALPHA, queries, documents) > 10 * spreads[COSINE]  # what 20 does to dot
    assert auto_scale(COSINE, norms(queries), norms(documents)) == ALPHA


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.floats(0.1, 100))
def test_auto_gives_the_logits_of_cosine_where_lengths_do_not_vary(length_q, length_d, alpha):
    random = np.random.default_rng(0)
    queries, documents = (COSINE.prepare_query(random.normal(size=(4, 8))) for _ in range(2))
    expected = alpha * COSINE.scores(queries, documents)
    for similarity in ALL:
        scale = auto_scale(similarity, np.full(4, length_q), np.full(4, length_d), alpha)
        got = scale * similarity.scores(queries * length_q, documents * length_d)
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


def test_auto_takes_tensors_and_leaves_zeros_out():
    lengths = np.array([2.0, 4.0, 0.0, 0.0])
    assert auto_scale(DOT, lengths, lengths) == pytest.approx(20 / 9)
    assert auto_scale(DOT, torch.from_numpy(lengths), torch.from_numpy(lengths)) == pytest.approx(20 / 9)
    with pytest.raises(TrainingError, match="every document embedding has length 0"):
        auto_scale(COSINE, lengths, np.zeros(3))


@given(st.floats(1e-6, 1e6), st.sampled_from(ALL))
def test_a_number_that_the_user_gave_is_never_changed(scale, similarity):
    """T-C2."""
    lengths = np.array([3.0, 5.0])
    assert resolve_scale(scale, similarity, lengths, lengths) == scale
    assert resolve_scale("auto", similarity, lengths, lengths) == auto_scale(similarity, lengths, lengths)


# Known positives


def slow_mask(queries, documents, known=()):
    batch = len(queries)
    positives = {(q, d) for q, d in zip(queries, documents[:batch], strict=True)} | set(known)
    return [
        [m != b and (queries[b], document) in positives for m, document in enumerate(documents)] for b in range(batch)
    ]


keys = st.integers(0, 4)


@given(
    st.integers(1, 4).flatmap(
        lambda batch: st.tuples(
            st.lists(keys, min_size=batch, max_size=batch), st.lists(keys, min_size=batch, max_size=batch * 3)
        )
    ),
    st.none() | st.lists(st.tuples(st.integers(0, 9), keys), max_size=6),
)
def test_the_mask_is_the_definition(batch, pairs):
    queries, documents = batch
    known = None if pairs is None else KnownPositives(pairs, n_documents=5)
    mask = known_positive_mask(torch.tensor(queries), torch.tensor(documents), known)
    assert mask.tolist() == slow_mask(queries, documents, pairs or ())


def test_several_positives_of_a_query_are_not_each_others_negatives():
    """T-E1."""
    mask = known_positive_mask(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 2]))
    assert mask.tolist() == [[False, True, False], [True, False, False], [False, False, False]]


# The loss of a trainer


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
        ["sand is stone", "iron", "rust is the salt of the sea"],
    )
    loss = InfoNCELoss(encoder, "dot", scale=0.1)
    got = loss(features(encoder, *columns))
    documents = [text for column in columns[1:] for text in column]
    same = [[m != b and text == columns[1][b] for m, text in enumerate(documents)] for b in range(3)]
    assert loss.masked_negatives == sum(map(sum, same)) == 5
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


def test_auto_is_measured_on_the_first_batch_and_kept(static, sentences):
    texts = sentences(16, 0)
    loss = InfoNCELoss(static, "dot", scale="auto")
    assert loss.telemetry() == {"gamma_q": 0, "gamma_d": 0, "scale": None}
    loss(features(static, texts[:4], texts[4:8]))
    expected = auto_scale(DOT, norms(static.encode(texts[:4])), norms(static.encode(texts[4:8])))
    assert loss.telemetry()["scale"] == pytest.approx(expected, rel=1e-5)
    measured = loss.fixed_scale
    loss(features(static, texts[8:12], texts[12:]))
    assert loss.fixed_scale == measured
    assert loss.get_config_dict() == {"similarity": "dot", "scale": measured}


def test_gammas_and_scale_of_the_model_are_used(static, sentences):
    texts = sentences(8, 0)
    static.append(LearnedSimilarity(Similarity(0.3, 0.8, learned=True), scale=7.0))
    loss = InfoNCELoss(static, "learnable", scale=99.0)
    assert loss.telemetry() == pytest.approx({"gamma_q": 0.3, "gamma_d": 0.8, "scale": 7.0})
    embedded = [torch.from_numpy(static.encode(side)) for side in (texts[:4], texts[4:])]
    expected = info_nce(*embedded, Similarity(0.3, 0.8), 7.0)
    torch.testing.assert_close(loss(features(static, texts[:4], texts[4:])).detach(), expected, rtol=1e-5, atol=1e-6)

    wrapped = torch.nn.Module()  # as DistributedDataParallel does
    wrapped.module = static
    loss.model = wrapped
    assert loss.learned is static[1]


@pytest.mark.parametrize("scale", [0, -1, math.nan, math.inf, "twenty", None])
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
    import copy

    results = []
    for attempt in range(2):
        model = copy.deepcopy(static)
        model.append(LearnedSimilarity(Similarity.parse("learnable")))
        train(model, InfoNCELoss(model, "learnable"), sentences(48, 0), tmp_path / str(attempt), seed=3)
        results.append(model.state_dict())
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name])
