"""Profiles a script that trains with DistributedDataParallel, from inside its process, without changing its results.

A step ends with each call of an optimizer's ``step``. The parts of a step, and where they are observed::

    step        ├ input ┤ forward ─ backward ────────── last gradient ┤ exchange, waiting, update ┤
    seen at      DataLoader's iterator          hooks of the parameters               hook of the optimizers

The compute time of a step ends with the last gradient of a DDP module's parameter, which a hook sees just before DDP's
reducer does, or with the rank's last own call of a collective of ``torch.distributed``. Time spent waiting for samples
or in a collective does not count.

Collectives are counted where Python calls ``torch.distributed``. Those of DDP's reducer, which is C++, are derived from
DDP's logging data about its buckets. Functional collectives (those of DTensor) and point-to-point messages are not
counted.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from evener.hardware.timers import Stopwatch, stopwatch
from evener.torch_internals.ddp import BROADCAST_BUFFERS, logged
from evener.torch_internals.modules import LoaderIterator

PAYLOADS = {
    "all_reduce": (0, "tensor"),
    "all_reduce_coalesced": (0, "tensors"),
    "broadcast": (0, "tensor"),
    "reduce": (0, "tensor"),
    "gather": (0, "tensor"),
    "scatter": (0, "tensor"),
    "all_gather": (1, "tensor"),
    "all_gather_into_tensor": (1, "input_tensor"),
    "all_gather_coalesced": (1, "input_tensor_list"),
    "reduce_scatter": (1, "input_list"),
    "reduce_scatter_tensor": (1, "input"),
    "all_to_all": (1, "input_tensor_list"),
    "all_to_all_single": (1, "input"),
    "barrier": (3, "-"),
}
"""The collectives, each with the position and name of the argument that a rank sends."""


@dataclass
class StepTimes:
    """Times and counts of one step on one rank, or their sum or mean over steps."""

    seconds: float = 0.0
    compute_seconds: float = 0.0
    """The rank's own work, up to its last gradient or collective."""
    input_seconds: float = 0.0
    """Time spent waiting for the DataLoader."""
    samples: float = 0.0
    """Size of the first dimension of the first tensor given to a DDP module, over all its calls."""
    collectives: float = 0.0
    nbytes: float = 0.0
    """Bytes that the rank gave to collectives."""

    @property
    def rest_seconds(self) -> float:
        """The rest of the step: gradient synchronization, waiting for others, and the update."""
        return max(0.0, self.seconds - self.compute_seconds - self.input_seconds)

    def add(self, other: StepTimes) -> None:
        """Adds ``other``, field by field."""
        for entry in fields(self):
            setattr(self, entry.name, getattr(self, entry.name) + getattr(other, entry.name))

    def mean(self, steps: int) -> StepTimes:
        """Returns the values divided by the number of steps."""
        return StepTimes(*(getattr(self, entry.name) / max(1, steps) for entry in fields(self)))


