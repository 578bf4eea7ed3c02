"""The gradient cache: the same loss and gradients as one graph, the same bits in both passes, and no activations."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentence_transformers.sentence_transformer.modules import Pooling
from torch.utils.checkpoint import DefaultDeviceType, set_checkpoint_early_stop

from offsphere import gradient_cache
from offsphere.cached_inputs import cached_input
from offsphere.encoders import checkpoint_gradients, set_dropout
from offsphere.errors import ConfigError
from offsphere.gradient_cache import embed_columns, micro_batches
from offsphere.losses import InfoNCELoss
from offsphere.modules import LearnedSimilarity, learned_similarity
from offsphere.packed import packed_input
from offsphere.similarity import Similarity

ALL = 10**9
WORDS = "iron rust water moon sea tide salt bee dance honey sun light leaf green ice cold fire hot wind sand".split()


def make_texts(counts: Sequence[int], seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, count)) for count in counts]


def ragged(model: Any, lengths: Sequence[int], columns: int = 2) -> list[dict[str, Any]]:
    return [model.preprocess(make_texts(np.roll(lengths, shift), shift)) for shift in range(columns)]


def loss_and_gradients(model: Any, columns: Any, factor: float = 1.0, seed: int = 5, **cache: Any) -> tuple[Any, ...]:
    """Of learned gammas and scale where the model has them."""
    model.zero_grad()
    torch.manual_seed(seed)
    given = ("dot", 0.02) if learned_similarity(model) is None else ()
    loss = InfoNCELoss(model, *given, **cache)([dict(features) for features in columns])
    (factor * loss).backward()
    return loss.detach(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_equal(found: tuple[Any, ...], expected: tuple[Any, ...], loss: float, gradient: float) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=loss, atol=0)
    assert found[1].keys() == expected[1].keys()
    largest = max(float(one.abs().max()) for one in expected[1].values())
    assert largest > 1e-5
    for name, one in expected[1].items():
        torch.testing.assert_close(found[1][name], one, rtol=0, atol=gradient * largest, msg=name)


def packing(model: Any, packed: bool) -> Any:
    return packed_input(model) if packed else contextlib.nullcontext()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 40), min_size=2, max_size=7),
    columns=st.integers(2, 4),
    tokens=st.integers(1, 150),
    kept=st.integers(0, 200),
    packed=st.booleans(),
)
def test_equals_one_graph_on_ragged_texts(transformer, lengths, columns, tokens, kept, packed):
    set_dropout(transformer.double().train(), 0.0)
    batch = ragged(transformer, lengths, columns)
    expected = loss_and_gradients(transformer, batch)
    with packing(transformer, packed):
        found = loss_and_gradients(transformer, batch, tokens_per_batch=tokens, tokens_kept=kept)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-13)
    for name, one in expected[1].items():
        torch.testing.assert_close(found[1][name], one, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("packed", [False, True])
def test_in_single_precision(transformer, packed):
    set_dropout(transformer.train(), 0.0)
    batch = ragged(transformer, [3, 1, 30, 7, 7, 12, 40, 2])
    expected = loss_and_gradients(transformer, batch)
    with packing(transformer, packed):
        assert_equal(loss_and_gradients(transformer, batch, tokens_per_batch=64), expected, 1e-6, 1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_both_passes_give_the_same_bits(transformer, packed, autocast, monkeypatch):
    """T-D1 and T-D3: with dropout, in the precision of the first pass; the canary forgets the random state."""
    transformer.train()
    batch = ragged(transformer, [3, 1, 30, 7, 7, 12, 40, 2], 3)
    given: list[torch.Tensor] = []
    transformer[0].register_forward_hook(lambda module, args, output: given.append(output["token_embeddings"].detach()))

    def run() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        given.clear()
        with set_checkpoint_early_stop(False), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = InfoNCELoss(transformer, "dot", 0.02, tokens_per_batch=64)(list(map(dict, batch)))
        first = list(given)
        given.clear()
        with set_checkpoint_early_stop(False):
            loss.backward()
        return first, given[::-1]

    with packing(transformer, packed):
        first, again = run()
        assert len(first) == len(again) > 4
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
        monkeypatch.setattr(gradient_cache, "RandContext", lambda *tensors: contextlib.nullcontext())
        first, again = run()
        assert not any(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_with_dropout_gradients_are_those_of_the_activations_kept(transformer, packed):
    transformer.train()
    batch = ragged(transformer, [3, 1, 30, 7, 7, 12, 40, 2])
    with packing(transformer, packed):
        expected = loss_and_gradients(transformer, batch, tokens_per_batch=64, tokens_kept=ALL)
        assert torch.equal(loss_and_gradients(transformer, batch, tokens_per_batch=64)[0], expected[0])
        for kept in (0, 100):
            found = loss_and_gradients(transformer, batch, tokens_per_batch=64, tokens_kept=kept)
            assert_equal(found, expected, 0.0, 1e-6)
        other = loss_and_gradients(transformer, batch, tokens_per_batch=64, seed=6)
        assert not torch.equal(other[0], expected[0]), "canary: dropout is off"


def test_autocast_is_on_again_in_the_second_pass(transformer):
    """T-D3. The backward pass of a trainer runs outside of it."""
    set_dropout(transformer.train(), 0.0)
    batch = ragged(transformer, [3, 1, 30, 7])
    dtypes: list[torch.dtype] = []
    layer = transformer[0].auto_model.encoder.layer[0].attention.self.query
    layer.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = InfoNCELoss(transformer, "dot", 0.02, tokens_per_batch=64)(batch)
    first = len(dtypes)
    loss.backward()
    assert len(dtypes) == 2 * first and set(dtypes) == {torch.bfloat16} and loss.dtype == torch.float32


def test_what_comes_in_scales_every_micro_batch(transformer):
    """As gradient accumulation and loss scaling do."""
    set_dropout(transformer.double().train(), 0.0)
    batch = ragged(transformer, [3, 1, 30, 7])
    once, thrice = (loss_and_gradients(transformer, batch, factor, tokens_per_batch=32) for factor in (1.0, 3.0))
    assert_equal((thrice[0], {name: one / 3 for name, one in thrice[1].items()}), once, 0.0, 1e-14)


def test_gradients_accumulate_over_batches(transformer):
    set_dropout(transformer.double().train(), 0.0)
    batches = [ragged(transformer, lengths) for lengths in ([3, 1, 30, 7], [9, 9, 2])]
    separate = [loss_and_gradients(transformer, batch)[1] for batch in batches]
    transformer.zero_grad()
    losses = [InfoNCELoss(transformer, "dot", 0.02, tokens_per_batch=32)(batch) for batch in batches]
    for loss in losses:  # the second forward pass came before the first backward pass
        loss.backward()
    for name, parameter in transformer.named_parameters():
        if parameter.grad is not None:
            total = separate[0][name] + separate[1][name]
            torch.testing.assert_close(parameter.grad, total, rtol=1e-9, atol=1e-12)


def test_learned_gammas_and_scale(transformer):
    transformer.append(LearnedSimilarity(Similarity(0.3, 0.8, learned=True), scale=2.0, learn_scale=True))
    set_dropout(transformer.double().train(), 0.0)
    batch = ragged(transformer, [3, 1, 30, 7])
    expected = loss_and_gradients(transformer, batch)
    assert all(expected[1][f"2.norm.{name}"].abs() > 1e-6 for name in ("gamma_q", "gamma_d", "log_scale"))
    assert_equal(loss_and_gradients(transformer, batch, tokens_per_batch=32), expected, 1e-12, 1e-12)


@pytest.mark.parametrize("packed", [False, True])
def test_prompts_that_are_left_out_of_the_mean(transformer, packed):
    """Pooling writes into the mask; columns with prompts of unlike length cannot be pooled together."""
    transformer[1] = Pooling(32, "mean", include_prompt=False)
    set_dropout(transformer.double().train(), 0.0)
    texts = make_texts([3, 1, 9, 7], 0), make_texts([8, 20, 2, 2], 1)
    prompts = "query: ", "a passage of the sea: "
    batch = [transformer.preprocess(one, prompt=prompt) for one, prompt in zip(texts, prompts, strict=True)]
    assert batch[0]["prompt_length"] != batch[1]["prompt_length"]
    copies = [[{n: v.clone() if torch.is_tensor(v) else v for n, v in one.items()} for one in batch] for _ in range(2)]
    expected = loss_and_gradients(transformer, copies[0])
    with packing(transformer, packed):
        assert_equal(loss_and_gradients(transformer, copies[1], tokens_per_batch=32), expected, 1e-12, 1e-12)


@pytest.mark.parametrize("packed", [False, True])
def test_above_a_frozen_trunk(transformer, tmp_path, packed):
    set_dropout(transformer.double().train(), 0.0)
    with cached_input(transformer.float(), 1, tmp_path), packing(transformer, packed):
        batch = ragged(transformer, [3, 1, 30, 7])
        expected = loss_and_gradients(transformer, batch)
        assert_equal(loss_and_gradients(transformer, batch, tokens_per_batch=32), expected, 1e-6, 1e-5)


def test_a_text_without_tokens(transformer):
    set_dropout(transformer.double().train(), 0.0)
    batch = ragged(transformer, [3, 1, 30, 7])
    batch[0]["attention_mask"][1] = 0
    batch[1]["attention_mask"][2] = 0
    expected = loss_and_gradients(transformer, batch)
    assert torch.isfinite(expected[0])
    with packed_input(transformer):
        assert_equal(loss_and_gradients(transformer, batch, tokens_per_batch=64), expected, 1e-12, 1e-12)


def test_with_gradient_checkpointing_inside(transformer):
    transformer.train()
    batch = ragged(transformer, [3, 1, 30, 7])
    expected = loss_and_gradients(transformer, batch, tokens_per_batch=64, tokens_kept=ALL)
    checkpoint_gradients(transformer)
    assert_equal(loss_and_gradients(transformer, batch, tokens_per_batch=64), expected, 0.0, 1e-6)


def test_a_static_embedding_has_no_activations(static, tmp_path):
    with cached_input(static.train(), None, tmp_path):
        batch = [static.preprocess(make_texts([3, 1, 9], seed)) for seed in (0, 1)]
        expected = loss_and_gradients(static, batch)
        assert_equal(loss_and_gradients(static, batch, tokens_per_batch=4), expected, 0.0, 0.0)


def test_padding_on_the_left(transformer):
    """Positions count from the first column, padding or not."""
    set_dropout(transformer.double().train(), 0.0)
    transformer.tokenizer.padding_side = "left"
    batch = ragged(transformer, [3, 1, 30, 7])
    assert batch[0]["attention_mask"][1, 0] == 0
    expected = loss_and_gradients(transformer, batch)
    assert_equal(loss_and_gradients(transformer, batch, tokens_per_batch=64), expected, 1e-12, 1e-12)


@pytest.mark.parametrize(("kept", "alive"), [(0, 0), (ALL, 7)])
def test_whether_activations_are_kept(transformer, kept, alive):
    """Between the forward and the backward pass."""
    transformer.train()
    made: list[weakref.ref[torch.Tensor]] = []
    feed = transformer[0].auto_model.encoder.layer[1].intermediate.dense
    feed.register_forward_hook(lambda module, args, output: made.append(weakref.ref(output)))
    loss = InfoNCELoss(transformer, "dot", tokens_per_batch=40, tokens_kept=kept)(ragged(transformer, [3, 1, 30, 7]))
    assert len(made) >= 4
    assert sum(one() is not None for one in made) == min(alive, len(made))
    loss.backward()


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=9),
    columns=st.integers(1, 3),
    budget=st.integers(1, 99),
    seed=st.integers(0, 9),
)
def test_every_text_is_in_one_micro_batch_within_the_budget(lengths, columns, budget, seed):
    random = np.random.default_rng(seed)
    batch, rows = [], []
    for _ in range(columns):
        counts = torch.from_numpy(random.permutation(lengths))
        mask = (torch.arange(int(counts.max())) < counts[:, None]).long()
        batch.append({"attention_mask": mask, "input_ids": torch.from_numpy(random.integers(1, 99, mask.shape)) * mask})
        rows += [row[:count].tolist() for row, count in zip(batch[-1]["input_ids"], counts.tolist(), strict=True)]
    found: dict[int, list[int]] = {}
    widths = []
    for part in micro_batches(batch, budget):
        features = part.features()
        assert features["input_ids"].shape == features["attention_mask"].shape == (len(part.texts), part.width)
        assert part.tokens == features["input_ids"].numel() and (part.tokens <= budget or len(part.texts) == 1)
        widths.append(part.width)
        for text, ids, mask in zip(part.texts.tolist(), features["input_ids"], features["attention_mask"], strict=True):
            assert text not in found
            found[text] = ids[mask.bool()].tolist()
    assert widths == sorted(widths, reverse=True)
    assert [found[text] for text in range(len(rows))] == rows


@pytest.mark.parametrize("kept", [0, ALL])
def test_under_distributed_data_parallel(transformer, tmp_path, kept):
    """Its forward, which synchronises buffers, is called once for all micro-batches, and each gradient sent once."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    set_dropout(transformer.double().train(), 0.0)
    transformer[0].auto_model.pooler = None  # which the loss does not use
    batch = ragged(transformer, [3, 1, 30, 7])
    expected = loss_and_gradients(transformer, batch)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(transformer)
        calls, reduced = [], []
        wrapped.register_forward_hook(lambda *given: calls.append(1))

        def reduce(state, bucket):
            reduced.append(bucket.buffer().numel())
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        wrapped.register_comm_hook(None, reduce)
        transformer.zero_grad()
        loss = InfoNCELoss(transformer, "dot", 0.02, tokens_per_batch=32, tokens_kept=kept)
        loss.model = wrapped  # as the trainer does
        value = loss([dict(features) for features in batch])
        value.backward()
        found = {name: one.grad.clone() for name, one in transformer.named_parameters() if one.grad is not None}
    finally:
        distributed.destroy_process_group()
    assert_equal((value.detach(), found), expected, 1e-12, 1e-12)
    assert len(calls) == 1
    assert sum(reduced) == sum(one.numel() for one in transformer.parameters())


def test_texts_that_cannot_be_cut(transformer):
    flattened = {"input_ids": torch.ones(1, 9), "cu_seq_lens_q": torch.tensor([0, 4, 9])}
    with pytest.raises(ConfigError, match=r"--tokens-per-batch cuts padded texts.*cu_seq_lens_q, input_ids"):
        embed_columns(transformer, [flattened], 8)
    with pytest.raises(ConfigError, match="tokens_per_batch must be a positive number"):
        InfoNCELoss(transformer, tokens_per_batch=0)


def test_on_the_processor_of_a_machine_with_another_accelerator(transformer, monkeypatch):
    """T-D2: nothing is asked of torch.mps, which has no ``device`` and here no random state either."""
    transformer.train()
    batch = ragged(transformer, [3, 1, 30, 7])
    expected = loss_and_gradients(transformer, batch, tokens_per_batch=40)
    monkeypatch.setattr(DefaultDeviceType, "_default_device_type", "mps")
    monkeypatch.delattr(torch.mps, "get_rng_state")
    assert not hasattr(torch.mps, "device")
    assert_equal(loss_and_gradients(transformer, batch, tokens_per_batch=40), expected, 0.0, 0.0)
