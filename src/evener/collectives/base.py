"""The all-reduce interface: an object that sums tensors in place over the ranks of a process group.

An all-reduce is an object and not a function because it owns resources: buffers shared with the other ranks, a
process group, a thread. It is built once for a group and closed after use::

    with SharedMemory(group) as all_reduce:
        work = all_reduce(tensor)       # returns at once, or when it is done, as the implementation sees fit
        work.wait()                     # now every rank holds the same bits

Every implementation must keep the promise of the last line: *the same bits on all ranks*. Replicas that differ in
the last bit drift apart, and nobody notices until the run is lost.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.utils.weak import WeakIdRef

from evener.collectives.missing_ranks import RollCall
from evener.collectives.sparse import is_native, sum_gathered
from evener.core.config.time_limit import TIMEOUT_SECONDS
from evener.core.half_precision import is_half
from evener.torch_internals.dispatch import is_fake

Key = Hashable
"""Identifies a tensor across calls, for an all-reduce that keeps state for each tensor (error feedback).

It must be the same in every call for a tensor, and differ between tensors. A tuple lists the parts of a tensor, such as
the parameters of a bucket. If a new key contains a part of an older key, it replaces the older one: a part belongs to
one bucket only.
"""

_MOST_SIZES = 256
TIMED_EVERY = 17
"""One of so many calls of a size is timed. A prime, so that of several buckets of one size each has its turn."""


class PieceKey(NamedTuple):
    """The key of a piece of a tensor that is summed in pieces."""

    whole: Key
    place: int


def key_of(tensors: Iterable[Tensor]) -> tuple[Key, ...]:
    """Returns the key of a tensor whose parts belong to ``tensors``, such as a gradient bucket to its parameters.

    The key goes by object identity and not by address, as freed memory is reused. It holds weak references only.
    """
    return tuple(WeakIdRef(tensor) for tensor in tensors)


class Work(ABC):
    """Handle of an all-reduce that is under way."""

    @abstractmethod
    def wait(self) -> None:
        """Waits until the tensor holds the sum.

        Raises:
            RankTimeoutError: A rank did not take part in time; the message names it.
            RankError: A rank's process died; the message names it.
        """

    @abstractmethod
    def future(self) -> Future[Tensor]:
        """Returns a future of the summed tensor, as a DDP communication hook must return it."""


class Done(Work):
    """Work of an all-reduce that was finished before the call returned."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> None:
        return None

    def future(self) -> Future[Tensor]:
        return _kept(self._tensor)


def _kept(tensor: Tensor) -> Future[Tensor]:
    """Returns a completed future; on a GPU, streams that use it wait for the work queued on the current stream."""
    future: Future[Tensor] = Future(devices=[tensor.device] if _has_streams(tensor) else None)
    future.set_result(tensor)
    return future


def _has_streams(tensor: Tensor) -> bool:
    """Returns True for a tensor on a GPU. A fake one of an estimate says that it is there, and has no memory."""
    return tensor.is_cuda and not is_fake(tensor)


