"""Registry of the all-reduces, by the names that the command line takes. To add one, write a file and an entry here.

Users name an all-reduce of their own as ``package.module:make``: a subclass of :class:`AllReduce`, or a function that
returns an all-reduce. It is called with those of these arguments that it declares: ``group``, the process group of the
ranks that take part, and ``timeout_seconds``, the longest wait for a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist

from evener.collectives.base import AllReduce
from evener.collectives.compress import Fp8, Half, Int8, TopK
from evener.collectives.executor.executor import SEGMENT_NBYTES, Scheduled
from evener.collectives.native import Native
from evener.collectives.reduce_scatter import NativeOwners, RangeOwners
from evener.collectives.schedules.algorithms import ALGORITHMS, usable_on
from evener.collectives.schedules.schedule import Topology
from evener.collectives.shared_memory.all_reduce import SharedMemory
from evener.collectives.shared_memory.multi_host import MakeAllReduce, two_level
from evener.collectives.shared_memory.reduce_scatter import SharedOwners
from evener.collectives.tuning.auto import measured
from evener.collectives.tuning.measure import device_of
from evener.core import plugins
from evener.core.call_by_name import called_with
from evener.core.config.time_limit import TIMEOUT_SECONDS
from evener.distributed.hosts import all_gather, hosts_of
from evener.errors import ConfigurationError

_TREE_NBYTES = 512 * 1024
_DIRECT_RANKS = 8
"""The largest number of ranks for which ``auto`` tries the algorithm "direct"."""


def _scheduled(name: str, group: dist.ProcessGroup, timeout_seconds: float) -> AllReduce:
    return Scheduled(name, ALGORITHMS[name], group, timeout_seconds)


def _tree(name: str, group: dist.ProcessGroup, timeout_seconds: float) -> AllReduce:
    topology = Topology(hosts_of(group))
    segment_nbytes = tree_segment_nbytes(topology)
    return Scheduled(name, ALGORITHMS[name], group, timeout_seconds, topology, segment_nbytes)


def tree_segment_nbytes(topology: Topology) -> int:
    """Returns the bytes of a segment in tree algorithms. While one segment goes up the tree, another goes down.

    Segments of several hosts are small and are divided over the ranks of a host. On a single host they have the default
    size: there the ranks' own cores move the bytes, and small segments gain nothing.
    """
    ranks_per_host = max(map(len, topology.hosts))
    return _TREE_NBYTES * ranks_per_host if len(topology.hosts) > 1 else SEGMENT_NBYTES


def _two_level(
    group: dist.ProcessGroup,
    timeout_seconds: float,
    wrap: Callable[[AllReduce], AllReduce] | None = None,
    inner_backend: str | None = None,
) -> AllReduce:
    """Builds "two-level": each host uses its default inside, over ``inner_backend`` if given. ``wrap`` compresses what
    is sent between hosts."""

    def between(leaders: dist.ProcessGroup, timeout_seconds: float) -> AllReduce:
        ring = _scheduled("ring", leaders, timeout_seconds)
        return wrap(ring) if wrap else ring

    return two_level(between, default, group, timeout_seconds, inner_backend=inner_backend)


def _auto(group: dist.ProcessGroup, timeout_seconds: float) -> AllReduce:
    """Builds "auto", which measures the all-reduces that the ranks can use and takes the fastest for each size."""
    topology = Topology(hosts_of(group))
    names = candidates(topology)
    if device_of(group).type == "cpu":
        names.append("two-level" if len(topology.hosts) > 1 else "shared-memory")
    made, refused = make_all(names, group, timeout_seconds)
    with ExitStack() as unfinished:
        for each in made.values():
            unfinished.enter_context(each)
        chosen = measured(made, group, timeout_seconds)
        unfinished.pop_all()
    chosen.note = "; ".join(f"without {name}: {reason}" for name, reason in refused.items())
    return chosen


def candidates(topology: Topology) -> list[str]:
    """Returns the names of the message-based all-reduces that ``auto`` measures: "native" and all useful algorithms."""
    useless = set() if len(topology.hosts) > 1 else {"ring-tree"}  # on one host it equals "ring"
    if topology.world_size > _DIRECT_RANKS:
        useless.add("direct")
    return ["native", *(name for name in usable_on(topology) if name not in useless)]


def make_all(
    names: Iterable[str], group: dist.ProcessGroup, timeout_seconds: float
) -> tuple[dict[str, AllReduce], dict[str, str]]:
    """Builds the named all-reduces. All ranks must call this together.

    Returns:
        The all-reduces that every rank could build, by name; and the reasons why the others could not be, by name.
    """
    made: dict[str, AllReduce] = {}
    refused: dict[str, str] = {}
    with ExitStack() as unfinished:
        for name in names:
            try:
                each, reason = unfinished.enter_context(find(name)(group, timeout_seconds)), None
            except ConfigurationError as error:
                each, reason = None, str(error)
            reasons = [text for text in all_gather(reason, group) if text]
            if each is not None and not reasons:
                made[name] = each
                continue
            refused[name] = "; ".join(dict.fromkeys(reasons))
            if each is not None:
                each.close()
        unfinished.pop_all()
    return made, refused


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
        "fp8": Fp8,
        "top-k": TopK,
    }
)

BETWEEN_HOSTS: Mapping[str, Callable[[AllReduce], AllReduce]] = MappingProxyType(
    {f"{name}-between": wrap for name, wrap in COMPRESSIONS.items()}
)
"""Compressions of messages between hosts only; the sum inside a host is exact."""


@dataclass(frozen=True)
class Substitute:
    """Replaces all all-reduces and range owners for groups of a special backend, such as one that simulates ranks."""

    all_reduce: Callable[[str | None, dist.ProcessGroup, float], AllReduce]
    """Called with the requested name, the group and the timeout."""
    owners: Callable[[str | None, dist.ProcessGroup, float], RangeOwners]


SUBSTITUTES: dict[str, Substitute] = {}
"""Substitutes by the name of the group's backend. Backends that simulate ranks register theirs."""


