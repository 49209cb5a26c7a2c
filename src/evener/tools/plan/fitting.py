"""Finds a strategy for a model that does not fit with the default one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.core.config.process_range import one_number
from evener.core.config.run_config import RunConfig
from evener.core.config.sizes import parse_limits, size_words
from evener.core.task.task import TaskLike
from evener.distributed.environment import default_processes, detect, kind_taken
from evener.errors import ConfigurationError
from evener.tools.estimate import MemoryEstimate, estimate_memory
from evener.tools.plan.plan import memory_here

_LESS_MEMORY: tuple[tuple[str, ...], ...] = (("zero=1",), ("zero=2",), ("zero=3",))
"""Options of ``sharded``, from the one that costs the least time to the one that needs the least memory."""


def fitting_strategy(
    task: TaskLike, config: RunConfig, options: Mapping[str, Any] | None = None
) -> tuple[RunConfig, str]:
    """Returns settings with which a run fits into memory, and a line that says what was changed.

    Only settings with the strategy ``auto`` are changed, and only if ``ddp`` needs more than a rank's memory limit or
    accelerator has, and ``sharded`` does not. The line is empty if nothing is changed.
    """
    kind = kind_taken(config.device)
    if config.strategy != "auto" or ":" in str(config.processes):  # a range: any number of ranks may train
        return config, ""
    ranks = one_number(config.processes) or default_processes(kind)
    limits = parse_limits(config.memory_limit, ranks)
    limits = [limit or memory_here(kind, rank) for rank, limit in enumerate(limits)]
    asked = config.mesh or config.memory_limit_at or config.samples_at_once
    if asked or ranks == 1 or not any(limits) or detect().world_size > 1:
        return config, ""
    try:
        usual = estimate_memory(task, config, options=options)
        exceeding = usual.exceeding(limits)
        for chosen in _LESS_MEMORY if exceeding else ():
            smaller = config.replace(strategy="sharded", strategy_option=chosen)
            found = estimate_memory(task, smaller, options=options)
            if not found.exceeding(limits):
                return smaller, _words(usual, found, limits[exceeding[0].rank] or 0, chosen)
    except ConfigurationError:  # what memory depends on is not known before the run
        pass
    return config, ""


def _words(usual: MemoryEstimate, found: MemoryEstimate, limit: int, chosen: tuple[str, ...]) -> str:
    return (
        f"strategy sharded, {', '.join(chosen)}: with ddp a rank would need {size_words(usual.peak)} and has "
        f"{size_words(limit)}; so it needs {size_words(found.peak)}"
    )
