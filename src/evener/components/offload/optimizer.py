"""Offloads optimizer state: updates one portion of the parameters after the other.

::

    computing   ─ wait ─ step of portion 0 ─ wait ─ step of portion 1 ─ ...          the optimizer skips all other
    beside      state 1 comes ── state 0 goes ── state 2 comes ── state 1 goes       parameters: no gradient

So the device holds the state of only a few portions at a time, also in a run's first update, which creates the state.
For optimizers that update each parameter independently, results are bitwise equal to those without offload. Gradients
are freed with their portion.

Ranks that can compute with offloaded memory directly (on a CPU) do so, and copy only state that the optimizer has newly
created. Between updates ``optimizer.state`` holds the offloaded tensors. Checkpoints and other code read them like any
state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from evener.components.offload.host_storage import Outside
from evener.components.offload.layout import divided_as, is_plain
from evener.components.optim.elementwise import ALONE, SAYS_ALONE, updates_alone
from evener.components.sharded_tensor.local import local
from evener.errors import ConfigurationError
from evener.hardware.memory import made_as
from evener.hardware.memory.counters import OPTIMIZER
from evener.torch_internals.optimizers import has_step_hooks

WINDOW = 2**25
"""Maximum bytes of the parameters of a portion. Their state is usually twice as large."""
SMALLEST = 2**12
"""Minimum size in bytes of a state tensor that is offloaded."""
_LINE = 64
"""Alignment in bytes of the state tensors in a buffer."""


def portions(sizes: Sequence[int], most: int) -> list[range]:
    """Divides items into consecutive ranges of at most ``most`` bytes together. A larger item gets a range of its
    own."""
    found, start, total = list[range](), 0, 0
    for place, size in enumerate(sizes):
        if total and total + size > most:
            found.append(range(start, place))
            start, total = place, 0
        total += size
    return [*found, range(start, len(sizes))] if sizes else found


def check_alone(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigurationError if the optimizer cannot update one portion of its parameters after the other."""
    if not updates_alone(optimizer):
        raise ConfigurationError(
            f"offload optimizer updates one portion of the parameters after the other, and {type(optimizer).__name__} "
            "is not known to update each by itself: use one of torch.optim "
            f"({', '.join(ALONE)}), let it say so by an attribute, {SAYS_ALONE} = True, or leave optimizer out of "
            "offload"
        )
    if has_step_hooks(optimizer):
        raise ConfigurationError(
            f"offload optimizer calls {type(optimizer).__name__}.step() once for each portion of the parameters, and "
            "the task has put hooks on it, which would be called as often: do what they do in an Observer, or leave "
            "optimizer out of offload"
        )


Key = tuple[Tensor, str]
"""A parameter, and the name of one of its states."""


@dataclass
class Portion:
    """Parameters that are updated together."""

    parameters: list[Tensor]
    homes: dict[Key, Tensor] = field(default_factory=dict)
    """Their offloaded state."""
    mark: Any = None
    """A mark behind the copies of their state to the device."""


