"""Changes to an encoder before it is trained: random weights, the length limit, dropout, gradient checkpointing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offsphere.errors import ConfigError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


def randomise(model: SentenceTransformer, seed: int) -> None:
    """The same architecture with new weights, as its authors initialise it, drawn from ``seed``."""
    import torch
    from sentence_transformers.base.modules import Transformer

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for module in model:
            if isinstance(module, Transformer):
                module.auto_model.load_state_dict(type(module.auto_model)(module.auto_model.config).state_dict())
            else:
                for part in module.modules():
                    if hasattr(part, "reset_parameters"):
                        part.reset_parameters()


def limit_length(model: SentenceTransformer, max_length: int) -> None:
    """Cut every text after ``max_length`` tokens, for transformers and static embeddings alike.

    Raises:
        ConfigError: If the encoder cannot read that many tokens.
    """
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    if isinstance(model[0], StaticEmbedding):
        model[0].tokenizer.enable_truncation(max_length)
        return
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None:
        # Encoders like RoBERTa count positions from behind the one of padding.
        table = getattr(getattr(model[0].auto_model, "embeddings", None), "position_embeddings", None)
        padding = getattr(table, "padding_idx", None)
        readable = positions if padding is None else positions - padding - 1
        if max_length > readable:
            raise ConfigError(f"--max-length {max_length} is more than the {readable} tokens that this encoder reads")
    model.max_seq_length = max_length


def set_dropout(model: SentenceTransformer, probability: float) -> None:
    """Drop that share of activations in training, everywhere where the encoder drops any."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
        for name in ("attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, probability)


def checkpoint_gradients(model: SentenceTransformer) -> None:
    """Compute the activations of each layer again for its gradient and keep them no longer: a forward pass for memory.

    The gradients stay the same, dropout included. It is in force in training only.

    Raises:
        ConfigError: If the encoder has no transformer, or its transformer has no such way to train.
    """
    from sentence_transformers.base.modules import Transformer

    if not isinstance(model[0], Transformer):
        raise ConfigError(
            f"--gradient-checkpointing needs a transformer; this encoder begins with {type(model[0]).__name__}"
        )
    transformer = model[0].auto_model
    if not transformer.supports_gradient_checkpointing:
        raise ConfigError(f"--gradient-checkpointing: {type(transformer).__name__} does not support it")
    # Older versions of transformers have it under the second name alone.
    enable = getattr(transformer, "activation_checkpointing_enable", None) or transformer.gradient_checkpointing_enable
    enable({"use_reentrant": False})
