"""The beginning of an index: what its manifest will say, or whether the index that is there fits what is asked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offsphere.diagnosis.subject import Encoder, open_bare
from offsphere.encoders import encode, model_fingerprint
from offsphere.errors import IndexFolderError
from offsphere.evaluation.evaluate import OWN, asked_similarity
from offsphere.search.manifest import Manifest, is_fresh, locate, read_manifest, refuse_differences, writing
from offsphere.similarity import Similarity

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Asked = str | Mapping[str, Any] | Similarity | None
"""How a similarity is asked for: by name, by exponents, as it is, or not at all."""


def begin(
    folder: Path,
    model: str,
    similarity: Asked,
    prompts: Mapping[str, str],
    max_length: int | None,
    device: str | None,
) -> tuple[Manifest, Encoder]:
    """The manifest in the folder, written if there was none, and the encoder; see ``Index.create`` for the arguments.

    Raises:
        UsageError: If neither the model nor the caller says which similarity it is.
        IndexFolderError: If the folder holds something else, or an index made in another way.
        EncoderError: If the model cannot be opened.
    """
    if url := re.match(r"\w\w+:/", str(folder)):  # a path joins the two slashes
        raise IndexFolderError(
            f"an index is a folder on this machine, found {url[0]}/...; make it here, and export it to object storage: "
            "offsphere export --index FOLDER --to lancedb:s3://BUCKET/FOLDER"
        )
    made = None if is_fresh(folder) else read_manifest(folder)
    limit = made.max_length if made and max_length is None else max_length
    encoder = open_bare(model, limit, {**(made.prompts if made else {}), **prompts}, device)
    declared = made.similarity if made and similarity is None else encoder.declared
    asked = Manifest(
        model=locate(model),
        fingerprint=model_fingerprint(encoder.model),
        similarity=resolve(similarity, declared, model),
        prompts={side: encoder.model.prompts.get(side) or "" for side in ("query", "document")},
        max_length=limit,
        dimension=_dimension(encoder.model),
    )
    if made is None:
        folder.mkdir(parents=True, exist_ok=True)
        with writing(folder):
            if is_fresh(folder):  # nobody else began one in the meantime
                asked.write(folder)
        made = read_manifest(folder)
    refuse_differences(folder, made, asked)
    return made, encoder


def resolve(asked: Asked, declared: Similarity | None, source: str) -> Similarity:
    """The similarity that is asked for, where None and ``own`` are the declared one.

    Args:
        asked: A name, exponents, or a similarity.
        declared: What the model, or the index, says.
        source: The model, for messages.

    Raises:
        ConfigError: If there is no such similarity.
        UsageError: If the declared one is asked for, and there is none.
    """
    if asked is None or isinstance(asked, str):
        return asked_similarity(asked or OWN, declared, source)
    return Similarity.parse(asked)


def _dimension(model: SentenceTransformer) -> int:
    return model.get_embedding_dimension() or encode(model, ["dimension"], "document").shape[1]
