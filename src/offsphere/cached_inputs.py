"""Input modules that compute the part of an encoder that never changes once per text, for all variants of a run.

``CachedTokens`` keeps the tokens of a static embedding; ``FrozenTrunk`` keeps the activations of the lower layers of a
transformer. Each takes the place of the encoder's first module, so that trainer, loss and ``encode`` work unchanged.
"""

from __future__ import annotations

import copy
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import InputModule, Transformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn

from offsphere.errors import ConfigError, EncoderError
from offsphere.progress import Progress, Silent

SILENT = Silent()
TRUNK_BATCH = 32

PARITY = 1e-5
"""How far, in share of the largest activation, a split forward pass may be from the whole one."""

PROBES = ["length", "where does the length of an embedding come from, and what does a ranking make of it"]
"""What parity is checked on."""


@contextmanager
def cached_input(model: SentenceTransformer, freeze_layers: int | None, folder: Path) -> Iterator[None]:
    """Inside, the model's first module is replaced by one that keeps what never changes, where there is such a one.

    Args:
        model: Changed in place, and changed back at the end: its module, and what takes gradients.
        freeze_layers: How many layers of a transformer to freeze; None trains it whole, with nothing to keep.
        folder: Where activations are kept.

    Raises:
        ConfigError: If layers are to be frozen in an encoder that has none, or none would be left to train.
        EncoderError: If the transformer cannot be split.
    """
    original = model[0]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if freeze_layers is not None and not isinstance(original, Transformer):
        raise ConfigError(f"--freeze-layers needs a transformer; this encoder begins with {type(original).__name__}")
    try:
        if freeze_layers is not None:
            model[0] = FrozenTrunk(original, freeze_layers, folder)
        elif isinstance(original, StaticEmbedding):
            model[0] = CachedTokens(original)
        yield
    finally:
        model[0] = original
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def original_input(model: SentenceTransformer) -> Iterator[None]:
    """Inside, the model has its own first module again, so that it can be saved for others."""
    stand_in = model[0]
    model[0] = getattr(stand_in, "original", stand_in)
    try:
        yield
    finally:
        model[0] = stand_in


