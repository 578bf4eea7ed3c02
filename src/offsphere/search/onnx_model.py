"""Write an encoder as an ONNX graph that ends in the prepared vector and the raw norm, and prove that it agrees.

The graph holds everything from token ids to q/|q|^gamma_q and d/|d|^gamma_d: transformer or token table, pooling,
dense layers, and ``Similarity``. Whoever runs it needs no torch.
"""

from __future__ import annotations

import inspect
import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offsphere.diagnosis.subject import Encoder
from offsphere.encoders import Side, encode, find_normalize, model_fingerprint, replace_folder
from offsphere.errors import ConfigError, EncoderError
from offsphere.evaluation.evaluate import OWN, asked_similarity
from offsphere.progress import Progress, Silent
from offsphere.search.causes import EQUAL, relative_errors
from offsphere.similarity import Similarity, norms

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from tokenizers import Tokenizer
    from torch import nn

GRAPH = "model.onnx"
TOKENIZER = "tokenizer.json"
SETTINGS = "embedder.json"
CODE = "embed.py"
README = "README.md"
FORMAT = 1
OPSET = 17
INPUTS = ("input_ids", "attention_mask")
OUTPUTS = ("query_vector", "document_vector", "norm")
SIDES: tuple[Side, ...] = ("query", "document")
Embed = Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]

PROBES = (
    "water",
    "Why does the sea taste of salt, and since when?",
    "",
    "The tide rises twice a day because the moon pulls the water, and the earth turns below. " * 30,
    " \t\n",
    "Ein Satz über Eis – 海は青い, 🙂 0.5 %",
)
"""Texts of unlike length, two of them empty; one is longer than what most encoders read."""


@dataclass(frozen=True)
class OnnxModel:
    """What was written.

    Attributes:
        folder: Holds the graph, the tokenizer, the settings, code that uses them, and a README.
        similarity: What the vectors are prepared for.
        dimension: Of the vectors.
        bytes: Of all files together.
        probes: Vectors that were compared with the model's own.
        largest_error: The largest distance of one from the model's, as a share of its length.
    """

    folder: str
    similarity: str
    dimension: int
    bytes: int
    probes: int
    largest_error: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def export_onnx(
    encoder: Encoder, folder: Path | str, *, similarity: str | None = None, progress: Progress | None = None
) -> OnnxModel:
    """A folder with ``model.onnx`` and what it takes to embed texts by it, once onnxruntime agrees with the model.

    The graph takes ``input_ids`` and ``attention_mask``, both (batch, sequence) int64, and gives ``query_vector``
    and ``document_vector``, both (batch, n) float32, and ``norm``, (batch,), the length before any preparation. A row
    whose mask is 0 everywhere gives zeros. Tokens are those of ``tokenizer.json``, prompts those of ``embedder.json``.

    Args:
        encoder: Without Normalize modules.
        folder: Made in one step; replaces an earlier export, and nothing else.
        similarity: What to prepare for; the encoder's own when None.
        progress: Told what happens.

    Raises:
        ConfigError: If a package is missing, or the folder holds something else.
        UsageError: If the similarity is not known.
        EncoderError: If the encoder cannot be written as a graph, or the graph does not give its vectors to 1e-4.
    """
    progress = progress or Silent()
    _check_packages()
    folder = Path(folder).expanduser().resolve()
    _check_folder(folder)
    model = encoder.model
    wanted = asked_similarity(similarity or OWN, encoder.declared, encoder.source)
    prompts: dict[Side, str] = {side: model.prompts.get(side) or "" for side in SIDES}
    _check_modules(model, prompts)
    progress.say(f"write {encoder.source} for {wanted.name} as an ONNX graph")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as unfinished:
        fresh = Path(unfinished) / "onnx"
        fresh.mkdir()
        tokenizer = portable_tokenizer(model)
        tokenizer.save(str(fresh / TOKENIZER))
        write_graph(model, wanted, tokenizer, fresh / GRAPH)
        expected = {side: encode(model, PROBES, side, prompt=prompts[side]) for side in SIDES}
        settings = {
            "format": FORMAT,
            "model": encoder.source,
            "fingerprint": model_fingerprint(model),
            "similarity": wanted.name,
            "gamma_q": wanted.gammas[0],
            "gamma_d": wanted.gammas[1],
            "prompts": prompts,
            "max_length": (tokenizer.truncation or {}).get("max_length"),
            "dimension": expected["query"].shape[1],
            "opset": OPSET,
        }
        (fresh / SETTINGS).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        progress.say("compare the graph with the model")
        largest = check_parity(fresh, wanted, expected)
        _write_code(fresh, settings)
        size = sum(file.stat().st_size for file in fresh.iterdir())
        replace_folder(fresh, folder)
    return OnnxModel(str(folder), wanted.name, settings["dimension"], size, 2 * len(SIDES) * len(PROBES), largest)


