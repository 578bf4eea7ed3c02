"""How much memory a training step needs for activations and for logits, and which way of computing it fits.

Activations are measured, not modelled: a few texts go through the encoder as it is (packed or padded, with dropout,
frozen layers, adapters), and what its graph holds is counted. That grows with tokens, and with tokens times length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import psutil
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import RandContext
from sentence_transformers.util import batch_to_device
from torch import Tensor

from offsphere.data import TrainingPairs
from offsphere.errors import TrainingError
from offsphere.gradient_cache import cut
from offsphere.losses import TILED_FROM
from offsphere.packed import is_packed
from offsphere.tiled_loss import TILE

SAMPLE = 128
"""Pairs whose tokens are counted."""
MEASURED = 2
"""Texts whose activations are counted, at each of two lengths."""
SHARE = {"cpu": 0.5, "cuda": 0.8}
"""Of all memory: what activations may take. Not of the memory that is free now, since the same command is to train
the same way each time, and the draw of dropout depends on the micro-batches."""
TOKENS = {"cpu": 2048, "cuda": 16384}
"""Of a micro-batch. On a CPU the speed is flat from 1k on and memory grows; a GPU wants more at once."""
OPTIMIZER = 3
"""Copies of the trained weights beside the weights: gradients and AdamW's two moments."""
LOGITS = 4
"""Copies of the (queries, documents) scores that cross_entropy and its backward pass hold, where it is not tiled."""
KEEP_ALL = 2**62


@dataclass(frozen=True)
class MemoryPlan:
    """How a step is computed, and what it was decided from; as a string, for a person to read.

    Attributes:
        tokens: Of a batch, mean over a sample of the pairs, without padding.
        activations: Bytes of the encoder's activations for a batch, if all are kept.
        logits: Bytes of the loss, if its matrix is held.
        tiled: Whether the loss is computed without its matrix.
        total: Bytes of memory that the device has.
        free: Bytes of it that are free now.
        needed: Bytes that this way takes beside the weights.
        tokens_per_batch: The most tokens in a micro-batch; None for all texts of a column at once.
        tokens_kept: Of how many tokens the activations are kept.
    """

    tokens: int
    activations: int
    logits: int
    tiled: bool
    total: int
    free: int
    needed: int
    tokens_per_batch: int | None
    tokens_kept: int

    @property
    def method(self) -> str:
        """One graph, kept micro-batches, or the gradient cache and the share of activations that it keeps."""
        if self.tokens_per_batch is None:
            return "one graph"
        parts = f"micro-batches of {self.tokens_per_batch} tokens"
        if self.tokens_kept >= self.tokens:
            return f"{parts}, activations kept"
        kept = f", {self.tokens_kept / self.tokens:.0%} of the activations kept" if self.tokens_kept else ""
        return f"gradient cache, {parts}{kept}"

    def __str__(self) -> str:
        loss = "tiled loss" if self.tiled else "plain loss"
        return (
            f"encoder {_size(self.activations)} of activations for {self.tokens} tokens a batch, logits "
            f"{_size(self.logits)}; {_size(self.total)} in all, {_size(self.free)} free: {self.method}, {loss}"
        )

    @property
    def warning(self) -> str | None:
        """What to type where less is free than the step takes."""
        if self.needed <= self.free:
            return None
        return (
            f"a step takes about {_size(self.needed)} and {_size(self.free)} are free; stop other programs, or give "
            f"--tokens-per-batch {self.tokens_per_batch or TOKENS['cpu']} or a smaller --batch-size"
        )


