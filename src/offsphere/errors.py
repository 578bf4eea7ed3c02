"""Every error that offsphere raises on purpose, and the exit code of the command line for each.

OffsphereError          exit 1, something went wrong while running
├── UsageError          exit 2, the request itself cannot be carried out as written
│   └── ConfigError     exit 2, a setting is unknown or has an impossible value
├── DataError           exit 1, a file or collection is malformed; names the file and the line
├── EncoderError        exit 1, an encoder cannot be opened or cannot do what was asked
├── TrainingError       exit 1, training stopped: loss not finite, nothing to train
├── RunError            exit 1, a run folder is missing parts, or belongs to another configuration
├── EmbeddingsError     exit 1, embeddings on disk are unfinished or damaged, or belong to another model
├── IndexFolderError    exit 1, an index is missing parts, or belongs to another model or similarity
└── StoreError          exit 1, a vector database refuses, cannot hold, or would change what it is given
"""

from __future__ import annotations

from pathlib import Path


class OffsphereError(Exception):
    """A failure that the user can act on; the message says what was found, expected, and what to type."""

    exit_code = 1


class UsageError(OffsphereError):
    """The request cannot be carried out as written."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown or has an impossible value."""


class DataError(OffsphereError):
    """A file or collection is malformed.

    Args:
        message: What was found and what was expected.
        path: The file, shown before the message.
        line: The 1-based line in that file, if one is to blame.
    """

    def __init__(self, message: str, path: Path | str | None = None, line: int | None = None):
        self.path = path
        self.line = line
        where = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(where + message)


class EncoderError(OffsphereError):
    """An encoder cannot be opened, or cannot do what was asked of it."""


class TrainingError(OffsphereError):
    """Training cannot start or cannot go on."""


class RunError(OffsphereError):
    """A run folder lacks parts, or belongs to another configuration."""


class EmbeddingsError(OffsphereError):
    """Embeddings on disk are unfinished or damaged, or belong to another model, prompt or text."""


class IndexFolderError(OffsphereError):
    """An index lacks parts, or belongs to another model or similarity."""


class StoreError(OffsphereError):
    """A vector database refuses, cannot hold, or would change what it is given."""