class OffloadedUpdates:
    """Steps an optimizer whose state is offloaded.

    Args:
        optimizer: The optimizer. Its state is created at its first step, and then offloaded.
        outside: The memory for offloaded state.

    Raises:
        ConfigurationError: If the optimizer cannot update one portion of its parameters after the other.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, outside: Outside) -> None:
        check_alone(optimizer)
        self._optimizer, self._outside = optimizer, outside
        self._leaving = deque[tuple[list[Tensor], Any]]()

    def step(self) -> None:
        """Updates all parameters that have a gradient. Frees their gradients."""
        gradients = {p: p.grad for p in self._parameters() if p.grad is not None}
        sizes = [local(parameter).nbytes for parameter in gradients]
        found = [[*gradients][each.start : each.stop] for each in portions(sizes, WINDOW)]
        for parameter in gradients:
            parameter.grad = None
        waiting = deque(map(Portion, found))
        coming = self._come(waiting.popleft()) if waiting else None
        while coming is not None:
            portion, coming = coming, self._come(waiting.popleft()) if waiting else None
            self._outside.beside.wait(portion.mark)
            for parameter in portion.parameters:
                parameter.grad = gradients.pop(parameter)
            self._optimizer.step()
            for parameter in portion.parameters:
                parameter.grad = None
            self._go(portion)
        self._settle()

    def load(self, found: dict[str, Any]) -> None:
        """Loads the optimizer's state one portion at a time, because ``load_state_dict`` creates it on the device."""
        optimizer, groups, state = self._optimizer, found["param_groups"], dict[Tensor, Any]()
        numbers = [number for group in groups for number in group["params"]]
        parameters = list(self._parameters())
        sizes = [local(parameter).nbytes for parameter in parameters]
        for part in portions(sizes, WINDOW) or [range(0)]:
            own = {
                numbers[place]: found["state"][numbers[place]]
                for place in part
                if numbers[place] in found["state"]
            }
            optimizer.load_state_dict({"state": own, "param_groups": groups})
            self._go(Portion(parameters[part.start : part.stop]))
            state |= optimizer.state
        self._settle()
        optimizer.state.update(state)

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self._optimizer.param_groups for parameter in group["params"])

    # Coming

    def _come(self, portion: Portion) -> Portion:
        """Starts to copy the portion's state to the device."""
        state, outside = self._optimizer.state, self._outside
        for parameter in portion.parameters:
            for key, value in state[parameter].items() if parameter in state else ():
                if isinstance(value, Tensor) and is_plain(value) and outside.holds(value):
                    portion.homes[parameter, key] = value
        made = {key: self._room_on_device(key[0], home) for key, home in portion.homes.items()}
        with outside.beside.lane():
            for key, home in portion.homes.items() if outside.apart else ():
                made[key].copy_(home, non_blocking=True)
            portion.mark = outside.beside.mark()
        for (parameter, key), numbers in made.items():
            state[parameter][key] = divided_as(numbers, parameter)
        return portion

    def _room_on_device(self, parameter: Tensor, home: Tensor) -> Tensor:
        if not self._outside.apart:
            return home
        with made_as(OPTIMIZER):
            return torch.empty_like(home, device=local(parameter).device)

    # Going

    def _go(self, portion: Portion) -> None:
        """Starts to copy the portion's state from the device, to its former place or to a new buffer."""
        outside, found = self._outside, dict(self._of(portion.parameters))
        homes = {
            key: home for key, value in found.items() if (home := self._home(portion, key, value)) is not None
        }
        homes |= _rooms_in(outside, {key: value for key, value in found.items() if key not in homes})
        gone = {key: value for key, value in found.items() if not outside.holds(value)}
        with outside.beside.lane():
            for key, value in gone.items():
                homes[key].copy_(value, non_blocking=True)
            mark = outside.beside.mark()
        for (parameter, name), home in homes.items():
            self._optimizer.state[parameter][name] = home
            outside.rest(home)
        self._leaving.append(([*gone.values()], mark))
        self._settle(1)

    def _of(self, parameters: Iterable[Tensor]) -> Iterator[tuple[Key, Tensor]]:
        """Yields the state tensors of the parameters that are to be offloaded: this rank's shards."""
        for parameter in parameters:
            entries = self._optimizer.state.get(parameter, {})
            for key, value in entries.items():
                numbers = local(value) if isinstance(value, Tensor) else None
                if numbers is not None and self._goes(numbers, parameter):
                    yield (parameter, key), numbers

    def _goes(self, numbers: Tensor, parameter: Tensor) -> bool:
        on_device = numbers.device == local(parameter).device and numbers.nbytes >= SMALLEST
        return is_plain(numbers) and (self._outside.holds(numbers) or on_device)

    def _home(self, portion: Portion, key: Key, value: Tensor) -> Tensor | None:
        """Returns the state's present or former place in offloaded memory. Returns None if it has none of its shape and
        type."""
        if self._outside.holds(value):
            return value
        home = portion.homes.get(key)
        alike = home is not None and home.shape == value.shape and home.dtype == value.dtype
        return home if alike else None

    def _settle(self, left: int = 0) -> None:
        """Makes the device wait until at most ``left`` portions are being copied to the host."""
        while len(self._leaving) > left:
            _left, mark = self._leaving.popleft()  # keeps the tensors alive until the device has waited
            self._outside.beside.wait(mark)


def _rooms_in(outside: Outside, states: dict[Key, Tensor]) -> dict[Key, Tensor]:
    """Allocates one buffer for all states, side by side."""
    sizes = [-(-value.nbytes // _LINE) * _LINE for value in states.values()]
    if not sizes:
        return {}
    pieces = outside.allocate(sum(sizes))[: sum(sizes)].split_with_sizes(sizes)
    return {
        key: piece[: value.nbytes].view(value.dtype).view(value.shape)
        for (key, value), piece in zip(states.items(), pieces, strict=True)
    }
