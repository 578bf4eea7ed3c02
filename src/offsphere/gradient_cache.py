"""Embeddings of a batch from micro-batches whose activations are not kept, but computed again for the backward pass.

GradCache (Gao et al. 2021, arXiv 2101.06983): all texts are embedded without keeping activations, the loss is
differentiated down to the embeddings, and each micro-batch then runs again, with the random state and the autocast it
first ran with, to take the gradient from there to the weights. Here every micro-batch is a checkpoint of
``torch.utils.checkpoint`` under one ordinary graph. So whatever stands above the embeddings needs no care of its own
(learned scalars, scaled gradients, several processes), and both passes run the same kernels. All columns share the
micro-batches, which are sorted by length, so that little of them is padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, groupby, repeat
from typing import Any

import torch
from sentence_transformers.base.losses.gradcache import RandContext
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from offsphere.errors import ConfigError

Features = dict[str, Any]


def embed_columns(
    model: nn.Module, columns: Sequence[Features], tokens_per_batch: int | None, tokens_kept: int = 0
) -> list[Tensor]:
    """The embeddings (texts, n) of each column, in the graph.

    Args:
        model: A sentence-transformers model, or DistributedDataParallel around one.
        columns: Tokenised texts, one mapping a column.
        tokens_per_batch: The most tokens in a micro-batch, padding counted; a longer text stands alone. None embeds
            each column at once and keeps all activations; so does a static embedding, which has none.
        tokens_kept: Activations of micro-batches with so many tokens in all are kept, those of the others are not.

    Raises:
        ConfigError: If texts are flattened (flash attention), so that they cannot be cut into micro-batches.
    """
    if tokens_per_batch is None or all("offsets" in features for features in columns):
        return [model(features)["sentence_embedding"] for features in columns]
    # One call alone goes through the wrapper of several processes: each call synchronises buffers, and processes have
    # unlike numbers of micro-batches. The gradients reach its hooks once, summed over all micro-batches.
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    models = chain([model], repeat(inner))

    def embed(part: MicroBatch) -> Tensor:
        return next(models)(part.features())["sentence_embedding"]

    def embed_twice(part: MicroBatch) -> Tensor:
        # RandContext, as torch's own way of keeping the random state does not know that of every device.
        def contexts() -> tuple[Any, Any]:
            return nullcontext(), RandContext(part.texts)

        return checkpoint(embed, part, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    embeddings, texts = [], []
    for part in micro_batches(columns, tokens_per_batch):
        tokens_kept -= part.tokens
        embeddings.append(embed(part) if tokens_kept >= 0 else embed_twice(part))
        texts.append(part.texts)
    in_order = torch.cat(embeddings).index_select(0, torch.cat(texts).argsort())
    return list(in_order.split([len(features["attention_mask"]) for features in columns]))


@dataclass(frozen=True)
class MicroBatch:
    """Texts of one or several columns.

    Attributes:
        columns: That they are taken from.
        texts: (texts,) their numbers, counted through the columns of the batch, ascending.
        width: Tokens of the longest.
    """

    columns: Sequence[_Column]
    texts: Tensor
    width: int

    @property
    def tokens(self) -> int:
        """Padding counted."""
        return len(self.texts) * self.width

    def features(self) -> Features:
        """The texts as one mapping, padded to the longest; made anew at each call, as modules write into it."""
        parts = [column.take(self.texts, self.width) for column in self.columns]
        merged = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return merged | self.columns[0].of_column


def micro_batches(columns: Sequence[Features], tokens_per_batch: int) -> Iterator[MicroBatch]:
    """All texts of all columns, the longest first: what does not fit into the memory fails at once.

    Columns share micro-batches unless they differ in more than their texts, such as in the length of their prompt.
    """
    firsts = [0]
    for features in columns:
        if "attention_mask" not in features or "cu_seq_lens_q" in features:
            raise ConfigError(
                f"--tokens-per-batch cuts padded texts, and the encoder gives {', '.join(sorted(features))}; leave it "
                "out, or open the encoder without flash attention"
            )
        firsts.append(firsts[-1] + len(features["attention_mask"]))
    described = sorted((_Column.of(*one) for one in zip(firsts[:-1], columns, strict=True)), key=lambda c: c.kind)
    for _, group in groupby(described, key=lambda column: column.kind):
        alike = list(group)
        lengths, order = torch.cat([column.lengths for column in alike]).cpu().sort(descending=True, stable=True)
        texts = torch.cat([column.texts for column in alike])[order.to(alike[0].texts.device)]
        for part in cut(lengths.tolist(), tokens_per_batch):
            yield MicroBatch(alike, texts[part].sort().values, int(lengths[part.start]))


def cut(lengths: Sequence[int], tokens_per_batch: int) -> Iterator[slice]:
    """Which texts make a micro-batch of at most that many tokens, padding counted, or are alone in one.

    Args:
        lengths: Of the texts, the longest first.
        tokens_per_batch: Positive.
    """
    start = 0
    while start < len(lengths):
        end = min(start + max(1, tokens_per_batch // int(lengths[start])), len(lengths))
        yield slice(start, end)
        start = end


@dataclass(frozen=True)
class _Column:
    """The features of a column, by what they belong to.

    Attributes:
        first: The number of its first text.
        of_token: (texts, tokens, ...).
        of_text: (texts, ...).
        of_column: All others.
    """

    first: int
    of_token: dict[str, Tensor]
    of_text: dict[str, Tensor]
    of_column: Features

    @classmethod
    def of(cls, first: int, features: Features) -> _Column:
        shape = features["attention_mask"].shape
        column = cls(first, {}, {}, {})
        for name, value in features.items():
            if not isinstance(value, Tensor) or name == "prompt_length" or value.shape[:1] != shape[:1]:
                column.of_column[name] = value
            elif value.shape[:2] == shape:
                column.of_token[name] = value
            else:
                column.of_text[name] = value
        return column

    @property
    def kind(self) -> str:
        """Equal where columns can be merged."""
        rows = [(name, value.shape[2:]) for name, value in self.of_token.items()]
        rows += [(name, value.shape[1:]) for name, value in self.of_text.items()]
        return repr((sorted(rows), sorted(self.of_column.items())))

    @property
    def texts(self) -> Tensor:
        """The numbers of its texts."""
        mask = self.of_token["attention_mask"]
        return torch.arange(self.first, self.first + len(mask), device=mask.device)

    @property
    def lengths(self) -> Tensor:
        """(texts,) how many tokens of each are to be kept: up to the last that is no padding, at least one."""
        mask = self.of_token["attention_mask"]
        return (mask.ne(0) * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1).clamp(min=1)

    def take(self, texts: Tensor, width: int) -> dict[str, Tensor]:
        """The rows of those texts that are its own, cut or padded to the width."""
        rows = texts[(texts >= self.first) & (texts < self.first + len(self.of_token["attention_mask"]))] - self.first
        taken = {name: values.index_select(0, rows) for name, values in self.of_text.items()}
        for name, values in self.of_token.items():
            cut = values[:, :width].index_select(0, rows)
            taken[name] = nn.functional.pad(cut, [0, 0] * (cut.ndim - 2) + [0, width - cut.shape[1]])
        return taken
