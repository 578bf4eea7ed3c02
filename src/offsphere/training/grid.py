"""Learning rate and inverse temperature by a grid on the cosine variant, to be the same for every variant and seed.

The paper finds its rates so (section 4), at one temperature; how far that one is right depends on the batch.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from offsphere.atomic import write_atomically

FURTHER = {"learning_rate": (3.0, "--lr-grid"), "alpha": (2.0, "--alpha-grid")}
"""By what factor to look beyond an edge of the grid, and where to say so."""


@dataclass(frozen=True)
class Tried:
    """One training of the grid.

    Attributes:
        learning_rate: Peak rate.
        alpha: Inverse temperature of cosine.
        validation: The best value on the dev splits.
        best_step: Where it was.
        converged_step: Where the training had converged, if it had.
    """

    learning_rate: float
    alpha: float
    validation: float
    best_step: int
    converged_step: int | None = None


def best_of(tried: Sequence[Tried]) -> Tried:
    """The one with the best validation; of equals the smallest rate, which changes the encoder least."""
    return min(tried, key=lambda one: (-one.validation, one.learning_rate, one.alpha))


def warn_of_edges(tried: Sequence[Tried]) -> list[str]:
    """A warning for the rate and for alpha, where a value beyond the grid may be better still."""
    warnings = []
    for name, (factor, flag) in FURTHER.items():
        best = getattr(best_of(tried), name)
        values = sorted({getattr(one, name) for one in tried})
        if len(values) == 1 or best not in (values[0], values[-1]):
            continue
        side, further = ("smallest", best / factor) if best == values[0] else ("largest", best * factor)
        warnings.append(
            f"the best {name.replace('_', ' ')} is the {side} of the grid, {best:g}; a better one may lie beyond: add "
            f"one such as {further:.1g} to {flag}, in another --out"
        )
    return warnings


def write_grid(path: Path, tried: Sequence[Tried]) -> None:
    """Write the table, the smallest rate first, and which row is used."""
    file = io.StringIO()
    writer = csv.DictWriter(file, [*(field.name for field in fields(Tried)), "best"], lineterminator="\n")
    writer.writeheader()
    for one in sorted(tried, key=lambda one: (one.learning_rate, one.alpha)):
        writer.writerow(asdict(one) | {"best": int(one == best_of(tried))})
    write_atomically(path, file.getvalue())


def read_grid(path: Path) -> list[Tried]:
    """What was tried so far; nothing if there is no such file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Tried(
                float(row["learning_rate"]),
                float(row["alpha"]),
                float(row["validation"]),
                int(row["best_step"]),
                int(row["converged_step"]) if row["converged_step"] else None,
            )
            for row in csv.DictReader(file)
        ]
