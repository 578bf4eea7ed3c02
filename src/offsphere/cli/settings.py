"""Commands whose flags are the settings of a run: one flag a setting, made from its type and description."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from offsphere.cli.app import Flag, about
from offsphere.config import Config, RunConfig, read_config

WITHOUT_FLAG = ("processes",)
"""Settings that something else than a flag decides."""
NAMES = {"seeds": ("--seeds", "--seed")}


def with_flags_of(
    kind: type[Config],
) -> Callable[[Callable[[Config, bool], None]], Callable[..., None]]:
    """Make a command of settings and ``as_json`` one with ``--config``, ``--json`` and a flag for each setting.

    Args:
        kind: The settings that the command takes.
    """

    def decorate(command: Callable[[Config, bool], None]) -> Callable[..., None]:
        names = [name for name in kind.model_fields if name not in WITHOUT_FLAG]

        def run(config: Path | None, as_json: bool, **flags: Any) -> None:
            given = {name: value for name, value in flags.items() if value is not None and value != []}
            command(read_config(kind, config, given), as_json)

        hints: dict[str, Any] = {name: _hint(kind, name) for name in names}
        hints["config"] = Annotated[Path | None, Flag(help="settings in YAML; flags come before them")]
        hints["as_json"] = Annotated[bool, Flag("--json", help="print the outcome as JSON")]
        defaults = {"as_json": False}
        run.__signature__ = Signature(  # type: ignore[attr-defined]
            [
                Parameter(name, Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=hint)
                for name, hint in hints.items()
            ]
        )
        run.__annotations__ = hints | {"return": None}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _hint(kind: type[RunConfig], name: str) -> Any:
    """The flag of a setting. Words, and what may be a number or a word, stay text: the settings check them."""
    flag = f"--{name.replace('_', '-')}"
    given = kind.model_fields[name].annotation
    options = [one for one in get_args(given) if one is not type(None)] if _is_union(given) else [given]
    plain = options[0] if len(options) == 1 else str
    if plain is bool:
        return Annotated[bool | None, Flag(flag, help=about(name, kind))]
    if get_origin(plain) is list:
        return Annotated[list[str] | None, Flag(*NAMES.get(name, (flag,)), help=about(name, kind))]
    return Annotated[(plain if plain in (int, float, Path) else str) | None, Flag(flag, help=about(name, kind))]


def _is_union(given: Any) -> bool:
    return get_origin(given) in (Union, UnionType)
