"""A stand-in for a GPU: PyTorch's meta device, on which nothing can be read, and a world of which one rank runs.

A step that asks a GPU for a number stops the host until the device has done all that was queued before; where there is
no GPU nobody sees it. On meta tensors there are no numbers, so whoever asks for one finds an error. What PyTorch lets
pass there all the same (``print``, assignment through a mask, copies to the device, constants made on it) is found by
watching every operation, and what is read through :mod:`evener.hardware.async_read` may be read from the next step on::

    device = StandIn()
    with device.session(rank=1, world_size=4) as session, Engine(task, session=session, steps=3) as engine:
        device.train(engine)                # raises HostWaitsError

The process group is PyTorch's ``fake`` one: nobody is at the other end, and tensors stay as they are. What the ranks
tell each other with numbers of the host comes back as if all had said the same.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict  # which cannot be imported where classes of torch.cuda are stand-ins
from torch import Tensor
from torch import library as operators
from torch._C._distributed_c10d import HashStore, Store, _create_work_from_future
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evener.data.prefetch import DELIVERIES, CopyOnSideStream
from evener.distributed.control_channel import Channel
from evener.distributed.environment import Environment
from evener.distributed.session import Session
from evener.distributed.watchdog.watchdog import Watchdog
from evener.hardware.async_copy import SENDERS
from evener.hardware.async_read import READERS, Readout
from evener.hardware.timers import STOPWATCHES, HostStopwatch
from evener.tools.estimate.fake_world import Echo
from evener.training.engine import Engine
from evener.training.step.step import Step
from tests import streams
from tests.streams import META, Streams


class HostWaitsError(AssertionError):
    """On a GPU the host would wait for the device here."""


class StandIn:
    """The device: knows which step is being taken, and what was copied to it in the first one."""

    def __init__(self) -> None:
        self.now = -1
        self.constants: list[str] = []
        """What was copied to the device in the first step, which may: it stays there."""
        self.rebuilt: set[int] = set()
        """The steps in which DDP put its buckets into the order of backward, for which the host waits."""
        self.streams = Streams()
        self._watched = False

    @contextmanager
    def session(self, rank: int = 0, world_size: int = 1) -> Iterator[Session]:
        """A rank of ``world_size`` on this device."""
        with ExitStack() as stack:
            if world_size > 1:
                dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
                stack.callback(dist.destroy_process_group)
            for registry, entry in self._parts():
                stack.enter_context(mock.patch.dict(registry, meta=entry))
            stack.enter_context(self.streams.patched())
            yield stack.enter_context(StandInSession(rank, world_size))

    def _parts(self) -> list[tuple[dict[str, Any], Any]]:
        """What Evener has for each kind of device, and that of this one."""
        return [
            (READERS, lambda numbers: OnMeta(self, numbers)),
            (SENDERS, lambda tensor, device: torch.empty_like(tensor, device=device)),
            (STOPWATCHES, lambda: MetaStopwatch(self)),
            (DELIVERIES, CopyOnSideStream),
        ]

    def train(self, engine: Engine) -> list[Step]:
        """All steps of the engine's run, each watched from the asking for its batch to its end.

        Raises:
            HostWaitsError: If the host would have to wait for the device, with the line that asks.
        """
        assert engine.config.steps is not None, "how many steps?"
        batches, steps = engine.batches(), []
        with self.watched():
            for _ in range(engine.config.steps):
                batch = next(batches)
                self.now += 1
                steps.append(engine.step(batch))
        assert next(batches, None) is None
        return steps

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Nothing in the block may wait for the device."""
        self._watched = True
        try:
            with functions(self), Operations(self), self.streams.watched():
                yield
        finally:
            self._watched = False

    def refuse(self, what: str) -> None:
        """Raises HostWaitsError in a step."""
        if self._watched:
            raise HostWaitsError(f"step {self.now}: {what} at {place()}")

    def sent(self, what: str) -> None:
        """A copy to the device, for which the host waits: once and for all, or in every step."""
        if self.streams.current.is_aside:
            return  # copies what is ahead
        if self._watched and self.now <= 0:
            self.constants.append(f"{what} at {place()}")
        else:
            self.refuse(what)


def place() -> str:
    """The line that led here, inside of Evener or of a test, and not in PyTorch or in this file."""
    frame: FrameType | None = sys._getframe(1)
    others = (__file__, streams.__file__, str(Path(torch.__file__).parent), contextlib.__file__, "<")
    while frame is not None and frame.f_code.co_filename.startswith(others):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "a thread of PyTorch"


# What the host would wait for

