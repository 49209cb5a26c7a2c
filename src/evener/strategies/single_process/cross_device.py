"""Modules on different devices of one process: what crosses from one to another is moved there.

A module computes on its device: what it is called with is moved there, and what it returns is moved back to where its
caller computes, so that the caller's own code finds all its values in one place::

    root, cuda:0      x ─▶ encoder ─▶ h ──┐                    ┌─▶ y + h
                                          ▼ moved        moved ┘
    decoder, cuda:1                       h ─▶ decoder ─▶ y ───┘

Two kinds of moves are saved. The children of an ``nn.Sequential`` hand on what they return as it is, for its code does
nothing else with it. And what comes back to a device from which it was moved, unchanged, is the tensor that stayed
there: of blocks that a loop calls one after the other, all on one device, each begins with what the one before left.

Moving has a gradient, which moves the other way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from evener.data.batch import map_leaves
from evener.errors import TaskError
from evener.nn.fqn import clean_name
from evener.strategies.single_process.devices import same
from evener.strategies.single_process.scatter_gather import leaves
from evener.torch_internals.version import version

Places = Mapping[str, torch.device]
"""The device of every module, by each of its names, parents before children."""


@dataclass
class Moves:
    """What was moved between devices."""

    count: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Tensors, by where they came from and where they went."""
    nbytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def clear(self) -> None:
        """Forgets what was counted."""
        self.count.clear()
        self.nbytes.clear()


class _Stayed(NamedTuple):
    """What a tensor was moved from, as it was then."""

    tensor: Tensor
    device: torch.device
    versions: tuple[int, int]
    """Of what stayed and of what was moved."""


class Mover:
    """Moves trees of tensors, and counts; a copy begins anew."""

    def __init__(self) -> None:
        self.moves = Moves()
        self._where, self._stayed = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[type[Mover], tuple[()]]:
        return Mover, ()

    def move(self, tree: Any, source: torch.device, target: torch.device) -> tuple[Any, bool]:
        """The tree with its tensors on ``target``, and whether any was elsewhere.

        Args:
            source: Where those are that do not tell: on the CPU, those that no border has seen.
        """
        moved = False

        def at_target(leaf: Any) -> Any:
            nonlocal moved
            found = self._moved(leaf, source, target)
            moved = moved or found is not leaf
            return found

        found = map_leaves(at_target, tree)
        return (found, True) if moved else (tree, False)

    def _moved(self, leaf: Any, source: torch.device, target: torch.device) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf.to(target) if hasattr(leaf, "to") and not same(source, target) else leaf
        here = self._device_of(leaf, source)
        kept = here.type == "cpu" and source.type != "cpu" and leaf not in self._where
        if here == target or kept:
            return leaf  # what a caller on a GPU keeps in the host's memory is meant to stay there
        stayed = self._what_stayed(leaf, target)
        if stayed is not None:
            return stayed
        found = leaf.to(target, non_blocking=True)
        self.moves.count[str(here), str(target)] += 1
        self.moves.nbytes[str(here), str(target)] += leaf.nbytes
        self._note(found, target)
        if not leaf.is_inference():
            self._stayed[found] = _Stayed(leaf, here, (version(leaf), version(found)))
        return found

    def note(self, tree: Any, device: torch.device) -> None:
        """Says that the tensors in it are on ``device``, where nobody has seen them yet."""
        for leaf in leaves(tree):
            if isinstance(leaf, Tensor) and leaf not in self._where:
                self._note(leaf, device)

    def _note(self, tensor: Tensor, device: torch.device) -> None:
        if tensor.device.type == "cpu" == device.type:
            self._where[tensor] = device

    def _device_of(self, tensor: Tensor, otherwise: torch.device) -> torch.device:
        """On the CPU the logical one that is noted, or else ``otherwise`` if that is one."""
        if tensor.device.type != "cpu":
            return tensor.device
        usual = otherwise if otherwise.type == "cpu" else tensor.device
        found: torch.device = self._where.get(tensor, usual)  # type: ignore[no-untyped-call]
        return found

    def _what_stayed(self, tensor: Tensor, target: torch.device) -> Tensor | None:
        stayed: _Stayed | None = self._stayed.get(tensor)  # type: ignore[no-untyped-call]
        if stayed is None or stayed.device != target:
            return None
        return stayed.tensor if stayed.versions == (version(stayed.tensor), version(tensor)) else None


class Chain:
    """An ``nn.Sequential`` with children on several devices, while it runs: it hands on what they return."""

    def __init__(self) -> None:
        self.runs = False

    def enter(self, *_: Any) -> None:
        self.runs = True

    def leave(self, *_: Any) -> None:
        self.runs = False


class Border:
    """Where a module's device begins.

    Args:
        device: The module's.
        caller: That of those who call it.
        chains: Of those who call it, the ones that hand on what it returns.
    """

    def __init__(
        self, mover: Mover, device: torch.device, caller: torch.device, chains: Sequence[Chain]
    ) -> None:
        self._mover, self._device, self._caller, self._chains = mover, device, caller, chains

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before ``forward``: what it is called with, on the module's device."""
        found, moved = self._mover.move((args, kwargs), self._caller, self._device)
        return found if moved else None

    def leave(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        """After ``forward``: what it returns, where the caller is; None to leave it as it is."""
        if any(chain.runs for chain in self._chains):
            self._mover.note(outputs, self._device)
            return None
        found, moved = self._mover.move(outputs, self._device, self._caller)
        return found if moved else None


def draw_borders(model: nn.Module, places: Places, outside: torch.device) -> Moves:
    """Has all that crosses between devices moved, from now on; returns what will have been moved.

    Args:
        outside: Where the model is called from.

    Raises:
        TaskError: If a module is called from two devices.
    """
    mover, devices = Mover(), {model.get_submodule(name): device for name, device in places.items()}
    chains = {module: Chain() for module in model.modules() if _is_mixed(module, devices)}
    for module, chain in chains.items():
        module.register_forward_pre_hook(chain.enter, prepend=True)
        module.register_forward_hook(chain.leave, always_call=True)
    for module, callers in _callers(model).items():
        own = devices[module]
        theirs = {devices[caller] for caller in callers} if module is not model else {outside}
        through = [chains[caller] for caller in callers if caller in chains]
        if len(theirs) > 1:
            name = next(name for name in places if model.get_submodule(name) is module)
            raise TaskError(
                f"{clean_name(name)} is called by modules on {' and '.join(sorted(map(str, theirs)))}, and cannot tell "
                "where to hand its outputs: place those who call it together, or give each a module of its own"
            )
        (caller,) = theirs
        if through or caller != own or module in chains:
            border = Border(mover, own, caller, through)
            module.register_forward_pre_hook(border.enter, prepend=True, with_kwargs=True)
            module.register_forward_hook(border.leave)
    return mover.moves


def _is_mixed(module: nn.Module, devices: Mapping[nn.Module, torch.device]) -> bool:
    return type(module) is nn.Sequential and any(devices[child] != devices[module] for child in module)


def _callers(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """For every module those whose ``forward`` calls it, as far as the tree tells: lists of modules call none."""
    found: dict[nn.Module, list[nn.Module]] = {model: []}
    for module in model.modules():
        if not is_list(module):
            for child in called_children(module):
                found.setdefault(child, []).append(module)
    return found


def called_children(module: nn.Module) -> Iterator[nn.Module]:
    """The children, and in place of a list of modules those in it."""
    for child in module.children():
        if is_list(child):
            yield from called_children(child)
        else:
            yield child


def is_list(module: nn.Module) -> bool:
    """Whether the module only holds others."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict)
