"""torchrun's agent, told when its workers have started and failed: ``_start_workers``, ``_monitor_workers``,
``_remaining_restarts``, ``_pcontext`` and ``_failures``.

The agent is made to be derived from, but the context in which its processes live, with their ids and with those that
have failed, has no public name.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext


class ElasticAgent(LocalElasticAgent):
    """Calls :meth:`started` and knows the processes."""

    def started(self, context: PContext) -> None:
        """The workers run, for the first time or again."""

    def failing(self, result: RunResult, restarts: int) -> bool:
        """Workers have failed, and ``restarts`` more starts are left; returns whether to use one, if there is."""
        return True

    @property
    def context(self) -> PContext | None:
        """The processes of the workers; None before they are started."""
        return self._pcontext

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        assert self._pcontext is not None
        self.started(self._pcontext)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED and not self.failing(result, self._remaining_restarts):
            self._remaining_restarts = 0
        return result


def failed(context: PContext) -> set[int]:
    """The local ranks that have failed by themselves so far."""
    return set(getattr(context, "_failures", {}))
