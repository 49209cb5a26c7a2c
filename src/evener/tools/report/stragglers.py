"""Finds the rank that the others wait for, and why it is slower: its samples, its forward or backward passes, or all.

In a synchronous step all ranks end together. Ranks differ in the time of their own work and in that of waiting for
samples before it. The others wait for what the slowest takes longer. Medians over the steps decide, so that a single
slow step says nothing about a rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from statistics import median

from evener.tools.plan.text import seconds_text
from evener.tools.report.schema import (
    BACKWARD,
    COMMUNICATION,
    COMPUTE,
    FORWARD,
    INPUT,
    Cause,
    RankTotals,
    Report,
)

BALANCE = "--balance auto"
WORTH = 0.08
"""A cause is named if it takes this part of the time of a step."""
_SLOWER = 1.1
_BOTH = 1.25
"""A rank is slow as a whole if forward and backward both take so many times as long as on other ranks."""
_ALIKE = 2.0
_SHARED = 1.01
_STEADY = 0.6
"""A rank is slow if it is the slowest in this part of the steps. Noise makes another rank the slowest in each."""
_GAIN = 1.03
"""The least predicted speedup of an advice."""


def straggler(report: Report) -> Iterator[Cause]:
    """Yields the cause for which other ranks wait for one rank, if there is one."""
    ranks = [rank for rank in report.ranks if COMPUTE in rank.medians]
    if len(ranks) < 2:
        return
    busy = {rank.rank: rank.medians[COMPUTE] + rank.medians.get(INPUT, 0.0) for rank in ranks}
    slow = max(ranks, key=lambda rank: busy[rank.rank])
    others = [rank for rank in ranks if rank is not slow]
    typical = median(busy[rank.rank] for rank in others)
    longer, step = busy[slow.rank] - typical, step_seconds(ranks)
    is_steady = slow.slowest is None or slow.slowest >= _STEADY
    if longer <= 0 or longer < WORTH * step or busy[slow.rank] < _SLOWER * typical or not is_steady:
        return
    kind, what = _kind(report, slow, others)
    who = f"rank {others[0].rank} waits" if len(others) == 1 else "the other ranks wait"
    wait = f"{who} {longer / step:.0%} of a step for rank {slow.rank}"
    if kind == "slow loader":
        advice, gain = loading_advice(report, slow, longer, step)
    else:
        advice, gain = _balance_advice(report, ranks, step)
    seconds = longer * report.identity.steps
    yield Cause(kind, f"{wait}, {what}", slow.rank, seconds, longer / step, advice, gain)


def step_seconds(ranks: Sequence[RankTotals]) -> float:
    """Returns the median length of a step: the work of the slowest rank and the communication after it."""
    longest = max(rank.medians[COMPUTE] + rank.medians.get(INPUT, 0.0) for rank in ranks)
    return longest + max(rank.medians.get(COMMUNICATION, 0.0) for rank in ranks)


def _kind(report: Report, slow: RankTotals, others: Sequence[RankTotals]) -> tuple[str, str]:
    """Returns the kind of the cause, and a description with numbers."""
    longer = {name: _longer(slow, others, name) for name in (INPUT, FORWARD, BACKWARD, COMPUTE)}
    if longer[INPUT] >= max(0.0, longer[COMPUTE]):
        return "slow loader", f"which waits {seconds_text(slow.medians[INPUT])} for its samples"
    if _is_throttled(report, slow.rank):
        return "slow rank", "which --throttle makes slower"
    if _has_more(report, slow, others):
        return "uneven shares", f"which has {slow.share:.0%} of the samples, each as fast as on other ranks"
    ratios = {name: _ratio(slow, others, name) for name in (FORWARD, BACKWARD, COMPUTE)}
    takes = f"{seconds_text(slow.medians[COMPUTE])} for its passes, {ratios[COMPUTE]:.1f}x the time of others"
    forward, backward = ratios[FORWARD], ratios[BACKWARD]
    if math.isnan(forward) or math.isnan(backward):
        return "slow rank", f"which takes {takes}"
    if min(forward, backward) >= _BOTH and max(forward, backward) <= _ALIKE * min(forward, backward):
        return "slow rank", f"which takes {takes}"
    name = FORWARD if longer[FORWARD] > longer[BACKWARD] else BACKWARD
    return (
        f"slow {name}",
        f"whose {name} takes {seconds_text(slow.medians[name])}, {ratios[name]:.1f}x the time of others",
    )


def _is_throttled(report: Report, rank: int) -> bool:
    """Returns True if the run emulated a slower device on this rank (``1,0.5`` has the speed of each)."""
    speeds = str(report.identity.settings.get("throttle") or "").split(",")
    with suppress(ValueError):
        return rank < len(speeds) and 0 < float(speeds[rank]) < 1
    return False


def _longer(slow: RankTotals, others: Sequence[RankTotals], name: str) -> float:
    return slow.medians.get(name, 0.0) - median(rank.medians.get(name, 0.0) for rank in others)


def _ratio(slow: RankTotals, others: Sequence[RankTotals], name: str) -> float:
    typical = median(rank.medians.get(name, math.nan) for rank in others)
    return slow.medians.get(name, math.nan) / typical if typical > 0 else math.nan


def _has_more(report: Report, slow: RankTotals, others: Sequence[RankTotals]) -> bool:
    """Returns True if the rank is slower only because it has more samples."""
    each = [rank.sample_seconds for rank in others if rank.sample_seconds is not None]
    typical = median(rank.share for rank in others)
    return bool(
        each
        and slow.sample_seconds is not None
        and slow.share > _SLOWER * typical
        and slow.sample_seconds < _SLOWER * median(each)
    )


def _balance_advice(report: Report, ranks: Sequence[RankTotals], step: float) -> tuple[str, float | None]:
    """Returns the advice to divide batches by speed, and its gain, if it is worth it and was not done.

    A rank with t seconds per sample takes s t for s samples. With shares by speed all ranks take N / sum(1 / t) for N
    samples together. That is the most they gain: a part of a rank's time may be fixed, and then moves with no sample.
    """
    each = [rank.sample_seconds for rank in ranks]
    if report.identity.plain_script or report.identity.learns:
        return "", None
    if not all(each) or sum(rank.share for rank in ranks) > _SHARED:
        return "", None
    samples = sum(
        rank.medians[COMPUTE] / seconds for rank, seconds in zip(ranks, each, strict=True) if seconds
    )
    balanced = samples / sum(1 / seconds for seconds in each if seconds)
    longest = max(rank.medians[COMPUTE] for rank in ranks)
    gain = step / max(step - longest + balanced, 1e-9)
    return (BALANCE, gain) if gain >= _GAIN else ("", None)


def loading_advice(report: Report, rank: RankTotals, seconds: float, step: float) -> tuple[str, float | None]:
    """Returns the advice to read samples with more workers, and its gain.

    Args:
        rank: The rank that waits for samples.
        seconds: What waiting for samples adds to a step.
        step: Length of a step.
    """
    rest = step - seconds
    if rest <= 0 or report.identity.plain_script:
        return "", None
    workers = rank.workers or 0
    reads = workers * step if workers else rank.medians[INPUT]  # a batch takes one worker so long
    needed = max(workers + 1, math.ceil(reads / rest))
    free = (rank.cores or needed + 1) - 1
    if needed > max(1, free):
        return "", None
    return f"--workers {needed}", step / rest
