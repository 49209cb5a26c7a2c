"""Decides from heartbeats when a run must end, and words the reason. The rank that checks all others decides.

====== =============================================================== ==============================================
        condition                                                       for how long
====== =============================================================== ==============================================
left    a rank has left, and this one and all others still wait         a few heartbeats
late    this rank waits, and another is elsewhere or silent, or all     the timeout
        are stuck in waits
apart   a rank is missing from an operation of all ranks together       the timeout
still   no rank has made any progress, whether it waits or not          the timeout
====== =============================================================== ==============================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from evener.distributed.watchdog.heartbeat import Heartbeat
from evener.distributed.watchdog.peer_state import PeerState

Verdict = Literal["left", "late", "apart", "still"]

_LOOK_SECONDS = 3.0
_IDLE_SECONDS = 8.0
AT_WORK = ("backward", "forward")
"""Calls in which a main thread may be idle while its device computes."""


def may_look(here: Heartbeat) -> bool:
    """Returns True if the rank of heartbeat ``here`` has reason to check all others."""
    stuck = here.stuck_seconds > min(here.limit / 3, _LOOK_SECONDS)
    idle = here.idle > min(here.limit / 3, _IDLE_SECONDS)
    return bool(here.together) or (stuck and (here.waits or idle))


def verdict(here: Heartbeat, others: Collection[PeerState]) -> Verdict | None:
    """Returns why the rank of heartbeat ``here`` must end the run. Returns None if it need not."""
    if here.together:
        return "apart" if any(other.apart_seconds >= here.limit for other in others) else None
    if is_left(here, others):
        return "left"
    if must_speak(here, others):
        return "late"
    return "still" if all_still(here, others) else None


def is_left(here: Heartbeat, others: Collection[PeerState]) -> bool:
    """Returns True if the wait can never end, because some ranks have left and all others wait as this rank does.

    A rank that still works may be the one that is waited for, and a rank may leave after giving its data. So a rank
    must have left, and all remaining ranks must have waited, for a few heartbeats.
    """
    patience = here.patience_seconds
    if not here.waits or here.phase in AT_WORK or here.seconds < patience:
        return False
    left = [other for other in others if other.state in ("ended", "gone")]
    rest = [other for other in others if other not in left]
    long_ago = any(other.silent_seconds >= patience for other in left)
    return long_ago and all(other.waits_for(patience, 2 * here.interval_seconds) for other in rest)


def must_speak(here: Heartbeat, others: Collection[PeerState]) -> bool:
    """Returns True if the rank of heartbeat ``here`` must end the run, because its wait is hopeless.

    A wait is hopeless if this rank has waited for the timeout, and another rank is elsewhere or silent, or all ranks
    have been where they are for as long. The lowest waiting rank reports; the others give it a few heartbeats to do so.
    """
    if not others or not here.waits or here.seconds < here.limit:
        return False
    missing = [other for other in others if other.is_missing(here)]
    patience = here.limit - here.patience_seconds
    all_stuck = all(other.beat is not None and other.beat.seconds >= patience for other in others)
    if not missing and not all_stuck:
        return False
    lower = any(other.rank < here.rank for other in others if other not in missing)
    return not lower or here.seconds > here.limit + 4 * here.interval_seconds


def all_still(here: Heartbeat, others: Collection[PeerState]) -> bool:
    """Returns True if no rank has made progress for the timeout.

    Always False for a run of one rank outside of Evener's phases: nobody waits for it. A waiting rank is given a few
    heartbeats more, because the other verdicts say more.
    """
    limit = here.limit + (here.patience_seconds if here.waits else 0.0)
    if here.idle < limit or (not others and here.phase is None):
        return False
    return all(other.is_still(here.limit - here.patience_seconds) for other in others)


def complaint(why: Verdict, here: Heartbeat, others: Iterable[PeerState]) -> str:
    """Returns the first line of the report."""
    limit = f"(timeout {here.limit:g} s)"
    if why == "left":
        return departure_message(here, others)
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
    lost = [other for other in others if other.apart_seconds >= here.limit]
    who = ", ".join(str(standing.rank) for standing in lost)
    seconds = max(standing.apart_seconds for standing in lost)
    return f"rank {who} was missing for {seconds:.0f} s from {here.together}, in which rank {here.rank} is {limit}"


def differ(beats: Sequence[Heartbeat]) -> bool:
    """Returns True if all ranks wait, but not in the same collective with the same type and shape.

    Waits with a step are Evener's own marks. They are not compared, because a rank there may be a step ahead.
    """
    calls = {(beat.phase, beat.payload) for beat in beats}
    return len(calls) > 1 and all(beat.waits and beat.step is None for beat in beats)


def departure_message(here: Heartbeat, others: Iterable[PeerState]) -> str:
    """Returns ``rank 1 has left after step 3 of 16 with status 0; but rank 0 waits in all-reduce of step 4``.

    Empty if no rank has left.
    """
    left = [other.departure_message for other in others if other.state in ("ended", "gone")]
    doing = "waits" if here.waits else "is still"
    return f"{'; '.join(left)}; but rank {here.rank} {doing} in {here.place}" if left else ""
