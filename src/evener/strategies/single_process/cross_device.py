"""Moves tensors between modules on different devices of one process.

The arguments of a module are moved to the module's device. Its outputs are moved back to the device of its caller, so
that the caller's own code finds all its values on one device::

    root, cuda:0      x ─▶ encoder ─▶ h ──┐                    ┌─▶ y + h
                                          ▼ moved        moved ┘
    decoder, cuda:1                       h ─▶ decoder ─▶ y ───┘

Two kinds of moves are avoided. Outputs of a child of an ``nn.Sequential`` go directly to the device of the next child,
because ``nn.Sequential`` itself does not use them. And an unchanged tensor that returns to the device it came from is
replaced by the original. So if a loop calls several blocks on one device in turn, each uses the previous block's output
without a copy.

Moves are differentiable: the gradient moves the other way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from evener.data.batch import map_leaves, tensors_in
from evener.errors import TaskError
from evener.hardware import async_copy
from evener.nn.fqn import clean_name
from evener.strategies.single_process.devices import same
from evener.strategies.single_process.written_arguments import WrittenArguments, copy_into
from evener.torch_internals.autograd import version

Places = Mapping[str, torch.device]
"""The device of every module, by each of its names; parents come before children."""


@dataclass
class Moves:
    """Counts the tensors and bytes that were moved between devices."""

    count: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The number of moved tensors, by source and target device."""
    nbytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def clear(self) -> None:
        """Resets the counters."""
        self.count.clear()
        self.nbytes.clear()


class _Stayed(NamedTuple):
    """The original of a moved tensor, on the source device."""

    tensor: Tensor
    device: torch.device
    versions: tuple[int, int]
    """Version counters of the original and of the moved tensor, at the time of the move."""


class DeviceMover:
    """Moves trees of tensors and counts the moves. A copy or an unpickled instance starts empty."""

    def __init__(self) -> None:
        self.moves = Moves()
        self._where, self._stayed = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[type[DeviceMover], tuple[()]]:
        return DeviceMover, ()

    def move(self, tree: Any, source: torch.device, target: torch.device) -> tuple[Any, bool]:
        """Returns the tree with its tensors on ``target``, and whether any of them had to be moved.

        Args:
            source: The assumed device of CPU tensors whose logical device is unknown.
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
            return leaf  # a caller on a GPU keeps some tensors in host memory on purpose
        stayed = self._what_stayed(leaf, target)
        if stayed is not None:
            return stayed
        found = async_copy.move_tensor(leaf, target)
        self.moves.count[str(here), str(target)] += 1
        self.moves.nbytes[str(here), str(target)] += leaf.nbytes
        self._note(found, target)
        if not leaf.is_inference():
            self._stayed[found] = _Stayed(leaf, here, (version(leaf), version(found)))
        return found

    def write(self, own: Tensor, changed: Tensor, caller: torch.device, device: torch.device) -> None:
        """Copies a tensor that has changed into the one in whose place it was given to a module. From now on it is
        replaced by that one if it returns.

        Args:
            caller: The assumed device of ``own``, as that of a source in :meth:`move`.
            device: The assumed device of ``changed``.
        """
        here, there = self._device_of(own, caller), self._device_of(changed, device)
        self.moves.count[str(there), str(here)] += 1
        self.moves.nbytes[str(there), str(here)] += changed.nbytes
        copy_into(own, async_copy.move_tensor(changed, here))
        self._stayed[changed] = _Stayed(own, here, (version(own), version(changed)))

    def note(self, tree: Any, device: torch.device) -> None:
        """Records ``device`` for the CPU tensors in the tree whose logical device is not recorded yet."""
        for tensor in tensors_in(tree):
            if tensor not in self._where:
                self._note(tensor, device)

    def _note(self, tensor: Tensor, device: torch.device) -> None:
        if tensor.device.type == "cpu" == device.type:
            self._where[tensor] = device

    def _device_of(self, tensor: Tensor, otherwise: torch.device) -> torch.device:
        """Returns the tensor's device. For a CPU tensor, returns the recorded logical device, or ``otherwise`` if that
        is a CPU device."""
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
    """Marks an ``nn.Sequential`` with children on several devices as running. While it runs, it passes on its
    children's outputs without moving them back."""

    def __init__(self) -> None:
        self.runs = False

    def enter(self, *_: Any) -> None:
        self.runs = True

    def leave(self, *_: Any) -> None:
        self.runs = False


class Border:
    """Hooks that move a module's arguments to its device, and its outputs to the caller's device.

    Args:
        device: The module's device.
        caller: The device of the module's callers.
        chains: The callers that are an ``nn.Sequential`` and pass on the outputs.
    """

    def __init__(
        self, mover: DeviceMover, device: torch.device, caller: torch.device, chains: Sequence[Chain]
    ) -> None:
        self._mover, self._device, self._caller, self._chains = mover, device, caller, chains
        self._calls: list[WrittenArguments] = []
        self._has_left = False

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Moves the arguments to the module's device. Returns None if nothing was moved."""
        found, moved = self._mover.move((args, kwargs), self._caller, self._device)
        self._calls.append(WrittenArguments((args, kwargs), found))
        return found if moved else None

    def leave(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        """Moves the outputs to the caller's device, and what the module has written into its arguments. Returns None
        if no output was moved."""
        self._has_left = True
        self._calls.pop().tell(self._write, self._to_caller)
        if any(chain.runs for chain in self._chains):
            self._mover.note(outputs, self._device)
            return None
        found, moved = self._mover.move(outputs, self._device, self._caller)
        return found if moved else None

    def end(self, *_: Any) -> None:
        """Forgets a call that an exception has ended. It is called after every call."""
        if not self._has_left and self._calls:
            self._calls.pop()
        self._has_left = False

    def _write(self, own: Tensor, changed: Tensor) -> None:
        self._mover.write(own, changed, self._caller, self._device)

    def _to_caller(self, value: Any) -> Any:
        return self._mover.move(value, self._device, self._caller)[0]


def draw_borders(model: nn.Module, places: Places, outside: torch.device) -> Moves:
    """Registers hooks that move tensors between devices. Returns the counters of these moves.

    Args:
        outside: The device of the code that calls the model.

    Raises:
        TaskError: If modules on two devices call the same module.
    """
    mover, devices = DeviceMover(), {model.get_submodule(name): device for name, device in places.items()}
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
            module.register_forward_hook(border.end, always_call=True)
    return mover.moves


def _is_mixed(module: nn.Module, devices: Mapping[nn.Module, torch.device]) -> bool:
    return type(module) is nn.Sequential and any(devices[child] != devices[module] for child in module)


def _callers(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """Maps every module to the modules that call it, judged by the module tree. Lists of modules call none."""
    found: dict[nn.Module, list[nn.Module]] = {model: []}
    for module in model.modules():
        if not is_list(module):
            for child in called_children(module):
                found.setdefault(child, []).append(module)
    return found


def called_children(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the children of a module. Replaces a list of modules by its entries."""
    for child in module.children():
        if is_list(child):
            yield from called_children(child)
        else:
            yield child


def is_list(module: nn.Module) -> bool:
    """Returns True if the module is only a container of other modules."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict)