class Promised(Work):
    """Work done by a thread, which sets the future's result, or the exception that ``wait`` raises."""

    def __init__(self, future: Future[Tensor]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.wait()

    def future(self) -> Future[Tensor]:
        # C++ takes an exception set from Python for a value; one raised in a callback is an error there too.
        return self._future.then(lambda done: done.value())


class NativeWork(Work):
    """Work of a PyTorch collective. Replaces its errors, which do not name missing ranks, by ones that do."""

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


class ChainedWork(Work):
    """Waits for ``work`` and then calls ``finish`` once, which computes the result from the sum.

    Args:
        work: The sum.
        finish: Writes the result, and returns the tensor that was to be summed.
        touched: All tensors that ``finish`` reads or writes. ``finish`` may run on another stream than they were
            allocated on, so they are recorded there: their memory must not be reused before that stream is done.
    """

    def __init__(self, work: Work, finish: Callable[[], Tensor], touched: Sequence[Tensor]) -> None:
        self._work, self._finish, self._touched = work, finish, touched
        self._finished: Tensor | None = None
        self._future: Future[Tensor] | None = None

    def wait(self) -> None:
        self._work.wait()  # first, as it raises Python errors
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
            if _has_streams(tensor):
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self._finish()


class TimedWork(Work):
    """Passes ``work`` on, and calls ``end`` once when the sum is there or was waited for."""

    def __init__(self, work: Work, end: Callable[[], None]) -> None:
        self._work, self._end = work, end

    def wait(self) -> None:
        self._work.wait()
        self._end_once()

    def future(self) -> Future[Tensor]:
        return self._work.future().then(self._value)

    def _value(self, done: Future[Tensor]) -> Tensor:
        value = done.value()
        self._end_once()
        return value

    def _end_once(self) -> None:
        end, self._end = self._end, _nothing
        end()


def _nothing() -> None:
    pass


@dataclass
class SizeCounts:
    """The calls of an all-reduce with dense tensors of one size, of which some are timed."""

    calls: int = 0
    timed: int = 0
    seconds: float = 0.0
    """Seconds of the timed calls from their start to the sum: also of waiting for ranks that call later, and for calls
    before that are not done."""
    least: float = math.inf
    """The shortest of them, which waited least."""

    def end(self, began: float) -> None:
        """Counts the time of a call that began at ``began`` on the clock ``perf_counter``."""
        taken = time.perf_counter() - began
        self.timed += 1
        self.seconds += taken
        self.least = min(self.least, taken)


def only(value: Tensor | list[Tensor]) -> Tensor:
    """Returns the tensor of a future's value, which torch's collectives wrap in a list."""
    return value[0] if isinstance(value, list) else value


class AllReduce(ABC):
    """Sums tensors over the ranks of a group, in place. Owns resources until it is closed.

    All ranks of the group must build it, call it and close it in the same order, with tensors of the same number
    of elements and dtype. Calls are carried out in the order in which they were made.

    Args:
        group: The ranks that take part; None is the default group.
        timeout_seconds: The longest wait for another rank.
    """

    name: str
    """The name by which the user selects it."""
    held_nbytes: int = 0
    """Bytes of this process's memory that it holds permanently, including shared memory."""
    waits: bool = False
    """True if a call returns when the sum is there, so that nothing can be done meanwhile."""
    adds_halves_in_float32: bool = False
    """True if it adds float16 and bfloat16 in float32 by itself; else they are converted to float32 and sent so."""

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
        self.given_nbytes = 0
        """Bytes of all dense tensors that it was given so far."""
        self.sizes: dict[int, SizeCounts] = {}
        """The calls with a dense tensor, by its bytes. Of many sizes only the first ones are kept."""
        self.note = ""
        """A remark for the user, such as why it was made in place of another one; may be empty."""

    @property
    def words(self) -> str:
        """Description of the implementation that runs, for people and for the record of a run."""
        return f"{self.name} ({self.note})" if self.note else self.name

    @property
    def remembers(self) -> bool:
        """True if calls need a key, because each adds what the call before left out of the tensor (error feedback)."""
        return False

    @property
    def sent_nbytes(self) -> int:
        """Bytes of all dense tensors that this rank has put into sums so far, after compression. How often an
        algorithm sends them on does not count."""
        return self.given_nbytes

    @property
    def exact(self) -> bool:
        """True if the result is the sum, up to the rounding of each addition; False if it is compressed."""
        return True

    def expected_seconds(self, nbytes: int) -> float | None:
        """Returns the expected time for a tensor of ``nbytes``, the same on all ranks, or None if not measured."""
        return None

    def __call__(self, tensor: Tensor, key: Key = None, *, lasting: bool = False) -> Work:
        """Starts to replace ``tensor`` by its sum over the ranks.

        Args:
            tensor: A tensor of any shape, number of elements (also 0), and dtype that torch can add. A tensor that is
                not contiguous is summed in a contiguous copy; a sparse one is summed by PyTorch's own collectives.
                float16 and bfloat16 are added in float32, and the sum is rounded once.
            key: Identifies the tensor, for an all-reduce that ``remembers``; with None nothing is remembered.
            lasting: True if the same memory is passed in call after call, on all ranks alike, and only torch refers to
                it. The all-reduce may then move the tensor's storage, in place, to memory where it is summed faster.
        """
        if tensor.layout is not torch.strided:
            return self._start_sparse(tensor)
        if tensor.requires_grad:
            tensor = tensor.detach()
        nbytes = tensor.nbytes
        self.given_nbytes += nbytes
        size = self.sizes.get(nbytes)
        if size is None:
            size = SizeCounts()
            if len(self.sizes) < _MOST_SIZES:
                self.sizes[nbytes] = size
        size.calls += 1
        if size.calls % TIMED_EVERY or not tensor.is_cpu:  # on a GPU the host only queues the sum
            return self._start_dense(tensor, key, lasting)
        began = time.perf_counter()
        work = self._start_dense(tensor, key, lasting)
        if not isinstance(work, Done):
            return TimedWork(work, partial(size.end, began))
        size.end(began)
        return work

    def _start_dense(self, tensor: Tensor, key: Key, lasting: bool) -> Work:
        if is_half(tensor) and not self.adds_halves_in_float32:
            wide = tensor.float().contiguous()
            return ChainedWork(self.start_for(wide, key), lambda: tensor.copy_(wide), (tensor, wide))
        if _is_plain(tensor):
            return self.start_lasting(tensor, key) if lasting else self.start_for(tensor, key)
        flat = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        return ChainedWork(self.start_for(flat, key), lambda: tensor.copy_(flat), (tensor, flat))

    def _start_sparse(self, tensor: Tensor) -> Work:
        if is_native(tensor):
            return NativeWork(tensor, start_native(tensor, self.group), self.roll_call)
        try:
            return Done(sum_gathered(tensor, self.group))
        except RuntimeError as error:
            raise self.roll_call.explain(error) from error

    def start_for(self, tensor: Tensor, key: Key) -> Work:
        """Does the same as ``start``. Override it in an all-reduce that uses the key or passes it on."""
        return self.start(tensor)

    def start_lasting(self, tensor: Tensor, key: Key) -> Work:
        """Does the same as ``start_for``, for a ``lasting`` tensor. Override it if moving the tensor saves time."""
        return self.start_for(tensor, key)

    def start_in(self, tensor: Tensor, segments: int, key: Key = None) -> Work:
        """Does the same as ``start_for``, pipelined in ``segments`` parts if the implementation supports that."""
        return self.start_for(tensor, key)

    @abstractmethod
    def start(self, tensor: Tensor) -> Work:
        """Starts the sum of a dense, contiguous tensor that requires no gradient. Subclasses must implement only this
        method."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copies a dense, contiguous ``tensor`` from rank ``source`` of the group to all others. All ranks must call
        this together, after they have waited for earlier sums. On a GPU it is queued on the current stream.

        Raises:
            RankTimeoutError, RankError: As `Work.wait`.
        """
        flat = tensor.view(-1).view(torch.uint8)  # bytes: not every backend knows every dtype
        try:
            dist.broadcast(flat, group=self.group, group_src=source)
        except RuntimeError as error:
            raise self.roll_call.explain(error) from error

    def close(self) -> None:  # noqa: B027 (most own nothing)
        """Releases the resources of the all-reduce. Closing twice does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_plain(tensor: Tensor) -> bool:
    """Returns True if the elements lie in memory one after the other, as they are. A single element counts as
    contiguous with any stride, with which it cannot be viewed as bytes."""
    follows = tensor.is_contiguous() and tensor.stride()[-1:] in ((1,), ())
    return follows and not tensor.is_conj() and not tensor.is_neg()


def start_native(tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts PyTorch's own all-reduce and returns its work."""
    work: dist.Work | None = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group, async_op=True)
    assert work is not None
    return work
