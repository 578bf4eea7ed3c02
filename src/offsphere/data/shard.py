"""One of several equal parts of some documents, so that as many processes or machines share the work."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from offsphere.errors import ConfigError


@dataclass(frozen=True)
class Shard:
    """The documents whose id hashes to one of ``count`` parts: every document is in exactly one of them.

    The hash is of the id alone, so it is the same on every machine, whatever the order of the documents and whatever
    else they say.

    Attributes:
        number: Which of them, from 1.
        count: How many there are.

    Raises:
        ConfigError: If there is no such part.
    """

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise ConfigError(
                f"there is no shard {self.number} of {self.count}; expected I/N with I from 1 to N, such as 1/4 for "
                "the first of four"
            )

    @classmethod
    def parse(cls, text: str) -> Shard:
        """The shard that ``I/N`` names.

        Raises:
            ConfigError: If it names none.
        """
        if not re.fullmatch(r"\d{1,9}/\d{1,9}", text, re.ASCII):
            raise ConfigError(f"expected a shard I/N, such as 1/4 for the first of four, found {text!r}")
        number, count = map(int, text.split("/"))
        return cls(number, count)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def holds(self, identifier: str) -> bool:
        """Whether the document with this id is in it: the first 8 bytes of its SHA-256, modulo ``count``."""
        if self.count == 1:
            return True
        first = hashlib.sha256(identifier.encode("utf-8", "surrogatepass")).digest()[:8]
        return int.from_bytes(first, "big") % self.count == self.number - 1


WHOLE = Shard()
"""All documents."""
