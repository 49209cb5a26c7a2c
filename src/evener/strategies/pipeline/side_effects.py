"""Finds what the code around blocks does besides returning values, which stages of a pipeline would lose or repeat.

- While code is read, it meets proxies in place of tensors. Whatever it does to real tensors happens once, and never
  again: to weights that it takes from ``self.parameters()``, to tensors in attributes, to globals.
- Where each stage runs the code again, a value that is kept from one pass to the next changes as often as stages run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from evener.components.tree_spec import taken_apart
from evener.errors import TaskError
from evener.torch_internals.dispatch import DispatchMode, written
from evener.torch_internals.modules import own_buffers, own_parameters
from evener.torch_internals.storages import StorageWeakRef, address, memory_of

_PLAIN = bool | int | float | complex | str | None
_CONSTANT = "_tensor_constant"
"""Beginning of the names of attributes in which ``torch.fx`` keeps tensors that code makes while it is read."""
State = dict[str, Any]
"""What a module holds, by the name of its attribute, or of its place in one."""


def state_of(module: nn.Module) -> State:
    """Returns the attributes of a module and what is in the containers among them; not what is in its submodules."""
    found: State = {}
    for key, value in vars(module).items():
        if key.startswith(_CONSTANT):
            continue
        found[key] = value
        for place, inner in _inside(value):
            found[_name(module, key, value, place)] = inner
    return found


def tensors_kept(module: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors in attributes of a module that are neither its parameters nor its buffers."""
    weights = {id(tensor) for tensor in (*own_parameters(module).values(), *own_buffers(module).values())}
    return {
        key: value
        for key, value in state_of(module).items()
        if isinstance(value, Tensor) and id(value) not in weights
    }


def changes(before: State, after: State) -> Iterator[str]:
    """Yields the names of what is no longer the same. Numbers and words are the same if they are equal."""
    for key in (*after, *(key for key in before if key not in after)):
        if key not in before or key not in after or not _is_same(before[key], after[key]):
            yield key


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple | deque | set):
        yield from enumerate(value)


def _name(module: nn.Module, key: str, value: Any, place: Any) -> str:
    own = value is own_buffers(module) or value is own_parameters(module) or key == "_modules"
    return str(place) if own else f"{key}[{place!r}]"


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and bool(one == other))


@contextmanager
def nothing_changed(model: nn.Module, opened: Iterable[str], tensors: bool = False) -> Iterator[None]:
    """Raises TaskError at the end of the block if ``forward`` has changed an attribute: the change would happen once,
    or in some of the stages only. The modules are as before after the block, also if it raises.

    Args:
        opened: Names of the modules whose code runs in the block.
        tensors: Whether attributes count that are tensors, what is in containers, and the modes of all modules. A model
            whose code is run again in every step may put tensors into its attributes.
    """
    modules = {name: module for name, module in model.named_modules() if name in opened}
    before = {name: state_of(module) for name, module in modules.items()}
    modes = {name: module.training for name, module in model.named_modules()}
    undo = [_restoring(module) for module in modules.values()] if tensors else []
    try:
        yield
        for name, module in modules.items():
            for key in changes(before[name], state_of(module)):
                value = vars(module).get(key)
                if tensors or (key in vars(module) and not isinstance(value, Tensor)):
                    raise TaskError(changed_words(module, key))
        for name, module in model.named_modules():
            if tensors and module.training != modes[name]:
                raise TaskError(
                    f"{type(model).__name__}.forward puts {name or 'itself'} in another mode, which would happen once, "
                    "when the model is cut into stages, and not in every step: do it inside of a block"
                )
    finally:
        for restore in undo:
            restore()


def changed_words(module: nn.Module, key: str) -> str:
    """Returns the refusal of code that changes an attribute."""
    name = type(module).__name__
    if key in own_buffers(module) or key in own_parameters(module):
        return (
            f"{name}.forward puts another tensor in the place of {key!r}, of which stages on other ranks would know "
            f"nothing: write into it (self.{key}.add_(1), self.{key}.copy_(...)), or do it inside of a block"
        )
    return (
        f"{name}.forward changes its attribute {key!r}, which would happen once, when the model is cut into stages, "
        "and not in every step: do it inside of a block, or keep it in a buffer"
    )


def _restoring(module: nn.Module) -> Callable[[], None]:
    """Returns a function that gives the module its attributes back, and to containers among them what was in them."""
    held = dict(vars(module))
    inside = [
        (value, value.copy()) for value in held.values() if isinstance(value, dict | list | set | deque)
    ]

    def restore() -> None:
        constants = {key: value for key, value in vars(module).items() if key.startswith(_CONSTANT)}
        vars(module).clear()
        vars(module).update(held | constants)
        for container, content in inside:
            container.clear()
            if isinstance(container, list | deque):
                container.extend(content)
            else:
                container.update(content)

    return restore


@contextmanager
def nothing_drawn(model: nn.Module) -> Iterator[None]:
    """Raises TaskError if random numbers were drawn in the block: these would be the same in every step."""
    drawn = torch.get_rng_state()
    yield
    if not torch.equal(drawn, torch.get_rng_state()):
        raise TaskError(
            f"{type(model).__name__}.forward draws random numbers outside of its blocks, which would be drawn once, "
            "when the model is cut into stages, and not in every step: draw them inside of a block"
        )


class OnlyProxies(DispatchMode):
    """Raises TaskError if code that is being read computes with a weight itself, not with its proxy, draws random
    numbers, or writes into a tensor that was there before.

    Args:
        weights: Name of each parameter and buffer, by the address of its memory.
    """

    def __init__(self, weights: Mapping[int, str]) -> None:
        super().__init__()
        self._weights = weights
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for place in places_in((args, kwargs)):
            if place in self._weights:
                raise TaskError(
                    f"the code around the blocks computes with {self._weights[place]} in a way that cannot be read, "
                    "such as by self.parameters()"
                )
        for place in places_in(written(func, args, kwargs)):
            if place not in self._made or self._made[place].expired():
                raise TaskError("the code around the blocks writes into a tensor that it did not make")
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            raise TaskError("the code around the blocks draws random numbers")
        found = func(*args, **kwargs)
        for tensor in taken_apart(found)[1]:
            for part in memory_of(tensor):
                storage = part.untyped_storage()
                self._made[address(storage)] = StorageWeakRef(storage)
        return found


class WeightsKept(DispatchMode):
    """Raises TaskError if the code around blocks writes into a parameter.

    Args:
        parameters: Name of each parameter, by the address of its memory.
    """

    def __init__(self, parameters: Mapping[int, str]) -> None:
        super().__init__()
        self._parameters = parameters

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for place in places_in(written(func, args, kwargs)):
            if place in self._parameters:
                raise TaskError(
                    f"the code around the blocks writes into the parameter {self._parameters[place]} (as for a copy of "
                    "the model that follows it), which each stage of a pipeline would do by itself, and with weights "
                    "that others hold: do it in a callback after the step, as evener.ema does for averages, or use "
                    "another strategy, such as 'sharded'"
                )
        return func(*args, **kwargs)


def places_in(tree: Any) -> Iterator[int]:
    """Yields the addresses of the memory of all tensors in a tree."""
    for tensor in taken_apart(tree)[1]:
        for part in memory_of(tensor):
            yield address(part.untyped_storage())


def places_of(named: Iterable[tuple[str, Tensor]]) -> dict[int, str]:
    """Returns the name of each tensor by the address of its memory."""
    return {address(part.untyped_storage()): name for name, tensor in named for part in memory_of(tensor)}
