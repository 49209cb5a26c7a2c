"""What every all-reduce is: a callable that sums a flat tensor in place, over the group it was built for.

An all-reduce is an object and not a function because it owns things: buffers shared with the other ranks, a
process group of its own, a thread. It is therefore built once for a group and closed after use, and whoever
calls it needs to know nothing else about it::

    with SharedMemory(group) as all_reduce:
        work = all_reduce(tensor)       # returns at once, or when it is done, as the implementation sees fit
        work.wait()                     # now every rank holds the same bits

The one promise that no implementation may break is the last line: *the same bits on all ranks*. Replicas
that differ in the last bit drift apart, and nothing notices until the run is lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.utils.weak import WeakIdRef

from evener.collectives.missing_ranks import RollCall
from evener.collectives.sparse import is_native, sum_gathered
from evener.core.half_precision import is_half
from evener.distributed.watchdog.watchdog import TIMEOUT_SECONDS

Key = Hashable
"""Which tensor a call is about, for an all-reduce that remembers something of it until its next call.

The same in every call for one tensor, another for every other. A tuple names the parts of a tensor, each of which is
remembered as a part of one tensor at most: other buckets of the same parameters take the place of the former ones.
"""


class Piece(NamedTuple):
    """The key of a piece of a tensor that is summed in pieces."""

    whole: Key
    place: int


def key_of(tensors: Iterable[Tensor]) -> tuple[Key, ...]:
    """The key of a tensor whose parts belong to ``tensors``, as a bucket of gradients does to parameters.

    It is who they are and not where they lie: memory that one gives back is soon another's. It does not keep them.
    """
    return tuple(WeakIdRef(tensor) for tensor in tensors)


class Work(ABC):
    """An all-reduce under way."""

    @abstractmethod
    def wait(self) -> None:
        """Returns when the tensor holds the sum.

        Raises:
            RankTimeoutError: A rank did not take part in time; the message names it.
            RankError: A rank's process died; the message names it.
        """

    @abstractmethod
    def future(self) -> Future[Tensor]:
        """A future of the summed tensor, as a communication hook of DDP has to return it."""


class Done(Work):
    """The work of an all-reduce that was finished before the call returned."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> None:
        return None

    def future(self) -> Future[Tensor]:
        return _kept(self._tensor)


def _kept(tensor: Tensor) -> Future[Tensor]:
    """A future that is done, for the streams of its tensor's device when the current one has come this far."""
    future: Future[Tensor] = Future(devices=[tensor.device] if tensor.is_cuda else None)
    future.set_result(tensor)
    return future