def plan_memory(
    model: SentenceTransformer,
    pairs: TrainingPairs,
    batch_size: int,
    tokens_per_batch: int | Literal["auto"] = "auto",
    processes: int = 1,
    total: int | None = None,
) -> MemoryPlan:
    """The way of computing a step that fits into the memory and repeats the least work.

    Args:
        model: As it is trained: packed or not, on its device, with its dropout.
        pairs: What is trained on.
        batch_size: Pairs a batch, of one process.
        tokens_per_batch: ``auto`` to decide; a number to use the gradient cache with micro-batches of so many tokens,
            whatever the memory.
        processes: That train together: each scores its queries against the documents of all.
        total: Bytes of memory to plan with; those of the device by default.
    """
    found_total, free = memory(model.device)
    kind = model.device.type if model.device.type in SHARE else "cpu"
    features = _tokenised(model, pairs)
    columns = [_lengths(column) for column in features]
    lengths = np.sort(np.concatenate(columns))[::-1]
    lengths = lengths[np.arange(n := batch_size * len(columns)) * len(lengths) // n]  # as a batch has them
    cost = _Cost.measured(model, max(features, key=lambda column: _lengths(column).max()))

    documents = batch_size * (len(columns) - 1) * processes
    tiled = batch_size * documents >= TILED_FROM
    logits = LOGITS * 4 * batch_size * documents
    fixed = OPTIMIZER * sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    fixed += LOGITS * 4 * min(TILE, batch_size) * documents if tiled else logits
    room = SHARE[kind] * (total or found_total) / (processes if kind == "cpu" else 1) - fixed

    if tokens_per_batch == "auto":
        per_batch, kept, activations, needed = _choose(lengths, cost, is_packed(model), room, TOKENS[kind])
    else:
        of_parts = _bytes_of_parts(lengths, cost, is_packed(model), tokens_per_batch)
        per_batch, kept, activations, needed = tokens_per_batch, 0, sum(of_parts), max(of_parts)
    return MemoryPlan(
        tokens=int(lengths.sum()),
        activations=round(activations),
        logits=logits,
        tiled=tiled,
        total=found_total,
        free=free,
        needed=round(fixed + needed),
        tokens_per_batch=per_batch,
        tokens_kept=kept,
    )


def _choose(
    lengths: np.ndarray, cost: _Cost, packed: bool, room: float, per_batch: int
) -> tuple[int | None, int, float, float]:
    """Tokens of a micro-batch, at most those proposed; tokens kept; bytes of all activations; bytes of those kept."""
    longest = int(lengths[0])
    whole = float(cost.of(lengths).sum())
    if whole == 0 or (packed and whole <= room):
        return None, 0, whole, whole
    while per_batch > 2 * longest and cost.of_tokens(per_batch, longest) > room / 2:
        per_batch //= 2
    of_parts = _bytes_of_parts(lengths, cost, packed, per_batch)
    activations, largest = sum(of_parts), max(of_parts)
    if activations <= room:
        return per_batch, KEEP_ALL, activations, activations
    fits = int((np.cumsum(of_parts) <= room - largest).sum())
    kept = list(cut(lengths.tolist(), per_batch))[:fits]
    tokens = sum((part.stop - part.start) * int(lengths[part.start]) for part in kept)
    return per_batch, tokens, activations, largest + sum(of_parts[:fits])


def _bytes_of_parts(lengths: np.ndarray, cost: _Cost, packed: bool, per_batch: int) -> list[float]:
    """Of each micro-batch, whose texts are padded to its longest unless they are packed."""
    parts = (lengths[part] for part in cut(lengths.tolist(), per_batch))
    return [float(cost.of(part).sum() if packed else len(part) * cost.of(part[0])) for part in parts]


def memory(device: torch.device) -> tuple[int, int]:
    """(all, free) bytes of a GPU, or of the machine."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, free
    found = psutil.virtual_memory()
    return found.total, found.available


@contextmanager
def out_of_memory_explained(batch_size: int, tokens_per_batch: int | None) -> Iterator[None]:
    """Inside, running out of memory is a ``TrainingError`` that says what to type.

    Args:
        batch_size: Pairs a batch.
        tokens_per_batch: In force; None without micro-batches.

    Raises:
        TrainingError: In place of the error of torch.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        is_gpu = isinstance(error, torch.OutOfMemoryError)
        if not is_gpu and not isinstance(error, MemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        device = "cuda" if is_gpu else "cpu"
        fewer = TOKENS[device] if tokens_per_batch is None else max(1, tokens_per_batch // 2)
        in_force = "" if tokens_per_batch is None else f" in micro-batches of {tokens_per_batch} tokens"
        raise TrainingError(
            f"{'the GPU' if is_gpu else 'the machine'} has too little memory for a batch of {batch_size} pairs"
            f"{in_force}. Type --tokens-per-batch {fewer}, which changes no gradient, or --batch-size "
            f"{max(2, batch_size // 2)}, which leaves each query fewer negatives. Torch says: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
        ) from error


def _tokenised(model: SentenceTransformer, pairs: TrainingPairs) -> list[dict[str, Any]]:
    """The features of a sample of the pairs, column by column."""
    sample = pairs.sample(min(SAMPLE, len(pairs)))
    columns = ("query", sample.queries), *(("document", texts) for texts in (sample.positives, *sample.negatives))
    return [model.preprocess(texts, prompt=model.prompts.get(side)) for side, texts in columns]


def _lengths(features: dict[str, Any]) -> np.ndarray:
    """Tokens of each text, without padding."""
    if "attention_mask" in features:
        return features["attention_mask"].sum(1).cpu().numpy()
    return np.diff([*features["offsets"].tolist(), len(features["input_ids"])])


@dataclass(frozen=True)
class _Cost:
    """Bytes of activations: of a token, and of a token and another of its text (attention)."""

    token: float
    pair: float

    @classmethod
    def measured(cls, model: SentenceTransformer, features: dict[str, Any]) -> _Cost:
        """From the longest and the middle one of some texts; 0 where an encoder has no mask, and so no layers."""
        if "attention_mask" not in features:
            return cls(0.0, 0.0)
        by_length = _lengths(features).argsort()
        rows = by_length[-1], by_length[len(by_length) // 2]
        (length, bytes_of), (other, bytes_of_other) = (_graph_bytes(model, features, int(row)) for row in rows)
        pair = 0.0
        if length > other:
            pair = max(0.0, (bytes_of / length - bytes_of_other / other) / (length - other))
        return cls(bytes_of / length - pair * length, pair)

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """Of texts with so many tokens."""
        return self.token * lengths + self.pair * np.square(lengths, dtype=float)

    def of_tokens(self, tokens: int, length: int) -> float:
        """Of so many tokens of texts of one length."""
        return tokens * (self.token + self.pair * length)


def _graph_bytes(model: SentenceTransformer, features: dict[str, Any], row: int) -> tuple[int, float]:
    """Tokens of a text, and bytes that the graph of its embedding holds; weights are not counted."""
    mask = features["attention_mask"]
    kept = mask[row].bool()
    same: dict[str, Any] = {}
    for name, values in features.items():
        if isinstance(values, Tensor) and values.shape[:2] == mask.shape:
            text = values[row][kept]
            same[name] = text.expand(MEASURED, *text.shape).clone()
        elif not isinstance(values, Tensor) or name == "prompt_length":
            same[name] = values
        else:
            same[name] = values[[row] * MEASURED]
    weights = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    held: dict[int, int] = {}

    def hold(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # keeps the storage; the tensor itself would keep its graph for ever

    training = model.training
    ids = same["input_ids"].to(model.device)
    try:
        with (
            torch.enable_grad(),
            RandContext(ids),
            torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor),
        ):
            model.train()(batch_to_device(same, model.device))
    finally:
        model.train(training)
    return int(kept.sum()), sum(held.values()) / MEASURED


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