def portable_tokenizer(model: SentenceTransformer) -> Tokenizer:
    """A tokenizer whose plain ``encode_batch`` gives what the model reads: special tokens, truncation and padding.

    Raises:
        EncoderError: If the encoder's tokenizer is not one of the ``tokenizers`` package.
    """
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    own = model.tokenizer
    if isinstance(model[0], StaticEmbedding):
        described = json.loads(own.to_str())
        described["post_processor"] = None  # the module never asks for special tokens
        tokenizer = Tokenizer.from_str(json.dumps(described))
        tokenizer.enable_padding()
        return tokenizer
    if not getattr(own, "is_fast", False):
        raise EncoderError(
            f"the tokenizer {type(own).__name__} runs in Python only, so nothing outside it could feed an ONNX graph; "
            "use an encoder with a tokenizer.json"
        )
    tokenizer = Tokenizer.from_str(own.backend_tokenizer.to_str())
    limit = model.max_seq_length
    if limit is None or limit >= 2**31:  # transformers writes "no limit" as a huge number
        tokenizer.no_truncation()
    else:
        tokenizer.enable_truncation(limit, direction=own.truncation_side)
    padding = {} if own.pad_token is None else {"pad_id": own.pad_token_id, "pad_token": own.pad_token}
    tokenizer.enable_padding(direction=own.padding_side, **padding)
    return tokenizer


def write_graph(model: SentenceTransformer, similarity: Similarity, tokenizer: Tokenizer, path: Path) -> None:
    """The graph from token ids to ``OUTPUTS``, traced through the model and ``Similarity``; any batch and length.

    Raises:
        EncoderError: If an operation of the encoder has no counterpart in ONNX.
    """
    import torch

    # Two texts of unlike length: a batch or a length of 1 would be taken for constant.
    encodings = tokenizer.encode_batch(list(PROBES[:2]))
    ids = torch.tensor([encoding.ids for encoding in encodings], device=model.device)
    mask = torch.tensor([encoding.attention_mask for encoding in encodings], device=model.device)
    dynamic = {name: {0: "batch", 1: "sequence"} for name in INPUTS} | {name: {0: "batch"} for name in OUTPUTS}
    try:
        with warnings.catch_warnings(), torch.no_grad():
            _ignore_exporter_warnings()
            # This exporter needs no package besides onnx. What it traced wrongly, check_parity finds.
            torch.onnx.export(
                _graph(model, similarity).eval(),
                (ids, mask),
                str(path),
                input_names=list(INPUTS),
                output_names=list(OUTPUTS),
                dynamic_axes=dynamic,
                opset_version=OPSET,
                dynamo=False,
            )
    except Exception as error:  # whatever the operation at hand raises
        raise EncoderError(
            f"this encoder cannot be written as an ONNX graph: {_reason(error)}\n"
            "Nothing was written. Its modules are " + ", ".join(type(module).__name__ for module in model)
        ) from error


def check_parity(folder: Path, similarity: Similarity, expected: dict[Side, np.ndarray]) -> float:
    """The largest distance between vectors of the graph and of the model, as a share of their length.

    The probes run as one padded batch and one by one, through the tokenizer and the code that stand in the folder.

    Args:
        folder: With graph, tokenizer and settings.
        similarity: What the graph prepares for.
        expected: By side, (len(PROBES), n) raw embeddings that the model gives for ``PROBES``.

    Raises:
        EncoderError: If a vector is off by more than 1e-4 of its length, a norm by as much, or one is not finite.
    """
    from offsphere.search.onnx_embed import Embedder

    try:
        embedder = Embedder(folder)
        seen_by = {
            side: _together_and_alone(embed)
            for side, embed in zip(SIDES, (embedder.queries, embedder.documents), strict=True)
        }
    except Exception as error:  # onnxruntime's errors have no class of their own in common
        raise EncoderError(f"onnxruntime cannot run the graph: {_reason(error)}\nNothing was written.") from error
    largest = 0.0
    for side in SIDES:
        raw = expected[side]
        lengths = norms(raw)
        prepared = similarity.prepare_query(raw) if side == "query" else similarity.prepare_document(raw)
        for seen, seen_lengths in seen_by[side]:
            errors = np.maximum(
                relative_errors(prepared, seen), relative_errors(lengths[:, None], seen_lengths[:, None])
            )
            if not (errors <= EQUAL).all():
                worst = int(np.where(np.isnan(errors), np.inf, errors).argmax())
                raise EncoderError(
                    f"the ONNX graph does not give the vectors of the model: the {side} {PROBES[worst][:40]!r} is off "
                    f"by {errors[worst]:.2g} of its length, more than {EQUAL:g}\n"
                    "Nothing was written. A module of this encoder does more than a graph of its tokens can hold."
                )
            largest = max(largest, float(errors.max()))
    return largest


