"""Tells the user which rank waits for which while a run stalls, long before the timeout.

The timeout of a wait is minutes, because a slow step is no error. The user wants to know sooner. After ten seconds
without progress, and then every minute, the rank that checks all others prints the state of all ranks to standard
error. The live line of a terminal shows it every second until something moves. This has no consequences for the run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from evener.distributed.watchdog.hang_rules import AT_WORK
from evener.distributed.watchdog.heartbeat import Heartbeat, format_phase
from evener.distributed.watchdog.peer_state import PeerState

FIRST_SECONDS = "EVENER__FIRST_WORD_SECONDS"
"""Environment variable with the seconds without progress after which the first message is printed; 10 by default."""
_AGAIN_SECONDS = 60.0
_COMPUTES_SECONDS = 3.0
_OVER = "\r\x1b[J"
"""Clears this line of a terminal, and those below."""
_RANKS_SHOWN = 6
_GROUPS_SHOWN = 3


def first_word_seconds() -> float:
    """Returns the seconds without progress after which the first message is printed."""
    return float(os.environ.get(FIRST_SECONDS, "10"))


class Reminder:
    """Prints what holds up a run, at most once a minute."""

    def __init__(self) -> None:
        self._last: float | None = None

    def is_due(self, seconds: float) -> bool:
        """Returns True if a message about a wait of so many seconds is due now, and counts it as printed."""
        now = time.monotonic()
        is_due = seconds >= first_word_seconds() and (
            self._last is None or now - self._last >= _AGAIN_SECONDS
        )
        self._last = now if is_due else self._last
        return is_due

    def say(self, seconds: float, message: Callable[[], str], over: bool = False) -> None:
        """Prints ``message`` to standard error if a message is due.

        Args:
            seconds: Length of the wait.
            message: Returns the message.
            over: True to overwrite a live line of this process, which is drawn again below the message.
        """
        if self.is_due(seconds):
            with suppress(OSError, ValueError):  # standard error is closed, or its reader is gone
                place = (_OVER if over else "\n") if sys.stderr.isatty() else ""  # below another's live line
                print(f"{place}evener: {message()}", file=sys.stderr, flush=True)


class Stall:
    """Reports for the watchdog of a rank that the rank makes no progress."""

    def __init__(self) -> None:
        self.show: Callable[[str], None] | None = None
        """Shows one line in place of the last one."""
        self._reminder = Reminder()
        self._shown = False

    def tell(self, here: Heartbeat, others: Collection[PeerState], speaks: bool) -> None:
        """Shows where all ranks are if the run stalls. Prints a message only if this rank ``speaks`` for all."""
        stalled = is_stalled(here)
        if stalled and speaks:
            live = self.show is not None
            self._reminder.say(here.stuck_seconds, lambda: stall_message(here, others), live)
        if self.show is not None and (stalled or self._shown):
            self.show(live_line(here, others) if stalled else "")
            self._shown = stalled


def is_stalled(here: Heartbeat) -> bool:
    """Returns True if this rank waits, or is in a phase of Evener's, for so long that the user should be told."""
    return here.stuck_seconds >= first_word_seconds() and (here.waits or here.phase is not None)


def stall_message(here: Heartbeat, others: Iterable[PeerState]) -> str:
    """Returns the message: ``no progress for 12 s: rank 0 waits in all-reduce of step 4 for rank 1 (in ...)``."""
    waiting, late = _told_apart(here, others)
    actions = {standing.rank: _doing(standing) for standing in late}
    missing = " and ".join(f"{ranks} ({doing})" for ranks, doing in _grouped(actions))
    there = "; ".join(_waiting_lines(waiting))
    return _lead(here, actions) + " for ".join(part for part in (there, missing) if part)


def live_line(here: Heartbeat, others: Iterable[PeerState]) -> str:
    """Returns the live line: ``no progress for 12 s: rank 1 at a.py:3 in main, its program; rank 0 waits in ...``.

    A terminal may cut off the end, so the rank that others wait for comes first.
    """
    waiting, late = _told_apart(here, others)
    lead = _lead(here, {standing.rank: _doing(standing) for standing in late})
    missing = [f"{ranks} {place}" for ranks, place in _grouped({each.rank: _at(each) for each in late})]
    return lead + "; ".join([*missing, *_waiting_lines(waiting)])


def _told_apart(here: Heartbeat, others: Iterable[PeerState]) -> tuple[dict[int, str], list[PeerState]]:
    """Returns the waiting ranks with their places, and the states of all other ranks."""
    standings = sorted([*others, PeerState(here.rank, here)], key=lambda standing: standing.rank)
    waiting = {s.rank: _place(s.beat) for s in standings if _waits(s) and s.beat is not None}
    return waiting, [standing for standing in standings if standing.rank not in waiting]


def _lead(here: Heartbeat, late: dict[int, str]) -> str:
    computes = any(action.startswith("computing") for action in late.values())
    return f"{'still computing after' if computes else 'no progress for'} {here.stuck_seconds:.0f} s: "


def _waiting_lines(waiting: dict[int, str]) -> list[str]:
    return [
        f"{ranks} {'wait' if ranks.startswith('ranks') else 'waits'} in {place}"
        for ranks, place in _grouped(waiting)
    ]


def _waits(standing: PeerState) -> bool:
    beat = standing.beat
    return beat is not None and not standing.is_lost and beat.waits and beat.phase not in AT_WORK


def _place(beat: Heartbeat) -> str:
    place = format_phase(beat.phase or "its program", beat.step)
    return f"{place}, at {beat.where[0]}" if beat.where else place


def _doing(standing: PeerState) -> str:
    """Describes what a late rank does. Says "computing" only if its main thread was seen to use the processor."""
    beat = standing.beat
    if beat is None:
        return "no sign of life yet"
    fates = {
        "ended": f"left{beat.exit_status_text}",
        "gone": "gone",
        "stopped": "stopped, by SIGSTOP or a debugger",
    }
    if standing.state in fates:
        return fates[standing.state]
    if standing.is_silent:
        return f"no sign of life for {standing.silent_seconds:.0f} s, last in {_place(beat)}"
    return f"{'computing ' * (beat.still < _COMPUTES_SECONDS)}in {_place(beat)}"


def _at(standing: PeerState) -> str:
    """Describes where a late rank is, for the live line: its line of code first, if known."""
    beat = standing.beat
    if beat is None or standing.is_lost or not beat.where:
        return _doing(standing)
    return f"at {beat.where[0]}, {format_phase(beat.phase or 'its program', beat.step)}"


def _grouped(texts: dict[int, str]) -> list[tuple[str, str]]:
    """Groups the ranks with equal text. Returns the first few groups, each as ranks and text."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(text, []).append(rank)
    return [(format_ranks(ranks), text) for text, ranks in list(groups.items())[:_GROUPS_SHOWN]]


def format_ranks(ranks: list[int]) -> str:
    """Formats ranks: ``rank 3``, ``ranks 0, 1``; of many the first six and the number of the others."""
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    more = f" and {len(ranks) - _RANKS_SHOWN} others" if len(ranks) > _RANKS_SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"
