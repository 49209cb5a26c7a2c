"""Assigns modules to devices: as the user says, or by the fastest placement that fits.

In one process the devices compute one after the other. A step takes the sum of the times of all modules, each at the
speed of its device, and of the moves. The modules are ordered by their first calls and cut into one contiguous range
for each device. Of all cuts that fit, the fastest is taken; of equally fast ones, the one that moves the fewest bytes;
of these, the one whose fullest device is the least full. Dynamic programming finds it: ``best[d][j]``, the best
placement of units ``0..j-1`` on devices ``0..d``, is the minimum over ``i`` of ``best[d-1][i]`` with units ``i..j-1``
added on device ``d``. This takes O(devices * units^2). Using the best placement of a prefix is correct, because times
and moves add up and a maximum never decreases.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from evener.core.config.sizes import size_words
from evener.errors import ConfigurationError, TaskError
from evener.nn.fqn import clean_name
from evener.strategies.single_process.cross_device import called_children
from evener.strategies.single_process.devices import Devices, parse_devices
from evener.strategies.single_process.profile import Seen
from evener.torch_internals.modules import own_buffers, own_parameters

TRAINED_COPIES = 4
"""Memory for training a weight, in multiples of the weight: the weight, its gradient, and two optimizer states, as with
Adam."""


def parse_placement(text: str) -> list[tuple[str, torch.device]]:
    """Parses a placement such as ``encoder=cuda:0,blocks.1?=cuda:1`` into pairs of a module's name, or a pattern of
    names, and a device.

    Raises:
        ConfigurationError: If the format is wrong.
    """
    entries = [entry.strip().partition("=") for entry in text.split(",")]
    if not all(name and device for name, _, device in entries):
        raise ConfigurationError(
            f"placement {text!r}: write a module's name and a device for each part, as in encoder=cuda:0,decoder=cuda:1"
        )
    return [(name, parse_devices([device])[0]) for name, _, device in entries]


def said_places(
    model: nn.Module, placement: Sequence[tuple[str, torch.device]], first: torch.device
) -> dict[str, torch.device]:
    """Returns the device of every module, under all its names: the device of its entry in ``placement``, or else of its
    parent. The root is on ``first``.

    A name takes precedence over a pattern, and a later entry over an earlier one.

    Raises:
        ConfigurationError: If an entry matches no module.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    said: dict[str, torch.device] = {}
    for pattern, device in sorted(placement, key=lambda entry: entry[0] in names):
        matching = [name for name in names if name and fnmatchcase(clean_name(name), pattern)]
        if not matching:
            near = difflib.get_close_matches(pattern, names, 3) or names[1:4]
            raise ConfigurationError(
                f"placement {pattern!r} is no module of the model; there are {', '.join(near)}, ..."
            )
        said.update(dict.fromkeys(matching, device))
    places = {"": first}
    for name in names[1:]:
        places[name] = said.get(name, places[name.rpartition(".")[0]])
    return places


