"""bf16 and fp16: what computes in them, and that lengths, scores and loss do not."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.modules import Dense
from transformers.modeling_layers import GradientCheckpointingLayer

from offsphere.data import load_collection
from offsphere.encoders import check_precision, checkpoint_gradients, computing_in, encode, open_encoder
from offsphere.errors import ConfigError
from offsphere.evaluation.embedding import embed
from offsphere.losses import InfoNCELoss, info_nce
from offsphere.modules import LearnedSimilarity
from offsphere.packed import packed_input
from offsphere.similarity import FIXED, NAMES, Similarity

QUERIES = ["iron rust water", "moon", "the sea does dance", "green leaf ice cold fire"]
DOCUMENTS = [f"the {text} star" for text in QUERIES]


@pytest.fixture(params=["decoder", "transformer"])
def model(request: pytest.FixtureRequest, decoder_folder) -> SentenceTransformer:
    """A decoder and a BERT, without dropout in force."""
    if request.param == "decoder":
        return open_encoder(decoder_folder(), device="cpu")
    return request.getfixturevalue("transformer").eval()


def relative(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max() / np.abs(other).max())


def test_encoding_in_bf16(model):
    """It computes in bf16 (else the vectors would be those of float32), and what comes out is float32."""
    single = encode(model, QUERIES, "query")
    with computing_in(model, "bf16"):
        features = model(model.preprocess(QUERIES))
        half = encode(model, QUERIES, "query")
    assert features["sentence_embedding"].dtype == torch.float32 and half.dtype == np.float32
    assert 1e-4 < relative(half, single) < 0.1
    np.testing.assert_array_equal(encode(model, QUERIES, "query"), single)
    assert "forward" not in vars(model)


def test_a_last_linear_layer_leaves_in_float32_too(transformer):
    """Under autocast alone it would leave in bfloat16."""
    transformer.append(Dense(32, 16))
    with torch.autocast("cpu", torch.bfloat16):
        assert transformer(transformer.preprocess(QUERIES))["sentence_embedding"].dtype == torch.bfloat16
    with computing_in(transformer, "bf16"):
        assert transformer(transformer.preprocess(QUERIES))["sentence_embedding"].dtype == torch.float32
        assert encode(transformer, QUERIES, "query").dtype == np.float32


def test_float32_changes_nothing(model):
    with computing_in(model, "float32"):
        assert "forward" not in vars(model)


def test_one_inside_the_other(model):
    with computing_in(model, "bf16"):
        outer, expected = vars(model)["forward"], encode(model, QUERIES, "query")
        with computing_in(model, "bf16"):
            np.testing.assert_array_equal(encode(model, QUERIES, "query"), expected)
        assert vars(model)["forward"] is outer


def test_copies_compute_with_their_own_weights(model):
    with computing_in(model, "bf16"):
        expected = encode(model, QUERIES, "query")
        for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with torch.no_grad():
                next(iter(model.parameters())).mul_(1.5)
            np.testing.assert_array_equal(encode(one, QUERIES, "query"), expected)
            with torch.no_grad():
                next(iter(model.parameters())).div_(1.5)


def test_the_packed_forward_pass_stands_aside(transformer):
    """Packing is for float32: under autocast the ordinary forward pass runs, and gives what it gives alone."""
    texts = ["iron", "moon sea tide salt bee dance", "rust", "the sun light of a green leaf"]
    with computing_in(transformer, "bf16"):
        ordinary = transformer.encode(texts)
        with packed_input(transformer):
            np.testing.assert_array_equal(transformer.encode(texts), ordinary)


def gradients(model: SentenceTransformer, similarity: str, precision: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a step, gammas and scale included."""
    one = copy.deepcopy(model)
    one.append(LearnedSimilarity(Similarity.parse(similarity), 2.0, learn_scale=True))
    with computing_in(one, precision):
        loss = InfoNCELoss(one, similarity)([one.preprocess(QUERIES), one.preprocess(DOCUMENTS)])
    assert loss.dtype == torch.float32
    loss.backward()
    return loss.item(), {n: p.grad for n, p in one.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("similarity", NAMES)
def test_a_training_step_in_bf16_is_nearly_that_of_float32(model, similarity):
    single, expected = gradients(model, similarity, "float32")
    half, found = gradients(model, similarity, "bf16")
    assert half == pytest.approx(single, rel=0.1, abs=0.02) and half != single
    assert found.keys() == expected.keys()
    assert all(torch.isfinite(gradient).all() for gradient in found.values())
    learned = [name for name in found if ".norm." in name and not name.startswith("0.")]
    assert len(learned) == (3 if similarity == "learnable" else 1)
    for name in learned:
        assert found[name].item() == pytest.approx(expected[name].item(), rel=0.3, abs=0.05)


def test_the_trainer_may_wrap_the_forward_pass_as_well(transformer, tmp_path):
    """As it does for fp16, whose loss it scales; afterwards the model computes as before."""
    before = encode(transformer, QUERIES, "query")
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path), max_steps=1, learning_rate=0.0, bf16=True, use_cpu=True, report_to="none",
        save_strategy="no", disable_tqdm=True, weight_decay=0.0,
    )  # fmt: skip
    dataset = Dataset.from_dict({"query": QUERIES, "positive": DOCUMENTS})
    with computing_in(transformer, "bf16"):
        loss = InfoNCELoss(transformer, "qnorm", 1.0)
        SentenceTransformerTrainer(transformer, arguments, dataset, loss=loss).train()
    assert "forward" not in vars(transformer)
    np.testing.assert_array_equal(encode(transformer, QUERIES, "query"), before)


