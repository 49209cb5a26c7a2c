"""Who waits for whom, in words, long before a run is hopeless.

The time limit of a wait is minutes, for a slow step is no fault. A person who looks at a line that does not move wants
to know sooner. After ten seconds without progress the rank that looks after all others says what it sees, on standard
error, and again every minute; the live line of a terminal says so every second, until something moves. Nothing is
concluded from it, so a rank that computes is said to compute.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from evener.runtime.heartbeat import Heartbeat, in_words
from evener.runtime.standing import SILENT_BEATS, Standing
from evener.runtime.verdict import AT_WORK

FIRST_SECONDS = "EVENER__FIRST_WORD_SECONDS"
"""Environment variable with the seconds after which the first word is said, 10 where it is not set."""
_AGAIN_SECONDS = 60.0
_COMPUTES_SECONDS = 3.0
_RANKS_SHOWN = 6
_GROUPS_SHOWN = 3


def first_word_seconds() -> float:
    """After so long without progress the first word is said."""
    return float(os.environ.get(FIRST_SECONDS, "10"))


class Reminder:
    """Says what holds a run up, once a minute at most."""

    def __init__(self) -> None:
        self._last: float | None = None

    def is_due(self, seconds: float) -> bool:
        """Whether a wait of so many seconds is to be told now."""
        now = time.monotonic()
        is_due = seconds >= first_word_seconds() and (
            self._last is None or now - self._last >= _AGAIN_SECONDS
        )
        self._last = now if is_due else self._last
        return is_due

    def say(self, seconds: float, words: Callable[[], str]) -> None:
        """Prints ``words`` to standard error if they are due."""
        if self.is_due(seconds):
            with suppress(OSError, ValueError):  # nobody listens, or standard error is closed
                below = "\n" if sys.stderr.isatty() else ""  # of a live line
                print(f"{below}evener: {words()}", file=sys.stderr, flush=True)


class Stall:
    """Tells of a rank that makes no progress, for its watchdog."""

    def __init__(self) -> None:
        self.show: Callable[[str], None] | None = None
        """Shows one line in place of the last one."""
        self._reminder = Reminder()
        self._shown = False

    def tell(self, here: Heartbeat, others: Collection[Standing], speaks: bool) -> None:
        """Says where all ranks stand if nothing moves; aloud only where this rank ``speaks`` for all."""
        stalled = is_stalled(here)
        if self.show is not None and (stalled or self._shown):
            self.show(stall_words(here, others) if stalled else "")
            self._shown = stalled
        if stalled and speaks:
            self._reminder.say(here.stuck_seconds, lambda: stall_words(here, others))


def is_stalled(here: Heartbeat) -> bool:
    """Whether this rank waits, or is in a phase of Evener's, for so long that a person wants to know."""
    return here.stuck_seconds >= first_word_seconds() and (here.waits or here.phase is not None)


def stall_words(here: Heartbeat, others: Iterable[Standing]) -> str:
    """``no progress for 12 s: rank 0 waits in all-reduce of step 4 for rank 1 (in its program, at a.py:3 in main)``."""
    standings = sorted([*others, Standing(here.rank, here)], key=lambda standing: standing.rank)
    waiting = {s.rank: _place(s.beat) for s in standings if _waits(s) and s.beat is not None}
    late = {s.rank: _doing(s) for s in standings if s.rank not in waiting}
    computes = any(words.startswith("computing") for words in late.values())
    lead = f"{'still computing after' if computes else 'no progress for'} {here.stuck_seconds:.0f} s: "
    missing = " and ".join(f"{ranks} ({words})" for ranks, words in _grouped(late))
    there = "; ".join(
        f"{ranks} {'wait' if ranks.startswith('ranks') else 'waits'} in {place}"
        for ranks, place in _grouped(waiting)
    )
    return lead + " for ".join(part for part in (there, missing) if part)


def _waits(standing: Standing) -> bool:
    beat = standing.beat
    is_there = standing.state == "running" and standing.silent_seconds <= SILENT_BEATS
    return beat is not None and is_there and beat.waits and beat.phase not in AT_WORK


def _place(beat: Heartbeat) -> str:
    words = in_words(beat.phase or "its program", beat.step)
    return f"{words}, at {beat.where[0]}" if beat.where else words


def _doing(standing: Standing) -> str:
    """What a rank does that others wait for: it computes only if its main thread was seen to."""
    beat = standing.beat
    if beat is None:
        return "no sign of life yet"
    fates = {
        "ended": f"left{beat.status_words}",
        "gone": "gone",
        "stopped": "stopped, by SIGSTOP or a debugger",
    }
    if standing.state in fates:
        return fates[standing.state]
    if standing.silent_seconds > SILENT_BEATS:
        return f"no sign of life for {standing.silent_seconds:.0f} s, last in {_place(beat)}"
    return f"{'computing ' * (beat.still < _COMPUTES_SECONDS)}in {_place(beat)}"


def _grouped(words: dict[int, str]) -> list[tuple[str, str]]:
    """Ranks of whom the same is to be said, together; the first few such groups."""
    groups: dict[str, list[int]] = {}
    for rank, text in words.items():
        groups.setdefault(text, []).append(rank)
    return [(rank_words(ranks), text) for text, ranks in list(groups.items())[:_GROUPS_SHOWN]]


def rank_words(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 0, 1``, of many the number of the others."""
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    more = f" and {len(ranks) - _RANKS_SHOWN} others" if len(ranks) > _RANKS_SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"