class CachedTokens(InputModule):
    """A static embedding that tokenises each text once.

    Args:
        static: The module whose table is trained; it is shared, not copied.
    """

    def __init__(self, static: StaticEmbedding):
        super().__init__()
        self.static = static
        self._tokens: dict[str, np.ndarray] = {}

    @property
    def original(self) -> StaticEmbedding:
        """The module that this one stands in for."""
        return self.static

    def preprocess(self, inputs: Sequence[str], prompt: str | None = None, **kwargs: Any) -> dict[str, Tensor]:
        """Token ids (tokens of all texts,) and offsets (texts,), from the cache where a text was seen before."""
        texts = [f"{prompt or ''}{text}" for text in inputs]
        self.fill(texts)
        rows = [self._tokens[text] for text in texts]
        offsets = np.cumsum([0, *(len(row) for row in rows[:-1])])
        ids = np.concatenate(rows).astype(np.int64)
        return {"input_ids": torch.from_numpy(ids), "offsets": torch.from_numpy(offsets)}

    def fill(self, texts: Iterable[str], progress: Progress = SILENT) -> None:
        """Tokenise the texts that are not in the cache yet."""
        missing = [text for text in dict.fromkeys(texts) if text not in self._tokens]
        if not missing:
            return
        done = progress.start("tokenise", len(missing))
        for start in range(0, len(missing), 1024):
            batch = missing[start : start + 1024]
            encodings = self.static.tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            for text, encoding in zip(batch, encodings, strict=True):
                self._tokens[text] = np.array(encoding.ids, np.int32)
            done(start + len(batch))

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """The static embedding of the tokens."""
        return self.static(features)

    def get_embedding_dimension(self) -> int:
        """Of the embedding."""
        return self.static.get_embedding_dimension()

    @property
    def tokenizer(self) -> Any:
        """Of the static embedding."""
        return self.static.tokenizer

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Save the static embedding itself."""
        self.static.save(output_path, *args, **kwargs)


class FrozenTrunk(InputModule):
    """A transformer that trains its upper layers on cached activations of its lower ones.

    The embeddings and the first ``layers`` layers run once per text, without dropout and in float32, and what they give
    is kept in a file beside the run. The upper layers see exactly what they would see in the whole model, which is
    checked when the trunk is made.

    Args:
        transformer: The module to split; it is shared, not copied, and its lower part stops taking gradients.
        layers: How many layers are frozen.
        folder: Where the file of activations is written; it is removed with this object.

    Raises:
        ConfigError: If the encoder has no such layer to train above.
        EncoderError: If its architecture cannot be split.
    """

    def __init__(self, transformer: Transformer, layers: int, folder: Path | None = None):
        super().__init__()
        self.transformer = transformer
        self.layers = layers
        whole = transformer.auto_model
        owner, attribute = _find_layers(whole)
        stack = getattr(owner, attribute)
        if layers >= len(stack):
            raise ConfigError(f"--freeze-layers {layers} leaves nothing to train: the encoder has {len(stack)} layers")
        # Outside the module tree, because the upper model only borrows the layers of the whole one.
        self._borrowed = (_upper(whole, owner, attribute, layers), stack[layers])
        self._file = tempfile.TemporaryFile(dir=folder)
        weakref.finalize(self, self._file.close)
        self._places: dict[str, tuple[int, Tensor]] = {}
        self._end = 0
        try:
            self._freeze()
            error = self._parity_error()
        except (AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError) as reason:
            raise _cannot_split(whole, f"its forward pass fails: {reason}") from reason
        if not error <= PARITY:
            raise _cannot_split(whole, f"the outputs differ by {error:.1e} of the largest")

    @property
    def original(self) -> Transformer:
        """The module that this one stands in for."""
        return self.transformer

    def preprocess(self, inputs: Sequence[str], prompt: str | None = None, **kwargs: Any) -> dict[str, Tensor]:
        """Padded activations (texts, tokens, width) with mask and token ids, from the cache where a text is there."""
        texts = [f"{prompt or ''}{text}" for text in inputs]
        self.fill(texts)
        rows = [self._read(text) for text in texts]
        padded = nn.utils.rnn.pad_sequence([activations for _, activations in rows], batch_first=True)
        ids = nn.utils.rnn.pad_sequence([ids for ids, _ in rows], batch_first=True)
        lengths = torch.tensor([len(ids) for ids, _ in rows])
        mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
        features = {"input_ids": ids, "attention_mask": mask, "trunk_activations": padded}
        if prompt and "prompt_length" in (alone := self.transformer.preprocess([""], prompt=prompt)):
            features["prompt_length"] = alone["prompt_length"]
        return features

    def fill(self, texts: Iterable[str], progress: Progress = SILENT) -> None:
        """Run the trunk on the texts that are not in the cache yet, in batches of like length."""
        missing = sorted({text for text in texts if text not in self._places}, key=lambda text: (len(text), text))
        if not missing:
            return
        done = progress.start("frozen layers", len(missing))
        for start in range(0, len(missing), TRUNK_BATCH):
            batch = missing[start : start + TRUNK_BATCH]
            features = self.transformer.preprocess(batch)
            with torch.no_grad():
                activations = self._trunk(features).cpu()
            for row, text in enumerate(batch):
                kept = features["attention_mask"][row].bool().cpu()
                self._write(text, features["input_ids"][row].cpu()[kept], activations[row][kept])
            done(start + len(batch))

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """The token embeddings that the upper layers make of the trunk's activations."""
        upper, _ = self._borrowed
        output = upper(inputs_embeds=features["trunk_activations"], attention_mask=features["attention_mask"])
        features["token_embeddings"] = output.last_hidden_state
        return features

    def get_embedding_dimension(self) -> int:
        """Of the token embeddings."""
        return self.transformer.get_embedding_dimension()

    @property
    def tokenizer(self) -> Any:
        """Of the transformer."""
        return self.transformer.tokenizer

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Save the whole transformer."""
        self.transformer.save(output_path, *args, **kwargs)

    def _freeze(self) -> None:
        """Freeze every parameter that the activations depend on, position biases that all layers share included."""
        parameters = [parameter for parameter in self.transformer.parameters() if parameter.requires_grad]
        activations = self._trunk(self.transformer.preprocess([PROBES[0]]))
        if not activations.requires_grad:
            return
        gradients = torch.autograd.grad(activations.sum(), parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.requires_grad_(gradient is None)

    def _trunk(self, features: dict[str, Any]) -> Tensor:
        """What goes into the first layer that is trained; the layers above it do not run."""
        _, first_trained = self._borrowed
        caught: list[Tensor] = []

        def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught.append(args[0] if args else kwargs["hidden_states"])
            raise _Caught

        was_training = self.transformer.training
        self.transformer.eval()
        handle = first_trained.register_forward_pre_hook(catch, with_kwargs=True)
        device = next(self.transformer.parameters()).device
        try:
            self.transformer(batch_to_device(features, device))
        except _Caught:
            pass
        finally:
            handle.remove()
            self.transformer.train(was_training)
        return caught[0].float()

    def _write(self, text: str, ids: Tensor, activations: Tensor) -> None:
        self._file.seek(self._end)
        self._file.write(activations.contiguous().numpy().tobytes())
        self._places[text] = (self._end, ids.int())
        self._end += activations.numel() * 4

    def _read(self, text: str) -> tuple[Tensor, Tensor]:
        start, ids = self._places[text]
        width = self.transformer.get_embedding_dimension()
        self._file.seek(start)
        activations = torch.frombuffer(bytearray(self._file.read(len(ids) * width * 4)), dtype=torch.float32)
        return ids.long(), activations.view(len(ids), width)

    @torch.no_grad()
    def _parity_error(self) -> float:
        """How far the split forward pass is from the whole one, in share of the largest, on texts of unlike length."""
        was_training = self.transformer.training
        self.transformer.eval()
        device = next(self.transformer.parameters()).device
        whole = self.transformer(batch_to_device(self.transformer.preprocess(PROBES), device))["token_embeddings"]
        split_input = batch_to_device(self.preprocess(PROBES), device)
        split = self.forward(split_input)["token_embeddings"]
        self.transformer.train(was_training)
        kept = split_input["attention_mask"].bool()
        return float((whole[kept] - split[kept]).abs().max() / whole[kept].abs().max())


class _Caught(Exception):
    """Ends a forward pass once the trunk's activations are known."""


