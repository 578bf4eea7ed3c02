"""Flags that take several values, spread before the command line is parsed."""

from __future__ import annotations

import re

SHORT = ("--similarities", "--similarity", "--seeds", "--lr-grid", "--alpha-grid")
LISTS = ("--train", "--eval", "--data", "--to", "--category", *SHORT)
"""Flags that take several values: ``--train A B``, ``--train A --train B`` and, for short ones, ``--seeds 0,1``."""

LISTS_BESIDE_ARGUMENTS = ("--delete", "--shards")
WITH_ARGUMENTS = ("encode", "index", "info", "search", "verify", "verify-endpoint", "serve")
"""Commands with arguments that have no flag. There a flag takes one value, so that an argument can follow it; only
``--delete A B`` and ``--shards A B`` take several."""

BETWEEN = re.compile(",(?!gamma_d=)")
"""A comma between values; the one inside ``gamma_q=0.2,gamma_d=0.9`` is none."""


def spread_lists(arguments: list[str]) -> list[str]:
    """``--train A B`` as ``--train A --train B``, and ``--seeds 0,1`` as two seeds."""
    command = arguments[0] if arguments else ""
    lists = LISTS_BESIDE_ARGUMENTS if command in WITH_ARGUMENTS else LISTS
    if command == "evaluate":
        lists = (*lists, "--model")
    spread: list[str] = []
    flag: str | None = None
    for argument in arguments:
        name, _, value = argument.partition("=")
        if argument.startswith("-"):
            flag = name if name in lists else None
            if flag is None:
                spread.append(argument)
            elif value:
                spread += _repeat(flag, value)
        elif flag is not None:
            spread += _repeat(flag, argument)
        else:
            spread.append(argument)
    return spread


def _repeat(flag: str, value: str) -> list[str]:
    return [part for one in (BETWEEN.split(value) if flag in SHORT else [value]) for part in (flag, one)]
