"""Data parallelism in one process: each device has a replica of the model, and a thread that computes its share.

Use it where processes cannot be started, as in a notebook or a service. Otherwise ``ddp`` is faster, because Python
threads share one interpreter lock.

::

    batch ─┬─ 3 samples ─▶ cuda:0   forward, backward ─┐
           │                                           ├─ sum ─▶ gradients of the model ─▶ clip, optimizer
           └─ 1 sample ──▶ cuda:1   forward, backward ─┘                                        │
                           ▲                                                                    │
                           └──────────── weights, before the next forward pass ─────────────────┘

The rest of Evener sees one rank with the model on its home device. Replicas are made once. Before every step or
evaluation pass they copy the weights, the buffers and plain attributes of the modules, such as numbers. Logical CPU
devices share the memory of the weights.

Results are as exact as with ``ddp``: gradients are summed, BatchNorm normalizes over the samples of all devices, and
Dropout draws per sample. A device without samples in a micro-batch does nothing, and no other device waits for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import ClassVar, NamedTuple

import numpy as np
from torch import Tensor
from torch.distributed import ProcessGroup

from evener.balance.base import Balancer
from evener.balance.by_speed import BySpeed
from evener.balance.policy import Policy
from evener.balance.registry import make_balancer
from evener.components.checks.embeddings import refuse_lookups
from evener.components.model_with_loss import Replica
from evener.core.types import Tree
from evener.data.batch import Batch, MicroBatch
from evener.data.costs import Costs, divide_by_cost
from evener.data.division import by_weights, divide
from evener.distributed.mesh import Layout
from evener.errors import ConfigurationError
from evener.hardware import async_copy
from evener.hardware.async_read import Readout, is_late, read
from evener.hardware.profile_ranges import named_range
from evener.hardware.timers import stopwatch
from evener.nn.batch_norm import exact_batch_norm
from evener.nn.context import Scope, own_scope
from evener.strategies.base import Strategy
from evener.strategies.interfaces import StepOutcome, Stepper, StrategySettings
from evener.strategies.learner import Learner
from evener.strategies.single import NoSync
from evener.strategies.single_process.devices import Devices, devices_of, home_of, parse_devices, refuse_ranks
from evener.strategies.single_process.parallel_apply import (
    DeviceThreads,
    PeerThreadError,
    ReplicaThreads,
    ThreadBarrier,
)
from evener.strategies.single_process.replicate import add_gradients, copied, follow, no_writes, take_buffers
from evener.strategies.single_process.scatter_gather import (
    UncutError,
    UnjoinableError,
    cut,
    different,
    is_ambiguous,
    join,
)
from evener.strategies.synchronizer import Synchronizer
from evener.torch_internals.modules import AnyBatchNorm


@dataclass(frozen=True)
class DataParallel(Strategy):
    """Data parallelism over the devices of one process, with a replica and a thread for each.

    Raises:
        ConfigurationError: If there are several ranks, or a device is invalid.
    """

    axis: ClassVar[str] = "data"
    one_process: ClassVar[bool] = True

    devices: str | None = None
    """For example ``cuda:0,cuda:1``. None takes the devices of the settings, or else all GPUs."""
    balance: str | None = None
    """The balancer that divides a batch over the devices, as ``--balance`` does over ranks. None takes the weights of
    the settings, or else equal shares."""

    def __post_init__(self) -> None:
        if self.devices is not None:
            parse_devices(self.devices.split(","))

    def layout(self, world_size: int, settings: StrategySettings) -> Layout:
        refuse_ranks("data_parallel", world_size)
        return Layout({"data": 1})

    def synchronizer(self, learner: Learner) -> Synchronizer:
        return NoSync(learner)

    def stepper(self, learner: Learner) -> Stepper:
        home, settings = learner.session.device, learner.settings
        devices = devices_of(self.devices, settings.devices, home)
        weights = ",".join(map(repr, settings.weights or ()))
        late = int(is_late(home))
        chosen: Balancer = (
            BySpeed(len(devices), lookahead=late, policy=Policy(placeholder=0))
            if self.balance == "auto"
            else make_balancer(self.balance or weights or "equal", len(devices), lookahead=late)
        )
        return DeviceReplicas(learner, devices, chosen, late)


class DevicePart(NamedTuple):
    """A device's part of a micro-batch."""

    micro: MicroBatch
    meeting: ThreadBarrier
    place: int
    """The device's number at the barrier."""


class Did(NamedTuple):
    """The losses and the time of one device in a step."""

    totals: list[Tensor]
    seconds: Readout


class Taken(NamedTuple):
    """A finished step, whose times the balancer has not seen yet."""

    step: int
    sizes: list[int]
    """The number of samples of each device."""
    costs: list[float] | None
    """What they cost, in samples of mean cost; None if the task gives no costs."""
    did: dict[int, Did]
    """The results of the devices that had samples."""


