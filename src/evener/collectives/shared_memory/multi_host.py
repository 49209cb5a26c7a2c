"""All-reduce over several hosts: each host adds up inside in its own way, one leader of each exchanges the sums.

The links inside a host are far faster than those between hosts, and a host of g ranks that sends its sum once moves a
g-th of what g ranks would. The buffer goes through in parts, so that the sum of one is made inside the hosts
while another is between them::

    part       0       1       2
    inside     sum     sum     sum                             all ranks of the host, as that host does it
    between            sum 0   sum 1   sum 2                   messages over host memory, the leaders
    inside                     copy 0  copy 1  copy 2          all ranks of the host, from the leader

Hosts may have unequal numbers of ranks, and need not have anything in common inside: of what a host does there only the
leader's sum is seen outside, and every rank gets the bits that the leaders have. So one host may use shared memory,
another NCCL or RCCL. Between hosts gloo moves host memory; a leader whose tensors lie on a GPU copies each part there
and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from evener.collectives.base import AllReduce, Key, Piece, Promised, Work
from evener.collectives.executor.streams import Streams
from evener.collectives.executor.subgroup import subgroup
from evener.collectives.executor.worker import Worker
from evener.distributed.hosts import all_gather, destroy, hosts_of
from evener.distributed.watchdog.watchdog import TIMEOUT_SECONDS
from evener.errors import ConfigurationError

_PART_NBYTES = 4 * 1024 * 1024
_LEADER = 0

MakeAllReduce = Callable[[dist.ProcessGroup, float], AllReduce]
"""(group, timeout_seconds) -> an all-reduce over it."""


class Told(NamedTuple):
    """What all ranks have to know of the all-reduces that one of them has."""

    inner: str
    """What runs inside its host, in words."""
    between: str = ""
    """Likewise between hosts; empty on a rank that is no leader, and where there is one host."""
    exact: bool = True
    """Whether the one between hosts is."""
    remembers: bool = False

    @classmethod
    def of(cls, inner: AllReduce, between: AllReduce | None) -> Told:
        if between is None:
            return cls(inner.words)
        return cls(inner.words, between.words, between.exact, between.remembers)


class _Part(NamedTuple):
    """A part of the buffer on its way between hosts."""

    here: Tensor
    """On this rank's device."""
    sent: Tensor
    """In host memory; the same where the device is the host's."""
    work: Work | None
    """None on a rank that is no leader."""