def _together_and_alone(embed: Embed) -> list[tuple[np.ndarray, np.ndarray]]:
    """Vectors and lengths of the probes from one padded batch, and from batches of one."""
    alone = [embed([probe]) for probe in PROBES]
    return [embed(PROBES), (np.concatenate([one[0] for one in alone]), np.concatenate([one[1] for one in alone]))]


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _graph(model: SentenceTransformer, similarity: Similarity) -> nn.Module:
    """The module that is traced: the model's own modules, with ``Similarity`` at the end."""
    import torch
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from torch import Tensor, nn

    from offsphere.modules import LearnedSimilarity

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(module for module in model if not isinstance(module, LearnedSimilarity))
            self.types = "token_type_ids" in getattr(model.tokenizer, "model_input_names", ())

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            features = {"input_ids": input_ids, "attention_mask": attention_mask}
            if self.types:  # one text, so one type
                features["token_type_ids"] = torch.zeros_like(input_ids)
            for part in self.parts:
                if isinstance(part, StaticEmbedding):
                    features["sentence_embedding"] = _mean_of_rows(part.embedding.weight, input_ids, attention_mask)
                else:
                    features = part(features)
            nothing = attention_mask.sum(1, keepdim=True) == 0
            raw = features["sentence_embedding"].masked_fill(nothing, 0.0)
            return similarity.prepare_query(raw), similarity.prepare_document(raw), norms(raw)

    def _mean_of_rows(table: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """What EmbeddingBag gives, for padded ids: ONNX has no such operation."""
        kept = mask.to(table.dtype).unsqueeze(1)
        return torch.bmm(kept, nn.functional.embedding(ids, table)).squeeze(1) / kept.sum(2).clamp(min=1.0)

    return Graph()


def _ignore_exporter_warnings() -> None:
    """The exporter says that it will be removed one day, and which Python values it takes for constant."""
    from torch.jit import TracerWarning

    warnings.filterwarnings("ignore", category=TracerWarning)
    for start in ("You are using the legacy TorchScript", "The feature will be removed"):
        warnings.filterwarnings("ignore", start, category=DeprecationWarning)
    warnings.filterwarnings("ignore", "Exporting aten::index operator of advanced indexing", category=UserWarning)


def _check_packages() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"an ONNX graph needs the package {error.name!r}; type: pip install 'offsphere[onnx]'"
        ) from error


def _check_folder(folder: Path) -> None:
    """An export replaces another one, never somebody's other files."""
    if not folder.exists():
        return
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else {folder.name}
    foreign = sorted(names - {GRAPH, TOKENIZER, SETTINGS, CODE, README})
    if foreign or (names and SETTINGS not in names):
        raise ConfigError(
            f"{folder} holds something else than an exported graph ({(foreign or sorted(names))[0]}), and would be "
            "replaced; give a folder that does not exist yet"
        )


def _check_modules(model: SentenceTransformer, prompts: dict[Side, str]) -> None:
    """Refuse what a graph of token ids cannot express, before the long work."""
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding

    if not isinstance(model[0], Transformer | StaticEmbedding):
        raise EncoderError(
            f"an ONNX graph begins with a transformer or a static token table; this encoder begins with "
            f"{type(model[0]).__name__}"
        )
    if find_normalize(model):
        raise EncoderError("this encoder still has a Normalize module, which erases lengths; open it with open_bare")
    if any(prompts.values()) and any(isinstance(part, Pooling) and not part.include_prompt for part in model):
        raise EncoderError(
            "the pooling of this encoder leaves the prompt's tokens out, which a graph of token ids cannot know; "
            "export it without prompts"
        )


def _write_code(folder: Path, settings: dict[str, Any]) -> None:
    from offsphere.search import onnx_embed

    (folder / CODE).write_text(inspect.getsource(onnx_embed), encoding="utf-8")
    (folder / README).write_text(_README.format(**settings), encoding="utf-8")


_README = """# An encoder as an ONNX graph

`model.onnx` turns tokens into vectors whose inner product is the score under `{similarity}`
(gamma_q = {gamma_q:g}, gamma_d = {gamma_d:g}). It needs `numpy`, `tokenizers` and `onnxruntime`, and no torch:

```python
from embed import Embedder

embedder = Embedder(".")
queries, query_norms = embedder.queries(["why is the sea salt"])
documents, document_norms = embedder.documents(["Rivers carry salt into the sea.", "The moon pulls the tide.", ""])
print(queries @ documents.T)
```

Store `document_vector` in a database under the metric inner product. Cosine, or a database that normalises, would
undo what gamma_d says about length.

| input | shape | |
|---|---|---|
| `input_ids` | (batch, sequence) int64 | `encode_batch` of `tokenizer.json`, the prompt in front of the text |
| `attention_mask` | (batch, sequence) int64 | 1 for a token, 0 for padding; all 0 for an empty text |

| output | shape | |
|---|---|---|
| `query_vector` | (batch, {dimension}) float32 | q / \\|q\\|^gamma_q |
| `document_vector` | (batch, {dimension}) float32 | d / \\|d\\|^gamma_d |
| `norm` | (batch,) float32 | the length of the raw embedding |

A row whose mask is all 0 gives zeros, which score 0. Prompts, length limit and the rest are in `embedder.json`;
`embed.py` is all the code there is.
"""
