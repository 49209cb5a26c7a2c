"""torchrun's agent, told when its workers have started: ``_start_workers``, ``_pcontext`` and ``_failures``.

The agent is made to be derived from, but the context in which its processes live, with their ids and with those that
have failed, has no public name.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext


class ElasticAgent(LocalElasticAgent):
    """Calls :meth:`started` and knows the processes."""

    def started(self, context: PContext) -> None:
        """The workers run, for the first time or again."""

    @property
    def context(self) -> PContext | None:
        """The processes of the workers; None before they are started."""
        return self._pcontext

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        assert self._pcontext is not None
        self.started(self._pcontext)
        return pids


def failed(context: PContext) -> set[int]:
    """The local ranks that have failed by themselves so far."""
    return set(getattr(context, "_failures", {}))