class Promised(Work):
    """The work of a thread: it sets the future's result, or the exception that ``wait`` raises."""

    def __init__(self, future: Future[Tensor]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.wait()

    def future(self) -> Future[Tensor]:
        # An exception set by Python is a mere value to C++; one raised in a callback is an error there too.
        return self._future.then(lambda done: done.value())


class NativeWork(Work):
    """The work of PyTorch's own collective, whose errors say neither who is missing nor what to do."""

    def __init__(self, tensor: Tensor, work: dist.Work, roll_call: RollCall) -> None:
        self._tensor = tensor
        self._work = work
        self._roll_call = roll_call

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._roll_call.explain(error) from error

    def future(self) -> Future[Tensor]:
        return self._work.get_future().then(self._value)

    def _value(self, done: Future[Tensor]) -> Tensor:
        try:
            return only(done.value())
        except RuntimeError as error:
            raise self._roll_call.explain(error) from error


class After(Work):
    """``work``, and then ``finish``, once: what makes the result of the sum.

    Args:
        work: The sum.
        finish: Returns the tensor that was to be summed.
        touched: What ``finish`` reads and writes. It may run on a stream of the future's own; memory that came from
            another stream must not be given out again before that one is done with it.
    """

    def __init__(self, work: Work, finish: Callable[[], Tensor], touched: Sequence[Tensor]) -> None:
        self._work, self._finish, self._touched = work, finish, touched
        self._finished: Tensor | None = None
        self._future: Future[Tensor] | None = None

    def wait(self) -> None:
        self._work.wait()  # first, as its errors are those of Python
        if self._future is not None:
            self._future.wait()
        elif self._finished is None:
            self._finished = self._finish_here()

    def future(self) -> Future[Tensor]:
        if self._finished is not None:
            return _kept(self._finished)
        if self._future is None:
            self._future = self._work.future().then(lambda _: self._finish_here())
        return self._future

    def _finish_here(self) -> Tensor:
        for tensor in self._touched:
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self._finish()


def only(value: Tensor | list[Tensor]) -> Tensor:
    """The tensor of a future's value, which torch's collectives wrap in a list."""
    return value[0] if isinstance(value, list) else value


class AllReduce(ABC):
    """Sums a tensor over the ranks of a group, in place; owns what it needs for that until it is closed.

    All ranks of the group build it, call it and close it in the same order, with tensors of the same number
    of elements and dtype. Calls are carried out in the order in which they were made.

    Args:
        group: The ranks that take part; None is the default group.
        timeout_seconds: How long any wait for another rank may last.
    """

    name: str
    """What the user calls it."""
    held_nbytes: int = 0
    """Bytes of this process's memory, shared memory too, that it holds all the time."""
    adds_halves_in_float32: bool = False
    """Whether it adds float16 and bfloat16 in float32 by itself; else they are sent in float32."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        resolved = group if group is not None else dist.group.WORLD
        assert resolved is not None
        self.group: dist.ProcessGroup = resolved
        self.timeout_seconds = timeout_seconds
        self.rank = dist.get_rank(resolved)
        self.world_size = dist.get_world_size(resolved)
        self.roll_call = RollCall(resolved)
        self.note = ""
        """Why it was made in place of another, if it was."""

    @property
    def words(self) -> str:
        """What runs, for people and for the record of a run."""
        return f"{self.name} ({self.note})" if self.note else self.name

    @property
    def remembers(self) -> bool:
        """Whether a call adds what an earlier one for the same tensor left out, and so wants a key."""
        return False

    @property
    def exact(self) -> bool:
        """Whether the result is the sum, but for the rounding of each addition."""
        return True

    def expected_seconds(self, nbytes: int) -> float | None:
        """How long a tensor of ``nbytes`` is expected to take, the same on all ranks; None if that was not measured."""
        return None

    def __call__(self, tensor: Tensor, key: Key = None, *, lasting: bool = False) -> Work:
        """Starts to replace ``tensor`` by its sum over the ranks.

        Args:
            tensor: Of any shape, dtype that torch can add, and number of elements (0 included). One that is not
                contiguous is summed in a contiguous copy; a sparse one is summed by PyTorch's own collectives. float16
                and bfloat16 are added in float32, and the sum is rounded once.
            key: Which tensor this is, for an all-reduce that ``remembers``; with None nothing of it is remembered.
            lasting: This very memory will come again, call after call, alike on all ranks, and only torch refers to it:
                an all-reduce may move it, in place, to where it is summed faster.
        """
        if tensor.layout is not torch.strided:
            return self._start_sparse(tensor)
        if tensor.requires_grad:
            tensor = tensor.detach()
        if is_half(tensor) and not self.adds_halves_in_float32:
            wide = tensor.float().contiguous()
            return After(self.start_for(wide, key), lambda: tensor.copy_(wide), (tensor, wide))
        if tensor.is_contiguous() and not tensor.is_conj():
            return self.start_lasting(tensor, key) if lasting else self.start_for(tensor, key)
        flat = tensor.contiguous().resolve_conj()
        return After(self.start_for(flat, key), lambda: tensor.copy_(flat), (tensor, flat))

    def _start_sparse(self, tensor: Tensor) -> Work:
        if is_native(tensor):
            return NativeWork(tensor, start_native(tensor, self.group), self.roll_call)
        try:
            return Done(sum_gathered(tensor, self.group))
        except RuntimeError as error:
            raise self.roll_call.explain(error) from error

    def start_for(self, tensor: Tensor, key: Key) -> Work:
        """As ``start``; what an all-reduce overrides that remembers something, or hands the key on."""
        return self.start(tensor)

    def start_lasting(self, tensor: Tensor, key: Key) -> Work:
        """As ``start_for``, for a tensor that may be moved; what an all-reduce overrides that gains by that."""
        return self.start_for(tensor, key)

    def start_in(self, tensor: Tensor, segments: int, key: Key = None) -> Work:
        """As ``start_for``, in ``segments`` parts that follow each other where it can be cut so."""
        return self.start_for(tensor, key)

    @abstractmethod
    def start(self, tensor: Tensor) -> Work:
        """The one method to write: as ``__call__``, for a dense, contiguous tensor that needs no gradient."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copies a dense, contiguous ``tensor`` of rank ``source`` (counted in the group) to all others, after the sums
        that were waited for. On a GPU it is queued on the current stream.

        Raises:
            RankTimeoutError, RankError: As `Work.wait`.
        """
        flat = tensor.view(-1).view(torch.uint8)  # bytes: not every backend knows every dtype
        try:
            dist.broadcast(flat, group=self.group, group_src=source)
        except RuntimeError as error:
            raise self.roll_call.explain(error) from error

    def close(self) -> None:  # noqa: B027 (most own nothing)
        """Gives back what the all-reduce owns; closing twice does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_native(tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """PyTorch's own all-reduce, under way."""
    work: dist.Work | None = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group, async_op=True)
    assert work is not None
    return work
