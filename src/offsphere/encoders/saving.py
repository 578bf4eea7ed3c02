"""Encoders written so that others can load them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from offsphere.encoders.lora import merged_lora
from offsphere.errors import EncoderError
from offsphere.similarity import FIXED, Similarity

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


def save_encoder(model: SentenceTransformer, folder: Path, similarity: Similarity, card: str) -> None:
    """Write a sentence-transformers folder that ranks as trained, in one step (all of it or nothing).

    For the four fixed similarities the folder needs no offsphere: cosine and dnorm rank as ``cosine``, dot and qnorm as
    ``dot``, because for one query the ranking depends on gamma_d alone. Learned gammas stay in the model as a module
    that prepares each side, to be compared with ``dot``; ``open_encoder`` loads it, and so does sentence-transformers
    with ``trust_remote_code=True`` where offsphere is installed. LoRA adapters are written as part of the weights.

    Args:
        model: The encoder without Normalize modules.
        folder: Replaced if it exists.
        similarity: The one it was trained with.
        card: The text of README.md.
    """
    fixed = not similarity.learned and similarity.gammas in FIXED.values()
    if not fixed and "raw" not in model.get_model_kwargs():
        raise EncoderError(
            f"{similarity!r} has no name in sentence-transformers, so the model must carry its gammas: add "
            "offsphere.modules.LearnedSimilarity to it before saving"
        )
    model.similarity_fn_name = "cosine" if fixed and similarity.gammas[1] == 1.0 else "dot"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as unfinished:
        target = Path(unfinished) / "model"
        with merged_lora(model):
            model.save_pretrained(str(target), create_model_card=False)
        (target / "README.md").write_text(card, encoding="utf-8")
        replace_folder(target, folder)


def replace_folder(fresh: Path, folder: Path) -> None:
    """Put a finished folder in the place of another; whatever ends the process, one of the two is there whole.

    Args:
        fresh: On the same file system; it is gone afterwards.
        folder: Where it goes. What was there stays as ``.NAME-old`` if the process ends half way.
    """
    old = folder.with_name(f".{folder.name}-old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
