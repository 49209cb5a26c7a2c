"""The same steps with numbers, counted by the same accounting: what an estimate is compared with."""

from __future__ import annotations

from evener.core.config.run_config import RunConfig
from evener.core.task.task import TaskLike, resolve
from evener.distributed.session import Session
from evener.hardware.memory import Accounting
from evener.tools.estimate.result import RankMemory
from evener.tools.estimate.steps import STEPS, CountedEngine, count_steps
from evener.training.builtin_tasks import BUILT_IN


def measure_memory(task: TaskLike, config: RunConfig, session: Session) -> RankMemory:
    """What this rank takes; all ranks of the session call it. Shared memory is not counted."""
    built = resolve(task, BUILT_IN)()  # the data set is there before the run
    with Accounting(device_type=session.device.type) as account:
        settings = config.replace(steps=STEPS + 1, epochs=None, check_replicas=0)
        with CountedEngine(account, built, settings, session=session) as engine:
            return count_steps(engine, account)[0]
