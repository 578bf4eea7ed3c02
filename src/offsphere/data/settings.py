"""What a ``collection.yaml`` says about the collection beside it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from offsphere.errors import DataError

FILE = "collection.yaml"
KEYS = ("exclude_self", "excluded", "licence", "name", "prompts")
SIDES = ("document", "query")


@dataclass(frozen=True)
class Settings:
    """The keys of ``collection.yaml``; see Collection for what they mean."""

    name: str | None = None
    licence: str | None = None
    exclude_self: bool = False
    excluded: dict[str, frozenset[str]] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=dict)


def read_settings(folder: Path) -> Settings:
    """The settings of a collection; the defaults where it has no ``collection.yaml``.

    Raises:
        DataError: If the file is not YAML, has an unknown key or a value of the wrong kind.
    """
    path = folder / FILE
    if not path.is_file():
        return Settings()
    content = _load(path)
    _check_keys(content, KEYS, path)
    name = _text(content, "name", path)
    if name is not None and "/" in name:
        raise DataError(f"expected a name that can stand in a file name, without '/', found {name!r}", path)
    return Settings(
        name=name,
        licence=_text(content, "licence", path),
        exclude_self=_flag(content, "exclude_self", path),
        excluded=_excluded(content, path),
        prompts=_prompts(content, path),
    )


def _load(path: Path) -> dict[str, Any]:
    """The mapping in the file. The base loader makes every scalar a string, so the id 007 stays 007."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise DataError(f"not YAML: {error.problem}", path, line) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"not YAML in UTF-8: {error}", path) from error
    return _mapping({"file": content or {}}, "file", path)


def _check_keys(content: dict[str, Any], known: tuple[str, ...], path: Path) -> None:
    for key in content:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            meant = f"did you mean {close[0]}?" if close else f"expected {', '.join(known)}"
            raise DataError(f"unknown key {key!r}; {meant}", path)


def _mapping(content: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    value = content.get(key) or {}
    if not isinstance(value, dict):
        raise DataError(f"{key} must be a mapping, found {value!r}", path)
    return value


def _text(content: dict[str, Any], key: str, path: Path) -> str | None:
    value = content.get(key) or None
    if value is not None and not isinstance(value, str):
        raise DataError(f"{key} must be text, found {value!r}", path)
    return value


def _flag(content: dict[str, Any], key: str, path: Path) -> bool:
    value = content.get(key, "false")
    if not isinstance(value, str) or value.lower() not in ("true", "false"):
        raise DataError(f"{key} must be true or false, found {value!r}", path)
    return value.lower() == "true"


def _excluded(content: dict[str, Any], path: Path) -> dict[str, frozenset[str]]:
    lists = _mapping(content, "excluded", path)
    for query, documents in lists.items():
        if not isinstance(documents, list) or not all(isinstance(document, str) for document in documents):
            raise DataError(f"excluded must list document ids for query {query!r}, found {documents!r}", path)
    return {query: frozenset(documents) for query, documents in lists.items()}


def _prompts(content: dict[str, Any], path: Path) -> dict[str, str]:
    prompts = _mapping(content, "prompts", path)
    _check_keys(prompts, SIDES, path)
    return {side: text for side in prompts if (text := _text(prompts, side, path)) is not None}
