"""What an index says about itself: its ``manifest.json``, and the lock that lets one process write at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offsphere.encoders import PACKAGE
from offsphere.errors import IndexFolderError
from offsphere.similarity import Similarity

FILE = "manifest.json"
LOCK = "index.lock"
TABLE = "documents"
FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """How an index was made. Whatever is written here holds for every vector in its table.

    Attributes:
        model: What to open the encoder with; an absolute path where it is a folder.
        fingerprint: Of that encoder, see ``encoders.model_fingerprint``; its Normalize modules are taken off first.
        similarity: What search ranks under.
        prompts: What stands before each ``query`` and each ``document``.
        max_length: Tokens kept of each text; the encoder's own limit where None.
        dimension: Of the vectors.
        fields: Metadata fields and their kind (see ``table.KINDS``); None where the field cannot be filtered by.
        approximate: The settings of approximate search, if the index has it.
    """

    model: str
    fingerprint: str
    similarity: Similarity
    prompts: dict[str, str]
    max_length: int | None
    dimension: int
    fields: dict[str, str | None] = field(default_factory=dict)
    approximate: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as the file has them."""
        return {"format": FORMAT, **vars(self), "similarity": self.similarity.to_dict()}

    def made_like(self, other: Manifest) -> bool:
        """Whether the vectors of both are made alike; what has been added since does not matter."""
        return replace(self, fields={}, approximate=None) == replace(other, fields={}, approximate=None)

    def write(self, folder: Path) -> None:
        """Put it in place of the one before, in one step."""
        temporary = folder / f"{FILE}.{os.getpid()}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / FILE)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an index.

    Raises:
        IndexFolderError: If there is none, or it is damaged or of a later version, with what to do.
    """
    path = folder / FILE
    if not path.is_file():
        raise IndexFolderError(_why_no_index(folder))
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        version = stored.pop("format")
        if version != FORMAT:
            raise IndexFolderError(
                f"{path} has format {version}, and this version of offsphere reads {FORMAT}; upgrade offsphere, or "
                "index again into another folder"
            )
        return Manifest(**{**stored, "similarity": Similarity.from_dict(stored["similarity"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IndexFolderError(
            f"{path} is damaged ({error}); restore it from a copy, or index again into another folder"
        ) from error


def is_fresh(folder: Path) -> bool:
    """Whether an index can be begun there: there is no such folder, or nothing in it but what a stopped begin left.

    Raises:
        IndexFolderError: If the folder has vectors of an index whose manifest is lost.
    """
    if not folder.exists():
        return True
    if (folder / f"{TABLE}.lance").exists() and not (folder / FILE).exists():
        raise IndexFolderError(_why_no_index(folder))
    if not folder.is_dir():
        return False
    return all(file.name == LOCK or file.name.startswith(f"{FILE}.") for file in folder.iterdir())


def locate(source: str | Path) -> str:
    """A model's source as it can be opened from any working directory."""
    name = str(source)
    if name.startswith(PACKAGE):
        return name
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_dir() else name


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Be the only process that writes to this index. The operating system ends the lock with the process.

    Raises:
        IndexFolderError: If another process writes, or the folder is read-only.
    """
    from filelock import FileLock, Timeout

    try:
        lock = FileLock(folder / LOCK, timeout=0)
        lock.acquire()
    except Timeout:
        raise IndexFolderError(
            f"another process is writing to {folder}; wait until it ends, then type the same command again"
        ) from None
    except OSError as error:
        raise IndexFolderError(f"cannot write to {folder}: {error}") from error
    try:
        yield
    finally:
        lock.release()


def refuse_another_model(folder: Path, made: Manifest, source: str, fingerprint: str) -> None:
    """Refuse a model whose embeddings cannot be compared with those of the index.

    Args:
        folder: Of the index.
        made: Its manifest.
        source: The model, as the user named it.
        fingerprint: Of it.

    Raises:
        IndexFolderError: If it is not the one that the index was made with.
    """
    if fingerprint != made.fingerprint:
        raise IndexFolderError(
            f"{folder} was made with {made.model} (fingerprint {made.fingerprint}), and {source} is another model "
            f"(fingerprint {fingerprint}), whose embeddings cannot be compared with those.\nOpen it with the model "
            f"that made it, or index again: offsphere index {source} COLLECTION --out ANOTHER_FOLDER"
        )


def refuse_differences(folder: Path, made: Manifest, asked: Manifest) -> None:
    """Refuse to go on with an index that was made in another way.

    Args:
        folder: Of the index.
        made: Its manifest.
        asked: The manifest that an index would have if it were made as asked now.

    Raises:
        IndexFolderError: If model, similarity, prompts or length limit differ, with what to type.
    """
    found = []
    for side in ("query", "document"):
        if made.prompts[side] != asked.prompts[side]:
            is_so, wanted = made.prompts[side], asked.prompts[side]
            found.append(f"its {side} prompt is {is_so!r}, not {wanted!r} (keep it with --{side}-prompt {is_so!r})")
    if made.similarity != asked.similarity:
        found.append(f"its similarity is {made.similarity}, not {asked.similarity} (leave out --similarity)")
    if made.max_length != asked.max_length:
        limit = made.max_length or "the limit of the model"
        found.append(f"its texts are cut at {limit}, not at {asked.max_length} (leave out --max-length)")
    if found:
        raise IndexFolderError(
            f"{folder} is an index already, and was made in another way: {'; '.join(found)}.\nAll vectors of an index "
            "are made alike; make another one with --out ANOTHER_FOLDER"
        )
    refuse_another_model(folder, made, asked.model, asked.fingerprint)


def _why_no_index(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder; make an index with: offsphere index MODEL COLLECTION --out {folder}"
    if (folder / f"{TABLE}.lance").exists():
        return (
            f"{folder} has {TABLE}.lance but no {FILE}, so nobody can say which model its vectors are from; restore "
            f"{FILE} from a copy, or index again into another folder"
        )
    return f"{folder} has no {FILE}, so it is no index; make one with: offsphere index MODEL COLLECTION --out FOLDER"