@pytest.mark.parametrize(
    ("device", "precision", "message"),
    [
        ("cpu", "fp16", "fp16 needs a GPU.*Type --precision bf16"),
        ("cpu", "half", "one of float32, bf16, fp16; found 'half'"),
    ],
)
def test_a_precision_that_cannot_be(device, precision, message):
    with pytest.raises(ConfigError, match=message):
        check_precision(device, precision)


# Half precision beyond the encoder


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e4])
def test_the_loss_of_half_precision_embeddings_is_finite(name, dtype, scale):
    """T-C4 for training: at no scale do lengths overflow, vanish, or give a gradient of NaN."""
    torch.manual_seed(0)
    similarity = Similarity.parse(name)
    embeddings = [(torch.randn(6, 32) * scale).to(dtype).requires_grad_() for _ in range(2)]
    alpha = 5.0 / scale ** (2 - sum(similarity.gammas))
    loss = info_nce(*embeddings, similarity, alpha)
    reference = info_nce(*(one.detach().double() for one in embeddings), similarity, alpha)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(reference.item(), rel=1e-3, abs=1e-5)
    if (dtype, scale) != (torch.float16, 1e-6):  # 1 / 1e-6 is more than a float16 can hold as a gradient
        loss.backward()
        assert all(torch.isfinite(one.grad).all() for one in embeddings)


def test_scores_added_up_in_bf16_reorder_a_real_ranking():
    """Case 38, an ablation: float32 ranks as float64 does; sums in bf16 change the first ten of most queries."""
    collection = load_collection(Path(__file__).parents[2] / "datasets" / "nq_qed", "test").sample(100, 400)
    embedded = embed(open_encoder("package:wordllama", device="cpu"), collection)
    similarity = Similarity.parse("dot")
    queries, documents = torch.tensor(embedded.queries), torch.tensor(embedded.documents)
    exact = similarity.scores(queries.double(), documents.double())
    in_half = torch.zeros(len(queries), len(documents), dtype=torch.bfloat16)
    for column in range(queries.shape[1]):
        in_half += (queries[:, column, None] * documents[None, :, column]).bfloat16()

    def reordered(scores: torch.Tensor) -> float:
        same = (scores.topk(10, dim=1).indices == exact.topk(10, dim=1).indices).all(1)
        return 1 - same.double().mean().item()

    assert reordered(similarity.scores(queries, documents)) == 0
    assert reordered(similarity.scores(queries.bfloat16(), documents.bfloat16())) < reordered(in_half.float())
    assert reordered(in_half.float()) > 0.5


# Gradient checkpointing


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_gradients_are_the_same_with_checkpointing(model, precision):
    plain, checkpointed = copy.deepcopy(model).train(), copy.deepcopy(model).train()
    checkpoint_gradients(checkpointed)
    runs = {plain: 0, checkpointed: 0}

    def count(linear: torch.nn.Module, *args: object) -> None:
        runs[plain if linear in set(plain.modules()) else checkpointed] += 1

    found = []
    for one in (plain, checkpointed):
        layer = next(part for part in one.modules() if isinstance(part, GradientCheckpointingLayer))
        next(part for part in layer.modules() if isinstance(part, torch.nn.Linear)).register_forward_hook(count)
        torch.manual_seed(0)
        with computing_in(one, precision):
            loss = InfoNCELoss(one, "qnorm", "auto")([one.preprocess(QUERIES), one.preprocess(DOCUMENTS)])
        loss.backward()
        found.append((loss.item(), {n: p.grad for n, p in one.named_parameters() if p.grad is not None}))
    assert (runs[plain], runs[checkpointed]) == (2, 4), "the first layer ran again for its gradient"
    (first, expected), (second, got) = found
    assert first == second and expected.keys() == got.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-6, atol=1e-6)


def test_what_cannot_be_checkpointed(static):
    with pytest.raises(ConfigError, match=r"--gradient-checkpointing needs a transformer; .* StaticEmbedding"):
        checkpoint_gradients(static)


def test_the_packed_forward_pass_leaves_it_to_the_ordinary_one(transformer):
    checkpoint_gradients(transformer)
    with packed_input(transformer) as how:
        assert not how.packed and "gradient checkpointing is on" in str(how)
