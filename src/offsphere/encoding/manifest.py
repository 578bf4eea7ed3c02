"""What a folder of embeddings says about itself: how they were made, and which shards are finished."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from offsphere.encoders import Side
from offsphere.encoding.storage import Storage
from offsphere.errors import EmbeddingsError

FILE = "manifest.json"
IDS = "ids.txt"
FORMAT = 1


@dataclass(frozen=True)
class Finished:
    """A shard that is stored.

    Attributes:
        number: From 0.
        start: Its first row.
        stop: The row behind its last one.
        texts: SHA-256 of its ids and texts.
        checksum: SHA-256 of its rows as they lie on disk.
        empty: Texts without a visible character; their embedding is the zero vector.
        cut: Texts longer than the model reads.
        tokens: Tokens read.
        tokens_lost: Tokens that were cut off.
        encoded: Different texts that went through the model; the others are empty, repeated, or came from the cache.
        seconds: That encoding took, reading and tokenising ahead not included.
        finished_at: When, UTC.
    """

    number: int
    start: int
    stop: int
    texts: str
    checksum: str
    empty: int
    cut: int
    tokens: int
    tokens_lost: int
    encoded: int
    seconds: float
    finished_at: str


@dataclass(frozen=True)
class Manifest:
    """How embeddings were made. All of it holds for every row.

    Attributes:
        model: What the encoder was opened with; an absolute path where it is a folder.
        fingerprint: Of that encoder, see ``encoders.model_fingerprint``; its Normalize modules are taken off first.
        similarity: What the model declares, see ``Similarity.to_dict``; None where it says nothing. The embeddings are
            raw, so they serve every other one as well.
        side: ``query`` or ``document``.
        prompts: What stands before each text, by side.
        prompt_tokens: How many of the tokens read are the prompt's, by side.
        max_length: Tokens read of each text; None where there is no limit.
        precision: Of the computation (``float32``, ``bf16``, ``fp16``, ``int8``); what is stored is float32.
        dimension: Of the embeddings.
        shard_size: Texts of a shard.
        source: What was encoded, as the user named it.
        count: Texts.
        ids: SHA-256 of ids.txt.
        fidelity: Of int8 against float32 on a sample of these texts, see ``encoding.int8``.
        shards: Those that are finished, by number.
    """

    model: str
    fingerprint: str
    similarity: dict[str, Any] | None
    side: Side
    prompts: dict[str, str]
    prompt_tokens: dict[str, int]
    max_length: int | None
    precision: str
    dimension: int
    shard_size: int
    source: str
    count: int
    ids: str
    fidelity: dict[str, Any] | None = None
    shards: dict[int, Finished] = field(default_factory=dict)

    @property
    def number_of_shards(self) -> int:
        """Finished or not."""
        return -(-self.count // self.shard_size)

    @property
    def finished(self) -> bool:
        """Whether every shard is stored."""
        return len(self.shards) == self.number_of_shards

    def total(self, count: str) -> int:
        """The sum of a count of the finished shards, such as ``cut``."""
        return sum(getattr(shard, count) for shard in self.shards.values())

    @property
    def tokens_lost_share(self) -> float:
        """Of all tokens of all texts, the share that the length limit cut off."""
        lost = self.total("tokens_lost")
        return lost / max(1, lost + self.total("tokens"))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as the file has them."""
        shards = [asdict(shard) for _, shard in sorted(self.shards.items())]
        totals = {name: self.total(name) for name in ("empty", "cut", "tokens", "tokens_lost")}
        return {
            "format": FORMAT,
            **{name: value for name, value in vars(self).items() if name != "shards"},
            "finished": self.finished,
            **totals,
            "tokens_lost_share": self.tokens_lost_share,
            "shards": shards,
        }

    def write(self, storage: Storage) -> None:
        """Put it in place of the one before, in one step."""
        storage.write(FILE, json.dumps(self.to_dict(), indent=1, ensure_ascii=False).encode() + b"\n")


DERIVED = ("finished", "empty", "cut", "tokens", "tokens_lost", "tokens_lost_share")


def read_manifest(storage: Storage) -> Manifest | None:
    """The manifest that is there; None where there is none.

    Raises:
        EmbeddingsError: If it is damaged or of a later version, with what to do.
    """
    content = storage.read(FILE)
    if content is None:
        return None
    try:
        stored = json.loads(content)
        version = stored.pop("format")
        if version != FORMAT:
            raise EmbeddingsError(
                f"{storage.name}/{FILE} has format {version}, and this version of offsphere reads {FORMAT}; upgrade "
                "offsphere, or encode again into another folder"
            )
        for name in DERIVED:
            del stored[name]
        shards = {one["number"]: Finished(**one) for one in stored.pop("shards")}
        return Manifest(**stored, shards=shards)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EmbeddingsError(
            f"{storage.name}/{FILE} is damaged ({error}), or is not of embeddings; restore it from a copy, or encode "
            "again into another folder"
        ) from error


MADE_ALIKE = {
    "fingerprint": "the model (fingerprint {})",
    "side": "the side {}",
    "prompts": "the prompts {}",
    "max_length": "a limit of {} tokens",
    "precision": "the precision {}",
    "dimension": "{} dimensions",
    "shard_size": "shards of {}",
}


def refuse_differences(storage: Storage, made: Manifest, asked: Manifest) -> None:
    """Refuse to put embeddings beside others that were made in another way.

    Raises:
        EmbeddingsError: Names every difference.
    """
    found = [
        f"{what.format(getattr(made, name))}, not {getattr(asked, name)}"
        for name, what in MADE_ALIKE.items()
        if getattr(made, name) != getattr(asked, name)
    ]
    if found:
        raise EmbeddingsError(
            f"{storage.name} has embeddings of {made.model}, made with {'; '.join(found)}.\nAll embeddings of a folder "
            "are made alike; give the same settings to go on, or --out ANOTHER_FOLDER"
        )
