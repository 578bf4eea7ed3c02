"""Where long work tells what it does; the command line shows it, a library user may leave it silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """Two things that long work has to say."""

    def say(self, text: str) -> None:
        """Give the reader a line, or several."""

    def start(self, what: str, total: int) -> Callable[[int], None]:
        """Begin a piece of work of ``total`` steps; the result is called with the number of steps done so far."""


class Silent:
    """Says nothing."""

    def say(self, text: str) -> None:
        """Drop the line."""

    def start(self, what: str, total: int) -> Callable[[int], None]:
        """Count without showing."""
        return lambda done: None
