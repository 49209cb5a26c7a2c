"""All-reduce over several hosts: shared memory inside a host, messages between one leader of each.

The links inside a host are far faster than those between hosts, and a host of g ranks that sends its sum once moves a
g-th of what g ranks would. The buffer goes through in parts, so that the sum of one is made inside the hosts
while another is between them::

    part       0       1       2
    inside     sum     sum     sum                             shared memory, all ranks of the host
    between            sum 0   sum 1   sum 2                   messages, the leaders
    inside                     copy 0  copy 1  copy 2          shared memory, from the leader

Hosts may have unequal numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor

from evener.collectives.base import AllReduce, Promised, Work
from evener.collectives.execute.subgroup import subgroup
from evener.collectives.execute.worker import Worker
from evener.collectives.shared_memory.all_reduce import SharedMemory
from evener.errors import ConfigurationError
from evener.runtime.hosts import all_gather, destroy, hosts_of
from evener.runtime.watchdog import TIMEOUT_SECONDS

_PART_NBYTES = 4 * 1024 * 1024
_LEADER = 0

MakeAllReduce = Callable[[dist.ProcessGroup, float], AllReduce]
"""(group, timeout_seconds) -> an all-reduce over it."""


class TwoLevel(AllReduce):
    """Sums inside each host by ``inner``, between hosts by ``between``.

    Args:
        inner: Over the ranks of this host; its first rank is the host's leader.
        between: Over the leaders of all hosts; None on a rank that is no leader.
        group: All ranks.
        timeout_seconds: As everywhere.
        owned: Closes them, and what they stand on.
    """

    name = "two-level"

    def __init__(
        self,
        inner: SharedMemory,
        between: AllReduce | None,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        *,
        owned: ExitStack,
    ) -> None:
        super().__init__(group, timeout_seconds)
        self._inner, self._between = inner, between
        self.held_nbytes = inner.held_nbytes
        self._worker = Worker("evener all-reduce two-level")
        self._owned = owned
        owned.callback(self._worker.close)

    @property
    def exact(self) -> bool:
        return self._between is None or self._between.exact

    def start(self, tensor: Tensor) -> Work:
        return Promised(self._worker.submit(lambda: self._run(tensor)))

    def close(self) -> None:
        self._owned.close()

    def _run(self, tensor: Tensor) -> Tensor:
        flying: list[tuple[Tensor, Work | None]] = []
        for part in torch.split(tensor.view(-1), _PART_NBYTES // tensor.element_size()):
            self._inner(part).wait()
            flying.append((part, self._between(part) if self._between is not None else None))
            if len(flying) > 1:
                self._land(*flying.pop(0))
        for part, work in flying:
            self._land(part, work)
        return tensor

    def _land(self, part: Tensor, work: Work | None) -> None:
        if work is not None:
            work.wait()
        self._inner.broadcast(part, _LEADER)


def two_level(
    make_between: MakeAllReduce,
    group: dist.ProcessGroup | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    hosts: tuple[tuple[int, ...], ...] | None = None,
) -> TwoLevel:
    """A :class:`TwoLevel` over the hosts that the ranks of ``group`` are on. A collective call.

    Args:
        make_between: Makes the all-reduce between the leaders.
        group: All ranks.
        timeout_seconds: For waits between hosts; inside a host others wait a little longer than their leader, so
            that it is the leader that names who is missing.
        hosts: The ranks (counted in the group) of each host; asked of the ranks if None.

    Raises:
        ConfigurationError: On every rank, if those of any host cannot share memory.
    """
    whole = group if group is not None else dist.group.WORLD
    assert whole is not None
    rank = dist.get_rank(whole)
    hosts = hosts or hosts_of(whole)
    host = next(host for host in hosts if rank in host)
    with ExitStack() as owned:
        inside = _owned_subgroup(owned, whole, host, timeout_seconds)
        assert inside is not None
        inner = owned.enter_context(_inner(inside, whole, 1.25 * timeout_seconds + 5))
        firsts = sorted(host[_LEADER] for host in hosts)
        leaders = _owned_subgroup(owned, whole, firsts, timeout_seconds)
        between = None
        if leaders is not None:
            between = owned.enter_context(make_between(leaders, timeout_seconds))
        return TwoLevel(inner, between, whole, timeout_seconds, owned=owned.pop_all())


def _owned_subgroup(
    owned: ExitStack, whole: dist.ProcessGroup, members: Sequence[int], timeout_seconds: float
) -> dist.ProcessGroup | None:
    made = subgroup(whole, members, timeout_seconds)
    if made is not None:
        owned.callback(destroy, made)
    return made


def _inner(inside: dist.ProcessGroup, whole: dist.ProcessGroup, timeout_seconds: float) -> SharedMemory:
    """Shared memory in each host, or an error on all ranks: those of other hosts would wait for these in vain."""
    inner, problem = None, None
    try:
        inner = SharedMemory(inside, timeout_seconds)
    except ConfigurationError as error:
        problem = str(error)
    problems = [text for text in all_gather(problem, whole) if text]
    if inner is not None and not problems:
        return inner
    if inner is not None:
        inner.close()
    raise ConfigurationError("; ".join(dict.fromkeys(problems)))
