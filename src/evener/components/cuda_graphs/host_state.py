"""What a pass reads in Python beside its batch: attributes of modules, of the loss, and of what these refer to.

A CUDA graph keeps the numbers and addresses of its recording. So before each replay it must be known that nothing has
changed since: no attribute, no module, hook or parameter, no memory of a tensor. And a pass that itself changes
something, such as a counter in ``forward``, cannot be recorded, because a replay runs no Python.

Everything is found once, by a walk from the model and the loss through containers, objects and closures, and to the
global numbers and words that a user's functions name. A check compares identities, about 2 us for a module, and looks
closer only where one differs. It does not see what ``forward`` asks of something else, such as a clock. For that
replays are compared with eager passes.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from evener.nn.fqn import clean_name
from evener.torch_internals.autograd import hooks_of
from evener.torch_internals.modules import HOLDERS

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_LIBRARIES = ("torch.", "numpy.", "evener.", "builtins.")
_ALWAYS = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that each module has, most for hooks. Their contents are looked at, and nothing takes their place."""
MOST_PLACES = 20_000
"""Number of containers after which the walk ends. So many are data, which no pass reads as a whole."""

_TRAINED = attrgetter("requires_grad")
_Named = Iterator[tuple[str, Any]]


@dataclass
class _Place:
    """A container whose contents a pass may read."""

    name: str
    read: Callable[[], Any]
    """Returns the contents now, sized and in order."""
    write: Callable[[], object]
    """Restores the contents of the walk."""
    before: list[Any]
    names: list[str]
    """A name for each of the contents."""

    def change(self) -> str:
        """Returns the name of something in it that has changed; "" if nothing has."""
        now = list(self.read())
        if len(now) != len(self.before):
            return self.name or "an attribute of the model"
        pairs = zip(self.names, now, self.before, strict=True)
        if found := next((name for name, one, other in pairs if not _is_same(one, other)), ""):
            return found
        self.before = now
        return ""


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_is_same, one, other))
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other))


