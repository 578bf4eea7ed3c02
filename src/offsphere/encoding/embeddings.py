"""Embeddings that ``offsphere encode`` has written: ids, the raw matrix, and the lengths that it holds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offsphere.encoders import UNIT_LENGTH_SPREAD, Side, model_fingerprint
from offsphere.encoding.manifest import IDS, Manifest, read_manifest
from offsphere.encoding.storage import MATRIX, LocalFolder, Storage, checksum, open_storage
from offsphere.encoding.texts import shard_hash
from offsphere.errors import EmbeddingsError
from offsphere.similarity import Similarity, norms

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

ROWS_AT_ONCE = 2**16


@dataclass(frozen=True)
class Lengths:
    """What the lengths of some embeddings look like.

    Attributes:
        count: Embeddings.
        zero: Of them, those of length 0, such as those of empty texts; the numbers below are without them.
        mean: Nan where there is none.
        cv: Standard deviation as a share of the mean.
        min: The shortest.
        max: The longest.
    """

    count: int
    zero: int
    mean: float
    cv: float
    min: float
    max: float

    @classmethod
    def of(cls, lengths: np.ndarray) -> Lengths:
        """Of lengths (N,)."""
        some = lengths[lengths > 0].astype(np.float64)
        if not len(some):
            return cls(len(lengths), len(lengths), np.nan, np.nan, np.nan, np.nan)
        mean = float(some.mean())
        cv = float(some.std() / mean)
        return cls(len(lengths), len(lengths) - len(some), mean, cv, float(some.min()), float(some.max()))

    @property
    def unit(self) -> bool:
        """Whether all agree to a thousandth: there is no length to keep."""
        return not self.cv >= UNIT_LENGTH_SPREAD

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.count - self.zero:
            return f"{self.count:,} embeddings, all of length 0"
        zero = f", {self.zero:,} of length 0 aside" if self.zero else ""
        unit = "; all the same, there is no length to keep" if self.unit else ""
        numbers = f"mean {self.mean:.4g}, CV {self.cv:.3g}, min {self.min:.4g}, max {self.max:.4g}"
        return f"length of {self.count:,} embeddings: {numbers}{zero}{unit}"


class Embeddings:
    """A finished folder of embeddings; made by ``open_embeddings``.

    Attributes:
        storage: Where it is.
        manifest: How the embeddings were made.
    """

    def __init__(self, storage: Storage, manifest: Manifest):
        self.storage, self.manifest = storage, manifest

    def __len__(self) -> int:
        return self.manifest.count

    @cached_property
    def ids(self) -> list[str]:
        """One a row, in the order of the source.

        Raises:
            EmbeddingsError: If ids.txt is missing or damaged.
        """
        content = self.storage.read(IDS)
        if content is None or hashlib.sha256(content).hexdigest() != self.manifest.ids:
            raise EmbeddingsError(
                f"{self.storage.name}/{IDS} is missing or damaged; the encode command that made it writes it again"
            )
        return content.decode().split("\n")[:-1]

    @cached_property
    def matrix(self) -> np.ndarray:
        """(N, n) raw float32, memory-mapped and read-only; read into memory from an address that is no folder."""
        shape = (self.manifest.count, self.manifest.dimension)
        if isinstance(self.storage, LocalFolder):
            file = self.storage.folder / MATRIX
            try:
                matrix = np.load(file, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError) as error:
                raise EmbeddingsError(f"{file} cannot be read ({error}); {_AGAIN}") from error
            if matrix.shape != shape or matrix.dtype != np.float32:
                raise EmbeddingsError(f"{file} is {matrix.shape} of {matrix.dtype}; expected {shape}; {_AGAIN}")
            return matrix
        return np.concatenate([np.empty((0, shape[1]), np.float32), *(rows for _, rows in self.shards())])

    @cached_property
    def norms(self) -> np.ndarray:
        """(N,) float32 lengths, computed from the matrix."""
        blocks = (self.matrix[start : start + ROWS_AT_ONCE] for start in range(0, len(self), ROWS_AT_ONCE))
        return np.concatenate([np.empty(0, np.float32), *map(norms, blocks)])

    @property
    def lengths(self) -> Lengths:
        """The lengths in numbers."""
        return Lengths.of(self.norms)

    def shards(self) -> Iterator[tuple[int, np.ndarray]]:
        """The first row of each shard and its rows (S, n), as they are stored.

        Raises:
            EmbeddingsError: If the rows of a shard are not those of its checksum.
        """
        for number in sorted(self.manifest.shards):
            yield self.manifest.shards[number].start, self.shard(number)

    def shard(self, number: int) -> np.ndarray:
        """(S, n) float32 rows of one shard, checked.

        Raises:
            EmbeddingsError: If they are not those of its checksum.
        """
        shard = self.manifest.shards[number]
        rows = self.storage.read_rows(number, shard.start, shard.stop, self.manifest.dimension)
        if rows is None or checksum(rows) != shard.checksum:
            raise EmbeddingsError(
                f"shard {number} of {self.storage.name} (rows {shard.start} to {shard.stop}) is damaged; {_AGAIN}, and "
                "encodes only this shard"
            )
        return rows

    def of(self, texts: Mapping[str, str]) -> np.ndarray:
        """(T, n) raw float32 of these texts, in their order; see ``rows_of``."""
        return self.matrix[self.rows_of(texts)]

    def rows_of(self, texts: Mapping[str, str]) -> np.ndarray:
        """(T,) the rows of these texts, in their order; refused unless they are the ones that were encoded.

        Args:
            texts: By id: some or all of those in the folder. Whole shards are compared by their hash.

        Raises:
            EmbeddingsError: If an id is not there, or a shard was made of other texts.
        """
        row = {one: number for number, one in enumerate(self.ids)}
        missing = [one for one in texts if one not in row]
        if missing:
            raise EmbeddingsError(
                f"{self.storage.name} has no embedding of {missing[0]!r}, nor of {len(missing) - 1} others; encode "
                "this collection again with the same command, which keeps what has not changed"
            )
        for shard in self.manifest.shards.values():
            ids = self.ids[shard.start : shard.stop]
            if all(one in texts for one in ids) and shard_hash([(one, texts[one]) for one in ids]) != shard.texts:
                raise EmbeddingsError(
                    f"{self.storage.name} was made of other texts: one of rows {shard.start} to {shard.stop - 1} says "
                    "something else now; encode again with the same command, which keeps what has not changed"
                )
        return np.array([row[one] for one in texts], np.int64)


_AGAIN = "the encode command that made it puts it right"


def open_embeddings(
    folder: str | Path,
    side: Side | None = None,
    *,
    model: SentenceTransformer | None = None,
    prompt: str | None = None,
    similarity: Similarity | str | None = None,
) -> Embeddings:
    """The embeddings in a folder, or at an fsspec address, that ``offsphere encode`` has finished.

    Args:
        folder: What was given as --out.
        side: Which side they must be of; which of the two to open where there are both.
        model: An encoder without Normalize modules that they must have been made with.
        prompt: What must stand before each text.
        similarity: What they are to be ranked under: refused if it keeps their length and they have none.

    Raises:
        EmbeddingsError: If there are no such embeddings, they are unfinished, or were made in another way.
    """
    storage = open_storage(folder)
    manifest = read_manifest(storage)
    if manifest is None and side is not None:
        storage = open_storage(f"{folder}/{side}")
        manifest = read_manifest(storage)
    if manifest is None:
        both = [one for one in ("query", "document") if read_manifest(open_storage(f"{folder}/{one}")) is not None]
        if both and side is None:
            raise EmbeddingsError(f"{folder} has {' and '.join(both)} embeddings; open one of {', '.join(both)} in it")
        raise EmbeddingsError(
            f"{folder} has no embeddings; make some with: offsphere encode MODEL COLLECTION --out {folder}"
        )
    found = []
    if side is not None and side != manifest.side:
        found.append(f"they are of the side {manifest.side}, not {side}")
    if model is not None and (fingerprint := model_fingerprint(model)) != manifest.fingerprint:
        found.append(
            f"they were made with {manifest.model} (fingerprint {manifest.fingerprint}), and this is another model "
            f"({fingerprint}) or another length limit"
        )
    if prompt is not None and prompt != manifest.prompts[manifest.side]:
        found.append(f"the prompt was {manifest.prompts[manifest.side]!r}, not {prompt!r}")
    if not manifest.finished:
        found.append(
            f"only {len(manifest.shards)} of {manifest.number_of_shards} shards are finished; the same encode command "
            "goes on"
        )
    embeddings = Embeddings(storage, manifest)
    if not found and similarity is not None:
        asked = Similarity.parse(similarity)
        gamma = asked.gammas[0 if manifest.side == "query" else 1]
        if gamma < 1 and embeddings.lengths.unit:
            found.append(f"all have the same length, and {asked.name} ranks by the length of a {manifest.side}")
    if found:
        raise EmbeddingsError(f"the embeddings in {storage.name} cannot be used: {'; '.join(found)}")
    return embeddings
