"""A rank that dies is replaced while the others stay.

::

    agent    rank 1 has died ─ takes the others at their word ─ announces start 2 ─ starts rank 1 ─▶ start 2
    others   ... wait for it, or for each other ... ─ connections broken, so waits end ────────────▶ start 2

A rank gives its word with a file that it takes back before it ends; the agent takes the file away, so that one of the
two fails. Every other way out (a second death before all are there, ranks that do not come) ends in a start of all
ranks, from the last checkpoint.
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

ALLOWED = "EVENER__RANKS_MAY_STAY"
"""Environment variable by which the agent says that it replaces single ranks."""

_LOOK_SECONDS = 0.1
_ANNOUNCEMENT = "start"
NEWS_SECONDS = 10.0
"""Within which the agent has seen that a rank is gone, and has said what becomes of it."""


@dataclass(frozen=True)
class Start:
    """A start in which single ranks are new."""

    number: int
    replaced: tuple[int, ...]
    pids: tuple[int, ...]
    """Of those that stay."""


class RecalledError(RankError):
    """This rank is to take part in another start; raised where it stood in the one before."""

    def __init__(self, start: Start) -> None:
        super().__init__(f"start {start.number} of the ranks, with {list(start.replaced)} new")
        self.start = start


# The agent's side


def take_at_their_word(run_dir: Path, ranks: Iterable[int], number: int) -> bool:
    """Whether all of ``ranks`` stay for the start after ``number``; then none of them can leave any more."""
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
    """Says that ``start`` is next."""
    _write(run_dir / _ANNOUNCEMENT, json.dumps(asdict(start)))


def _write(path: Path, text: str) -> None:
    """Nobody reads half of it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


# A rank's side


def announced(run_dir: Path) -> Start | None:
    """The last start that was announced, if one was."""
    try:
        found = json.loads((run_dir / _ANNOUNCEMENT).read_text())
    except OSError:
        return None
    return Start(found["number"], tuple(found["replaced"]), tuple(found["pids"]))


def is_successor(run_dir: Path) -> bool:
    """Whether this process takes part in a start in which other ranks stayed."""
    start = announced(run_dir)
    return start is not None and start.number == generation()


_stays: list[Stay] = []


def check_recall() -> None:
    """Raises RecalledError in a wait that nothing else would end, if this rank has been called to another start."""
    for stay in _stays:
        if stay.start is not None:
            raise RecalledError(stay.start)


def may_be_recalled() -> bool:
    """Whether this rank stays if another dies, so that there is no time for a long report."""
    return bool(_stays)


class Stay:
    """This rank stays if others die: from ``__enter__`` until :meth:`leave`.

    Args:
        run_dir: The launcher's, which it shares with its ranks.
        called: Told at once when this rank is called to another start, in a thread.
    """

    def __init__(self, run_dir: Path, rank: int, called: Callable[[], object] = lambda: None) -> None:
        self.start: Start | None = None
        self._tell = called
        self._run_dir, self._word = run_dir, _word(run_dir, rank)
        self._news, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look, name="evener-succession", daemon=True)

    def __enter__(self) -> Stay:
        _write(self._word, str(generation()))
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
        """Takes this rank's word back: it has done its part.

        Raises:
            RecalledError: It was taken already.
        """
        try:
            self._word.unlink()
        except FileNotFoundError:
            if start := self.called(NEWS_SECONDS):
                raise RecalledError(start) from None

    def called(self, seconds: float) -> Start | None:
        """The start that this rank is to take part in, when it is known within ``seconds``."""
        self._news.wait(seconds)
        return self.start

    def _look(self) -> None:
        """Breaks connections again and again, until no wait is left that was begun meanwhile."""
        while not self._over.wait(_LOOK_SECONDS):
            found = announced(self._run_dir)
            if found is None or found.number <= generation():
                continue
            if self.start is None:
                self._tell()
            self.start = found
            self._news.set()
            with suppress(OSError):
                sever(found.pids)
