"""What each block holds, when, and how long it takes: seen in two steps in which all are computed again.

Such steps take the least memory that there is to have, and their blocks' repetitions are just what would be saved. So
nothing is computed for the measuring alone, and what strategies hold and send is in it. One step is counted by an
:class:`~evener.hardware.memory.Accounting`, which slows it down; another has its time taken.

::

    counted    forward 0 │ forward 1 │ loss │ again 1, backward 1 │ again 0, backward 0, optimizer
    waiting              0           0 1    0                     none
    nbytes            peak        peak   peak    peak                  peak                            a moment each
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import Tensor, UntypedStorage

from evener.components.activation_checkpoint.policy import AGAIN, KEPT, KEPT_PRODUCTS, Measured, Moment, Way
from evener.hardware.async_read import Readout
from evener.hardware.memory import Accounting
from evener.hardware.timers import Stopwatch
from evener.torch_internals.dispatch_mode import DispatchMode, wraps
from evener.torch_internals.matrix_products import PRODUCTS
from evener.torch_internals.storages import address
from evener.torch_internals.written import written

SECONDS_OF_AN_OPERATOR = 25e-6
"""What PyTorch's selective checkpointing is taken to cost the host for each operator of a block, in forward and again:
two calls from C++ into Python, as what an accounting was measured to cost, which has one and a half of them."""


@dataclass(eq=False)
class Call:
    """One call of a block in a counted step."""

    name: str
    nbytes: int = 0
    """Held by what backward needs, beyond its inputs, and its outputs, which are others' inputs."""
    seconds: Readout | None = None
    """Of its repetition, counting included."""
    products: Products | None = None


class Counted:
    """Looks on in a step that ``account`` counts."""

    whole = True

    def __init__(self, account: Accounting, stopwatch: Callable[[], Stopwatch]) -> None:
        self._account, self._stopwatch = account, stopwatch
        self._waiting: list[Call] = []
        self._outputs: list[tuple[weakref.ref[UntypedStorage], int]] = []
        self.calls: list[Call] = []
        self.moments: list[tuple[int, tuple[Call, ...]]] = []
        account.reset_peak()

    def called(self, name: str) -> Call:
        self.passed()
        call = Call(name)
        self.calls.append(call)
        self._waiting.append(call)
        return call

    @contextmanager
    def again(self, call: Call) -> Iterator[None]:
        self.passed()
        if call in self._waiting:
            self._waiting.remove(call)
        before, watch = self._account.held, self._stopwatch()
        call.products = Products(self._stopwatch)
        watch.start()
        with call.products:
            yield
        watch.mark()
        call.seconds = watch.taken()
        outputs = sum(nbytes for storage, nbytes in self._outputs if storage() is not None)
        call.nbytes = self._account.held - before - outputs

    def returned(self, call: Call, found: Any) -> None:
        storages = {address(storage): storage for storage in map(Tensor.untyped_storage, _tensors(found))}
        self._outputs = [(weakref.ref(storage), storage.nbytes()) for storage in storages.values()]

    def passed(self) -> None:
        """What was held at most since the last moment is one."""
        self.moments.append((self._account.peak, tuple(self._waiting)))
        self._account.reset_peak()


class Products(DispatchMode):
    """What the operators of a repetition make that are worth keeping, and how long they take."""

    def __init__(self, stopwatch: Callable[[], Stopwatch]) -> None:
        super().__init__()
        self._stopwatch = stopwatch
        self._made: set[int] = set()
        self._taken: list[Readout] = []
        self.nbytes, self.operators = 0, 0
        self.overwritten = False
        """Whether something was written into what one of them had made, which then cannot be kept."""

    @property
    def seconds(self) -> float:
        """Of all of them; on a GPU it waits for these."""
        return sum(taken.value() for taken in self._taken)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(wraps, types)):
            return NotImplemented
        self.operators += 1
        if function not in PRODUCTS:
            self._look(written(function, args, kwargs or {}))
            return function(*args, **(kwargs or {}))
        watch = self._stopwatch()
        watch.start()
        found = function(*args, **(kwargs or {}))
        watch.mark()
        self._taken.append(watch.taken())
        for tensor in _tensors(found):
            self._made.add(address(tensor.untyped_storage()))
            self.nbytes += tensor.nbytes
        return found

    def _look(self, into: Sequence[Any]) -> None:
        """An address may be another tensor's by then, for which a way is left out that would have been possible."""
        tensors = [tensor for each in into for tensor in _tensors(each)]
        self.overwritten |= any(address(tensor.untyped_storage()) in self._made for tensor in tensors)


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    found = found if isinstance(found, tuple | list) else ()
    return [each for each in found if isinstance(each, Tensor)]