class _Pass(nn.Module):
    """Stands in for the embeddings and gives back the activations among what it gets."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = (*args, *kwargs.values())
        return next(value for value in given if isinstance(value, Tensor) and value.is_floating_point())


def _cannot_split(whole: nn.Module, reason: str) -> EncoderError:
    return EncoderError(f"{type(whole).__name__} cannot be split exactly ({reason}); leave --freeze-layers out")


def _find_layers(whole: nn.Module) -> tuple[nn.Module, str]:
    """The module that holds the stack of layers, and the attribute it is under."""
    for parent, attribute in (("encoder", "layer"), ("transformer", "layer"), ("", "layers")):
        owner = getattr(whole, parent, None) if parent else whole
        if isinstance(getattr(owner, attribute, None), nn.ModuleList) and hasattr(whole, "embeddings"):
            return owner, attribute  # type: ignore[return-value]
    raise EncoderError(
        f"--freeze-layers does not know where the layers of {type(whole).__name__} are; it knows encoders like BERT, "
        "RoBERTa, XLM-R, MPNet, DistilBERT and ModernBERT. Leave it out to train the whole model"
    )


def _upper(whole: nn.Module, owner: nn.Module, attribute: str, layers: int) -> nn.Module:
    """A model that borrows the whole one's parts, without the frozen layers, whose embeddings pass their input on."""
    upper_stack = getattr(owner, attribute)[layers:]
    upper = _borrow(whole)
    upper._modules["embeddings"] = _Pass()
    if owner is whole:
        upper._modules[attribute] = upper_stack
    else:
        upper_owner = _borrow(owner)
        upper_owner._modules[attribute] = upper_stack
        parent = next(name for name, module in whole.named_children() if module is owner)
        upper._modules[parent] = upper_owner
    return upper


def _borrow(module: nn.Module) -> nn.Module:
    """A shallow copy whose children can be replaced without touching the original's."""
    borrowed = copy.copy(module)
    borrowed._modules = dict(module._modules)
    return borrowed
