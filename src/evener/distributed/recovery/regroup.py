"""Changes of the number of ranks of a run, on which its ranks agree between two steps.

::

    launcher    another machine waits to join ─▶ the file `newcomers` ┐
    user        `evener resize RUN N` ─▶ a file in the run directory  ├▶ a rank's row of step n says so
    cluster     SIGTERM or SIGUSR1 to a rank or a launcher            ┘
    ranks       step n + 1: all have read the row ─ exchange what each was asked ─ decide alike ─ save ─ note, exit 0
    launchers   find the notes of their ranks ─ meet anew ─ start the ranks again, those that leave excepted

The exit status is 0, so that no launcher takes the end of its ranks for a failure. On one machine, ranks that each hold
the whole state do not end: they wait until the launcher has announced the next start, and take part in it with what
they have in memory (:mod:`evener.distributed.recovery.replacement`). What is saved serves if a rank dies meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from evener.core.text import counted, few
from evener.errors import EvenerError
from evener.files import replace_text

BOUNDS = "EVENER__MAY_BECOME"
"""Environment variable with which the launcher tells its ranks the `Bounds`."""
LAUNCH = "EVENER__LAUNCH"
"""Environment variable with the name of a launch on several machines, whose number may change."""
NOTICES = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that announce the end of a machine. All others ask the whole run to stop."""
_NEWCOMERS = "newcomers"


@dataclass(frozen=True)
class Bounds:
    """What a run may become: a number of ranks on one machine, or of machines."""

    counts: tuple[int, ...] = ()
    """The allowed numbers of ranks, the largest first. Empty with several machines."""
    least_machines: int = 0
    """The smallest number of machines; 0 if the run is on one machine."""
    keeps_store: bool = False
    """True if this machine keeps the store through which the machines meet. The run cannot do without it."""

    @classmethod
    def from_environment(cls) -> Bounds | None:
        """Returns the bounds that the launcher has set, or None if the number of ranks is fixed."""
        text = os.environ.get(BOUNDS)
        if not text:
            return None
        found = json.loads(text)
        return cls(tuple(found["counts"]), found["least_machines"], found["keeps_store"])

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Request:
    """What one rank was asked to do, as it tells the others."""

    host: str
    machine: int = 0
    """Index of the rank's machine."""
    signal: int = 0
    """Number of the signal that it got; 0 if none."""
    ranks: int = 0
    """Number of ranks that `evener resize` asks for; 0 if none."""
    newcomers: tuple[str, ...] = ()
    """Names of machines that wait to join."""
    keeps_store: bool = False


@dataclass(frozen=True)
class GroupChange:
    """A change of the number of ranks, on which all ranks have agreed."""

    leave: tuple[int, ...] = ()
    """Ranks that leave."""
    ranks: int = 0
    """Number of ranks after the change, on one machine; 0 with several machines."""
    signal: int = 0
    """The signal because of which ranks leave; 0 if none."""
    words: str = ""
    """Who comes and who leaves, for the records."""
    in_memory: bool = False
    """True if the ranks that do not leave keep their processes, and what they hold."""


@dataclass(frozen=True)
class Stop:
    """The end of the whole run, because of a signal."""

    signal: int
    why: str = ""
    """Why the other ranks cannot go on alone; empty if all were asked."""


@dataclass(frozen=True)
class Stay:
    """The number of ranks stays as it is."""

    why: str = ""


class RegroupError(EvenerError):
    """Raised on every rank when their number changes.

    Args:
        stays: Whether this rank waits for the next start, and goes on with what it has in memory.
    """

    def __init__(self, words: str, stays: bool) -> None:
        super().__init__(words)
        self.stays = stays


