"""A rank's part in changes of the number of ranks: asks for them, agrees on them, and ends for them.

:mod:`evener.distributed.recovery.regroup` has the decision, and draws who takes part.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NoReturn

from evener.distributed.recovery.regroup import (
    NOTICES,
    Bounds,
    GroupChange,
    RegroupError,
    Request,
    Stay,
    Stop,
    decision,
    newcomers,
    note_change,
    note_stop,
)
from evener.distributed.restart_count import generation
from evener.distributed.session import RUN_DIR, Session
from evener.distributed.signals import asked_to_stop
from evener.distributed.watchdog.store_health import LAUNCHER_PID
from evener.training.reporting.resize import answer_resize, resize_asked

_LOOK_SECONDS = 0.5
_SAME_SECONDS = 0.5
"""Time for a signal that is sent to several ranks to reach all of them."""


class Regrouping:
    """Changes of the number of ranks of a run, on one of its ranks.

    Args:
        run_dir: The run directory, in which `evener resize` asks.
    """

    def __init__(self, session: Session, run_dir: Path) -> None:
        launcher = os.environ.get(RUN_DIR)
        # A program that a rank has started has another parent.
        is_its_rank = os.environ.get(LAUNCHER_PID) == str(os.getppid())
        self._bounds = Bounds.from_environment() if launcher and is_its_rank else None
        self._session, self._run_dir, self._launcher = session, run_dir, Path(launcher or "")
        self._looked = 0.0

    def is_asked(self) -> bool:
        """Returns True if this rank knows of a reason to change the number of ranks. Looks about twice a second."""
        now = time.monotonic()
        if self._bounds is None or now - self._looked < _LOOK_SECONDS:
            return False
        self._looked = now
        asked = self._request(0)
        return bool(asked.newcomers or asked.ranks)

    def _request(self, number: int) -> Request:
        assert self._bounds is not None
        environment, several = self._session.environment, bool(self._bounds.least_machines)
        first = self._session.rank == 0 and not several
        return Request(
            environment.host,
            environment.node,
            number,
            resize_asked(self._run_dir) if first else 0,
            newcomers(self._launcher) if several and environment.local_rank == 0 else (),
            self._bounds.keeps_store,
        )

    def agree(self, number: int, steps: int) -> GroupChange | Stop | Stay:
        """Returns what all ranks have decided together. A collective call.

        Args:
            number: Number of a signal that a rank has got; 0 if none has.
            steps: Number of steps done.
        """
        if self._bounds is None:
            return Stop(number)
        if number in NOTICES:
            time.sleep(_SAME_SECONDS)
        requests = self._session.control.gather_objects(self._request(asked_to_stop()))
        agreed = decision(requests, self._bounds)
        if self._session.rank == 0 and requests[0].ranks:
            accepted = isinstance(agreed, GroupChange) and agreed.ranks == requests[0].ranks
            words = (
                agreed.words
                if isinstance(agreed, GroupChange)
                else agreed.why or "all its ranks are asked to end"
            )
            answer_resize(self._run_dir, accepted, words, steps)
        return agreed

    def stop(self) -> None:
        """Tells the launcher that the whole run ends."""
        if self._bounds is not None:
            note_stop(self._launcher, generation())

    def end(self, change: GroupChange, steps: int) -> NoReturn:
        """Ends this rank's part in the current start, in a way that tells its launcher why.

        Raises:
            RegroupError: Always.
        """
        leaves = self._session.rank in change.leave
        if leaves or not change.in_memory:
            others = ", and the others go on" if leaves else ""
            self._session.watchdog.progress(f"step {steps}, saved{others}")
        note_change(self._launcher, generation(), self._session.environment.local_rank, change)
        raise RegroupError(change.words, stays=change.in_memory and not leaves)