class DeviceReplicas(Stepper):
    """Runs each device's part of every micro-batch, and sums the gradients on the model's device.

    Args:
        late: After how many more steps the times of a step are read, so that the host does not wait for the devices.
    """

    def __init__(self, learner: Learner, devices: Devices, balancer: Balancer, late: int) -> None:
        self._learner, self._devices, self._balancer = learner, devices, balancer
        self._home = home_of(devices, learner.session.device) or 0
        self._together = ReplicaThreads()
        refuse_lookups(learner.model, learner.mesh, len(devices))
        if len(devices) > 1 and any(isinstance(module, AnyBatchNorm) for module in learner.model.modules()):
            exact_batch_norm(learner.model, self._together)
        self._crew = DeviceThreads(devices)
        learner.mesh.close_with_mesh(self._crew.close)
        self._watches = [stopwatch(device) for device in devices]
        self.shares: tuple[int, ...] = (1,) * len(devices)
        """The number of samples of each device in the last step."""
        self._late, self._unobserved = late, deque[Taken]()
        self._rows: bool | None = None

    @cached_property
    def _replicas(self) -> list[Replica]:
        """The replicas by device. The one of the home device holds the model itself."""
        learner = self._learner
        return [
            Replica(
                learner.model if place == self._home else copied(learner.model, device),
                learner.task.exact_loss(),
                learner.task.forward,
            )
            for place, device in enumerate(self._devices)
        ]

    # Training

    def run(self, batch: Batch, divisor: Callable[[], float], step: int) -> StepOutcome:
        learner = self._learner
        with learner.work_timer.step(step):
            parts = self._parts(batch, self._shares(step, batch.size), step)
            self._refresh()
            did = self._compute(parts, divisor, step)
            self._gather(lead=min(did))
            missing = learner.synchronizer.complete()
        self._unobserved.append(Taken(step, _sizes(parts, len(self._devices)), self._costs_of(parts), did))
        device = learner.session.device
        totals = [async_copy.move_tensor(total, device) for one in did.values() for total in one.totals]
        return StepOutcome(
            totals=tuple(map(read, totals)),
            missing=missing,
            buffers_changed=False,
            compute_seconds=learner.work_timer.taken(),
            soundness=learner.synchronizer.soundness(),
        )

    def _shares(self, step: int, size: int) -> tuple[int, ...]:
        """Returns the shares of the devices in this step, after telling the balancer the times of earlier steps."""
        while len(self._unobserved) > self._late:
            number, sizes, costs, did = self._unobserved.popleft()
            seconds = [did[place].seconds.value() if n else math.nan for place, n in enumerate(sizes)]
            if costs is None:
                self._balancer.observe(number, sizes, seconds)
            else:
                self._balancer.observe_costs(
                    number, self._balancer.shares(number, sum(sizes)), costs, seconds
                )
        self.shares = tuple(self._balancer.shares(step, size))
        return self.shares

    def _parts(self, batch: Batch, shares: Sequence[int], step: int) -> list[dict[int, DevicePart]]:
        """Returns, for each micro-batch, the parts of the devices that have samples in it."""
        micros, most = batch.micro_batches, len(batch.micro_batches[0].samples)
        if batch.skipped:  # micro-batches lack the samples that could not be read
            counts = [by_weights(len(micro.samples), shares) for micro in micros]
        elif self._costs is None:
            counts = [[len(rows) for rows in row] for row in divide(batch.size, shares, most)]
        else:
            each = self._costs(np.concatenate([micro.samples.numpy() for micro in micros]))
            counts = divide_by_cost(each, self._balancer.fractions(step, batch.size), shares, most).tolist()
        lead = next(place for place, share in enumerate(shares) if share)
        return [self._cut(micro, led(row, lead)) for micro, row in zip(micros, counts, strict=True)]

    @cached_property
    def _costs(self) -> Costs | None:
        task = self._learner.task
        return None if task.cost is None else Costs(task.cost, task.train)

    def _costs_of(self, parts: Sequence[dict[int, DevicePart]]) -> list[float] | None:
        """Returns the cost of each device's samples in a step, in samples of mean cost; None without costs."""
        if self._costs is None:
            return None
        found = [0.0] * len(self._devices)
        for row in parts:
            for place, part in row.items():
                found[place] += float(self._costs(part.micro.samples.numpy()).sum()) / self._costs.mean
        return found

    def _cut(self, micro: MicroBatch, counts: Sequence[int]) -> dict[int, DevicePart]:
        """Cuts a micro-batch into the devices' parts. If it is ambiguous how to cut it, the first device gets all of
        it."""
        used = {place: count for place, count in enumerate(counts) if count}
        if len(used) > 1 and is_ambiguous(micro):
            used = {min(used): len(micro.samples)}
        meeting = ThreadBarrier(len(used), self._learner.session.timeout_seconds)
        pieces = cut(micro, list(used.values())) if len(used) > 1 else [micro]
        return {
            place: DevicePart(piece, meeting, index)
            for index, (place, piece) in enumerate(zip(used, pieces, strict=True))
        }

    def _compute(
        self, parts: Sequence[dict[int, DevicePart]], divisor: Callable[[], float], step: int
    ) -> dict[int, Did]:
        """Runs forward and backward on all devices. Waits for the divisor meanwhile."""
        value: Future[float] = Future()
        jobs = {
            place: self._training(place, [row[place] for row in parts if place in row], value, step)
            for place in sorted(set(chain.from_iterable(parts)))
        }

        def drop() -> None:
            _drop(part.meeting for row in parts for part in row.values())
            if not value.done():
                value.set_exception(PeerThreadError("the step was given up"))

        try:
            return self._crew.run(jobs, drop, lambda: value.set_result(divisor()))
        except BaseException:
            self._forget()
            raise

    def _training(
        self, place: int, parts: Sequence[DevicePart], divisor: Future[float], step: int
    ) -> Callable[[], Did]:
        """Returns the function that a device's thread runs in a step."""
        replica, watch = self._replicas[place], self._watches[place]

        def job() -> Did:
            totals = []
            watch.start()
            for part in parts:
                with self._computing(place, part, step) as (micro, scope):
                    with named_range("forward on device", place), no_writes(replica, len(self._devices)):
                        term = replica(micro)
                    totals.append(term.detach())
                    scope.rewind()
                    with named_range("backward on device", place):
                        (term / divisor.result()).backward()
            watch.mark()
            return Did(totals, watch.taken())

        return job

    @contextmanager
    def _computing(self, place: int, part: DevicePart, step: int) -> Iterator[tuple[MicroBatch, Scope]]:
        """Yields the part, moved to its device, and its scope, with the thread joined to the barrier."""
        micro = part.micro.to(self._devices[place], non_blocking=True)
        scope = Scope(micro.samples, step, self._learner.settings.seed, micro.weight, _no_ranks)
        with own_scope(scope), self._together.joined(part.meeting, part.place, self._watches[place]):
            yield micro, scope

    def _forget(self) -> None:
        """Drops the replicas' gradients of a failed step."""
        for replica in self._others():
            for parameter in replica.parameters():
                parameter.grad = None

    def _gather(self, lead: int) -> None:
        """Sums the gradients of all devices in the model, and copies the buffers of device ``lead`` to it."""
        add_gradients([replica.model for replica in self._replicas], self._home)
        if lead != self._home:
            take_buffers(self._replicas[lead].model, self._learner.model)

    def _others(self) -> list[Replica]:
        return [replica for place, replica in enumerate(self._replicas) if place != self._home]

    def _refresh(self) -> None:
        for replica in self._others():
            follow(self._learner.model, replica.model)

    # Evaluation

    def outputs(self, micro: MicroBatch) -> Tree:
        """Returns the model's outputs: computed on all devices if they have a row for each sample, else on the home
        device alone."""
        if self._rows is not False and len(self._devices) > 1:
            try:
                return self._joined(micro)
            except (UnjoinableError, UncutError):
                self._rows = self._rows and False
        return self._learner.task.forward(self._learner.model, micro.inputs)

    def _joined(self, micro: MicroBatch) -> Tree:
        """Returns the outputs computed on all devices.

        The first call uses two parts of different sizes, to find out if the outputs have a row for each sample: some
        other dimension may match one of the sizes by chance, but not both.

        Raises:
            UncutError: If the inputs or targets cannot be cut.
            UnjoinableError: If the outputs cannot be joined.
        """
        n = len(micro.samples)
        if self._rows is None:
            self._together_on(micro, different(n, len(self._devices)))
            self._rows = True
        return self._together_on(micro, by_weights(n, self.shares))

    def _together_on(self, micro: MicroBatch, counts: Sequence[int]) -> Tree:
        parts = self._cut(micro, counts)
        self._refresh()
        jobs = {place: self._evaluating(place, part) for place, part in parts.items()}
        found = self._crew.run(jobs, lambda: _drop(part.meeting for part in parts.values()))
        sizes = [part.micro.size for part in parts.values()]
        return join(list(found.values()), sizes, self._learner.session.device)

    def _evaluating(self, place: int, part: DevicePart) -> Callable[[], Tree]:
        model, forward = self._replicas[place].model, self._learner.task.forward

        def job() -> Tree:
            with self._computing(place, part, 0) as (micro, _):
                return forward(model, micro.inputs)

        return job


def led(counts: Sequence[int], lead: int) -> list[int]:
    """Returns the counts, changed so that ``lead`` has at least one sample. Its buffers then see every micro-batch."""
    found = list(counts)
    if not found[lead]:
        found[max(range(len(found)), key=found.__getitem__)] -= 1
        found[lead] = 1
    return found


def _sizes(parts: Sequence[dict[int, DevicePart]], devices: int) -> list[int]:
    """Returns the number of samples that each device had in a step."""
    return [sum(row[place].micro.size for row in parts if place in row) for place in range(devices)]


def _drop(meetings: Iterable[ThreadBarrier]) -> None:
    for meeting in meetings:
        meeting.drop()


def _no_ranks() -> ProcessGroup | None:
    raise ConfigurationError(
        "strategy 'data_parallel' computes the parts of a batch in threads of one process, and a layer or a loss of "
        "this model asks for the ranks that compute the other parts (evener.nn.data_group, evener.nn.Experts): use "
        "'ddp', which has them"
    )
