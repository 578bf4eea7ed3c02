"""Flags that take several values, spread before the command line is parsed."""

from __future__ import annotations

LISTS = ("--train", "--eval", "--data", "--similarities", "--similarity", "--seeds", "--to", "--category")
"""Flags that take several values: ``--train A B``, ``--train A --train B`` and, for short ones, ``--seeds 0,1``."""

LISTS_BESIDE_ARGUMENTS = ("--delete", "--shards")
WITH_ARGUMENTS = ("index", "search", "verify", "verify-endpoint", "serve")
"""Commands with arguments that have no flag. There a flag takes one value, so that an argument can follow it; only
``--delete A B`` and ``--shards A B`` take several."""


def spread_lists(arguments: list[str]) -> list[str]:
    """``--train A B`` as ``--train A --train B``, and ``--seeds 0,1`` as two seeds."""
    lists = LISTS_BESIDE_ARGUMENTS if arguments[:1] and arguments[0] in WITH_ARGUMENTS else LISTS
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
    separated = flag in ("--similarities", "--similarity", "--seeds") and "gamma_" not in value
    return [part for one in (value.split(",") if separated else [value]) for part in (flag, one)]
