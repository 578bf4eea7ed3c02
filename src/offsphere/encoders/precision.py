"""The precision that an encoder computes in; what it gives, and every length and score, is float32 or better."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, get_args

from offsphere.errors import ConfigError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Precision = Literal["float32", "bf16", "fp16"]


@contextmanager
def computing_in(model: SentenceTransformer, precision: Precision) -> Iterator[None]:
    """Inside, the encoder computes in that precision under autocast, in training and in ``encode``.

    Weights stay float32. The embedding leaves the model as float32, so that its length, the scores and the loss are
    computed as ever: in half precision the squares of a length overflow, and many scores tie.

    Args:
        model: Any encoder; its ``forward`` is another one inside, and the same as before afterwards.
        precision: ``float32`` changes nothing. ``fp16`` needs a scaled loss in training, which the trainer gives it.

    Raises:
        ConfigError: If the model's device has no such arithmetic.
    """
    check_precision(model.device.type, precision)
    if precision == "float32":
        yield
        return
    before = vars(model).get("forward")
    model.forward = _Autocast(model, before, precision)
    try:
        yield
    finally:
        # Not "delete what was set": the trainer wraps the forward in its own way and leaves it so.
        vars(model).pop("forward", None)
        if before is not None:
            model.forward = before


def check_precision(device: str, precision: str) -> None:
    """Refuse a precision that the kind of device cannot compute in.

    Raises:
        ConfigError: With the one to use instead.
    """
    import torch

    if precision not in get_args(Precision):
        raise ConfigError(f"--precision is one of {', '.join(get_args(Precision))}; found {precision!r}")
    if precision == "fp16" and device == "cpu":
        raise ConfigError(
            "--precision fp16 needs a GPU: its loss must be scaled, and a processor computes it no faster. "
            "Type --precision bf16, or leave it out"
        )
    if precision == "bf16" and device == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError("--precision bf16: this GPU does not compute in it; type --precision fp16")


class _Autocast:
    """A model's forward pass under autocast; an object and not a closure, so that copies of the model copy it too."""

    def __init__(self, model: SentenceTransformer, before: Any, precision: str):
        self.model = model
        self.before = before
        self.precision = precision

    def __call__(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        import torch

        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float16
        with torch.autocast(self.model.device.type, dtype=dtype):
            if self.before is not None:
                features = self.before(features, **kwargs)
            else:
                features = type(self.model).forward(self.model, features, **kwargs)
        features["sentence_embedding"] = features["sentence_embedding"].float()
        return features