class HostState:
    """The state of a model and of other objects in Python.

    Args:
        roots: Objects, by the name that messages give them.
    """

    def __init__(self, roots: dict[str, Any]) -> None:
        self._places: list[_Place] = []
        self._empty: list[Any] = []
        self._empty_names: list[str] = []
        self._seen: dict[int, Any] = {}  # with the objects: as long as they live, no other has the same id
        self._tensors: list[Tensor] = []
        self._tensor_names: list[str] = []
        for name, root in roots.items():
            self._walk(name, root)
        self._tensors_before = self._of_tensors()

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors found, with their names."""
        return list(zip(self._tensor_names, self._tensors, strict=True))

    def change(self) -> str:
        """Returns the name of something that has changed since the walk; "" if nothing has."""
        if (tensors := self._of_tensors()) != self._tensors_before:
            pairs = zip(self.tensors, tensors, self._tensors_before, strict=True)
            return next(name for (name, _), one, other in pairs if one != other)
        if any(self._empty):
            return next(name for name, each in zip(self._empty_names, self._empty, strict=True) if each)
        for place in self._places:
            now = place.read()
            is_same = len(now) == len(place.before) and all(map(is_, now, place.before))
            if not is_same and (found := place.change()):
                return found
        return ""

    def _of_tensors(self) -> list[tuple[int, bool]]:
        """Returns the address of each tensor, and True if it is trained."""
        tensors = self._tensors
        return list(zip(map(Tensor.data_ptr, tensors), map(_TRAINED, tensors), strict=True))

    def hook(self) -> str:
        """Returns the name of a parameter with a hook on its gradient, which a graph would call once more; else ""."""
        hooked = ((name, hooks_of(tensor)) for name, tensor in self.tensors if tensor.requires_grad)
        return next((name for name, hooks in hooked if hooks is not None and hooks[0]), "")

    def restore(self) -> None:
        """Gives all containers the contents of the walk."""
        for each in self._empty:
            each.clear()
        for place in self._places:
            if place.change():
                place.write()

    def _walk(self, name: str, value: Any) -> None:
        todo = [(name, value)]
        while todo and len(self._places) < MOST_PLACES:
            name, value = todo.pop()
            if isinstance(value, (*_PLAIN, type, types.ModuleType)) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if not isinstance(value, Tensor):
                todo.extend(self._parts(name, value))
            elif type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided:
                self._tensors.append(value)
                self._tensor_names.append(clean_name(name))

    def _parts(self, name: str, value: Any) -> _Named:
        """Records a container. Yields what it holds, by name."""
        if isinstance(value, dict):
            return self._of_dict(name, value)
        if isinstance(value, list):
            before = list(value)
            names = [f"{name}[{number}]" for number in range(len(before))]
            self._record(name, value, lambda: value, partial(_refill, value, before), before, names)
            return zip(names, before, strict=True)
        if isinstance(value, tuple | frozenset):
            return ((f"{name}[{number}]", each) for number, each in enumerate(value))
        if isinstance(value, types.MethodType):
            return ((name, each) for each in (value.__self__, value.__func__))
        if isinstance(value, partial):
            return ((name, each) for each in (value.func, value.args, value.keywords))
        if isinstance(value, types.FunctionType):
            return self._of_function(name, value)
        return self._of_object(name, value)

    def _record(
        self,
        name: str,
        value: Sized,
        read: Callable[[], Any],
        write: Callable[[], object],
        before: list[Any],
        names: list[str],
    ) -> None:
        """Records what a container holds. Empty ones, such as the hooks of most modules, are looked at together."""
        if len(value):
            self._places.append(_Place(name, read, write, before, names))
        else:
            self._empty.append(value)
            self._empty_names.append(name)

    def _of_dict(self, name: str, value: dict[Any, Any]) -> _Named:
        before = dict(value)
        names = [f"{name}.{key}" if name else str(key) for key in before]
        self._record(name, value, value.values, partial(_remap, value, before), [*before.values()], names)
        return zip(names, before.values(), strict=True)

    def _of_object(self, name: str, value: Any) -> _Named:
        inside = getattr(value, "__dict__", None)
        if isinstance(value, nn.Module):
            yield from self._of_module(name, value)
        elif isinstance(inside, dict):
            yield from self._of_dict(name, inside)
        for call in ("forward", "total", "__call__"):
            yield name, getattr(type(value), call, None)

    def _of_module(self, name: str, module: nn.Module) -> _Named:
        inside = vars(module)
        before = {key: value for key, value in inside.items() if key not in _ALWAYS}
        # Of two keys at least it returns a tuple.
        size, entries = len(inside), itemgetter(*before, "training")

        def read() -> Any:
            try:
                return entries(inside) if len(inside) == size else ()
            except KeyError:
                return ()

        names = [f"{name}.{key}" if name else key for key in before]
        write = partial(_remap, inside, dict(inside))
        self._record(name, inside, read, write, [*before.values(), module.training], [*names, name])
        yield from zip(names, before.values(), strict=True)
        yield from (
            (name if key in HOLDERS else f"{name}.{key}", inside[key]) for key in inside if key in _ALWAYS
        )

    def _of_function(self, name: str, function: types.FunctionType) -> _Named:
        cells = [cell for cell in function.__closure__ or () if _is_filled(cell)]
        before = _contents(cells)
        where = f"a variable around {function.__name__}"
        read, write = partial(_contents, cells), partial(_fill, cells, before)
        self._record(where, cells, read, write, before, [where] * len(cells))
        yield from ((name, each) for each in (*before, *(function.__defaults__ or ())))
        if not f"{function.__module__}.".startswith(_LIBRARIES):
            self._record_globals(function.__globals__, function.__code__.co_names)

    def _record_globals(self, spot: dict[str, Any], names: tuple[str, ...]) -> None:
        for name in names:
            if name in spot and isinstance(spot[name], _PLAIN):
                read, write = partial(_entry, spot, name), partial(spot.__setitem__, name, spot[name])
                named = f"the global variable {name}"
                self._places.append(_Place(named, read, write, read(), [named]))


def _entry(spot: dict[str, Any], name: str) -> list[Any]:
    return [spot.get(name)]


def _refill(value: list[Any], before: list[Any]) -> None:
    value[:] = before


def _remap(value: dict[Any, Any], before: dict[Any, Any]) -> None:
    value.clear()
    value.update(before)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _contents(cells: list[types.CellType]) -> list[Any]:
    return [cell.cell_contents for cell in cells]


def _fill(cells: list[types.CellType], before: list[Any]) -> None:
    for cell, value in zip(cells, before, strict=True):
        cell.cell_contents = value
