"""All-reduce over several hosts: each host sums its ranks' tensors, and one leader of each host exchanges the sums.

The links inside a host are far faster than those between hosts. A host of g ranks that sends only its sum moves 1/g of
the bytes that g ranks would send. The buffer is cut into parts, so that one part is summed inside the hosts while
another is sent between them::

    part       0       1       2
    inside     sum     sum     sum                             all ranks of the host, as that host does it
    between            sum 0   sum 1   sum 2                   messages over host memory, the leaders
    inside                     copy 0  copy 1  copy 2          all ranks of the host, from the leader

Hosts may have different numbers of ranks, and may sum inside in different ways: other hosts only see the leader's sum,
and every rank gets the leaders' bits. So one host may use shared memory, another NCCL or RCCL. Between hosts, gloo
sends from host memory; a leader whose tensors are on a GPU copies each part to host memory and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from evener.collectives.base import AllReduce, Key, PieceKey, Promised, Work
from evener.collectives.executor.streams import Streams
from evener.collectives.executor.subgroup import owned_subgroup
from evener.collectives.executor.worker import Worker
from evener.core.config.time_limit import TIMEOUT_SECONDS
from evener.distributed.hosts import all_gather, hosts_of
from evener.errors import ConfigurationError

PART_NBYTES = 4 * 1024 * 1024
_LEADER = 0

MakeAllReduce = Callable[[dist.ProcessGroup, float], AllReduce]
"""Maps (group, timeout_seconds) to an all-reduce over the group."""


class SharedFacts(NamedTuple):
    """Facts about the all-reduces of one rank that all ranks must know."""

    inner: str
    """Description of the all-reduce inside the rank's host."""
    between: str = ""
    """Description of the all-reduce between hosts; empty if the rank is no leader or there is only one host."""
    exact: bool = True
    """True if the all-reduce between hosts is exact."""
    remembers: bool = False
    """True if the all-reduce between hosts has error feedback."""

    @classmethod
    def from_all_reduces(cls, inner: AllReduce, between: AllReduce | None) -> SharedFacts:
        if between is None:
            return cls(inner.words)
        return cls(inner.words, between.words, between.exact, between.remembers)


class _BufferPart(NamedTuple):
    """A part of the buffer that is being summed between hosts."""

    here: Tensor
    """The part on this rank's device."""
    sent: Tensor
    """The part in host memory; the same tensor as ``here`` on a CPU or on a rank that is no leader."""
    work: Work | None
    """The sum between hosts; None on a rank that is no leader."""


