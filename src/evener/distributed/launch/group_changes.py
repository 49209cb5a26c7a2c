"""A launcher's part in changes of the number of ranks: finds what its ranks have agreed on, and what a failure means.

On one machine (``--processes MIN:MAX``) the launcher starts as many ranks as were agreed on. With several
(``--nnodes MIN:MAX``) it meets the other launchers anew, and whoever has come takes part.
"""

from __future__ import annotations

from pathlib import Path

from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from evener.distributed.failure import Failure
from evener.distributed.launch.membership import Membership
from evener.distributed.launch.process_count import Headcount
from evener.distributed.launch.rendezvous import Rendezvous
from evener.distributed.recovery.regroup import BOUNDS, LAUNCH, Bounds, GroupChange, is_stopped, noted_change
from evener.distributed.recovery.replacement import NothingKeptError


class GroupChanges:
    """Changes of the number of ranks of one run, as its launcher on this machine sees them.

    Args:
        handler: The rendezvous of the machines.
        keeps_store: Whether this process hosts the store through which they meet.
        launch: The name of the launch, the same on all machines, if their number may change.
        ranks_agree: Whether the ranks know of steps, on which they can agree.
    """

    def __init__(
        self,
        handler: RendezvousHandler,
        rendezvous: Rendezvous,
        processes: Headcount,
        run_dir: Path,
        keeps_store: bool,
        launch: str,
        ranks_agree: bool = True,
    ) -> None:
        self._handler, self._run_dir, self._launch = handler, run_dir, launch
        self._members: Membership | None = None
        self._bounds = Bounds(processes.counts) if ranks_agree and len(processes.counts) > 1 else None
        self._done = 0
        self.has_left = False
        """True if the other machines go on without this one."""
        if rendezvous.is_elastic and isinstance(handler, DynamicRendezvousHandler):
            self._members = Membership(handler, run_dir, ranks_agree)
            if ranks_agree:
                self._bounds = Bounds(least_machines=rendezvous.nodes[0], keeps_store=keeps_store)

    def variables(self) -> dict[str, str]:
        """Returns the environment variables that tell the ranks what the run may become. Those of a run in whose rank
        this launcher was started do not hold here."""
        return {BOUNDS: self._bounds.to_json() if self._bounds else "", LAUNCH: self._launch}

    @property
    def between_machines(self) -> bool:
        """True if the number of machines may change."""
        return self._members is not None

    def start_number(self, restarts: int) -> int:
        """Returns the number of the current start, which is the same on all machines, after so many restarts."""
        return self._members.round if self._members else restarts + self._done

    def noted(self, start: int, ranks: int, own: int) -> GroupChange | None:
        """Returns the change for which the ``ranks`` ranks of this machine, of which ``own`` is the first, have ended.
        Returns None if there is none."""
        change = None if self._bounds is None else noted_change(self._run_dir, start, ranks)
        if change is not None and not change.in_memory:
            self._done += 1
            self.has_left = self._members is not None and own in change.leave
            if self._members is not None:
                self._members.prove()
        return change

    def kept(self, start: int, ranks: int) -> GroupChange | None:
        """Returns the change for which ranks of this machine wait, with what they have in memory. None if there is
        none."""
        change = noted_change(self._run_dir, start, ranks) if self._bounds is not None else None
        return change if change is not None and change.in_memory else None

    @property
    def may_have_lost(self) -> bool:
        """True if machines that have just come may be gone already."""
        return self._members is not None and self._members.has_grown

    def made(self) -> None:
        """Counts a change whose ranks have kept their memory."""
        self._done += 1

    def judged(self, start: int, cause: Failure, hopeless: bool, progressed: bool) -> tuple[bool, bool]:
        """Judges a failure of ranks.

        Args:
            start: The number of the current start.
            cause: The failure that caused the others.
            hopeless: Whether a restart would fail for the same reason on the same machines.
            progressed: Whether the ranks took a step in this start.

        Returns:
            Whether a restart is hopeless, and whether it is not to be counted, because other machines are the reason
            or because the death behind it has counted when a rank was replaced.
        """
        if cause.kind == "interrupted" and is_stopped(self._run_dir, start):
            return True, False
        if self._members is None:
            has_counted = isinstance(cause.to_error(), NothingKeptError)
            self._done += has_counted  # the next start has a number of its own all the same
            return hopeless, has_counted
        if progressed:
            self._members.prove()
        if self._members.has_grown and not progressed:  # those that have come may be the reason, and go
            return False, True
        return hopeless, progressed and not cause.is_own

    def part(self, ended: bool) -> None:
        """Leaves the rendezvous.

        Args:
            ended: Whether the run has ended for all machines. Otherwise others may go on without this one.
        """
        if self._members is not None and (self.has_left or self._members.is_new or not ended):
            self._members.leave()
        else:
            self._handler.shutdown()