def check_together(model: nn.Module, places: Mapping[str, torch.device]) -> None:
    """Raises TaskError if a tensor or a module has two names that are placed on different devices."""
    found: dict[int, tuple[str, torch.device]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        device = places[module_name]
        held: dict[str, Tensor | None] = {**own_parameters(module), **own_buffers(module)}
        for thing, name in [(module, module_name), *((t, f"{module_name}.{key}") for key, t in held.items())]:
            if thing is None:
                continue
            other, there = found.setdefault(id(thing), (name, device))
            if there != device:
                raise TaskError(
                    f"{clean_name(other).strip('.')} on {there} and {clean_name(name).strip('.')} on {device} are one: "
                    "place both on the same device"
                )


# Computed


class Unit(NamedTuple):
    """Modules that are placed on one device together."""

    names: tuple[str, ...]
    seconds: float
    nbytes: int
    """Bytes needed to train them."""
    inputs: int
    """Bytes of the inputs of the first module."""


def computed_places(
    model: nn.Module,
    seen: Mapping[str, Seen],
    devices: Devices,
    speeds: Sequence[float],
    memories: Sequence[float],
) -> dict[str, torch.device]:
    """Returns the device of every module, under all its names. Modules in no unit are on the first device.

    Raises:
        ConfigurationError: If the model does not fit, or has fewer parts than there are devices.
    """
    units, base = units_of(model, seen, len(devices), max(memories))
    _check_room(units, base, devices, memories)
    chosen = cut_units(units, speeds, memories, base)
    if chosen is None:
        largest = max(units, key=lambda unit: unit.nbytes)
        raise ConfigurationError(
            f"no cut of the model's {len(units)} parts, in the order of their calls, fits the devices' memory of "
            f"{', '.join(map(size_words, memories))}; the largest part, {largest.names[0]}, takes "
            f"{size_words(largest.nbytes)}: place them by hand, or use smaller batches"
        )
    entries = [(name, devices[d]) for unit, d in zip(units, chosen, strict=True) for name in unit.names]
    return said_places(model, [(clean_name(name), device) for name, device in entries], devices[0])


def _check_room(units: Sequence[Unit], base: int, devices: Devices, memories: Sequence[float]) -> None:
    needed = base + sum(unit.nbytes for unit in units)
    if needed > sum(memories):
        raise ConfigurationError(
            f"training the model takes about {size_words(needed)} (weights, gradients, an optimizer's state, and what "
            f"a batch keeps for backward), and the {len(devices)} devices have {size_words(sum(memories))} together: "
            "use more devices, or smaller batches"
        )
    if len(units) < len(devices):
        raise ConfigurationError(
            f"the model has {len(units)} parts that can be placed apart "
            f"({', '.join(unit.names[0] for unit in units[:4])}), fewer than {len(devices)} devices: name fewer"
        )


Cost = tuple[int, int, float]
"""Nanoseconds, bytes moved, and how full the fullest device is; compared in this order."""
Way = tuple[Cost, list[int]]
"""The cost of a placement, and the device of every unit."""


def cut_units(
    units: Sequence[Unit], speeds: Sequence[float], memories: Sequence[float], base: int = 0
) -> list[int] | None:
    """Returns the device of every unit: in order, with each device used. Returns None if nothing fits.

    Args:
        base: Bytes that the first device holds besides the units.
    """
    slowness = [round(max(speeds) / speed, 3) for speed in speeds]
    time = [0, *accumulate(round(unit.seconds * 1e9) for unit in units)]
    size = [0, *accumulate(unit.nbytes for unit in units)]
    best: dict[int, Way] = {0: ((0, 0, 0.0), [])}
    for device, (slow, memory) in enumerate(zip(slowness, memories, strict=True)):
        following: dict[int, Way] = {}
        for stop in range(1, len(units) + 1):
            ways = []
            for start, ((took, moved, full), before) in best.items():
                held = size[stop] - size[start] + (base if device == 0 else 0)
                if start < stop and held <= memory:
                    more = round((time[stop] - time[start]) * slow)
                    crossing = units[start].inputs if start else 0
                    cost = (took + more, moved + crossing, max(full, _fullness(held, memory)))
                    ways.append((cost, [*before, *[device] * (stop - start)]))
            if ways:
                following[stop] = min(ways)
        best = following
    return best[len(units)][1] if len(units) in best else None


def _fullness(held: float, memory: float) -> float:
    return held if math.isinf(memory) else held / memory


def units_of(
    model: nn.Module, seen: Mapping[str, Seen], number: int, largest: float
) -> tuple[list[Unit], int]:
    """Returns the units to place, in the order of their first calls, and the bytes that belong to no unit.

    Parts are the children of the model and of each ``nn.Sequential``. The heaviest parts are divided further while
    there are fewer than ``number``, or one is larger than ``largest``. A module that is never called is used directly
    by its parent, and stays with it.
    """
    names = {module: name for name, module in model.named_modules()}

    def inner(name: str) -> list[str]:
        children = called_children(model.get_submodule(name))
        return [names[child] for child in children if names[child] in seen]

    def nbytes(name: str) -> int:
        return _weight_nbytes(model.get_submodule(name)) + seen[name].saved_nbytes

    parts = list(_through_chains(model, "", inner))
    while len(parts) < number or max(map(nbytes, parts), default=0) > largest:
        divisible = [name for name in parts if inner(name)]
        if not divisible:
            break
        heaviest = max(divisible, key=nbytes)
        parts.remove(heaviest)
        parts += _through_chains(model, heaviest, inner)
    parts.sort(key=lambda name: seen[name].order)
    return _tied_together(model, parts, seen)


def _through_chains(model: nn.Module, name: str, inner: Callable[[str], list[str]]) -> Iterator[str]:
    """Yields the called children of a module. Replaces an ``nn.Sequential`` by its own children."""
    for child in inner(name):
        if type(model.get_submodule(child)) is nn.Sequential and inner(child):
            yield from _through_chains(model, child, inner)
        else:
            yield child


def _tied_together(
    model: nn.Module, parts: Sequence[str], seen: Mapping[str, Seen]
) -> tuple[list[Unit], int]:
    """Joins parts that share tensors into units. A part that shares tensors with modules outside of all parts is in no
    unit."""
    inside = {name: {id(t) for t in held_tensors(model.get_submodule(name))} for name in parts}
    of_parts = {id(module) for name in parts for module in model.get_submodule(name).modules()}
    rest = [module for module in model.modules() if id(module) not in of_parts]
    loose = {id(tensor): tensor for module in rest for tensor in _held(module)}
    groups: list[tuple[list[str], set[int]]] = []
    for name in parts:
        if inside[name] & loose.keys():
            loose |= {id(tensor): tensor for tensor in held_tensors(model.get_submodule(name))}
            continue
        sharing = [group for group in groups if group[1] & inside[name]]
        joined = [other for group in sharing for other in group[0]]
        tensors = set().union(inside[name], *(group[1] for group in sharing))
        place = groups.index(sharing[0]) if sharing else len(groups)
        groups = [group for group in groups if group not in sharing]
        groups.insert(place, ([*joined, name], tensors))
    units = [_unit(model, names, seen) for names, _ in groups]
    in_units = {name for unit in units for name in unit.names}
    base = sum(seen[name].saved_nbytes for name in parts if name not in in_units)
    return units, base + sum(map(_training_nbytes, loose.values()))


def _unit(model: nn.Module, names: Sequence[str], seen: Mapping[str, Seen]) -> Unit:
    tensors = {id(t): t for name in names for t in held_tensors(model.get_submodule(name))}
    kept = sum(seen[name].saved_nbytes for name in names)
    return Unit(
        tuple(names),
        sum(seen[name].seconds for name in names),
        kept + sum(map(_training_nbytes, tensors.values())),
        seen[names[0]].inputs,
    )


def _weight_nbytes(module: nn.Module) -> int:
    return sum(map(_training_nbytes, {id(t): t for t in held_tensors(module)}.values()))


def held_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yields the parameters and buffers of a module and its descendants. Tied tensors come once for each name."""
    return (tensor for inner in module.modules() for tensor in _held(inner))


def _held(module: nn.Module) -> Iterator[Tensor]:
    yield from (p for p in own_parameters(module).values() if p is not None)
    yield from (b for b in own_buffers(module).values() if b is not None)


def _training_nbytes(tensor: Tensor) -> int:
    return tensor.nbytes * (TRAINED_COPIES if tensor.requires_grad else 1)