class TwoLevel(AllReduce):
    """Sums inside each host by ``inner``, between hosts by ``between``.

    Args:
        inner: Over the ranks of this host, of any kind; its first rank is the host's leader.
        between: Over the leaders of all hosts, for CPU tensors; None on a rank that is no leader.
        group: All ranks.
        timeout_seconds: As everywhere.
        told: Of the leader of each host.
        owned: Closes them, and what they stand on.
    """

    name = "two-level"

    def __init__(
        self,
        inner: AllReduce,
        between: AllReduce | None,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        *,
        told: Sequence[Told],
        owned: ExitStack,
    ) -> None:
        super().__init__(group, timeout_seconds)
        self._inner, self._between, self._told = inner, between, told
        self.note = _note(told)
        self.held_nbytes = inner.held_nbytes
        self._worker = Worker("evener all-reduce two-level")
        self._streams = Streams()
        self._owned = owned
        owned.callback(self._worker.close)

    @property
    def exact(self) -> bool:
        return all(each.exact for each in self._told)

    @property
    def remembers(self) -> bool:
        return any(each.remembers for each in self._told)

    def start(self, tensor: Tensor) -> Work:
        return self.start_for(tensor, None)

    def start_for(self, tensor: Tensor, key: Key) -> Work:
        if tensor.is_cuda:
            return Promised(self._on_stream(tensor, key))
        return Promised(self._worker.submit(lambda: self._run(tensor, key)))

    def close(self) -> None:
        self._owned.close()

    def _on_stream(self, tensor: Tensor, key: Key) -> Future[Tensor]:
        """The thread waits for the device, as what goes between hosts must be in host memory; the caller does not."""
        stream = self._streams.behind(tensor)

        def run() -> Tensor:
            with torch.cuda.stream(stream):
                self._run(tensor, key)
            stream.synchronize()
            return tensor

        return self._worker.submit(run)

    def _run(self, tensor: Tensor, key: Key) -> Tensor:
        flying: list[_Part] = []
        for index, part in enumerate(torch.split(tensor.view(-1), _PART_NBYTES // tensor.element_size())):
            self._inner(part).wait()
            flying.append(self._send(part, None if key is None else Piece(key, index)))
            if len(flying) > 1:
                self._land(flying.pop(0))
        for each in flying:
            self._land(each)
        return tensor

    def _send(self, part: Tensor, key: Key) -> _Part:
        if self._between is None:
            return _Part(part, part, None)
        sent = part if _in_host_memory(part) else _copy_on_host(part)
        return _Part(part, sent, self._between(sent, key))

    def _land(self, part: _Part) -> None:
        if part.work is not None:
            part.work.wait()
        if part.sent is not part.here:
            part.here.copy_(part.sent)
        self._inner.broadcast(part.here, _LEADER)


def _in_host_memory(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _copy_on_host(tensor: Tensor) -> Tensor:
    """In pinned memory, which a GPU copies to and from at the full speed of its link."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)


def two_level(
    make_between: MakeAllReduce,
    make_inner: MakeAllReduce,
    group: dist.ProcessGroup | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    hosts: tuple[tuple[int, ...], ...] | None = None,
    inner_backend: str | None = None,
) -> TwoLevel:
    """A :class:`TwoLevel` over the hosts that the ranks of ``group`` are on. A collective call.

    Args:
        make_between: Makes the all-reduce between the leaders, over a group of gloo; the same on all ranks.
        make_inner: Makes the one inside this host; ranks of another host may give another.
        group: All ranks.
        timeout_seconds: For waits between hosts; inside a host others wait a little longer than their leader, so
            that it is the leader that names who is missing.
        hosts: The ranks (counted in the group) of each host; asked of the ranks if None.
        inner_backend: Of the group inside this host, as ``nccl``; another host may give another. The whole group's if
            None.

    Raises:
        ConfigurationError: On every rank, if those of any host cannot make theirs.
    """
    whole = group if group is not None else dist.group.WORLD
    assert whole is not None
    rank = dist.get_rank(whole)
    hosts = hosts or hosts_of(whole)
    host = next(host for host in hosts if rank in host)
    longer = 1.25 * timeout_seconds + 5
    with ExitStack() as owned:
        inside = _owned_subgroup(owned, whole, host, longer, inner_backend)
        assert inside is not None
        inner = owned.enter_context(_made_everywhere(make_inner, inside, whole, longer))
        firsts = sorted(host[_LEADER] for host in hosts)
        leaders = _owned_subgroup(owned, whole, firsts, timeout_seconds, "gloo")
        between = None
        if leaders is not None and len(hosts) > 1:
            between = owned.enter_context(make_between(leaders, timeout_seconds))
        of_ranks = all_gather(Told.of(inner, between), whole)
        told = [of_ranks[host[_LEADER]] for host in hosts]
        return TwoLevel(inner, between, whole, timeout_seconds, told=told, owned=owned.pop_all())


def _note(told: Sequence[Told]) -> str:
    """What runs between the hosts, and inside them."""
    inside = [each.inner for each in told]
    notes = [f"between hosts {told[0].between}" if told[0].between else "on one host"]
    for kind in dict.fromkeys(inside):
        count = inside.count(kind)
        notes.append(f"inside {'all' if count == len(inside) else f'{count} of {len(inside)}'} {kind}")
    return ", ".join(notes)


def _owned_subgroup(
    owned: ExitStack,
    whole: dist.ProcessGroup,
    members: Sequence[int],
    timeout_seconds: float,
    backend: str | None = None,
) -> dist.ProcessGroup | None:
    made = subgroup(whole, members, timeout_seconds, backend)
    if made is not None:
        owned.callback(destroy, made)
    return made


def _made_everywhere(
    make_inner: MakeAllReduce, inside: dist.ProcessGroup, whole: dist.ProcessGroup, timeout_seconds: float
) -> AllReduce:
    """One in each host, or an error on all ranks: those of other hosts would wait for these in vain."""
    inner, problem = None, None
    try:
        inner = make_inner(inside, timeout_seconds)
    except ConfigurationError as error:
        problem = str(error)
    problems = [text for text in all_gather(problem, whole) if text]
    if inner is not None and not problems:
        return inner
    if inner is not None:
        inner.close()
    raise ConfigurationError("; ".join(dict.fromkeys(problems)))
