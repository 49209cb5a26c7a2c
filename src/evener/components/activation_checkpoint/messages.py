"""What people are told of blocks that are computed again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from evener.components.activation_checkpoint.policy import AGAIN, KEPT_PRODUCTS, Measured
from evener.core.config.recompute import Recompute
from evener.core.config.sizes import size_words


def before(asked: Recompute, blocks: int, steps: int) -> str:
    """Of a run that begins.

    Args:
        steps: In which it is measured.
    """
    if not asked.is_budget:
        return f"recomputes all {blocks} blocks in backward"
    return (
        f"recomputes all {blocks} blocks in backward while they are measured, {steps} steps, then as few as "
        f"{asked.text} allows"
    )


def of_choice(ways: Iterable[str], peak: int, kept_peak: int, times: float) -> str:
    """What was chosen, and what came of it.

    Args:
        ways: Of every block.
        peak: Bytes, of the rank that has the most.
        kept_peak: Bytes that it would have if nothing were computed again.
        times: How many times as long a step takes.
    """
    ways = list(ways)
    again, parts = ways.count(AGAIN), ways.count(KEPT_PRODUCTS)
    which = f"{again} of {len(ways)} blocks" if again or not parts else ""
    of_parts = f"{parts} of {len(ways)} blocks but for their products" if parts else ""
    return (
        f"recomputes {' and '.join(filter(None, (which, of_parts)))}: {size_words(peak)} instead of "
        f"{size_words(kept_peak)}, about {times:.2f} times the time"
    )


def impossible(asked: Recompute, ranks: Sequence[Measured], budgets: Sequence[int]) -> str:
    """Of a budget that cannot be met."""
    rank = max(range(len(ranks)), key=lambda each: ranks[each].least - budgets[each])
    found, budget = ranks[rank], budgets[rank]
    return (
        f"recompute={asked.text} gives rank {rank} {size_words(budget)}, and a step takes {size_words(found.least)} at "
        f"least, with all {len(found.blocks)} blocks computed again ({size_words(found.kept_peak)} with none): raise "
        "the budget, use a smaller micro_batch, a strategy that divides the model such as sharded, or precision bf16"
    )


def above(nbytes: int) -> str:
    """Of a step that took more than the budget with all blocks computed again, after one that did not."""
    return f"; this step had more samples or longer ones than those measured, and took {size_words(nbytes)} too much"
