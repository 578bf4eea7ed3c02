"""LoRA: small matrices beside the weights of a transformer, trained in their place (peft)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from offsphere.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

UNUSED = r".*\bpooler\b.*"
"""Layers of BERT that no pooling of ours reads; adapters there would never get a gradient."""


def add_lora(model: SentenceTransformer, rank: int, seed: int = 0) -> None:
    """Freeze the transformer and put adapters on all its linear layers, in place; embeddings stay as they are.

    The adapters scale by 2 (alpha is twice the rank) and start with a product of zero.

    Args:
        model: An encoder that begins with a transformer.
        rank: Of the product of two matrices that each adapter is.
        seed: Of the one that does not start at zero.

    Raises:
        ConfigError: If the encoder has no transformer.
        UsageError: If peft is not installed.
    """
    import torch
    from sentence_transformers.base.modules import Transformer

    if not isinstance(model[0], Transformer):
        raise ConfigError(f"--lora needs a transformer; this encoder begins with {type(model[0]).__name__}")
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UsageError("--lora needs peft; type: pip install 'offsphere[lora]'") from error
    transformer = model[0].auto_model
    unused = UNUSED if any("pooler" in name for name, _ in transformer.named_modules()) else None
    adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", exclude_modules=unused)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(adapters, transformer)


@contextmanager
def merged_lora(model: SentenceTransformer) -> Iterator[None]:
    """Inside, the adapters are part of the weights and gone as such, so that it can be saved for others.

    Afterwards weights and adapters are bitwise as before: other trainings start from the same weights.

    Args:
        model: Any encoder; nothing happens to one without adapters.
    """
    owner: Any = getattr(model[0], "auto_model", None)
    if not hasattr(owner, "peft_config"):
        yield
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[tuple[str, Any]] = [
        (name, module) for name, module in owner.named_modules() if isinstance(module, BaseTunerLayer)
    ]
    kept = {}
    try:
        for name, layer in layers:
            kept[name] = layer.get_base_layer().weight.data
            layer.get_base_layer().weight.data = kept[name].clone()
            layer.merge(safe_merge=True)
            owner.set_submodule(name, layer.get_base_layer())
        yield
    finally:
        for name, layer in layers:
            if name in kept:
                owner.set_submodule(name, layer)
                layer.get_base_layer().weight.data = kept[name]
                layer.merged_adapters.clear()