@dataclass
class Timed:
    """Looks on in a step and takes the time of each repetition."""

    stopwatch: Callable[[], Stopwatch]
    whole: bool = False
    taken: dict[str, list[Readout]] = field(default_factory=lambda: defaultdict(list))

    def called(self, name: str) -> str:
        return name

    @contextmanager
    def again(self, call: str) -> Iterator[None]:
        watch = self.stopwatch()
        watch.start()
        try:
            yield
        finally:
            watch.mark()
            self.taken[call].append(watch.taken())

    def returned(self, call: str, found: Any) -> None:
        pass

    def seconds(self) -> dict[str, float]:
        """Of a step, by block; on a GPU it waits for these."""
        return {name: sum(each.value() for each in taken) for name, taken in self.taken.items()}


def measured(counted: Counted, seconds: Mapping[str, float], step_seconds: float) -> Measured:
    """What was seen in both steps.

    Args:
        seconds: Of the repetitions of each block.
    """
    own = {name: [c for c in counted.calls if c.name == name] for name in {c.name: 0 for c in counted.calls}}
    most = dict.fromkeys(own, 0)
    peaks: dict[tuple[str, ...], int] = {}
    for nbytes, waiting in counted.moments:
        names = tuple(name for name in own if any(call.name == name for call in waiting))
        peaks[names] = max(nbytes, peaks.get(names, 0))
        for name in names:
            most[name] = max(most[name], sum(call.nbytes for call in waiting if call.name == name))
    usual = _usual(own, seconds)
    return Measured(
        blocks={name: tuple(_ways(calls, most[name], usual[name])) for name, calls in own.items()},
        moments=tuple(Moment(nbytes, names) for names, nbytes in peaks.items()),
        kept_peak=max(nbytes + sum(call.nbytes for call in waiting) for nbytes, waiting in counted.moments),
        seconds=step_seconds,
    )


def _usual(own: Mapping[str, list[Call]], seconds: Mapping[str, float]) -> dict[str, float]:
    """The seconds of each block: the median of those that are alike, for one step is short, and machines are noisy."""
    kinds: dict[Any, list[str]] = defaultdict(list)
    for name, calls in own.items():
        kinds[tuple((call.nbytes, call.products and call.products.operators) for call in calls)].append(name)
    medians = {kind: median(seconds.get(name, 0.0) for name in names) for kind, names in kinds.items()}
    return {name: medians[kind] for kind, names in kinds.items() for name in names}


def _ways(calls: Sequence[Call], nbytes: int, seconds: float) -> Iterator[Way]:
    """Of a block that holds so much; its products are kept where that is less, and saves time."""
    yield Way(KEPT, nbytes, 0.0)
    found = [call.products for call in calls if call.products is not None]
    total, counted = (
        sum(call.nbytes for call in calls),
        sum(call.seconds.value() for call in calls if call.seconds),
    )
    if total > 0 and counted > 0 and not any(each.overwritten for each in found):
        kept = nbytes * sum(each.nbytes for each in found) // total
        cheap = max(0.0, 1 - sum(each.seconds for each in found) / counted)
        added = seconds * cheap + SECONDS_OF_AN_OPERATOR * sum(each.operators for each in found)
        if kept < nbytes and added < seconds:
            yield Way(KEPT_PRODUCTS, kept, added)
    yield Way(AGAIN, 0, seconds)
