"""The lengths of whatever gives or holds embeddings: a model, a folder, an array."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offsphere.diagnosis.subject import open_bare
from offsphere.encoders import Side, encode, model_fingerprint, token_limit
from offsphere.encoding.embeddings import Lengths, open_embeddings
from offsphere.encoding.manifest import FILE
from offsphere.encoding.texts import Texts
from offsphere.errors import DataError, UsageError
from offsphere.packed.packing import PROBES
from offsphere.similarity import norms


@dataclass(frozen=True)
class Description:
    """What there is to say.

    Attributes:
        kind: ``model``, ``embeddings`` or ``array``.
        lengths: Of the embeddings, Normalize modules of a model taken off.
        facts: Everything else, by name.
    """

    kind: str
    lengths: Lengths
    facts: dict[str, Any]

    @property
    def lines(self) -> list[str]:
        """For a person to read."""
        return [f"{name.replace('_', ' ')}: {_shown(value)}" for name, value in self.facts.items()] + [
            str(self.lengths)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"kind": self.kind, **self.facts, "lengths": self.lengths.to_dict()}


def describe(target: str, data: str | None = None, side: Side | None = None) -> Description:
    """The lengths of an array in a .npy file, of a folder that ``offsphere encode`` wrote, or of a model's embeddings.

    Args:
        target: Which of them.
        data: For a model: a collection or file of which 256 texts are encoded; a few built-in ones if None.
        side: Of the texts of a model, ``document`` if None; of a folder with both.

    Raises:
        DataError: If a file is no array of embeddings.
        EmbeddingsError: If a folder has none.
        EncoderError: If there is no such model.
    """
    path = Path(target).expanduser()
    if data is not None and (path.suffix == ".npy" or (path / FILE).is_file()):
        raise UsageError("--data gives texts to a model; an array and a folder of embeddings have theirs already")
    if path.suffix == ".npy":
        return _array(path)
    if any((path / part / FILE).is_file() for part in ("", "query", "document")):
        embeddings = open_embeddings(path, side)
        manifest = embeddings.manifest
        names = ("model", "fingerprint", "side", "prompts", "max_length", "precision", "dimension", "source")
        facts = {name: getattr(manifest, name) for name in names}
        return Description("embeddings", embeddings.lengths, facts | {"tokens_lost_share": manifest.tokens_lost_share})
    encoder = open_bare(target, None, None, None)
    model, asked = encoder.model, side or "document"
    texts = PROBES if data is None else Texts(data, asked).sample()
    facts = {
        "model": target,
        "fingerprint": model_fingerprint(model),
        "modules": [type(module).__name__ for module in model],
        "normalize_modules_taken_off": len(encoder.normalize_modules),
        "declared_similarity": encoder.declared.name if encoder.declared else None,
        "prompts": {one: model.prompts.get(one) or "" for one in ("query", "document")},
        "max_length": token_limit(model),
        "texts": f"{len(texts)} {asked} texts of {data}" if data else f"{len(texts)} built-in texts; --data for yours",
    }
    return Description("model", Lengths.of(norms(encode(model, texts, asked))), facts)


def _array(path: Path) -> Description:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read as an array ({error})", path) from error
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.floating):
        raise DataError(
            f"is {array.shape} of {array.dtype}; expected floating numbers of (embeddings, dimension)", path
        )
    return Description(
        "array", Lengths.of(norms(array)), {"file": str(path), "shape": list(array.shape), "dtype": str(array.dtype)}
    )


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {one!r}" for name, one in value.items())
    return (
        ", ".join(map(str, value))
        if isinstance(value, list)
        else f"{value:.2%}"
        if isinstance(value, float)
        else str(value)
    )
