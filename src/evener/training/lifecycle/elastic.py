"""Finds the numbers of ranks that ``--processes MIN:MAX`` allows on this machine with these settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from evener.balance.registry import decides
from evener.core.config.process_range import ProcessRange
from evener.core.config.run_config import RunConfig
from evener.core.task.task import TaskLike
from evener.distributed.environment import check_processes, default_processes, kind_taken
from evener.distributed.launch.launch import is_launched
from evener.distributed.launch.process_count import Headcount
from evener.distributed.launch.rendezvous import Rendezvous
from evener.errors import ConfigurationError
from evener.training.consistency.startup import OWN_SETTINGS
from evener.training.factory import check_division
from evener.version import evener_version


def headcount_of(config: RunConfig, rendezvous: Rendezvous | None) -> Headcount | None:
    """Returns the numbers of ranks that the run may have, or None if the settings give no range.

    Raises:
        ConfigurationError: If there are devices for fewer ranks than the minimum, the settings fit no number in the
            range, name something for each rank, or are for several machines.
    """
    if not isinstance(config.processes, str):
        return None
    _refuse_launched(config.processes, rendezvous)
    _refuse_by_hand(config)
    given, device = ProcessRange.parse(config.processes), kind_taken(config.device)
    most = _served(given, device)
    return Headcount(_allowed(config, range(most, given.least - 1, -1)))


def restarting(config: RunConfig, rendezvous: Rendezvous | None) -> Rendezvous | None:
    """Returns a rendezvous that allows one restart for each rank the run can lose, unless it gives a number itself."""
    if rendezvous is not None and rendezvous.is_elastic and rendezvous.max_restarts is None:
        return replace(rendezvous, max_restarts=rendezvous.nodes[1] - rendezvous.nodes[0])
    if not isinstance(config.processes, str):
        return rendezvous
    given, meeting = ProcessRange.parse(config.processes), rendezvous or Rendezvous()
    if meeting.max_restarts is not None:
        return meeting
    return replace(meeting, max_restarts=given.most - given.least)


def _refuse_launched(processes: str, rendezvous: Rendezvous | None) -> None:
    if is_launched():
        raise ConfigurationError(
            f"processes is {processes!r}, and these ranks were started by another launcher, which alone can start them "
            "again with fewer: leave it out"
        )
    if rendezvous is not None and rendezvous.nodes != (1, 1):
        raise ConfigurationError(
            f"processes is {processes!r} and nnodes {rendezvous.nnodes!r}: a death ends the ranks of all machines, "
            "which cannot tell whose were lost; give processes one number, or use one machine"
        )


def _refuse_by_hand(config: RunConfig) -> None:
    """Refuses settings with a value for each rank, because the number of ranks may change."""
    weights = config.balance is not None and not decides(config.balance)
    asked = {
        f"balance {config.balance!r}": weights,
        f"max_shares {config.max_shares!r}": config.max_shares,
        f"throttle {config.throttle!r}": config.throttle,
        f"throttle_at {','.join(config.throttle_at)!r}": config.throttle_at,
    }
    given = [name for name, is_given in asked.items() if is_given]
    if given:
        raise ConfigurationError(
            f"{' and '.join(given)} says something of each rank, and with processes {config.processes!r} there may be "
            "fewer: leave it out (balance auto finds shares for as many as there are), or give processes one number"
        )


def _served(given: ProcessRange, device: str) -> int:
    """Returns the largest number of ranks in the range that this machine has devices for."""
    check_processes(given.least, device)
    most = min(given.most, default_processes(device)) if device != "cpu" else given.most
    check_processes(most, device)
    return most


def _allowed(config: RunConfig, counts: range) -> tuple[int, ...]:
    """Returns those of the counts over which model and batch can be divided."""
    refused: dict[int, ConfigurationError] = {}
    for count in counts:
        try:
            check_division(config, count)
        except ConfigurationError as error:
            refused[count] = error
    if len(refused) == len(counts):
        raise refused[counts[0]]
    return tuple(count for count in counts if count not in refused)


def joining_terms(task: TaskLike, config: RunConfig, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns what must be equal on a machine that joins a run (``nnodes`` MIN:MAX), as far as its launcher knows it.

    The ranks compare the rest when they start: model, data and the parts of the task.
    """
    named = task if isinstance(task, str) else getattr(task, "__qualname__", type(task).__name__)
    settings = {name: value for name, value in config.as_dict().items() if name not in OWN_SETTINGS}
    return {
        "the version of Evener": evener_version(),
        "the version of torch": torch.__version__.partition("+")[0],
        "the task": named,
        "its options": {name: str(value) for name, value in (options or {}).items()},
        **{f"setting {name}": value for name, value in settings.items()},
    }
