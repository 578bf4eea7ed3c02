"""What every command shares: the program itself, its output, its flags and its progress."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from offsphere.config import RunConfig

if TYPE_CHECKING:
    from rich.progress import TaskID

app = typer.Typer(
    name="offsphere",
    help="Which embeddings to normalise: train, prove, and keep the ranking of retrievers whose vectors carry length.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
Flag = typer.Option
out = Console()
err = Console(stderr=True)


def about(name: str, kind: type[RunConfig] = RunConfig) -> str:
    """The help of a setting and its default, from the one place that has both."""
    field = kind.model_fields[name]
    default = field.get_default(call_default_factory=True)
    if field.is_required() or default is None or default == [] or isinstance(default, bool):
        return field.description or ""
    shown = ",".join(map(str, default)) if isinstance(default, list) else default
    return f"{field.description} (default: {shown})"


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    """Options of the program itself."""
    if version:
        from offsphere import __version__

        out.print(__version__)
        raise typer.Exit


def by_side(query: str | None, document: str | None) -> dict[str, str]:
    """The prompts that were given."""
    return {side: prompt for side, prompt in (("query", query), ("document", document)) if prompt is not None}


class Shown:
    """Progress on the terminal: lines on standard error, and a bar while it is a terminal."""

    def __enter__(self) -> Shown:
        from rich.progress import Progress, TimeRemainingColumn

        self._bars = Progress(*Progress.get_default_columns()[:3], TimeRemainingColumn(), console=err, transient=True)
        self._task: TaskID | None = None
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """Print the line above the bar."""
        self._bars.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def start(self, what: str, total: int) -> Callable[[int], None]:
        """Show a bar for this piece of work in place of the one before."""
        if self._task is not None:
            self._bars.remove_task(self._task)
        task = self._task = self._bars.add_task(what, total=total)

        def done(steps: int) -> None:
            if task in self._bars.task_ids:
                self._bars.update(task, completed=steps)

        return done


def print_json(value: Any) -> None:
    """Machine output, alone on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def quiet_libraries() -> None:
    """Keep the libraries' own bars and notices off the terminal; errors still come through."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
