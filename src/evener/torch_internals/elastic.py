"""Private names of torchrun's agent and rendezvous: its worker processes, and the state of the rendezvous.

- ``_start_workers``, ``_monitor_workers``, ``_rendezvous``, ``_remaining_restarts``, ``_pcontext``, ``_failures``,
  ``_capture_process_failures`` and ``_running_local_ranks`` tell an agent when its workers have started and failed. The
  agent is made to be derived from, but its context of processes, with their ids and failures, is private. The context
  ends all processes when the first one fails. To replace a single rank, a failure is removed from the context before
  the context looks at it, and a new process takes the place of the old one. To change the number of ranks while some
  stay, the dictionaries of the context, which have an entry for each local rank, are filled anew.
- ``DynamicRendezvousHandler._state_holder`` holds the machines that take part in a c10d rendezvous, and those that wait
  for the next round. A user who starts a run on several machines wants to see which one is missing, and a run whose
  number of machines may change must know who waits and who is gone.

Tested with torch 2.11, 2.13, 2.15.

- ``_RendezvousState`` and ``_NodeDesc`` are the state of a c10d rendezvous. torch gives it to a backend as a pickle,
  and
  unpickles whatever the backend returns. Evener's backend stores it as JSON, and needs the classes for that.

Tested with torch 2.11, 2.13.

- ``_bootstrap_store_info`` is the address of the ranks' store. The handler keeps it for later rounds, without telling
  it to machines that come later, which then wait in vain. Evener forgets it before each round.
- ``_op_executor`` and ``_Action`` remove a machine from the rendezvous. The only public way to leave, ``shutdown``,
  closes the rendezvous for all.

Tested with torch 2.11, 2.13, 2.15, as is the change of the number of workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _Action as Action
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc as NodeDesc
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState as RendezvousState

__all__ = [
    "ElasticAgent",
    "NodeDesc",
    "RendezvousState",
    "failed",
    "forget_store",
    "leave",
    "members",
    "numbers",
    "participants",
    "round_of",
    "running",
    "waiting",
]


class ElasticAgent(LocalElasticAgent):
    """Torchrun's local agent with methods that derived classes override, and with rank replacement."""

    def started(self, context: PContext) -> None:
        """Called when the workers have started, for the first time or again."""

    def failing(self, result: RunResult, restarts: int) -> bool:
        """Called when workers have failed, with the number of restarts left. Returns False to forbid a restart."""
        return True

    def replaces(self, failures: Mapping[int, ProcessFailure]) -> bool:
        """Called when local ranks have failed. Returns True to replace them while the other ranks continue."""
        return False

    def follow_changes(self) -> None:
        """Called before each look at the workers."""

    def regroups(self) -> bool:
        """Called when all workers have ended. Returns True to start them again, which does not count as a restart."""
        return False

    def meets_again(self) -> bool:
        """Called when a machine of a new round has not told its number of workers. Returns True to meet once more."""
        return False

    def spare_restart(self) -> None:
        """Keeps the next restart from being counted."""
        self._remaining_restarts += 1

    @property
    def restarts_done(self) -> int:
        """The number of restarts and rank replacements so far."""
        return self._worker_group.spec.max_restarts - self._remaining_restarts

    @property
    def start_number(self) -> int:
        """The number of the current start; 0 for the first."""
        return self.restarts_done

    @property
    def is_alone(self) -> bool:
        """True if this agent runs all workers of the run."""
        return self._worker_group.group_world_size == 1

    @property
    def context(self) -> PContext | None:
        """The processes of the workers; None before they are started."""
        return self._pcontext

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        try:
            super()._rendezvous(worker_group)
        except dist.DistError:
            if not self.meets_again():
                raise
            self._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        assert self._pcontext is not None
        self._replace_in(self._pcontext)
        self.started(self._pcontext)
        return pids

    def _replace_in(self, context: PContext) -> None:
        """Patches ``context`` so that failed ranks are replaced before the context sees the failure."""
        if not isinstance(context, SubprocessContext):
            return
        borrowed: Any = context
        capture: Callable[[set[int]], None] = borrowed._capture_process_failures

        def replace_failed(done: set[int]) -> None:
            capture(done)
            failures = context._failures
            if failures and self._remaining_restarts and self.replaces(dict(failures)):
                self._remaining_restarts -= 1
                for local_rank in list(failures):
                    self._replace(context, local_rank)
                    done.discard(local_rank)

        borrowed._capture_process_failures = replace_failed

    def _replace(self, context: SubprocessContext, local_rank: int) -> None:
        """Replaces a failed process by a new one with the same local rank, arguments and environment variables."""
        failure = context._failures.pop(local_rank)
        Path(failure.error_file).unlink(missing_ok=True)
        self._start_in(context, local_rank)
        self._worker_group.workers[local_rank].id = context.subprocess_handlers[local_rank].proc.pid

    def _start_in(self, context: SubprocessContext, local_rank: int) -> None:
        variables = context.envs[local_rank] | {"TORCHELASTIC_RESTART_COUNT": str(self.start_number)}
        handler = get_subprocess_handler(
            entrypoint=str(context.entrypoint),
            args=context.args[local_rank],
            env=variables,
            stdout=context.stdouts[local_rank],
            stderr=context.stderrs[local_rank],
            local_rank_id=local_rank,
        )
        context.subprocess_handlers[local_rank] = handler

    def renumber(self, stay: Sequence[int], ranks: int) -> None:
        """Changes the number of workers while some of them stay. The others must have ended with status 0.

        Args:
            stay: The local ranks that stay, in the order of their new numbers, which begin at 0.
            ranks: The new number of workers. Those that are missing are started.
        """
        context, group = self._pcontext, self._worker_group
        assert isinstance(context, SubprocessContext)
        borrowed: Any = context
        workers = [Worker(rank, rank, rank, ranks, ranks) for rank in range(ranks)]
        for name in ("args", "envs", "stdouts", "stderrs", "error_files", "subprocess_handlers"):
            held = getattr(context, name)
            moved = {new: held[old] for new, old in enumerate(stay)}
            held.clear()
            held.update(moved)
        for rank in range(len(stay), ranks):
            folder = Path(context.error_files[0]).parent.with_name(f"start-{self.start_number}-{rank}")
            folder.mkdir()
            context.error_files[rank] = str(folder / "error.json")
            context.args[rank], context.envs[rank] = context.args[0], dict(context.envs[0])
            context.stdouts[rank], context.stderrs[rank] = context.stdouts[0], context.stderrs[0]
            context.envs[rank]["TORCHELASTIC_ERROR_FILE"] = context.error_files[rank]
        for rank in range(ranks):
            context.envs[rank] |= numbers(rank, ranks)
        group.spec.local_world_size = context.nprocs = ranks
        group.workers = workers
        for rank in range(ranks):
            if rank >= len(stay):
                self._start_in(context, rank)
            workers[rank].id = context.subprocess_handlers[rank].proc.pid
        borrowed._running_local_ranks = set(range(ranks))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.follow_changes()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.SUCCEEDED, WorkerState.FAILED) and self.regroups():
            self.spare_restart()
            return RunResult(state=WorkerState.UNHEALTHY)
        if result.state is WorkerState.FAILED and not self.failing(result, self._remaining_restarts):
            self._remaining_restarts = 0
        return result


