"""What a run is about to do, in lines for a reader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offsphere.config import RunConfig
    from offsphere.training.materials import Materials
    from offsphere.training.plan import Plan
    from offsphere.training.run import Run


def announcement(run: Run, done: int) -> Iterator[str]:
    """The lines: encoder, data, plan, similarities, folder, then notes on what a reader may not expect.

    Args:
        run: Before it trains.
        done: Variants that the folder has already.
    """
    config, plan, materials = run.config, run.plan, run.materials
    frozen = "" if config.freeze_layers is None else f", the first {config.freeze_layers} layers frozen"
    adapters = "" if config.lora is None else f", LoRA adapters of rank {config.lora} trained"
    yield f"encoder        {config.model} ({config.init}{frozen}{adapters})"
    if run.prompts:
        yield f"prompts        {run.prompts}"
    yield f"training       {len(materials.pairs)} pairs of {', '.join(config.train)}"
    yield f"               {plan.steps} steps of {_size(plan)}, {_rate_and_scale(config, plan)}"
    if plan.processes > 1:
        yield (
            f"processes      {plan.processes}; the documents of all are negatives for the queries of each: "
            f"{plan.negatives:,} in-batch negatives a query"
        )
    yield f"similarities   {', '.join(config.trained)}; seeds {', '.join(map(str, config.seeds))}"
    yield from _evaluation(materials)
    state = f" ({done} of {len(run.variants)} variants are done already)" if done else ""
    yield f"run folder     {config.out}{state}"
    yield from (f"note: {note}" for note in _notes(run))


def _size(plan: Plan) -> str:
    """How many pairs a step takes."""
    factors = ((plan.accumulate, "batches"), (plan.processes, "processes"))
    return " x ".join([f"{plan.batch_size}", *(f"{factor} {what}" for factor, what in factors if factor > 1)])


def _rate_and_scale(config: RunConfig, plan: Plan) -> str:
    chosen = {"learning_rate": f"{plan.learning_rate:g}", "alpha": f"{plan.alpha:g}"} | {
        name: f"the best of {', '.join(f'{one:g}' for one in values)} under cosine"
        for name, values in config.grids.items()
    }
    alpha = "" if config.alpha is None and config.alpha_grid is None else f", alpha {chosen['alpha']}"
    return f"rate {chosen['learning_rate']}, scale {config.scale}{alpha}"


def _evaluation(materials: Materials) -> Iterator[str]:
    for domain, inside in (("in domain", True), ("out of domain", False)):
        for one in materials.evaluation:
            if (one.name in materials.in_domain) == inside:
                yield f"{domain:<14} {one.name}: {len(one.queries)} queries, {len(one.documents)} documents"


def _notes(run: Run) -> Iterator[str]:
    plan, materials = run.plan, run.materials
    yield from materials.notes()
    for one in (*materials.dev, *materials.evaluation):
        if own := run.prompts_on(one).in_place_of(run.prompts):
            yield (
                f"{one.name} ({one.split}): {own}; training applies the model's, set with --query-prompt and "
                "--document-prompt"
            )
    if plan.accumulate > 1:
        yield (
            f"{plan.accumulate} batches are accumulated in a step, which adds no negatives: each query still meets "
            f"{plan.negatives:,} of other pairs. A larger --batch-size with --tokens-per-batch adds them in the same "
            "memory"
        )
    if run.normalized:
        yield (
            f"{run.config.model} ends with a Normalize module, which erases every length; it is taken off for all "
            "variants (cosine does not see the difference)"
        )
