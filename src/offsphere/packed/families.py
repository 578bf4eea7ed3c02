"""Which transformers have a packed forward pass, and where their parts are.

The parts are the model's own modules, never copies: what trains them, saves them or wraps them does so here as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Layer:
    """One layer with its norms behind its residual sums: attention, then a feed-forward network.

    Attributes:
        attention_dropout: On the attention weights.
        output_dropout: On the attention's output before its residual sum; None where the family has none.
        down_dropout: On the feed-forward network's output before its residual sum.
    """

    query: nn.Module
    key: nn.Module
    value: nn.Module
    attention_dropout: nn.Dropout
    output: nn.Module
    output_dropout: nn.Module | None
    output_norm: nn.Module
    up: nn.Module
    activation: Callable[[Tensor], Tensor]
    down: nn.Module
    down_dropout: nn.Module
    down_norm: nn.Module


@dataclass(frozen=True)
class Family:
    """How the transformers of one architecture are computed.

    Attributes:
        layers: Of a model, from the lowest on.
        token_types: Whether its embeddings take token types.
        counts_tokens: Whether positions count the tokens that are not padding, from behind the padding's own index on;
            they are columns otherwise.
        bias: Of a model and a length: what is added to the attention scores of every layer, (heads, length, length).
    """

    layers: Callable[[PreTrainedModel], list[Layer]]
    token_types: bool = False
    counts_tokens: bool = False
    bias: Callable[[PreTrainedModel, int], Tensor] | None = None

    def positions(self, model: PreTrainedModel, token_ids: Tensor) -> Tensor:
        """The position (texts, longest) of each token in padded token ids of that shape."""
        if not self.counts_tokens:
            return torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
        padding = model.embeddings.padding_idx
        real = token_ids.ne(padding)
        return real.cumsum(1) * real + padding


def find_family(model: PreTrainedModel) -> Family | None:
    """The family of a model of the transformers library; None where its class is not among those known."""
    if not type(model).__module__.startswith("transformers.models."):
        return None
    return FAMILIES.get(type(model).__name__)


def _bert_layers(model: PreTrainedModel) -> list[Layer]:
    return [
        Layer(
            query=layer.attention.self.query,
            key=layer.attention.self.key,
            value=layer.attention.self.value,
            attention_dropout=layer.attention.self.dropout,
            output=layer.attention.output.dense,
            output_dropout=layer.attention.output.dropout,
            output_norm=layer.attention.output.LayerNorm,
            up=layer.intermediate.dense,
            activation=layer.intermediate.intermediate_act_fn,
            down=layer.output.dense,
            down_dropout=layer.output.dropout,
            down_norm=layer.output.LayerNorm,
        )
        for layer in model.encoder.layer
    ]


def _mpnet_layers(model: PreTrainedModel) -> list[Layer]:
    return [
        Layer(
            query=layer.attention.attn.q,
            key=layer.attention.attn.k,
            value=layer.attention.attn.v,
            attention_dropout=layer.attention.attn.dropout,
            output=layer.attention.attn.o,
            output_dropout=layer.attention.dropout,
            output_norm=layer.attention.LayerNorm,
            up=layer.intermediate.dense,
            activation=layer.intermediate.intermediate_act_fn,
            down=layer.output.dense,
            down_dropout=layer.output.dropout,
            down_norm=layer.output.LayerNorm,
        )
        for layer in model.encoder.layer
    ]


def _mpnet_bias(model: PreTrainedModel, length: int) -> Tensor:
    """It depends on how far two tokens are apart, so that a shorter text needs the corner of a longer one's."""
    weights = model.encoder.relative_attention_bias.weight
    return model.encoder.compute_position_bias(weights.new_empty(1, length, 1))[0]


def _distilbert_layers(model: PreTrainedModel) -> list[Layer]:
    return [
        Layer(
            query=layer.attention.q_lin,
            key=layer.attention.k_lin,
            value=layer.attention.v_lin,
            attention_dropout=layer.attention.dropout,
            output=layer.attention.out_lin,
            output_dropout=None,
            output_norm=layer.sa_layer_norm,
            up=layer.ffn.lin1,
            activation=layer.ffn.activation,
            down=layer.ffn.lin2,
            down_dropout=layer.ffn.dropout,
            down_norm=layer.output_layer_norm,
        )
        for layer in model.transformer.layer
    ]


_BERT = Family(_bert_layers, token_types=True)
_ROBERTA = Family(_bert_layers, token_types=True, counts_tokens=True)

FAMILIES = {
    "BertModel": _BERT,
    "RobertaModel": _ROBERTA,
    "XLMRobertaModel": _ROBERTA,
    "CamembertModel": _ROBERTA,
    "MPNetModel": Family(_mpnet_layers, counts_tokens=True, bias=_mpnet_bias),
    "DistilBertModel": Family(_distilbert_layers),
}
"""By the class of the model in the transformers library."""
