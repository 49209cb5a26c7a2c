"""Finds a strategy for a model that does not fit with the default one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.core.config.process_range import one_number
from evener.core.config.run_config import RunConfig
from evener.core.config.sizes import parse_limits, size_words
from evener.core.task.task import TaskLike
from evener.distributed.environment import default_processes, detect, kind_taken
from evener.tools.estimate import MemoryEstimate, estimate_memory

_LESS_MEMORY: tuple[tuple[str, ...], ...] = (("zero=1",), ("zero=2",), ("zero=3",))
"""Options of ``sharded``, from the one that costs the least time to the one that needs the least memory."""


def fitting_strategy(
    task: TaskLike, config: RunConfig, options: Mapping[str, Any] | None = None
) -> tuple[RunConfig, str]:
    """Returns settings with which a run fits into memory, and a line that says what was changed.

    Only settings with the strategy ``auto`` are changed, and only if ``ddp`` needs more than a rank's memory limit, and
    ``sharded`` does not. The line is empty if nothing is changed. Without a limit nothing is looked at: to ask an
    accelerator for its memory takes some of it from the ranks.
    """
    asked = config.strategy != "auto" or config.mesh or config.memory_limit_at or config.micro_batch
    any_number = ":" in str(config.processes)
    if asked or any_number or config.memory_limit is None or detect().world_size > 1:
        return config, ""
    ranks = one_number(config.processes) or default_processes(kind_taken(config.device))
    limits = parse_limits(config.memory_limit, ranks)
    if ranks == 1:
        return config, ""
    try:
        usual = estimate_memory(task, config, options=options)
        exceeding = usual.exceeding(limits)
        for chosen in _LESS_MEMORY if exceeding else ():
            smaller = config.replace(strategy="sharded", strategy_option=chosen)
            found = estimate_memory(task, smaller, options=options)
            if not found.exceeding(limits):
                return smaller, _words(usual, found, limits[exceeding[0].rank] or 0, chosen)
    except Exception:  # memory is not known before the run, or what is wrong is for the run to say
        pass
    return config, ""


def _words(usual: MemoryEstimate, found: MemoryEstimate, limit: int, chosen: tuple[str, ...]) -> str:
    return (
        f"strategy sharded, {', '.join(chosen)}: with ddp a rank would need {size_words(usual.peak)} and has "
        f"{size_words(limit)}; so it needs {size_words(found.peak)}"
    )
