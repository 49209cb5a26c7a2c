"""Finds a strategy for a model that does not fit with the default one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from evener.core.config.process_range import one_number
from evener.core.config.run_config import RunConfig
from evener.core.config.sizes import parse_limits, parse_size, size_words
from evener.core.task.task import Task, TaskLike, resolve
from evener.distributed.environment import default_processes, detect, kind_taken
from evener.hardware import accelerators
from evener.tools.estimate import MemoryEstimate, estimate_memory
from evener.tools.plan.catalogue import read_catalogue
from evener.tools.plan.trials import quiet
from evener.training.builtin_tasks import BUILT_IN

_LESS_MEMORY: tuple[tuple[str, ...], ...] = (("zero=1",), ("zero=2",), ("zero=3",))
"""Options of ``sharded``, from the one that costs the least time to the one that needs the least memory."""
ROOM = 0.95
"""The part of a card's memory that is counted on: PyTorch's allocator leaves gaps."""
STATE = 4
"""Bytes of weights, gradients and two moments of AdamW, as a multiple of those of the weights."""


def fitting_strategy(
    task: TaskLike, config: RunConfig, options: Mapping[str, Any] | None = None
) -> tuple[RunConfig, str]:
    """Returns settings with which a run fits into memory, and a line that says what was changed.

    Only settings with the strategy ``auto`` are changed, and only if ``ddp`` needs more than a rank has and ``sharded``
    does not. The line is empty if nothing is changed. A rank has its memory limit. Without one, an accelerator has its
    memory; then only a model is looked at whose weights, gradients and optimizer state could fill half of that, for a
    rank that lacks memory for its samples computes them in pieces.
    """
    asked = config.strategy != "auto" or config.mesh or config.memory_limit_at or config.micro_batch
    any_number = ":" in str(config.processes)
    if asked or any_number or detect().world_size > 1:
        return config, ""
    kind = kind_taken(config.device)
    ranks = one_number(config.processes) or default_processes(kind)
    if ranks == 1 or (config.memory_limit is None and kind == "cpu"):
        return config, ""
    try:
        if config.memory_limit is not None:
            limits = parse_limits(config.memory_limit, ranks)
        else:
            limits = [card_nbytes(kind, rank) for rank in range(ranks)]
            if not _could_fill(task, options, limits):
                return config, ""
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


def card_nbytes(kind: str, rank: int) -> int | None:
    """Returns the bytes that a rank of this machine has on its accelerator for tensors. None if that is not known. The
    accelerator's properties are read, for which no memory is taken from the ranks."""
    whole = accelerators.whole_memory_of(torch.device(kind, rank % max(1, accelerators.count(kind))))
    workspace = parse_size(read_catalogue()["workspace"]["cuda"])
    return None if whole is None else int((whole - workspace) * ROOM)


def _could_fill(task: TaskLike, options: Mapping[str, Any] | None, limits: Sequence[int | None]) -> bool:
    """Returns True if weights, gradients and the state of AdamW take more than half of what a rank has."""
    model = model_without_numbers(resolve(task, BUILT_IN, options)())
    nbytes = sum(each.nbytes for each in model.parameters())
    return any(limit is not None and 2 * STATE * nbytes > limit for limit in limits)


def model_without_numbers(task: Task) -> nn.Module:
    """Builds the model of a task, on the meta device if it can be built there."""
    with quiet(), torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return task.model()
        except Exception:  # it needs numbers to be built
            return task.model()


def _words(usual: MemoryEstimate, found: MemoryEstimate, limit: int, chosen: tuple[str, ...]) -> str:
    return (
        f"strategy sharded, {', '.join(chosen)}: with ddp a rank would need {size_words(usual.peak)} and has "
        f"{size_words(limit)}; so it needs {size_words(found.peak)}"
    )
