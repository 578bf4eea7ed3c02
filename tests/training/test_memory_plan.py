"""What the memory plan says a step needs is what it takes, and what it picks fits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from offsphere.cached_inputs import cached_input
from offsphere.data import TrainingPairs
from offsphere.errors import TrainingError
from offsphere.losses import InfoNCELoss
from offsphere.packed import packed_input
from offsphere.training import memory_plan
from offsphere.training.memory_plan import TOKENS, out_of_memory_explained, plan_memory

LARGE = 2**50
WORDS = [f"topic{t}word{w}" for t in range(12) for w in range(6)]


@pytest.fixture
def uneven() -> TrainingPairs:
    """Short queries, and documents of 1 to 30 words."""
    random = np.random.default_rng(0)
    n = 64
    texts = [[" ".join(random.choice(WORDS, k)) for k in random.integers(1, most, n)] for most in (4, 31)]
    ids = [[f"{side}{i}" for i in range(n)] for side in "qd"]
    relevant = {q: frozenset([d]) for q, d in zip(*ids, strict=True)}
    return TrainingPairs("uneven", texts[0], texts[1], [], ids[0], ids[1], [], relevant)


def held(model, pairs, **cache) -> int:
    """Bytes that the graph of the embeddings of all pairs holds."""
    weights = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    found = {}

    def hold(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    columns = [model.preprocess(texts) for texts in (pairs.queries, pairs.positives)]
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        loss = InfoNCELoss(model.train(), "dot", **cache)(columns)
    assert loss.requires_grad
    return sum(found.values())


@pytest.mark.parametrize("packed", [True, False])
def test_activations_are_those_of_the_batch(bert_model, uneven, packed):
    with packed_input(bert_model) if packed else torch.enable_grad():
        plan = plan_memory(bert_model, uneven, len(uneven))
        cache = {} if packed else {"tokens_per_batch": plan.tokens_per_batch, "tokens_kept": plan.tokens_kept}
        assert plan.activations == pytest.approx(held(bert_model, uneven, **cache), rel=0.15)
    counted = sum(int(bert_model.preprocess(one)["attention_mask"].sum()) for one in (uneven.queries, uneven.positives))
    assert plan.tokens == counted


def test_dropout_and_frozen_layers_are_seen(bert_model, uneven, tmp_path):
    whole = plan_memory(bert_model, uneven, 32)
    with cached_input(bert_model, 1, tmp_path):
        frozen = plan_memory(bert_model, uneven, 32)
    assert 0.3 * whole.activations < frozen.activations < 0.7 * whole.activations
    for module in bert_model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert plan_memory(bert_model, uneven, 32).activations < 0.95 * whole.activations


def test_measuring_leaves_no_trace(bert_model, uneven):
    state = torch.get_rng_state()
    plan_memory(bert_model.eval(), uneven, 32)
    assert torch.equal(torch.get_rng_state(), state) and not bert_model.training
    assert all(parameter.grad is None for parameter in bert_model.parameters())


def test_what_it_picks_depends_on_the_memory(bert_model, uneven):
    batch = 512
    with packed_input(bert_model):
        ample = plan_memory(bert_model, uneven, batch, total=LARGE)
        assert ample.tokens_per_batch is None and ample.method == "one graph"
        methods = []
        fixed = ample.needed - ample.activations
        for share in (0.9, 0.5, 0.01):
            total = round((fixed + share * ample.activations) / memory_plan.SHARE["cpu"])
            plan = plan_memory(bert_model, uneven, batch, total=total)
            methods.append(plan)
            assert plan.needed <= fixed + share * ample.activations * 1.01 or share == 0.01
        assert [plan.tokens_per_batch for plan in methods] == sorted(
            [p.tokens_per_batch for p in methods], reverse=True
        )
        kept = [plan.tokens_kept / plan.tokens for plan in methods]
        assert 1 > kept[0] > kept[1] > kept[2] == 0
        assert "gradient cache" in methods[0].method and "of the activations kept" in methods[0].method
        assert methods[2].method.endswith(f"micro-batches of {methods[2].tokens_per_batch} tokens")
    padded = plan_memory(bert_model, uneven, batch, total=LARGE)
    assert padded.tokens_per_batch == TOKENS["cpu"] and "activations kept" in padded.method


def test_the_same_machine_gives_the_same_plan(bert_model, uneven, monkeypatch):
    """Whatever is free at the moment, as dropout is drawn by micro-batch; it is told where that is too little."""
    plans = []
    for free in (2**40, 2**10):
        monkeypatch.setattr(memory_plan, "memory", lambda device, free=free: (2**34, free))
        plans.append(plan_memory(bert_model, uneven, 64))
    assert [(p.tokens_per_batch, p.tokens_kept) for p in plans[:1]] == [
        (p.tokens_per_batch, p.tokens_kept) for p in plans[1:]
    ]
    assert plans[0].warning is None
    assert "--tokens-per-batch 2048 or a smaller --batch-size" in str(plans[1].warning)


def test_a_number_is_the_users(bert_model, uneven):
    plan = plan_memory(bert_model, uneven, 64, 100, total=LARGE)
    assert (plan.tokens_per_batch, plan.tokens_kept) == (100, 0)
    assert plan.needed < plan_memory(bert_model, uneven, 64, total=LARGE).needed


def test_logits_outgrow_the_encoder(bert_model, static_model, uneven):
    """T-D4: a tiled loss alone helps only where the logits dominate."""
    small, large = (plan_memory(bert_model, uneven, batch) for batch in (64, 2**15))
    assert not small.tiled and small.logits < small.activations and "plain loss" in str(small)
    assert large.tiled and large.logits == 2**30 * 16 and "tiled loss" in str(large)
    assert large.needed < large.logits
    static = plan_memory(static_model, uneven, 4096)
    assert static.activations == 0 and static.tokens_per_batch is None and static.tiled
    assert plan_memory(bert_model, uneven, 64, processes=4).logits == 4 * small.logits


def test_activations_and_logits_that_both_outgrow_the_memory(bert_model, uneven):
    """T-D4: the tiled loss alone would leave the activations, and the gradient cache alone the logits."""
    batch = 4096
    with packed_input(bert_model):
        ample = plan_memory(bert_model, uneven, batch, total=LARGE)
        assert (ample.method, ample.tiled) == ("one graph", True)
        fixed = ample.needed - ample.activations
        total = round((fixed + ample.activations / 10) / memory_plan.SHARE["cpu"])
        both = plan_memory(bert_model, uneven, batch, total=total)
    assert both.tiled and both.tokens_per_batch is not None and both.tokens_kept < both.tokens
    assert "gradient cache" in str(both) and str(both).endswith("tiled loss")
    room = total * memory_plan.SHARE["cpu"]
    assert both.needed < room * 1.01 < min(both.activations, both.logits)
    assert (both.activations, both.logits) == (ample.activations, ample.logits)


def test_what_is_printed(bert_model, uneven):
    text = str(plan_memory(bert_model, uneven, 64, total=LARGE))
    assert text.startswith("encoder ") and "MB of activations for" in text and "logits 0.1 MB" in text


class Overflow(nn.Module):
    def forward(self, features):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")


@pytest.mark.parametrize(
    ("tokens", "advice"),
    [(None, "--tokens-per-batch 16384"), (4096, r"4096 tokens\. Type --tokens-per-batch 2048")],
)
def test_out_of_memory_says_what_to_type(bert_model, uneven, tokens, advice):
    bert_model.append(Overflow())
    columns = [bert_model.preprocess(texts) for texts in (uneven.queries, uneven.positives)]
    with (
        pytest.raises(TrainingError, match=rf"batch of 64 pairs.*{advice}.*--batch-size 32.*Tried to allocate 2\.00"),
        out_of_memory_explained(64, tokens),
    ):
        InfoNCELoss(bert_model, tokens_per_batch=tokens)(columns)


def test_the_memory_of_the_machine_and_other_errors():
    with pytest.raises(TrainingError, match=r"the machine has too little memory.*--tokens-per-batch 2048"):
        with out_of_memory_explained(64, None):
            torch.empty(2**52)
    with pytest.raises(RuntimeError, match="something else"), out_of_memory_explained(64, None):
        raise RuntimeError("something else")
