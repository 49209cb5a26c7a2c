"""Profiles a user's script from inside its process, without changing its results.

A step ends with an optimizer's ``step``. Its parts, and where they are observed::

    step      ├ input ┤ forward ├ backward ┤ exchange ├ forward ┤ update ┤
    seen at   DataLoader        autograd    DDP's last             hooks of the optimizers
                                            gradient

``forward`` is what the rank does outside of the other parts. Where the gradients of a DDP module are summed, the
exchange begins with the module's last gradient, which a hook sees just before DDP's reducer does, and ends with the
backward pass. Calls of collectives, and waits for those that run in the background, are exchange, too.

- With several optimizers, a step ends with the first one that steps, until another one steps twice without it.
- Where no optimizer of PyTorch steps, a step ends with each backward pass.
- What comes before a batch of the training data is no part of a step if a batch of other data came since the last step:
  it was an evaluation.

Collectives are counted where Python calls ``torch.distributed``. Those of DDP's reducer, which is C++, are derived from
DDP's logging data about its buckets. Functional collectives (those of DTensor) and point-to-point messages are not
counted, and what waits for them counts as the part in which it happens.

An error in the profiler itself ends the profiling, and not the script.
"""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import fields
from operator import add
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from evener.distributed.ddp_profiler.exchange import PAYLOADS, GradientExchange, nbytes_of, samples_of
from evener.distributed.ddp_profiler.part_watch import PartWatch, replaced
from evener.distributed.ddp_profiler.step_times import ObservedStep, StepTimes
from evener.distributed.ddp_profiler.timeline import (
    BACKWARD,
    EXCHANGE,
    FORWARD,
    INPUT,
    SAVING,
    UPDATE,
    PartClock,
    clock_of,
    part_seconds,
)
from evener.hardware.accelerators import WITH_STREAMS
from evener.hardware.async_read import Readout, read
from evener.torch_internals.ddp import BROADCAST_BUFFERS
from evener.torch_internals.modules import LoaderIterator, dataset_of

PASSES_WITHOUT_OPTIMIZER = 20
"""After so many backward passes without a step of an optimizer, each backward pass counts as a step."""
_MOST_KINDS = 256
"""Sizes of further collectives are rounded up to powers of two."""
READ_SECONDS = 0.02
"""Least time between two readings of ended steps. Short steps are read several at a time, which costs each of them
less: between the work of a model, Python's code is in no cache. A step that takes longer is read when it ends."""
_LINGER_SECONDS = 1.0
"""Longest wait for a device at the end."""


class _EndedStep(NamedTuple):
    """A step whose times are not read yet."""

    marks: list[Any]
    """Each part with the mark of its begin; see `part_seconds`."""
    clock: PartClock
    between_seconds: float
    saved_seconds: float
    """Time of saves in what came before the step."""
    samples: int
    collectives: dict[tuple[str, int], int]
    """The number of calls by name and bytes."""
    loss: float | Readout
    lr: float
    ended: float


