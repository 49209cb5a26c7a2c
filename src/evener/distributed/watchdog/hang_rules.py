"""When a run is hopeless, and why, in words. Decided by the rank that looks after all others, of heartbeats alone.

====== =============================================================== ==============================================
        what is seen                                                    since
====== =============================================================== ==============================================
left    a rank has left, this one waits, and so do all that are there   a few heartbeats
late    this rank waits, and another is elsewhere or silent, or all     the timeout
        are stuck in the same wait
apart   a rank is missing from what all do together                     the timeout
still   no rank has made any progress, whether it waits or not          the timeout
====== =============================================================== ==============================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from evener.distributed.watchdog.heartbeat import Heartbeat
from evener.distributed.watchdog.peer_state import SILENT_BEATS, Standing

Verdict = Literal["left", "late", "apart", "still"]

_LOOK_SECONDS = 3.0
_IDLE_SECONDS = 8.0
AT_WORK = ("backward", "forward")
"""Calls in which a main thread may stand still while its device computes for it alone."""


def may_look(here: Heartbeat, timeout_seconds: float) -> bool:
    """Whether the rank of heartbeat ``here`` has reason to look after all others."""
    stuck = here.stuck_seconds > min(timeout_seconds / 3, _LOOK_SECONDS)
    idle = here.idle > min(timeout_seconds / 3, _IDLE_SECONDS)
    return bool(here.together) or (stuck and (here.waits or idle))


def verdict(
    here: Heartbeat, others: Collection[Standing], timeout_seconds: float, interval_seconds: float
) -> Verdict | None:
    """Why the rank of heartbeat ``here`` must end the run; None while there is hope."""
    if here.together:
        return "apart" if any(other.apart_seconds >= timeout_seconds for other in others) else None
    if is_left(here, others, interval_seconds):
        return "left"
    if must_speak(here, others, timeout_seconds, interval_seconds):
        return "late"
    return "still" if all_still(here, others, timeout_seconds, interval_seconds) else None


def is_left(here: Heartbeat, others: Collection[Standing], interval_seconds: float) -> bool:
    """Whether nobody will ever come, because some have left and all the others wait as this rank does.

    A rank that is still at work may be the one that is waited for, and what the others had to give, they may have
    given: so they must have left, and all that are there waited, for a few heartbeats.
    """
    patience = SILENT_BEATS * interval_seconds
    if not here.waits or here.phase in AT_WORK or here.seconds < patience:
        return False
    left = [other for other in others if other.state in ("ended", "gone")]
    rest = [other for other in others if other not in left]
    long_ago = any(other.silent_seconds >= patience for other in left)
    return long_ago and all(other.waits_for(patience, 2 * interval_seconds) for other in rest)


def must_speak(
    here: Heartbeat, others: Collection[Standing], timeout_seconds: float, interval_seconds: float
) -> bool:
    """Whether the wait of the rank of heartbeat ``here`` is hopeless.

    It is when this rank has waited for the timeout, and another rank is elsewhere or silent, or all have been in the
    same place for as long. The lowest of the ranks that wait speaks; the others give it a few heartbeats to do so.
    """
    if not others or not here.waits or here.seconds < timeout_seconds:
        return False
    missing = [other for other in others if other.is_missing(here, interval_seconds)]
    patience = timeout_seconds - SILENT_BEATS * interval_seconds
    all_stuck = all(other.beat is not None and other.beat.seconds >= patience for other in others)
    if not missing and not all_stuck:
        return False
    lower = any(other.rank < here.rank for other in others if other not in missing)
    return not lower or here.seconds > timeout_seconds + 4 * interval_seconds


def all_still(
    here: Heartbeat, others: Collection[Standing], timeout_seconds: float, interval_seconds: float
) -> bool:
    """Whether no rank has made progress for the timeout.

    A rank alone in a program of its own is left in peace: it keeps nobody waiting. Of ranks that wait more can be said,
    a few heartbeats later at most.
    """
    patience = SILENT_BEATS * interval_seconds
    limit = timeout_seconds + (patience if here.waits else 0.0)
    if here.idle < limit or (not others and here.phase is None):
        return False
    return all(other.is_still(timeout_seconds - patience) for other in others)


def complaint(
    why: Verdict, here: Heartbeat, others: Iterable[Standing], timeout_seconds: float, interval_seconds: float
) -> str:
    """The first line of a report."""
    limit = f"(timeout {timeout_seconds:g} s)"
    if why == "left":
        return left_words(here, others)
    if why == "still":
        who = "no rank has" if list(others) else "this rank, the only one, has not"
        return f"{who} made any progress for {here.idle:.0f} s {limit}"
    if why == "late":
        beats = [here, *(other.beat for other in others if other.beat is not None)]
        if differ(beats):
            calls = "; ".join(
                f"rank {beat.rank} {beat.place}" for beat in sorted(beats, key=lambda b: b.rank)
            )
            return f"the ranks call different collectives: {calls} {limit}"
        return f"rank {here.rank} has waited {here.seconds:.0f} s in {here.place} {limit}"
    lost = [other for other in others if other.apart_seconds >= timeout_seconds]
    who = ", ".join(str(standing.rank) for standing in lost)
    seconds = max(standing.apart_seconds for standing in lost)
    return f"rank {who} was missing for {seconds:.0f} s from {here.together}, in which rank {here.rank} is {limit}"


def differ(beats: Sequence[Heartbeat]) -> bool:
    """Whether all ranks wait, but not in the same collective with the same type and shape.

    What is marked has a name of Evener's own, and a rank that waits there may be a step ahead.
    """
    calls = {(beat.phase, beat.payload) for beat in beats}
    return len(calls) > 1 and all(beat.waits and beat.step is None for beat in beats)


def left_words(here: Heartbeat, others: Iterable[Standing]) -> str:
    """``rank 1 has left after step 3 of 16 with status 0, but rank 0 waits in all-reduce of step 4``.

    Empty if no rank has left.
    """
    left = [other.left_words for other in others if other.state in ("ended", "gone")]
    doing = "waits" if here.waits else "is still"
    return f"{'; '.join(left)}; but rank {here.rank} {doing} in {here.place}" if left else ""