class TwoLevel(AllReduce):
    """Sums inside each host by ``inner``, and between hosts by ``between``.

    Args:
        inner: An all-reduce of any kind over the ranks of this host; its first rank is the host's leader.
        between: An all-reduce of CPU tensors over the leaders of all hosts; None on a rank that is no leader, or if
            there is only one host.
        group: All ranks.
        timeout_seconds: The longest wait for a rank.
        facts: The facts of each host's leader.
        owned: Closes both all-reduces and their process groups.
    """

    name = "two-level"

    def __init__(
        self,
        inner: AllReduce,
        between: AllReduce | None,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        *,
        facts: Sequence[SharedFacts],
        owned: ExitStack,
    ) -> None:
        super().__init__(group, timeout_seconds)
        self._inner, self._between, self._facts = inner, between, facts
        self.note = _note(facts)
        self._worker = Worker("evener all-reduce two-level")
        self._streams = Streams()
        self._owned = owned
        owned.callback(self._worker.close)

    @property
    def held_nbytes(self) -> int:  # type: ignore[override]
        return self._inner.held_nbytes + (self._between.held_nbytes if self._between else 0)

    @property
    def exact(self) -> bool:
        return all(each.exact for each in self._facts)

    @property
    def remembers(self) -> bool:
        return any(each.remembers for each in self._facts)

    def start(self, tensor: Tensor) -> Work:
        return self.start_for(tensor, None)

    def start_for(self, tensor: Tensor, key: Key) -> Work:
        if tensor.is_cuda:
            return Promised(self._on_stream(tensor, key))
        return Promised(self._worker.submit(lambda: self._run(tensor, key)))

    def close(self) -> None:
        self._owned.close()

    def _on_stream(self, tensor: Tensor, key: Key) -> Future[Tensor]:
        """Runs the sum in the thread, on a separate stream. The thread waits for the device, since messages between
        hosts are in host memory; the caller does not wait."""
        stream = self._streams.behind(tensor)

        def run() -> Tensor:
            with torch.cuda.stream(stream):
                self._run(tensor, key)
            stream.synchronize()
            return tensor

        return self._worker.submit(run)

    def _run(self, tensor: Tensor, key: Key) -> Tensor:
        flying: list[_BufferPart] = []
        for index, part in enumerate(torch.split(tensor.view(-1), PART_NBYTES // tensor.element_size())):
            self._inner(part).wait()
            flying.append(self._send(part, None if key is None else PieceKey(key, index)))
            if len(flying) > 1:
                self._land(flying.pop(0))
        for each in flying:
            self._land(each)
        return tensor

    def _send(self, part: Tensor, key: Key) -> _BufferPart:
        if self._between is None:
            return _BufferPart(part, part, None)
        sent = part if _in_host_memory(part) else _copy_on_host(part)
        return _BufferPart(part, sent, self._between(sent, key))

    def _land(self, part: _BufferPart) -> None:
        if part.work is not None:
            part.work.wait()
        if part.sent is not part.here:
            part.here.copy_(part.sent)
        self._inner.broadcast(part.here, _LEADER)


def _in_host_memory(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _copy_on_host(tensor: Tensor) -> Tensor:
    """Copies a tensor to pinned host memory, which a GPU copies from and to at the full speed of its link."""
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
    """Builds a :class:`TwoLevel` over the hosts of the ranks of ``group``. All ranks must call this together.

    Args:
        make_between: Builds the all-reduce between the leaders, over a gloo group; the same on all ranks.
        make_inner: Builds the all-reduce inside this host; may differ between hosts.
        group: All ranks.
        timeout_seconds: The longest wait between hosts. Waits inside a host are a little longer, so that the leader is
            the first to fail and names the missing rank.
        hosts: The ranks (counted in the group) of each host; None to ask the ranks.
        inner_backend: The backend of the group inside this host, such as ``nccl``; may differ between hosts. None for
            that of ``group``.

    Raises:
        ConfigurationError: On every rank, if the ranks of any host cannot build their inner all-reduce.
    """
    whole = group if group is not None else dist.group.WORLD
    assert whole is not None
    rank = dist.get_rank(whole)
    hosts = hosts or hosts_of(whole)
    host = next(host for host in hosts if rank in host)
    longer = 1.25 * timeout_seconds + 5
    with ExitStack() as owned:
        inside = owned_subgroup(owned, whole, host, longer, inner_backend)
        assert inside is not None
        inner = owned.enter_context(_made_everywhere(make_inner, inside, whole, longer))
        firsts = sorted(host[_LEADER] for host in hosts)
        leaders = owned_subgroup(owned, whole, firsts, timeout_seconds, "gloo")
        between = None
        if leaders is not None and len(hosts) > 1:
            between = owned.enter_context(make_between(leaders, timeout_seconds))
        of_ranks = all_gather(SharedFacts.from_all_reduces(inner, between), whole)
        facts = [of_ranks[host[_LEADER]] for host in hosts]
        return TwoLevel(inner, between, whole, timeout_seconds, facts=facts, owned=owned.pop_all())


def _note(facts: Sequence[SharedFacts]) -> str:
    """Describes the all-reduces between the hosts and inside them."""
    inside = [each.inner for each in facts]
    notes = [f"between hosts {facts[0].between}" if facts[0].between else "on one host"]
    for kind in dict.fromkeys(inside):
        count = inside.count(kind)
        notes.append(f"inside {'all' if count == len(inside) else f'{count} of {len(inside)}'} {kind}")
    return ", ".join(notes)


def _made_everywhere(
    make_inner: MakeAllReduce, inside: dist.ProcessGroup, whole: dist.ProcessGroup, timeout_seconds: float
) -> AllReduce:
    """Builds the inner all-reduce of each host. If one host fails, raises ConfigurationError on all ranks, as ranks of
    other hosts would wait for it."""
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
