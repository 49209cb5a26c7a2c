"""One process with several devices: a replica of the model on each, and a thread that computes its part of every batch.

For those who cannot start processes: a notebook, a service. Python's threads take turns in the interpreter, so that
``ddp`` is quicker wherever processes can be started.

::

    batch ─┬─ 3 samples ─▶ cuda:0   forward, backward ─┐
           │                                           ├─ sum ─▶ gradients of the model ─▶ clip, optimizer
           └─ 1 sample ──▶ cuda:1   forward, backward ─┘                                        │
                           ▲                                                                    │
                           └──────────── weights, before the next forward pass ─────────────────┘

The rest of Evener sees one rank with the model on the first device. Replicas are copies that stay; before every pass
they take over the weights, the buffers, and whatever plain numbers the modules hold. Logical devices of the CPU share
the memory of the weights.

Exactness is that of ``ddp``: gradients are sums, BatchNorm normalizes by the samples of all devices, Dropout draws by
sample. A device without samples of a micro-batch simply does nothing: nobody waits for it.
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
from evener.data.division import by_weights, divide
from evener.distributed.mesh import Layout
from evener.errors import ConfigurationError
from evener.hardware.async_read import Readout, is_late, read
from evener.hardware.timers import stopwatch
from evener.nn.batch_norm import exact_batch_norm
from evener.nn.context import Scope, own_scope
from evener.strategies.base import Strategy
from evener.strategies.interfaces import Settings, StepOutcome, Stepper, Synchronizer
from evener.strategies.learner import Learner
from evener.strategies.single import Alone
from evener.strategies.single_process.devices import Devices, devices_of, home_of, parse_devices, refuse_ranks
from evener.strategies.single_process.parallel_apply import Crew, LeftAloneError, Meeting, Together
from evener.strategies.single_process.replicate import add_gradients, copied, follow, take_buffers
from evener.strategies.single_process.scatter_gather import (
    UncutError,
    UnjoinableError,
    cut,
    different,
    is_ambiguous,
    join,
)
from evener.torch_internals.layers import AnyBatchNorm


@dataclass(frozen=True)
class DataParallel(Strategy):
    """Replicas on the devices of one process, a thread each.

    Raises:
        ConfigurationError: For several ranks, or devices that are none.
    """

    axis: ClassVar[str] = "data"
    one_process: ClassVar[bool] = True

    devices: str | None = None
    """Such as ``cuda:0,cuda:1``; None for those of the settings, or else all GPUs."""
    balance: str | None = None
    """What divides a batch over the devices, as ``--balance`` does over ranks; None for the settings' weights, or else
    equal parts."""

    def __post_init__(self) -> None:
        if self.devices is not None:
            parse_devices(self.devices.split(","))

    def layout(self, world_size: int, settings: Settings) -> Layout:
        refuse_ranks("data_parallel", world_size)
        return Layout({"data": 1})

    def synchronizer(self, learner: Learner) -> Synchronizer:
        return Alone(learner)

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
        return Replicas(learner, devices, chosen, late)


class Part(NamedTuple):
    """A device's part of a micro-batch."""

    micro: MicroBatch
    meeting: Meeting
    place: int
    """At the meeting."""


class Did(NamedTuple):
    """What a device came to in a step."""

    totals: list[Tensor]
    seconds: Readout


class Taken(NamedTuple):
    """A step that is over."""

    step: int
    sizes: list[int]
    """Samples of each device."""
    did: dict[int, Did]
    """By the devices that had some."""


