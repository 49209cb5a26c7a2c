"""Measures the memory of real steps with the same accounting, to compare an estimate with."""

from __future__ import annotations

from evener.core.config.run_config import RunConfig
from evener.core.task.task import TaskLike, resolve
from evener.distributed.session import Session
from evener.hardware.memory import MemoryTracker
from evener.tools.estimate.result import RankMemory
from evener.tools.estimate.steps import STEPS, CountedEngine, count_steps
from evener.training.builtin_tasks import BUILT_IN


def measure_memory(task: TaskLike, config: RunConfig, session: Session) -> RankMemory:
    """Returns the memory of this rank, without shared memory. All ranks of the session must call this together."""
    built = resolve(task, BUILT_IN)()  # before tracking: a run loads its dataset before it starts
    with MemoryTracker(device_type=session.device.type) as account:
        settings = config.replace(steps=STEPS + 1, epochs=None, check_replicas=0)
        with CountedEngine(account, built, settings, session=session) as engine:
            return count_steps(engine, account)[0]