def make(
    name: str | None = None,
    group: dist.ProcessGroup | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    compression: str | None = None,
    inner_backend: str | None = None,
) -> AllReduce:
    """Builds the all-reduce ``name`` over ``group``. All ranks must call this together.

    Args:
        name: See :func:`find`; None for the default of the group.
        group: The ranks; None is the default group.
        timeout_seconds: The longest wait for a rank.
        compression: A name in ``COMPRESSIONS`` or ``BETWEEN_HOSTS``; None for none.
        inner_backend: If hosts have different kinds of devices, the backend for this host's; ``group`` must be a gloo
            group then.

    Raises:
        ConfigurationError: There is no such name, or the group's ranks cannot use it.
    """
    whole = group if group is not None else dist.group.WORLD
    assert whole is not None
    if compression is not None:
        check_compression(compression, name)
    substitute = SUBSTITUTES.get(dist.get_backend(whole))
    with ExitStack() as unfinished:
        one = partial(substitute.all_reduce, name) if substitute else find(name) if name else default
        between = BETWEEN_HOSTS.get(compression or "")
        if inner_backend is not None:
            _check_mixed(name)
        if not substitute and (between or (inner_backend and name != "native")):
            one = partial(_two_level, wrap=between, inner_backend=inner_backend)
        made = unfinished.enter_context(one(whole, timeout_seconds))
        finished = COMPRESSIONS[compression](made) if compression and not between else made
        unfinished.pop_all()
    return finished


def _check_mixed(name: str | None) -> None:
    if name not in (None, "native", "two-level"):
        raise ConfigurationError(
            f"all-reduce {name!r} wants one kind of device on all hosts, and these have different ones: leave it out "
            "for two-level, which lets each host sum inside in its own way, or say native, which is gloo over all"
        )


def check_compression(compression: str, name: str | None = None, others: Iterable[str] = ()) -> None:
    """Checks that a compression exists and works with an all-reduce.

    Args:
        compression: Name of the compression.
        name: Name of the all-reduce; None for the default.
        others: Names of further compressions.

    Raises:
        ConfigurationError: There is no such compression, or it does not work with that all-reduce.
    """
    known = (*COMPRESSIONS, *BETWEEN_HOSTS, *others)
    if compression not in known:
        raise ConfigurationError(f"there is no compression {compression!r}; there are {', '.join(known)}")
    if compression in BETWEEN_HOSTS and name not in (None, "two-level"):
        raise ConfigurationError(
            f"compression {compression!r} is of what goes between hosts in the all-reduce 'two-level', and {name!r} "
            f"has no such part: leave --allreduce out, or use {compression.removesuffix('-between')!r}"
        )


def find(name: str) -> MakeAllReduce:
    """Returns the factory of the all-reduce ``name``: an entry of ``ALL_REDUCES``, or the user's own, named as
    ``package.module:make``.

    Raises:
        ConfigurationError: There is no such name.
    """
    if name in ALL_REDUCES:
        return ALL_REDUCES[name]
    found = plugins.find(name, "all-reduce", "function or class", callable, known=ALL_REDUCES)
    return partial(make_own, found, name)


def make_own(
    function: Callable[..., object], name: str, group: dist.ProcessGroup, timeout_seconds: float
) -> AllReduce:
    """Builds an all-reduce by the user's ``function``; errors call it ``name``.

    Raises:
        ConfigurationError: ``function`` needs other arguments, or does not return an all-reduce.
    """
    try:
        made = called_with(function, {"group": group, "timeout_seconds": timeout_seconds})
    except ConfigurationError as error:
        raise ConfigurationError(f"all-reduce {name!r}: {error}") from error
    if not isinstance(made, AllReduce):
        raise ConfigurationError(
            f"all-reduce {name!r} returned a {type(made).__name__}, not an evener.collectives.base.AllReduce"
        )
    return made


def default(group: dist.ProcessGroup, timeout_seconds: float = TIMEOUT_SECONDS) -> AllReduce:
    """Builds the default all-reduce: shared memory for CPU ranks of one host if that works, else the backend's own."""
    if device_of(group).type != "cpu" or len(hosts_of(group)) > 1:
        return Native(group, timeout_seconds)
    try:
        return SharedMemory(group, timeout_seconds)
    except ConfigurationError as error:  # raised on every rank alike
        native = Native(group, timeout_seconds)
        native.note = str(error)
        return native


def make_owners(name: str | None, group: dist.ProcessGroup, timeout_seconds: float) -> RangeOwners:
    """Builds a reduce-scatter and all-gather to and from range owners. All ranks must call this together.

    Args:
        name: ``native`` or ``shared-memory``; None for shared memory if the ranks can use it, else native.
        group: The ranks.
        timeout_seconds: The longest wait for a rank.

    Raises:
        ConfigurationError: There is none of that name, or the group's ranks cannot use it.
    """
    if name not in (None, "native", "shared-memory"):
        raise ConfigurationError(
            f"all-reduce {name!r} brings the sum to all ranks; to the owners of ranges 'native' and 'shared-memory' "
            "bring it"
        )
    if substitute := SUBSTITUTES.get(dist.get_backend(group)):
        return substitute.owners(name, group, timeout_seconds)
    if name == "native" or device_of(group).type != "cpu":
        return NativeOwners(group)
    try:
        return SharedOwners(group, timeout_seconds)
    except ConfigurationError:  # raised on every rank alike
        if name is not None:
            raise
        return NativeOwners(group)