class Replicas(Stepper):
    """Gives every device its part of each micro-batch, and sums what they come to where the model is.

    Args:
        late: How many steps after its own the times of a step are read, so that the host waits for no device.
    """

    def __init__(self, learner: Learner, devices: Devices, balancer: Balancer, late: int) -> None:
        self._learner, self._devices, self._balancer = learner, devices, balancer
        self._home = home_of(devices, learner.session.device) or 0
        self._together = Together()
        refuse_lookups(learner.model, learner.mesh, len(devices))
        if len(devices) > 1 and any(isinstance(module, AnyBatchNorm) for module in learner.model.modules()):
            exact_batch_norm(learner.model, self._together)
        self._crew = Crew(devices)
        learner.mesh.own(self._crew.close)
        self._watches = [stopwatch(device) for device in devices]
        self.shares: tuple[int, ...] = (1,) * len(devices)
        """Samples of each device in the last step."""
        self._late, self._unobserved = late, deque[Taken]()
        self._rows: bool | None = None

    @cached_property
    def _replicas(self) -> list[Replica]:
        """By device; that of the home device holds the model itself."""
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
        with learner.pace.step(step):
            parts = self._parts(batch, self._shares(step, batch.size))
            self._refresh()
            did = self._compute(parts, divisor, step)
            self._gather(lead=min(did))
            missing = learner.synchronizer.complete()
        self._unobserved.append(Taken(step, _sizes(parts, len(self._devices)), did))
        device = learner.session.device
        totals = [total.to(device, non_blocking=True) for one in did.values() for total in one.totals]
        return StepOutcome(
            totals=tuple(map(read, totals)),
            missing=missing,
            buffers_changed=False,
            compute_seconds=learner.pace.taken(),
            soundness=learner.synchronizer.soundness(),
        )

    def _shares(self, step: int, size: int) -> tuple[int, ...]:
        """Of the devices in this step, after the balancer has heard how long earlier ones took."""
        while len(self._unobserved) > self._late:
            number, sizes, did = self._unobserved.popleft()
            seconds = [did[place].seconds.value() if n else math.nan for place, n in enumerate(sizes)]
            self._balancer.observe(number, sizes, seconds)
        self.shares = tuple(self._balancer.shares(step, size))
        return self.shares

    def _parts(self, batch: Batch, shares: Sequence[int]) -> list[dict[int, Part]]:
        """For each micro-batch, the parts of the devices that have samples of it."""
        micros = batch.micro_batches
        table = divide(batch.size, shares, len(micros[0].samples))
        lead = next(place for place, share in enumerate(shares) if share)
        return [
            self._cut(micro, led([len(rows) for rows in row], lead))
            for micro, row in zip(micros, table, strict=True)
        ]

    def _cut(self, micro: MicroBatch, counts: Sequence[int]) -> dict[int, Part]:
        """The parts of the devices; where a form is ambiguous, all for the first."""
        used = {place: count for place, count in enumerate(counts) if count}
        if len(used) > 1 and is_ambiguous(micro):
            used = {min(used): len(micro.samples)}
        meeting = Meeting(len(used), self._learner.session.timeout_seconds)
        pieces = cut(micro, list(used.values())) if len(used) > 1 else [micro]
        return {
            place: Part(piece, meeting, index)
            for index, (place, piece) in enumerate(zip(used, pieces, strict=True))
        }

    def _compute(
        self, parts: Sequence[dict[int, Part]], divisor: Callable[[], float], step: int
    ) -> dict[int, Did]:
        """Forward and backward on all devices; the divisor is asked for meanwhile."""
        value: Future[float] = Future()
        jobs = {
            place: self._training(place, [row[place] for row in parts if place in row], value, step)
            for place in sorted(set(chain.from_iterable(parts)))
        }

        def drop() -> None:
            _drop(part.meeting for row in parts for part in row.values())
            if not value.done():
                value.set_exception(LeftAloneError("the step was given up"))

        try:
            return self._crew.run(jobs, drop, lambda: value.set_result(divisor()))
        except BaseException:
            self._forget()
            raise

    def _training(
        self, place: int, parts: Sequence[Part], divisor: Future[float], step: int
    ) -> Callable[[], Did]:
        """What the thread of a device does in a step."""
        replica, watch = self._replicas[place], self._watches[place]

        def job() -> Did:
            totals = []
            watch.start()
            for part in parts:
                with self._computing(place, part, step) as (micro, scope):
                    term = replica(micro)
                    totals.append(term.detach())
                    scope.rewind()
                    (term / divisor.result()).backward()
            watch.mark()
            return Did(totals, watch.taken())

        return job

    @contextmanager
    def _computing(self, place: int, part: Part, step: int) -> Iterator[tuple[MicroBatch, Scope]]:
        """The part on its device, and its scope."""
        micro = part.micro.to(self._devices[place], non_blocking=True)
        scope = Scope(micro.samples, step, self._learner.settings.seed, group=_no_ranks)
        with own_scope(scope), self._together.joined(part.meeting, part.place, self._watches[place]):
            yield micro, scope

    def _forget(self) -> None:
        """Gives up the gradients of a step that failed."""
        for replica in self._others():
            for parameter in replica.parameters():
                parameter.grad = None

    def _gather(self, lead: int) -> None:
        """What the devices came to, where the model is; buffers are those of the ``lead``."""
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
        """As the model gives them: on all devices if they are rows of the samples, else on the home device alone."""
        if self._rows is not False and len(self._devices) > 1:
            try:
                return self._joined(micro)
            except (UnjoinableError, UncutError):
                self._rows = self._rows and False
        return self._learner.task.forward(self._learner.model, micro.inputs)

    def _joined(self, micro: MicroBatch) -> Tree:
        """Outputs of two parts that differ in size tell once whether they are rows of the samples: another dimension
        may happen to be as long as one of them, but not as both.

        Raises:
            UncutError, UnjoinableError: If all devices cannot do it together.
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

    def _evaluating(self, place: int, part: Part) -> Callable[[], Tree]:
        model, forward = self._replicas[place].model, self._learner.task.forward

        def job() -> Tree:
            with self._computing(place, part, 0) as (micro, _):
                return forward(model, micro.inputs)

        return job


def led(counts: Sequence[int], lead: int) -> list[int]:
    """The counts with one sample at least for the ``lead``, whose buffers have then seen every micro-batch."""
    found = list(counts)
    if not found[lead]:
        found[max(range(len(found)), key=found.__getitem__)] -= 1
        found[lead] = 1
    return found


def _sizes(parts: Sequence[dict[int, Part]], devices: int) -> list[int]:
    """Samples that each device had in a step."""
    return [sum(row[place].micro.size for row in parts if place in row) for place in range(devices)]


def _drop(meetings: Iterable[Meeting]) -> None:
    for meeting in meetings:
        meeting.drop()


def _no_ranks() -> ProcessGroup | None:
    raise ConfigurationError(
        "strategy 'data_parallel' computes the parts of a batch in threads of one process, and a layer or a loss of "
        "this model asks for the ranks that compute the other parts (evener.nn.data_group, evener.nn.Experts): use "
        "'ddp', which has them"
    )
