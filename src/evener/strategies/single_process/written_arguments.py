"""Gives the caller of a module what the module has written into its arguments, if these had to be moved.

On one device caller and module share the tensors and containers of a call. ``nn.ReLU(inplace=True)`` changes its
caller's tensor, and a block of a transformer adds its keys to a list of caches. A module on another device gets copies.
So what it has changed in them is written into the originals when it returns::

    caller, cuda:0      h, caches ─── moved ──▶ h', caches'        module, cuda:1
                        h, caches ◀── written ─ what has changed
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evener.data.batch import has_to
from evener.torch_internals.autograd import version


class _Moved(NamedTuple):
    """A tensor of the caller, the one that the module got in its place, and the version of that before the call."""

    own: Tensor
    given: Tensor
    version: int


class _Holder(NamedTuple):
    """A container of the caller, the one that the module got in its place, and what that held before the call."""

    own: Any
    given: Any
    before: dict[Any, Any]


class WrittenArguments:
    """The arguments of one call of a module.

    Args:
        own: The caller's arguments.
        given: What the module gets: the same, or copies with the tensors on the module's device.
    """

    def __init__(self, own: Any, given: Any) -> None:
        self._tensors: list[_Moved] = []
        self._holders: list[_Holder] = []
        self._own: dict[int, Any] = {}
        self._walk(own, given)

    def _walk(self, own: Any, given: Any) -> None:
        self._own[id(given)] = own
        if isinstance(given, Tensor):
            if given is not own and not given.is_inference():
                self._tensors.append(_Moved(own, given, version(given)))
            return
        held, there = _contents(given), _contents(own)
        if held is None or there is None:
            return
        self._holders.append(_Holder(own, given, held))
        for key, child in held.items():
            self._walk(there[key], child)

    def tell(self, written: Callable[[Tensor, Tensor], None], to_caller: Callable[[Any], Any]) -> None:
        """Writes what has changed since the call into the caller's arguments.

        Args:
            written: Called with a tensor of the caller and the changed one, to copy that.
            to_caller: Returns a new value, moved to the caller's device.
        """
        for moved in self._tensors:
            if version(moved.given) != moved.version:
                written(moved.own, moved.given)
        for holder in self._holders:
            now = _contents(holder.given) or {}
            if now.keys() != holder.before.keys() or any(now[k] is not v for k, v in holder.before.items()):
                _write(holder.own, {key: self._of_caller(value, to_caller) for key, value in now.items()})

    def _of_caller(self, value: Any, to_caller: Callable[[Any], Any]) -> Any:
        if id(value) not in self._own:
            self._own[id(value)] = to_caller(value)  # once, if it is in several containers
        return self._own[id(value)]


def copy_into(own: Tensor, values: Tensor) -> None:
    """Writes values into a tensor, with their history. A leaf has none: it can have been written without a gradient
    only."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and not (own.is_leaf and own.requires_grad)):
        own.copy_(values)


def _contents(value: Any) -> dict[Any, Any] | None:
    """Returns what a container holds, by key; None for other objects."""
    if has_to(value):
        return None
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return {name: getattr(value, name) for name in fields}
    return None


def _write(own: Any, values: dict[Any, Any]) -> None:
    if isinstance(own, list):
        own[:] = values.values()
    elif isinstance(own, MutableMapping):
        for key in [key for key in own if key not in values]:
            del own[key]
        own.update(values)
    elif dataclasses.is_dataclass(own):
        for name, value in values.items():
            object.__setattr__(own, name, value)