class DdpProfiler:
    """Context manager that counts and times the steps of the script that runs in it.

    The means leave out the first step, which is slow. The times of a step on a GPU are read when the device has passed
    its end, so that the profiler never waits for the device.

    Args:
        on_step: Called with each step and its device, also with the first step if its begin is known: from the first
            batch of a DataLoader on, or from the wrapping of a model by DDP on.
    """

    def __init__(self, on_step: Callable[[ObservedStep, torch.device], None] | None = None) -> None:
        self.steps = 0
        self.kinds: Counter[tuple[str, int]] = Counter()
        """The calls of each collective by name and bytes, in all steps but the first."""
        self.device = torch.device("cpu")
        self._on_step = on_step
        self._parts = PartWatch(self.device)
        self._sums = [0.0] * len(fields(StepTimes))
        self._stack = ExitStack()
        self._pending: deque[_EndedStep] = deque()
        self._leader: weakref.ref[Optimizer] | None = None
        """The optimizer whose steps end a step; ``_others`` are those that have stepped since."""
        self._others: set[int] = set()
        self._updater = 0
        self._ended = self._read = self._alone = 0
        self._read_at = 0.0
        self._is_known = self._wraps = False
        self._data: set[int] = set()
        """The datasets of the batches of the step before; ``_seen`` are those since then."""
        self._scaled: tuple[Any, Any] = (None, None)
        self._last: tuple[list[Any], int, Any] | None = None
        """The last gradient of a DDP module in this backward pass: its place in the marks, and its mark."""
        self._new_step()

    def _new_step(self, between_seconds: float = 0.0, saved_seconds: float = 0.0) -> None:
        self._between, self._saved, self._saving = between_seconds, saved_seconds, 0.0
        self._found: dict[tuple[str, int], int] = {}
        self._began = time.perf_counter()
        self._parts.begin()
        self._seen: set[int] = set()
        self._passes = self._samples = 0
        self._loss: float | Readout = math.nan

    @property
    def failure(self) -> str:
        """The error that ended the profiling; empty if there was none."""
        return self._parts.failure

    @property
    def mean(self) -> StepTimes:
        """Mean over all steps except the first."""
        return StepTimes(*(total / max(1, self.steps) for total in self._sums))

    def __enter__(self) -> DdpProfiler:
        wrap, safely = self._parts.wrap, self._parts.safely
        with ExitStack() as stack:
            for register, hook in (
                (register_optimizer_step_pre_hook, self._before_update),
                (register_optimizer_step_post_hook, self._after_update),
            ):
                stack.callback(register(safely(hook)).remove)
            for name in PAYLOADS:
                before = functools.partial(self._collective, name)
                wrap(stack, distributed_c10d, name, EXCHANGE, before)
                stack.enter_context(replaced(dist, name, getattr(distributed_c10d, name)))
            ddp: Any = DistributedDataParallel
            wrap(stack, dist.Work, "wait", EXCHANGE)
            wrap(stack, ddp, BROADCAST_BUFFERS, EXCHANGE, self._buffers)
            wrap(stack, ddp, "__init__", None, after=self._new_model)
            wrap(stack, DataLoader, "__iter__", INPUT)
            wrap(stack, LoaderIterator, "__next__", INPUT, self._before_batch, self._after_batch)
            wrap(stack, torch.autograd, "backward", BACKWARD, self._before_backward, self._after_backward)
            wrap(stack, torch.amp.GradScaler, "scale", None, after=self._after_scale)
            wrap(stack, torch, "save", SAVING, self._before_save, self._after_save)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        until = time.monotonic() + _LINGER_SECONDS
        with suppress(Exception):  # the device may have failed
            while self._pending and time.monotonic() < until:
                self._read_off()
                time.sleep(0.01 if self._pending else 0)

    # Steps

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self._parts.may_enter(UPDATE):
            self._updater = id(optimizer)
            self._parts.enter(UPDATE)

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self._updater == id(optimizer) and self._parts.part == UPDATE:
            self._parts.leave()
        leader = self._leader and self._leader()
        if leader is None or id(optimizer) in self._others:
            self._leader, leader = weakref.ref(optimizer), optimizer
        if optimizer is not leader:
            self._others.add(id(optimizer))
            return
        self._others.clear()
        group = optimizer.param_groups[0]
        lr = group.get("lr")
        self._end_step(lr if isinstance(lr, float | int) else math.nan)
        device = next((each.device for each in group["params"]), self.device)
        if device != self.device:
            self.device, self._parts.clock = device, clock_of(device)
            self._new_step()

    def _end_step(self, lr: float = math.nan) -> None:
        marks, clock = self._parts.marks, self._parts.clock
        marks += (FORWARD, clock.mark())
        self._pending.append(
            _EndedStep(
                marks,
                clock,
                self._between,
                self._saved,
                self._samples,
                self._found,
                self._loss,
                lr,
                time.time(),
            )
        )
        self._ended += 1
        self._data = self._seen
        self._new_step()
        if self._began - self._read_at >= READ_SECONDS:
            self._read_at = self._began
            self._read_off()

    def _read_off(self) -> None:
        """Reads the times of the steps whose end the device has passed."""
        pending = self._pending
        while pending and pending[0].clock.has_passed(pending[0].marks[-1]):
            step = pending.popleft()
            parts = part_seconds(step.clock, step.marks)
            parts[SAVING] += step.saved_seconds
            calls, nbytes = 0, 0
            for (_, size), number in step.collectives.items():
                calls, nbytes = calls + number, nbytes + size * number
            numbers = [sum(parts), *parts, step.between_seconds, step.samples, calls, nbytes]
            self._read += 1
            if self._read > 1:
                self.steps += 1
                self._sums = list(map(add, self._sums, numbers))
                self._count_kinds(step.collectives)
            if self._on_step is not None and (self._read > 1 or self._is_known):
                loss = step.loss if isinstance(step.loss, float) else step.loss.value()
                self._on_step(ObservedStep(numbers, loss, step.lr, step.ended), self.device)

    def _count_kinds(self, collectives: dict[tuple[str, int], int]) -> None:
        kinds = self.kinds
        for kind, calls in collectives.items():
            if kind not in kinds and len(kinds) >= _MOST_KINDS:
                kind = kind[0], 1 << kind[1].bit_length()
            kinds[kind] += calls

    def _restart(self) -> None:
        """Begins the step anew: what came before is no part of it."""
        between = time.perf_counter() - self._began - self._saving if self._ended else 0.0
        seen = set[int]() if self._ended else self._seen
        self._is_known = True
        self._new_step(self._between + between, self._saved + self._saving if self._ended else 0.0)
        self._seen = seen

    # What is observed

    def _before_batch(self, args: Any, _: Any) -> None:
        data = id(dataset_of(args[0]))
        if not self._passes and (not self._ended or (data in self._data and not self._seen <= self._data)):
            self._restart()
        self._seen.add(data)

    def _after_batch(self, batch: Any, _: Any) -> None:
        if not self._wraps:
            self._samples += samples_of(batch)

    def _before_save(self, *_: Any) -> None:
        self._save_began = time.perf_counter()

    def _after_save(self, *_: Any) -> None:
        self._saving += time.perf_counter() - self._save_began

    def _after_scale(self, scaled: Any, args: Any) -> None:
        self._scaled = scaled, args[1] if len(args) > 1 else None

    def _before_backward(self, args: Any, _: Any) -> None:
        self._last = None
        self._passes += 1
        (scaled, plain), self._scaled = self._scaled, (None, None)
        loss = args[0] if args else None
        loss = plain if scaled is not None and scaled is loss else loss
        self._loss = math.nan
        # Reading the number of a tensor of another class might call collectives.
        if self._passes == 1 and type(loss) is Tensor and loss.numel() == 1:
            if loss.is_cpu:
                self._loss = float(loss.item())
            elif loss.device.type in WITH_STREAMS:
                self._loss = read(loss)

    def _after_backward(self, *_: Any) -> None:
        if self._last is not None and self._last[0] is self._parts.marks:
            marks, place, mark = self._last
            marks[place:] = (EXCHANGE, mark)
        self._last = None
        if self._leader is None:
            self._alone += 1
            if self._alone > PASSES_WITHOUT_OPTIMIZER:
                self._is_known = self._ended > 0
                self._end_step()

    def _call(self, name: str, nbytes: int) -> None:
        self._found[name, nbytes] = self._found.get((name, nbytes), 0) + 1

    def _collective(self, name: str, args: Any, kwargs: Any) -> None:
        place, keyword = PAYLOADS[name]
        self._call(name, nbytes_of(kwargs.get(keyword, args[place] if len(args) > place else None)))

    def _buffers(self, args: Any, kwargs: Any) -> None:
        self._call("broadcast", nbytes_of(kwargs.get("tensors", args[1] if len(args) > 1 else None)))

    def _buckets(self, sizes: list[int]) -> None:
        for nbytes in sizes:
            self._call("all_reduce", nbytes)

    def _new_model(self, _: Any, args: Any) -> None:
        model = args[0]
        if not self._wraps:
            self._wraps, self._samples = True, 0
        if not self._ended and not self._passes:
            self._restart()
        exchange = GradientExchange(model, self._buckets)
        parts, safely = self._parts, self._parts.safely
        begin_backward = safely(exchange.begin_backward)

        def forward(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
            exchange.end_forward()
            if exchange.is_begun:
                self._samples += samples_of(args) or samples_of(kwargs)

        model.register_forward_hook(safely(forward), with_kwargs=True)

        def gradient(_: Tensor) -> None:
            if exchange.is_begun:
                begin_backward()
            exchange.number += 1
            clock = parts.clock
            if exchange.syncs and (clock.is_cheap or exchange.number >= exchange.usual) and not parts.failure:
                self._last = parts.marks, len(parts.marks), clock.mark()

        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(gradient)
