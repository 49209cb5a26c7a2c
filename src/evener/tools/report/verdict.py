"""The verdict on a run: where its time went, what was wrong with which rank, and the next step. Pure functions.

Each advice is computed from the numbers of this run, and its gain is what these predict. If nothing takes a part of the
time that is worth a word, the verdict says that nothing stands out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from evener.core.config.sizes import size_words
from evener.core.text import counted
from evener.tools.plan.checkpoint_interval import daly_interval
from evener.tools.plan.text import seconds_text
from evener.tools.report.schema import (
    COMMUNICATION,
    COMPUTE,
    INPUT,
    Cause,
    Goodput,
    RankTotals,
    Report,
    Verdict,
)
from evener.tools.report.stragglers import BALANCE, WORTH, loading_advice, step_seconds, straggler

FAULTS = ("death", "hang", "error")
KINDS = (
    *FAULTS,
    "slow forward",
    "slow backward",
    "slow rank",
    "uneven shares",
    "slow loader",
    "slow link",
    "communication",
    "oversubscribed threads",
    "busy machine",
    "memory growth",
    "checkpoints",
    "evaluation",
    "lost steps",
)
"""The causes that are named."""

_COMMUNICATION, _CHECKPOINTS, _EVALUATION, _LOST = 0.2, 0.05, 0.3, 0.05
_LEAST_SECONDS = 2.0
"""Checkpoints and evaluations of less than this are not worth a word."""
_SLOW_LINK = 2.0
_QUEUED, _QUEUED_BY_OTHERS = 0.15, 0.3
_LEAST_GROWN = 16 << 20
_SHOWN = 3
_GOOD_CHECKPOINTS, _GOOD_EVALUATION = 0.01, 0.1


def verdict_of(report: Report) -> Verdict:
    """Returns the verdict on a report, whose own verdict does not count."""
    faults = list(_faults(report))
    threads = list(_threads(report))
    slow = [] if any(cause.rank is not None for cause in threads) else list(straggler(report))
    losses = [
        *slow,
        *threads,
        *_loading(report, slow),
        *_communication(report),
        *_memory(report),
        *_saving(report),
        *_evaluating(report),
        *_lost(report),
    ]
    losses.sort(key=lambda cause: -(cause.seconds or 0.0))
    causes = [_rounded(each) for each in (*faults, *losses)]
    return Verdict(_words(report, causes), not causes, tuple(causes))


def _rounded(cause: Cause) -> Cause:
    numbers = (
        None if value is None else float(f"{value:.4g}")
        for value in (cause.seconds, cause.fraction, cause.gain)
    )
    seconds, fraction, gain = numbers
    return replace(cause, seconds=seconds, fraction=fraction, gain=gain)


def training_seconds(goodput: Goodput) -> float:
    """Returns all accounted seconds but those of the start-up."""
    return goodput.total - (goodput.startup or 0.0)


# The sentences


def _words(report: Report, causes: Sequence[Cause]) -> str:
    """Returns the verdict in words."""
    whole, goodput = training_seconds(report.goodput), report.goodput
    if not whole:
        spent = "no step has ended yet"
    else:
        parts = {
            "compute": goodput.compute,
            "communication": goodput.communication,
            "waiting for ranks": goodput.waiting,
            "waiting for samples": goodput.input,
            "checkpoints": goodput.checkpoints or 0.0,
            "evaluation": goodput.evaluation,
            "repeated steps": goodput.lost_steps,
            "other work": goodput.other,
        }
        shown = [
            f"{seconds / whole:.0%} {name}" for name, seconds in parts.items() if seconds / whole >= 0.01
        ]
        spent = f"of {seconds_text(whole)} of training, {', '.join(shown)}"
    if not causes:
        return f"Nothing stands out: {spent}."
    first = "; ".join(_with_advice(cause) for cause in causes[:_SHOWN])
    more = f", and {len(causes) - _SHOWN} more" if len(causes) > _SHOWN else ""
    return f"{first[0].upper()}{first[1:]}{more}. {spent[0].upper()}{spent[1:]}."


def _with_advice(cause: Cause) -> str:
    if not cause.advice:
        return cause.words
    most = "up to " if cause.advice == BALANCE else ""
    gain = f", training would be {most}{cause.gain:.2f}x as fast" if cause.gain is not None else ""
    return f"{cause.words}: with {cause.advice}{gain}"


# The causes


def _faults(report: Report) -> Iterator[Cause]:
    overcome = {attempt.reason for attempt in report.attempts}
    for event in report.events:
        if event.kind in FAULTS:
            words = event.words.strip().partition("\n")[0].rstrip(".:")
            went_on = " (the run went on after it)" if event.words in overcome else ""
            yield Cause(event.kind, f"after {counted(event.step, 'step')}: {words}{went_on}", event.rank)


def _loading(report: Report, slow: Sequence[Cause]) -> Iterator[Cause]:
    """Yields that all ranks wait for samples, unless one of them is the cause already."""
    ranks = [rank for rank in report.ranks if COMPUTE in rank.medians and INPUT in rank.medians]
    if not ranks or any(cause.kind == "slow loader" for cause in slow):
        return
    seconds, step = min(rank.medians[INPUT] for rank in ranks), step_seconds(ranks)
    if seconds <= 0 or seconds < WORTH * step:
        return
    latest = max(ranks, key=lambda rank: rank.medians[INPUT])
    advice, gain = loading_advice(report, latest, seconds, step)
    who = "all ranks wait" if len(ranks) > 1 else "rank 0 waits"
    words = f"{who} {seconds / step:.0%} of a step for samples"
    rank = None if len(ranks) > 1 else latest.rank
    steps = report.identity.steps
    yield Cause("slow loader", words, rank, seconds * steps, seconds / step, advice, gain)


def _communication(report: Report) -> Iterator[Cause]:
    ranks = [rank for rank in report.ranks if COMPUTE in rank.medians]
    if len(ranks) < 2:
        return
    step, seconds = step_seconds(ranks), median(rank.medians.get(COMMUNICATION, 0.0) for rank in ranks)
    if seconds <= 0 or seconds < _COMMUNICATION * step:
        return
    lost = seconds * report.identity.steps, seconds / step
    takes = f"communication takes {seconds / step:.0%} of a step"
    link = slow_link([rank.link_seconds for rank in report.ranks])
    if link is not None:
        rank, ratio = link
        gain = step / (step - seconds * (1 - 1 / ratio))
        words = f"{takes}, and messages from and to rank {rank} take {ratio:.1f}x the time of others"
        yield Cause("slow link", words, rank, *lost, "a link as fast as the others", gain)
        return
    alone = sum(rank.medians[COMPUTE] for rank in ranks) + max(rank.medians.get(INPUT, 0.0) for rank in ranks)
    faster = step / alone >= 1.05 and all(rank.device.startswith("cpu") for rank in ranks)
    yield Cause(
        "communication", takes, None, *lost, *(("--processes 1", step / alone) if faster else ("", None))
    )


def slow_link(seconds: Sequence[float | None]) -> tuple[int, float] | None:
    """Returns the rank whose messages are slow, and how many times as long they take as the others. None if there is no
    such rank.

    Args:
        seconds: For each rank the time of a message to the next rank and back. A rank with a slow link is slow with the
            rank before and with the next one.
    """
    known = [each for each in seconds if each is not None]
    if len(known) < 3 or len(known) < len(seconds):
        return None
    both = [min(known[rank - 1], known[rank]) for rank in range(len(known))]
    rank = max(range(len(both)), key=both.__getitem__)
    rest = [each for place, each in enumerate(known) if place not in (rank, (rank - 1) % len(known))]
    ratio = both[rank] / max(max(rest), 1e-9)
    return (rank, ratio) if ratio >= _SLOW_LINK else None


def _threads(report: Report) -> Iterator[Cause]:
    """Yields for each host that its ranks have more threads than it has cores, or that other programs have them."""
    hosts = defaultdict[str, list[RankTotals]](list)
    for rank in report.ranks:
        if rank.threads and rank.cores and rank.queued is not None:
            hosts[rank.host].append(rank)
    for host, ranks in hosts.items():
        queued, cores = max(rank.queued or 0.0 for rank in ranks), max(rank.cores or 1 for rank in ranks)
        threads, fair = sum(rank.threads or 0 for rank in ranks), max(1, cores // len(ranks))
        lost = max(min((rank.queued or 0.0) * rank.compute, rank.queued_seconds or 0.0) for rank in ranks)
        whole = training_seconds(report.goodput)
        fraction = lost / whole if whole else 0.0
        crowded = threads > max(cores, len(ranks))
        if fraction < (_QUEUED if crowded else _QUEUED_BY_OTHERS):
            continue
        waited = f"threads waited {queued:.0%} of their time for a core"
        if not crowded:
            yield Cause(
                "busy machine", f"on {host} {waited}, which other programs used", None, lost, fraction
            )
            continue
        wide = [rank for rank in ranks if (rank.threads or 0) > fair]
        only = wide[0].rank if len(wide) == 1 and len(ranks) > 1 else None
        who = (
            f"rank {only} has {wide[0].threads} threads"
            if only is not None
            else f"{len(ranks)} ranks have {threads} threads"
        )
        words = f"{who} on {cores} cores of {host}, where {waited}"
        gain = whole / (whole - lost)
        yield Cause("oversubscribed threads", words, only, lost, fraction, f"OMP_NUM_THREADS={fair}", gain)


def _memory(report: Report) -> Iterator[Cause]:
    growing = [
        rank for rank in report.memory if (rank.growth or 0.0) * report.identity.steps / 2 >= _LEAST_GROWN
    ]
    for rank in growing[:1]:
        growth = rank.growth or 0.0
        only = len(growing) == 1
        who = f"rank {rank.rank}" if only else f"{len(growing)} ranks"
        left = (rank.limit - rank.peak) / growth if rank.limit else math.inf
        until = f", and reaches its limit in {left:,.0f} steps" if 0 < left < math.inf else ""
        words = f"the memory of {who} grows by {size_words(round(growth))} a step, to {size_words(rank.peak)}{until}"
        yield Cause("memory growth", words, rank.rank if only else None)


def _saving(report: Report) -> Iterator[Cause]:
    goodput, whole = report.goodput, training_seconds(report.goodput)
    seconds, saves = goodput.checkpoints or 0.0, goodput.saves or 0
    if saves < 2 or seconds < _LEAST_SECONDS or seconds < _CHECKPOINTS * whole:
        return
    interval = math.ceil(seconds / saves / _GOOD_CHECKPOINTS)
    gain = whole / (whole - seconds + _GOOD_CHECKPOINTS * whole)
    words = f"{saves} saves stop training for {seconds / whole:.0%} of the time"
    yield Cause(
        "checkpoints",
        words,
        None,
        seconds,
        seconds / whole,
        *_setting(report, f"--save-every {interval}s", gain),
    )


def _evaluating(report: Report) -> Iterator[Cause]:
    whole, seconds = training_seconds(report.goodput), report.goodput.evaluation
    number = len(report.evaluations)
    if number < 2 or seconds < _LEAST_SECONDS or seconds < _EVALUATION * whole:
        return
    now = report.identity.settings.get("evaluate_every")
    fewer = math.ceil(seconds / (_GOOD_EVALUATION * (whole - seconds))) if seconds < whole else number
    fewer = min(number, fewer)
    every = fewer * (now if type(now) is int and now > 0 else 1)
    gain = whole / (whole - seconds + seconds / fewer)
    words = f"{number} evaluations take {seconds / whole:.0%} of the time"
    yield Cause(
        "evaluation",
        words,
        None,
        seconds,
        seconds / whole,
        *_setting(report, f"--evaluate-every {every}", gain),
    )


def _setting(report: Report, advice: str, gain: float) -> tuple[str, float | None]:
    """Returns an advice of a setting with its gain; nothing for a script, which has no settings of Evener's."""
    return ("", None) if report.identity.plain_script else (advice, gain)


def _lost(report: Report) -> Iterator[Cause]:
    goodput, whole = report.goodput, training_seconds(report.goodput)
    restarts = len(report.attempts) - 1
    if restarts < 1 or goodput.lost_steps < _LOST * whole or goodput.lost_steps < _LEAST_SECONDS:
        return
    steps = sum(attempt.lost_steps for attempt in report.attempts)
    words = f"{counted(steps, 'step')} repeated after {counted(restarts, 'restart')}"
    advice = ""
    if goodput.saves and goodput.checkpoints and not report.identity.plain_script:
        advice = f"--save-every {daly_interval(goodput.checkpoints / goodput.saves, whole / restarts):.0f}s"
    yield Cause("lost steps", words, None, goodput.lost_steps, goodput.lost_steps / whole, advice)
