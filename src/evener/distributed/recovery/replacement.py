"""Rank replacement: a rank that dies is replaced while the other ranks stay.

::

    agent    rank 1 has died ─ takes the others at their word ─ announces start 2 ─ starts rank 1 ─▶ start 2
    others   ... wait for it, or for each other ... ─ connections broken, so waits end ────────────▶ start 2

Ranks that can work without the others go on meanwhile: they join the start when the new rank is ready.

A rank promises to stay with a file, which it deletes before it leaves. The agent deletes the files of all survivors
before it replaces a rank. Whichever of the two comes second finds no file and fails. In all other cases (another death
before all ranks have joined, ranks that do not come) all ranks are restarted from the last checkpoint.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from evener.distributed.recovery.abort_gloo import sever
from evener.distributed.restart_count import generation
from evener.errors import RankError
from evener.files import replace_text

ALLOWED = "EVENER__RANKS_MAY_STAY"
"""Environment variable with which the launcher tells ranks that it can replace single ranks."""

_LOOK_SECONDS = 0.1
_ANNOUNCEMENT = "start"
NEWS_SECONDS = 10.0
"""Time within which the agent notices a lost rank and announces the next start."""


@dataclass(frozen=True)
class Start:
    """A start in which only some ranks are new."""

    number: int
    replaced: tuple[int, ...]
    pids: tuple[int, ...]
    """Process ids of the ranks that stay."""
    world_size: int = 0
    """The new number of ranks; 0 if it does not change. Then the ranks that stay keep their numbers. Otherwise they are
    numbered in the order of ``pids``."""


class RecalledError(RankError):
    """Raised in a rank that must take part in another start, wherever it was in the one before."""

    def __init__(self, start: Start) -> None:
        super().__init__(f"start {start.number} of the ranks, with {list(start.replaced)} new")
        self.start = start


class NothingKeptError(RankError):
    """Raised where the ranks that stayed have nothing in memory from which the next start could go on.

    All ranks start again then. The death for which some were replaced has counted as a restart already.
    """


# The agent's side


def take_at_their_word(run_dir: Path, ranks: Iterable[int], number: int) -> bool:
    """Returns True if all of ``ranks`` stay for the start after ``number``. Then none of them can leave any more."""
    words = [_word(run_dir, rank) for rank in ranks]
    if not words or not all(_says(word, number) for word in words):
        return False
    try:
        for word in words:
            word.unlink()
    except FileNotFoundError:
        return False
    return True


def _word(run_dir: Path, rank: int) -> Path:
    return run_dir / f"stays-{rank}"


def _says(word: Path, number: int) -> bool:
    try:
        return word.read_text() == str(number)
    except OSError:
        return False


def announce(run_dir: Path, start: Start) -> None:
    """Announces ``start`` to the ranks that stay, in a file."""
    replace_text(run_dir / _ANNOUNCEMENT, json.dumps(asdict(start)))


# A rank's side


def _readiness(run_dir: Path, number: int) -> Path:
    return run_dir / f"ready-{number}"


def say_ready(run_dir: Path) -> None:
    """Tells the ranks that stay that this new rank is ready to meet them."""
    _readiness(run_dir, generation()).touch()


def announced(run_dir: Path) -> Start | None:
    """Returns the start that was announced last. Returns None if none was."""
    try:
        found = json.loads((run_dir / _ANNOUNCEMENT).read_text())
    except OSError:
        return None
    return Start(found["number"], tuple(found["replaced"]), tuple(found["pids"]), found["world_size"])


def is_successor(run_dir: Path) -> bool:
    """Returns True if this process takes part in a start in which other ranks stayed."""
    start = announced(run_dir)
    return start is not None and start.number == generation()


_stays: list[SurvivorLease] = []


def check_recall() -> None:
    """Raises RecalledError if this rank was recalled to another start. Called in waits that nothing else would end."""
    for stay in _stays:
        if stay.start is not None:
            raise RecalledError(stay.start)


def may_be_recalled() -> bool:
    """Returns True if this rank stays when another dies. Then there is no time for a long report."""
    return bool(_stays)


class SurvivorLease:
    """The promise of this rank to stay if others die, from ``__enter__`` until :meth:`leave`.

    Args:
        run_dir: The directory that the launcher shares with its ranks.
        rank: This rank.
        called: Called in a thread as soon as this rank is recalled to another start.
        goes_on: True if this rank works on until a new rank is ready, as long as no connection is broken that it needs.
    """

    def __init__(
        self, run_dir: Path, rank: int, called: Callable[[], object] = lambda: None, *, goes_on: bool = False
    ) -> None:
        self.start: Start | None = None
        """The start to which this rank is recalled."""
        self._announced: Start | None = None
        self._tell, self._goes_on = called, goes_on
        self._run_dir, self._word = run_dir, _word(run_dir, rank)
        self._news, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look, name="evener-succession", daemon=True)

    def __enter__(self) -> SurvivorLease:
        replace_text(self._word, str(generation()))
        _stays.append(self)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._word.unlink(missing_ok=True)
        _stays.remove(self)

    def leave(self) -> None:
        """Withdraws the promise to stay, because this rank has done its work.

        Raises:
            RecalledError: If the agent has already taken the promise for another start.
        """
        try:
            self._word.unlink()
        except FileNotFoundError:
            if start := self.called(NEWS_SECONDS):
                raise RecalledError(start) from None

    def called(self, seconds: float) -> Start | None:
        """Waits up to ``seconds`` for a start to be announced. Returns the start to take part in; None for none."""
        self._news.wait(seconds)
        if self._announced is not None:
            self._recall(self._announced)
        return self.start

    def _recall(self, start: Start) -> None:
        if self.start is None:
            self._tell()
        self.start = start

    def _look(self) -> None:
        """Body of the thread: looks for a recall, and then breaks connections repeatedly, also those of new waits."""
        while not self._over.wait(_LOOK_SECONDS):
            found = announced(self._run_dir)
            if found is None or found.number <= generation():
                continue
            self._announced = found
            self._news.set()
            if self._goes_on and not _readiness(self._run_dir, found.number).exists():
                continue
            self._recall(found)
            with suppress(OSError):
                sever(found.pids)