def numbers(rank: int, ranks: int) -> dict[str, str]:
    """Returns the environment variables by which a worker of one machine knows its rank and their number."""
    own = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    return own | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks))


def running(context: PContext) -> dict[int, int]:
    """Returns the process ids of the workers known to be running, by local rank."""
    known: set[int] = getattr(context, "_running_local_ranks", set()) - failed(context)
    return {rank: pid for rank, pid in context.pids().items() if rank in known}


def failed(context: PContext) -> set[int]:
    """Returns the local ranks that have failed so far, without those that the context ended."""
    return set(getattr(context, "_failures", {}))


def participants(handler: RendezvousHandler | None) -> int | None:
    """Returns the number of machines in the open rendezvous round; None if the backend does not count them."""
    if isinstance(handler, DynamicRendezvousHandler):
        return len(handler._state_holder.state.participants)
    return None


def waiting(handler: DynamicRendezvousHandler) -> list[str]:
    """Returns the names of the machines that wait for the next round, with their launchers' process ids."""
    return sorted(map(_name, handler._state_holder.state.wait_list))


def members(handler: DynamicRendezvousHandler) -> frozenset[str]:
    """Returns the names of the machines of the current round, in the same form."""
    return frozenset(map(_name, handler._state_holder.state.participants))


def _name(node: NodeDesc) -> str:
    return f"{node.addr} (pid {node.pid})"


def round_of(handler: DynamicRendezvousHandler) -> int:
    """Returns the number of the current round; 0 for the first."""
    return handler._state_holder.state.round


def forget_store(handler: RendezvousHandler) -> None:
    """Makes the handler agree anew on the address of the ranks' store in the next round."""
    if isinstance(handler, DynamicRendezvousHandler):
        handler._bootstrap_store_info = None


def leave(handler: DynamicRendezvousHandler, seconds: float) -> None:
    """Removes this machine from the rendezvous, which stays open for the others."""
    handler._stop_heartbeats()
    handler._op_executor.run(_depart, time.monotonic() + seconds)


def _depart(context: Any, deadline: float) -> Action:
    lists = {
        Action.REMOVE_FROM_PARTICIPANTS: context.state.participants,
        Action.REMOVE_FROM_WAIT_LIST: context.state.wait_list,
        Action.REMOVE_FROM_REDUNDANCY_LIST: context.state.redundancy_list,
    }
    found = next((action for action, nodes in lists.items() if context.node in nodes), Action.FINISH)
    return Action.ERROR_TIMEOUT if found is not Action.FINISH and time.monotonic() > deadline else found