_READ = {
    *("_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "equal"),
    *("unique_consecutive", "is_nonzero", "bincount", "nonzero_numpy", "argwhere"),
}
"""Operations whose result, or its shape, is known to the host only when the device has come so far."""
_SHOWN = ("__repr__", "__format__", "numpy", "__array__", "__reduce_ex__")
_MADE = ((torch, "tensor"), (torch, "as_tensor"), (torch, "asarray"), (Tensor, "new_tensor"))


class Operations(TorchDispatchMode):
    """Sees each operation, also those of backward and of what PyTorch's own functions are made of."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        target = torch.device(options["device"]) if options.get("device") is not None else None
        if any(tensor.device == META for tensor in tensors) or (tensors and target == META):
            self._look(str(function.overloadpacket).removeprefix("aten."), args, tensors, target)
        if function is torch.ops.aten.copy_.default and args[1].device == META != args[0].device:
            return args[0]  # DDP hears the order of rank 0, which is its own
        if function is torch.ops.c10d.allreduce_.default:
            return _summed(args[0])
        return function(*args, **options)

    def _look(self, name: str, args: Any, tensors: list[Tensor], target: torch.device | None) -> None:
        if name in _READ:
            self._device.refuse(f"{name} reads the device")
        if name in ("_to_copy", "copy_", "_copy_from"):
            self._look_at_copy(tensors, target)
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
            self._look_at_indices(name, args)
        elif name == "where" and any(tensor.device != META for tensor in tensors):
            self._device.sent("an operand of where() is copied to the device")

    def _look_at_copy(self, tensors: list[Tensor], target: torch.device | None) -> None:
        into, source = (target or tensors[0].device), tensors[-1].device
        if into == source:
            return
        if _ddp_orders_buckets():
            self._device.rebuilt.add(self._device.now)
        elif into == META:
            self._device.sent("a copy to the device")
        else:
            self._device.refuse("a copy from the device")

    def _look_at_indices(self, name: str, args: Any) -> None:
        indices = [index for index in args[1] if index is not None]
        is_filling = name.startswith("index_put") and args[2].numel() == 1
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices) and not is_filling:
            self._device.refuse("indexing by a mask, of which the device alone knows how many it chooses,")
        if any(index.device != META for index in indices):
            self._device.sent("indices are copied to the device")


def _ddp_orders_buckets() -> bool:
    """Before its second forward pass DDP tells all ranks of the order in which rank 0's backward came."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_pre_forward":
            return True
        frame = frame.f_back
    return False


def _summed(tensors: list[Tensor]) -> tuple[list[Tensor], Any]:
    """What an all-reduce returns. The future of PyTorch's own on the meta device holds no tensor, as DDP wants it."""
    future: Future[list[Tensor]] = Future()
    future.set_result(tensors)
    return tensors, _create_work_from_future(future).boxed()


@cache
def sum_at_once() -> None:
    """Lets all-reduces of the device end at once in this process, without anything that watches operations."""
    operators.register_kernel("c10d::allreduce_", "meta", lambda tensors, *_: _summed(tensors))


@contextmanager
def functions(device: StandIn) -> Iterator[None]:
    """Watches the calls of which no operation is left on the meta device.

    They are replaced, for PyTorch's own way to watch functions does not reach into backward.
    """
    with ExitStack() as stack:
        for name in _SHOWN:
            stack.enter_context(mock.patch.object(Tensor, name, _shown(device, name)))
        for owner, name in _MADE:
            stack.enter_context(mock.patch.object(owner, name, _made(device, owner, name)))
        yield


def _shown(device: StandIn, name: str) -> Callable[..., Any]:
    original = getattr(Tensor, name)

    def shown(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if tensor.device == META:
            device.refuse(f"{name} reads the device")
        return original(tensor, *args, **options)

    return shown


def _made(device: StandIn, owner: Any, name: str) -> Callable[..., Any]:
    original = getattr(owner, name)

    def made(*args: Any, **options: Any) -> Any:
        tensor = original(*args, **options)
        if tensor.device == META and not any(_is_there(leaf) for leaf in args[-1:]):
            device.sent(f"{name} makes a tensor on the host and copies it to the device")
        return tensor

    return made


def _is_there(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device == META


# The parts of Evener that depend on the kind of device


class OnMeta:
    """Numbers that are on their way until the next step begins, and then are all 1."""

    def __init__(self, device: StandIn, numbers: Tensor) -> None:
        self._device, self._started = device, device.now
        self.tensor = numbers

    def values(self) -> list[float]:
        if self._started >= self._device.now:
            self._device.refuse("a number of this same step is read")
        return [1.0] * self.tensor.numel()

    def value(self) -> float:
        (value,) = self.values()
        return value


class MetaStopwatch(HostStopwatch):
    """Time that is known when the device has passed the last mark."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self._device = device

    def taken(self) -> Readout:
        return OnMeta(self._device, torch.empty((), device=META))

    def whole(self) -> Readout:
        return self.taken()


class StandInSession(Session):
    """A session on the stand-in, one rank of a world that is not there."""

    def __init__(self, rank: int, world_size: int) -> None:
        place = Environment(rank, world_size, local_rank=rank, local_world_size=world_size)
        super().__init__("cpu", environment=place)

    def _take_device(self) -> torch.device:
        return META

    def _open_store(self) -> Store:
        return HashStore()

    def _enter_watchdog(self, stack: Any, store: Store) -> Watchdog:
        return Watchdog(self.rank, self.world_size, store)  # never started: nobody is late

    def _enter_control(self, stack: Any) -> Channel:
        return Echo(self.world_size)
