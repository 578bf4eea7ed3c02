"""GGUF files of language models: unpacked once into a plain folder of float32 weights, then opened from there."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from pathlib import Path

from offsphere.errors import EncoderError

logger = logging.getLogger(__name__)


def unpacked(file: Path) -> Path:
    """A folder with the model of a GGUF file as transformers saves it: configuration, float32 weights, tokenizer.

    It takes 4 bytes a weight and stands in the assets cache of huggingface_hub (``HF_ASSETS_CACHE`` moves it), by the
    hash of the file. Unpacking takes some seconds and is done once.

    Raises:
        EncoderError: If the package gguf is not installed.
    """
    from huggingface_hub import cached_assets_path

    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    cache = cached_assets_path("offsphere", "gguf", digest[:32])
    folder = cache / "model"
    if not folder.exists():
        try:
            import gguf  # noqa: F401
        except ImportError as error:
            raise EncoderError("a GGUF file needs the package gguf; type: pip install 'offsphere[gguf]'") from error
        logger.warning("unpacking %s into %s; this takes some seconds, once", file.name, folder)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".model-") as unfinished:
            fresh = Path(unfinished) / "model"
            _unpack(file, fresh)
            try:
                fresh.rename(folder)
            except OSError:
                if not folder.exists():  # else another process was quicker, with the same content
                    raise
    return folder


def _unpack(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, config=config)
    model = AutoModel.from_pretrained(file.parent, gguf_file=file.name, config=config, dtype=torch.float32)
    model.hf_quantizer.remove_quantization_config(model)  # or transformers would not save the weights it unpacked
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
