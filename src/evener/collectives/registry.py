"""The all-reduces by the names that a command line takes: a new one is a new file and an entry here.

A user's own is named ``package.module:make``, a function (or class) that is called as those here are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist

from evener.collectives.algorithm import Topology
from evener.collectives.algorithms import ALGORITHMS, usable_on
from evener.collectives.auto import measured
from evener.collectives.base import DEFAULT_TIMEOUT_SECONDS, AllReduce
from evener.collectives.compress import Half, Int8, TopK
from evener.collectives.executor import SEGMENT_NBYTES, Scheduled
from evener.collectives.host import hosts_of
from evener.collectives.measure import device_of
from evener.collectives.native import Native
from evener.collectives.shared_memory import SharedMemory
from evener.collectives.two_level import MakeAllReduce, two_level
from evener.errors import ConfigurationError

_TREE_NBYTES = 512 * 1024


def _scheduled(name: str, group: dist.ProcessGroup, timeout_seconds: float) -> AllReduce:
    return Scheduled(name, ALGORITHMS[name], group, timeout_seconds)


def _tree(name: str, group: dist.ProcessGroup, timeout_seconds: float) -> AllReduce:
    topology = Topology(hosts_of(group))
    segment_nbytes = tree_segment_nbytes(topology)
    return Scheduled(name, ALGORITHMS[name], group, timeout_seconds, topology, segment_nbytes)


def tree_segment_nbytes(topology: Topology) -> int:
    """Bytes of a segment of what flows through trees between hosts: while one goes up, another goes down.

    Each rank of a host has a part of it. Inside a host, where the ranks' own cores move the bytes, it gains nothing.
    """
    ranks_per_host = max(map(len, topology.hosts))
    return _TREE_NBYTES * ranks_per_host if len(topology.hosts) > 1 else SEGMENT_NBYTES


def _two_level(group: dist.ProcessGroup, timeout_seconds: float) -> AllReduce:
    return two_level(partial(_scheduled, "ring"), group, timeout_seconds)


def _auto(group: dist.ProcessGroup, timeout_seconds: float) -> AllReduce:
    """The shared memory that ranks of a host have, or else what the messages of a backend can do."""
    topology = Topology(hosts_of(group))
    names = ["native", *(name for name in ("ring", "tree", "halving") if name in usable_on(topology))]
    if device_of(group).type == "cpu":
        names.append("two-level" if len(topology.hosts) > 1 else "shared-memory")
    return measured(
        {name: ALL_REDUCES[name](group, timeout_seconds) for name in names}, group, timeout_seconds
    )


ALL_REDUCES: Mapping[str, MakeAllReduce] = MappingProxyType(
    {
        "native": Native,
        "ring": partial(_scheduled, "ring"),
        "tree": partial(_tree, "tree"),
        "halving": partial(_scheduled, "halving"),
        "direct": partial(_scheduled, "direct"),
        "ring-tree": partial(_tree, "ring-tree"),
        "shared-memory": SharedMemory,
        "two-level": _two_level,
        "auto": _auto,
    }
)

COMPRESSIONS: Mapping[str, Callable[[AllReduce], AllReduce]] = MappingProxyType(
    {
        "fp16": lambda inner: Half(inner, torch.float16),
        "bf16": lambda inner: Half(inner, torch.bfloat16),
        "int8": Int8,
        "top-k": TopK,
    }
)


def make(
    name: str | None = None,
    group: dist.ProcessGroup | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    compression: str | None = None,
) -> AllReduce:
    """The all-reduce ``name`` (see :func:`find`) over ``group``; its default if None. A collective call.

    Raises:
        ConfigurationError: There is no such name, or the group's ranks cannot use it.
    """
    whole = group if group is not None else dist.group.WORLD
    assert whole is not None
    if compression is not None and compression not in COMPRESSIONS:
        raise ConfigurationError(
            f"there is no compression {compression!r}; there are {', '.join(COMPRESSIONS)}"
        )
    made = (find(name) if name else default)(whole, timeout_seconds)
    return COMPRESSIONS[compression](made) if compression else made


def find(name: str) -> MakeAllReduce:
    """What makes the all-reduce ``name``: one of ``ALL_REDUCES``, or ``package.module:make`` of the user's own.

    Raises:
        ConfigurationError: There is no such name.
    """
    if name in ALL_REDUCES:
        return ALL_REDUCES[name]
    module_name, _, function_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), function_name, None) if function_name else None
    except (ModuleNotFoundError, ValueError):
        found = None
    if not callable(found):
        raise ConfigurationError(
            f"there is no all-reduce {name!r}; there are {', '.join(ALL_REDUCES)}, or package.module:make of your own"
        )
    own: MakeAllReduce = found
    return own


def default(group: dist.ProcessGroup, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> AllReduce:
    """Shared memory for CPU ranks of one host where it works, and what the backend has for all others."""
    if device_of(group).type == "cpu" and len(hosts_of(group)) == 1:
        try:
            return SharedMemory(group, timeout_seconds)
        except ConfigurationError:  # raised on every rank alike
            pass
    return Native(group, timeout_seconds)