class DdpProfiler:
    """Context manager that counts and times the steps of the script that runs in it.

    The first step is left out: it begins with the script and not with training. The stopwatch of a step is read only at
    the end of the next step, so that the profiler never waits for the device.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.total = StepTimes()
        self._device = torch.device("cpu")
        self._step, self._watch = StepTimes(), self._started()
        self._before: tuple[StepTimes, Stopwatch] | None = None
        self._began: float | None = None
        self._depth = 0
        self._stack = ExitStack()

    @property
    def mean(self) -> StepTimes:
        """Mean over all steps except the first."""
        return self.total.mean(self.steps)

    def __enter__(self) -> DdpProfiler:
        with ExitStack() as stack:
            hook = register_optimizer_step_post_hook(lambda *_: self._end_step())
            stack.callback(hook.remove)
            for name in PAYLOADS:
                self._wrap(stack, distributed_c10d, name, functools.partial(self._collective, name))
                stack.enter_context(_replaced(dist, name, getattr(distributed_c10d, name)))
            ddp: Any = DistributedDataParallel
            self._wrap(stack, ddp, "__init__", self._new_model)
            self._wrap(stack, ddp, BROADCAST_BUFFERS, self._buffers)
            self._wrap(stack, LoaderIterator, "__next__", self._input)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._read_off()

    def _wrap(self, stack: ExitStack, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replaces ``owner.name(...)`` by ``around(original, ...)``."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        stack.enter_context(_replaced(owner, name, wrapped))

    def _started(self) -> Stopwatch:
        watch = stopwatch(self._device)
        watch.start()
        return watch

    def _end_step(self) -> None:
        now = time.perf_counter()
        self._read_off()
        if self._began is not None:
            self._step.seconds = now - self._began
            self._before = self._step, self._watch
        self._began = now
        self._step, self._watch = StepTimes(), self._started()

    def _read_off(self) -> None:
        if self._before is not None:
            (step, watch), self._before = self._before, None
            step.compute_seconds = watch.seconds()
            self.total.add(step)
            self.steps += 1

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Pauses the stopwatch while the rank waits. Ignores nested waits and waits of other threads."""
        if threading.current_thread() is not threading.main_thread() or self._depth:
            yield
            return
        self._depth += 1
        self._watch.pause()
        try:
            yield
        finally:
            self._watch.resume()
            self._depth -= 1

    def _input(self, original: Callable[..., Any], loader: Any) -> Any:
        began = time.perf_counter()
        with self._paused():
            batch = original(loader)
        if threading.current_thread() is threading.main_thread():
            self._step.input_seconds += time.perf_counter() - began
        return batch

    def _collective(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        place, keyword = PAYLOADS[name]
        payload = kwargs.get(keyword, args[place] if len(args) > place else None)
        self._count(1, _nbytes(payload))
        with self._paused():
            return original(*args, **kwargs)

    def _count(self, collectives: int, nbytes: int) -> None:
        self._watch.mark()
        self._step.collectives += collectives
        self._step.nbytes += nbytes

    def _buffers(
        self, original: Callable[..., Any], model: Any, tensors: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._count(1, _nbytes(tensors))
        with self._paused():
            return original(model, tensors, *args, **kwargs)

    def _new_model(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._device = trained[0].device
        exchange = _Exchange(model, self._count)
        model.register_forward_pre_hook(self._samples, with_kwargs=True)
        model.register_forward_hook(lambda *_: exchange.begin())
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(lambda _: self._gradient(exchange))

    def _samples(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = [leaf for leaf in _leaves((args, kwargs)) if leaf.dim()]
        self._step.samples += len(leaves[0]) if leaves else 0

    def _gradient(self, exchange: _Exchange) -> None:
        exchange.first_gradient()
        self._watch.mark()


class _Exchange:
    """Counts the all-reduces of a DDP module's reducer in each backward pass, from DDP's logging data."""

    def __init__(self, model: Any, count: Callable[[int, int], None]) -> None:
        self._model = weakref.ref(model)
        self._count = count
        self._begun = False
        self._known: tuple[int, int] | None = None

    def begin(self) -> None:
        """Called at the end of a forward pass. Notes if its backward pass will synchronize gradients."""
        model = self._model()
        self._begun = bool(model is not None and model.require_backward_grad_sync and torch.is_grad_enabled())

    def first_gradient(self) -> None:
        """Called for each gradient. Counts the all-reduces at the first gradient of a backward pass."""
        model = self._model()
        if self._begun and model is not None:
            self._begun = False
            self._count(*self._buckets(model))

    def _buckets(self, model: Any) -> tuple[int, int]:
        """Returns the number of all-reduces and their bytes. They are final once DDP has rebuilt its buckets."""
        if self._known is None:
            data = logged(model)
            rebuilt = data.get("rebuilt_bucket_sizes")
            sizes = [int(size) for size in (rebuilt or data["bucket_sizes"]).split(",")]
            map_of_unused = int(data.get("find_unused_parameters", 0))
            found = len(sizes) + map_of_unused, sum(sizes)
            if not rebuilt:
                return found
            self._known = found
        return self._known


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _nbytes(payload: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in _leaves(payload))


def _leaves(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value)
