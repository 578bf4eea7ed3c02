"""What destinations hold, rank and serve, for readers in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from offsphere.report.summary import count
from offsphere.report.tables import new_table, plain

if TYPE_CHECKING:
    from rich.console import Console

    from offsphere.search.endpoint import EndpointCheck
    from offsphere.search.export import Exported
    from offsphere.search.verify import Verification


def print_exported(console: Console, rows: Sequence[Exported]) -> None:
    """Print for each destination what was written, what is there, and how exactly it reads back."""
    for row in rows:
        _say(console, f"\n{row.target}", "bold")
        _say(console, f"  {row.written:,} documents written, {row.kept:,} stored before, {row.stored:,} stored now")
        if row.empty:
            _say(console, f"  left out as without text, never an answer: {count(row.empty, 'document')}")
        if row.extra:
            _say(console, f"  {row.extra:,} of them are not of this export and were left there", "yellow")
        _say(console, f"  {row.read_back:,} vectors read back, off by at most {row.largest_error:.1e} of their length")


def print_verification(console: Console, found: Verification) -> None:
    """Print the verdict, then what was measured against the threshold, then the causes."""
    verdict = f"{found.target} ranks as {found.model} ({found.similarity})"
    if not found.passed:
        verdict = f"{found.target} does not rank as {found.model} ({found.similarity})"
    _say(console, f"\n{verdict}", "bold green" if found.passed else "bold red")
    encoded = "all" if found.encoded == found.documents else f"{found.encoded:,}"
    _say(console, f"{found.queries:,} queries; {found.documents:,} documents, {encoded} of them encoded anew")
    table = new_table("", "")
    for heading in ("found", "at least"):
        table.add_column(heading, justify="right")
    shares = {
        f"overlap@{found.k}": found.overlap,
        "Kendall's tau": found.tau,
        "equal scores": found.same_scores,
        "documents stored": found.present,
    }
    for name, share in shares.items():
        table.add_row(name, f"{share:.4f}", f"{found.threshold:g}")
    console.print(table)
    _say(console, f"metric {found.metric}, {found.dimension} dimensions, {found.stored:,} documents at the destination")
    for cause in found.causes:
        _say(console, f"cause: {cause.name}: {cause.sentence}", "red")
    if not found.passed and not found.causes:
        _say(console, "no cause could be measured; compare the settings of the export with those of this check", "red")


def print_endpoint(console: Console, found: EndpointCheck) -> None:
    """Print what the endpoint does to direction and length, then a verdict for each similarity."""
    _say(console, f"\n{found.url} beside {found.model}", "bold")
    gamma = "cannot be told" if found.gamma is None else f"{round(found.gamma, 2) + 0.0:.2f}"
    lines = {
        "encodes": found.encoding,
        "direction": f"median cosine {found.cosine:.5f} to the model without a prompt, {found.dimension} dimensions",
        "lengths": f"mean {found.norm_mean:.4g} (CV {found.norm_cv:.2g}), "
        f"the model's {found.own_norm_mean:.4g} (CV {found.own_norm_cv:.2g})",
        "ratio": f"{found.ratio:.4g} (CV {found.ratio_cv:.2g}); power of the length removed: {gamma}",
        "long text": found.long_text,
        "same answer twice": "yes" if found.deterministic else "no",
        "order kept": "yes" if found.order_kept else "no",
    }
    for name, value in lines.items():
        _say(console, f"  {name}: {value}")
    table = new_table("Which similarities survive", "similarity")
    for heading in ("ranks", "scores", "because"):
        table.add_column(heading)
    for one in found.served:
        name = f"{one.similarity} (the model's own)" if one.similarity == found.own else one.similarity
        table.add_row(
            plain(name), *("yes" if value else "no" for value in (one.ranks, one.scores)), plain(one.sentence)
        )
    console.print(table)


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