def decision(requests: Sequence[Request], bounds: Bounds) -> GroupChange | Stop | Stay:
    """Decides what becomes of the run. All ranks decide alike, because all know all requests.

    A signal that came to some ranks alone is a notice: they leave, and the others go on if there are enough of them.

    Args:
        requests: The request of each rank, in order.
    """
    asked = [request.signal for request in requests if request.signal]
    if asked and (len(asked) == len(requests) or not set(asked) <= set(NOTICES)):
        return Stop(next((number for number in asked if number not in NOTICES), asked[0]))
    if asked:
        return _departure(requests, bounds, asked[0])
    if bounds.least_machines:
        come = _come(requests)
        return GroupChange(words=come) if come else Stay()
    have, wanted = len(requests), next((request.ranks for request in requests if request.ranks), 0)
    if wanted not in bounds.counts:
        return Stay(
            f"the run cannot be divided over {wanted} ranks, but over {few(list(map(str, bounds.counts)))}"
        )
    if wanted == have:
        return Stay(f"the run has {have} ranks already")
    return GroupChange(
        tuple(range(wanted, have)),
        wanted,
        words=f"{wanted} instead of {have} ranks, as asked",
    )


def _come(requests: Sequence[Request]) -> str:
    names = sorted({name for request in requests for name in request.newcomers})
    return f"{few(names)} come{'s' * (len(names) == 1)}" if names else ""


def _departure(requests: Sequence[Request], bounds: Bounds, number: int) -> GroupChange | Stop:
    name = signal.Signals(number).name
    if not bounds.least_machines:
        gone = [rank for rank, request in enumerate(requests) if request.signal]
        stay = [rank for rank, request in enumerate(requests) if not request.signal]
        ranks = max((count for count in bounds.counts if count <= len(stay)), default=0)
        words = f"rank {few([str(rank) for rank in gone])} leaves, on {name}"
        leave = tuple(sorted([*gone, *stay[ranks:]]))
        return (
            GroupChange(leave, ranks, number, words)
            if ranks
            else Stop(number, f"{counted(len(stay), 'rank')} would be left")
        )
    machines = {request.machine for request in requests if request.signal}
    hosts = sorted({request.host for request in requests if request.machine in machines})
    if any(request.keeps_store for request in requests if request.machine in machines):
        return Stop(number, f"{few(hosts)} keeps the store through which the machines meet")
    left = len({request.machine for request in requests} - machines)
    if left < bounds.least_machines:
        return Stop(number, f"{left} of {bounds.least_machines} machines would be left")
    leave = tuple(rank for rank, request in enumerate(requests) if request.machine in machines)
    words = f"{few(hosts)} leaves with rank {few([str(rank) for rank in leave])}, on {name}"
    return GroupChange(leave, signal=number, words="; ".join(filter(None, [words, _come(requests)])))


# Files between a launcher and its ranks


def tell_newcomers(run_dir: Path, names: Sequence[str]) -> None:
    """Tells the ranks of this machine which machines wait to join; none of them: that nobody waits."""
    path = run_dir / _NEWCOMERS
    if not names:
        path.unlink(missing_ok=True)
    elif not path.exists():
        replace_text(path, json.dumps(sorted(names)))


def newcomers(run_dir: Path) -> tuple[str, ...]:
    """Returns the names of the machines that wait to join."""
    try:
        return tuple(json.loads((run_dir / _NEWCOMERS).read_text()))
    except OSError:
        return ()


def _note(run_dir: Path, start: int, local_rank: int) -> Path:
    return run_dir / f"change-{start}-{local_rank}"


def note_change(run_dir: Path, start: int, local_rank: int, change: GroupChange) -> None:
    """Notes for the launcher that this rank ends, in the start of this number, for a change."""
    replace_text(_note(run_dir, start, local_rank), json.dumps(asdict(change)))


def noted_change(run_dir: Path, start: int, local_ranks: int) -> GroupChange | None:
    """Returns the change for which all ranks of this machine have ended. Returns None if there is none."""
    try:
        notes = [_note(run_dir, start, rank).read_text() for rank in range(local_ranks)]
    except OSError:
        return None
    found = json.loads(notes[0])
    return GroupChange(**found | {"leave": tuple(found["leave"])})


def note_stop(run_dir: Path, start: int) -> None:
    """Notes for the launcher that all ranks have saved and end, in the start of this number, because of a signal."""
    (run_dir / f"stop-{start}").touch()


def is_stopped(run_dir: Path, start: int) -> bool:
    """Returns True if all ranks have ended because of a signal, so that none is to be started again."""
    return (run_dir / f"stop-{start}").exists()


def is_noted(run_dir: Path, start: int) -> bool:
    """Returns True if a rank of this machine has ended, or is about to, for a change."""
    return any(run_dir.glob(f"change-{start}-*"))
