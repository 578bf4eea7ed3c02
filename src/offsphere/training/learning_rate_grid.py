"""The learning rate by a grid on the cosine variant (paper, section 4), to be the same for every variant and seed."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from offsphere.training.run_folder import write_atomically


@dataclass(frozen=True)
class TriedRate:
    """One training of the grid.

    Attributes:
        learning_rate: Peak rate.
        validation: The best value on the dev splits.
        best_step: Where it was.
        converged_step: Where the training had converged, if it had.
    """

    learning_rate: float
    validation: float
    best_step: int
    converged_step: int | None = None


def best_rate(tried: Sequence[TriedRate]) -> TriedRate:
    """The one with the best validation; of equals the smallest, which changes the encoder least."""
    return min(tried, key=lambda one: (-one.validation, one.learning_rate))


def warn_of_edge(tried: Sequence[TriedRate]) -> str | None:
    """A warning if a rate beyond the grid may be better still."""
    best = best_rate(tried).learning_rate
    rates = sorted(one.learning_rate for one in tried)
    if best not in (rates[0], rates[-1]):
        return None
    side, further = ("smallest", best / 3) if best == rates[0] else ("largest", best * 3)
    return (
        f"the best learning rate is the {side} of the grid, {best:g}; a better one may lie beyond: add one such as "
        f"{further:.1g} to --lr-grid, in another --out"
    )


def write_rates(path: Path, tried: Sequence[TriedRate]) -> None:
    """Write the table, the smallest rate first, and which one is used."""
    file = io.StringIO()
    writer = csv.DictWriter(file, [*(field.name for field in fields(TriedRate)), "best"], lineterminator="\n")
    writer.writeheader()
    for one in sorted(tried, key=lambda one: one.learning_rate):
        writer.writerow(asdict(one) | {"best": int(one == best_rate(tried))})
    write_atomically(path, file.getvalue())


def read_rates(path: Path) -> list[TriedRate]:
    """The rates that were tried so far; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [
            TriedRate(
                float(row["learning_rate"]),
                float(row["validation"]),
                int(row["best_step"]),
                int(row["converged_step"]) if row["converged_step"] else None,
            )
            for row in csv.DictReader(file)
        ]
