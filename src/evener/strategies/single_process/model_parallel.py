"""Model parallelism by layers in one process: for a model that is too large for a single device.

The devices compute one after the other, so that several are not faster than one that could hold the whole model.
``pipeline`` keeps all devices busy at the same time, and ``ddp`` or ``sharded`` divide the samples. This strategy needs
only one process and no change of the model: tensors are moved between devices automatically
(:mod:`evener.strategies.single_process.cross_device`).

The user assigns modules to devices, or the placement is computed (:mod:`evener.strategies.single_process.placement`)
from one forward pass on the host. The model is built on the host and moved in parts, so that no device ever holds all
of it.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from evener.components.model_init import settle_on
from evener.core.config.sizes import parse_size, size_words
from evener.data.batch import map_leaves, move, tensors_in
from evener.data.loader import Loader
from evener.distributed.mesh import Layout
from evener.errors import ConfigurationError
from evener.hardware import accelerators, async_copy
from evener.hardware.async_read import Readout, read
from evener.nn.fqn import clean_name
from evener.strategies.base import Strategy
from evener.strategies.interfaces import Stepper, StrategySettings
from evener.strategies.learner import Learner
from evener.strategies.single import NoSync
from evener.strategies.single_process.cross_device import Moves, Places, draw_borders
from evener.strategies.single_process.devices import (
    Devices,
    devices_of,
    home_of,
    parse_devices,
    refuse_ranks,
    shown,
)
from evener.strategies.single_process.placement import (
    check_together,
    computed_places,
    held_tensors,
    parse_placement,
    said_places,
)
from evener.strategies.single_process.profile import Seen, profile
from evener.strategies.steppers.plain import Plain
from evener.strategies.synchronizer import Synchronizer
from evener.torch_internals.modules import own_buffers, own_parameters

N = TypeVar("N", int, float)

HOST = torch.device("cpu")
FREE = 0.9
"""Fraction of a GPU's free memory that a computed placement may use."""
_PLACE, _MOVES = "evener_device", "evener_moves"


@dataclass(frozen=True)
class Layers(Strategy):
    """Places the modules of one model on several devices of one process.

    Raises:
        ConfigurationError: If there are several ranks, if devices or the placement are invalid, or if the model does
            not fit.
        TaskError: If one tensor would be on two devices.
    """

    one_process: ClassVar[bool] = True

    devices: str | None = None
    """For example ``cuda:0,cuda:1``. None takes the devices of the settings, or else all GPUs. The model's own code
    runs on the first device."""
    placement: str | None = None
    """For example ``encoder=cuda:0,decoder=cuda:1``: names of modules, or patterns, with devices. Other modules go to
    the device of their parent. None computes the placement."""
    memory: str | None = None
    """For example ``8GiB,16GiB``: the usable memory of each device, for a computed placement. None takes the free
    memory of a GPU, and no limit on a CPU."""
    speeds: str | None = None
    """For example ``1,2``: the relative speed of each device, for a computed placement. None means equal speeds."""

    def __post_init__(self) -> None:
        named = parse_devices(self.devices.split(",")) if self.devices is not None else None
        entries = parse_placement(self.placement) if self.placement is not None else []
        if named is not None:
            check_named(entries, named)
        numbers(self.speeds, "speeds", float)
        numbers(self.memory, "memory", parse_size)
        unused = [name for name in ("memory", "speeds") if getattr(self, name) is not None]
        if entries and unused:
            raise ConfigurationError(
                f"{' and '.join(unused)} would do nothing: placement says where everything goes; leave one out"
            )

    def layout(self, world_size: int, settings: StrategySettings) -> Layout:
        refuse_ranks("layers", world_size)
        return Layout({"data": 1})

    def settle(self, divided: nn.Module, learner: Learner) -> nn.Module:
        devices = devices_of(self.devices, learner.settings.devices, learner.session.device)
        model = settle_on(divided, HOST, learner.settings.weight_type)
        places = self._places(model, devices, learner)
        part_stateless(model, places)
        check_together(model, places)
        move_modules(model, places)
        outside = devices[home_of(devices, learner.session.device) or 0]
        setattr(model, _MOVES, draw_borders(model, places, outside))
        if self.placement is None:
            print(f"layers: {in_parts(model)}", file=sys.stderr, flush=True)
        _lead_penalty(learner)
        return model

    def _places(self, model: nn.Module, devices: Devices, learner: Learner) -> Places:
        if self.placement is not None:
            entries = parse_placement(self.placement)
            check_named(entries, devices)
            return said_places(model, entries, devices[0])
        speeds = of_each(devices, numbers(self.speeds, "speeds", float), "speeds", lambda device: 1.0)
        memories = of_each(devices, numbers(self.memory, "memory", parse_size), "memory", _free)
        return computed_places(model, first_pass(model, learner), devices, speeds, memories)

    def synchronizer(self, learner: Learner) -> Synchronizer:
        return OnSeveral(learner)

    def stepper(self, learner: Learner) -> Stepper:
        return Plain(learner)


def check_named(entries: Sequence[tuple[str, torch.device]], devices: Devices) -> None:
    """Raises ConfigurationError if a placement uses a device that is not in ``devices``."""
    strange = [f"{name}={device}" for name, device in entries if device not in devices]
    if strange:
        raise ConfigurationError(
            f"placement {strange[0]!r} is on none of the devices {shown(devices)}; name its device there too"
        )


def numbers(text: str | None, what: str, convert: Callable[[str], N]) -> list[N] | None:
    """Parses a comma-separated list of numbers above 0. Returns None if ``text`` is None.

    Raises:
        ConfigurationError: If the text is no such list.
    """
    if text is None:
        return None
    try:
        found = [convert(part) for part in text.split(",")]
    except ConfigurationError:
        raise
    except ValueError:
        found = []
    if not found or not all(math.isfinite(number) and number > 0 for number in found):
        raise ConfigurationError(
            f"{what} {text!r}: write a number above 0 for each device, with commas between"
        )
    return found


def of_each(
    devices: Devices, given: Sequence[float] | None, what: str, usual: Callable[[torch.device], float]
) -> list[float]:
    """Returns one number for each device: the given ones, or the defaults that ``usual`` returns.

    Raises:
        ConfigurationError: If the number of given values differs from the number of devices.
    """
    found = [usual(device) for device in devices] if given is None else list(given)
    if len(found) != len(devices):
        raise ConfigurationError(
            f"{len(found)} numbers of {what} for {len(devices)} devices, {shown(devices)}: give one for each"
        )
    return found


def _free(device: torch.device) -> float:
    """Returns the bytes of the device that a computed placement may use; infinite on a CPU."""
    own = accelerators.memory_of(device) if accelerators.is_accelerator(device) else None
    return math.inf if own is None else FREE * own[0]


def first_pass(model: nn.Module, learner: Learner) -> Mapping[str, Seen]:
    """Profiles the modules in a forward pass over the first batch of the training set, on the host."""
    task, dataset = learner.task, learner.portion(learner.task.train)
    options: Any = {"batch_size": task.batch_size, "collate": task.collate, "convert": learner.convert}
    with Loader(dataset, None, device=HOST, **options) as loader:
        (micro,) = next(loader).micro_batches
    with learner.micro_scope(micro, 0):
        return profile(model, lambda: task.forward(model, micro.inputs))


# The model on its devices


def part_stateless(model: nn.Module, places: Places) -> None:
    """Copies modules without tensors that are used on several devices, such as one ReLU for all layers, so that each
    device has its own."""
    first: dict[nn.Module, torch.device] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if (
            first.setdefault(module, places[name]) != places[name]
            and next(held_tensors(module), None) is None
        ):
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, copy.deepcopy(module))


@torch.no_grad()
def move_modules(model: nn.Module, places: Places) -> None:
    """Moves every module's own tensors to its device. Tied tensors stay tied."""
    moved: dict[int, Tensor] = {}
    for name, device in places.items():
        module = model.get_submodule(name)
        setattr(module, _PLACE, device)
        for parameter in own_parameters(module).values():
            if parameter is not None and id(parameter) not in moved:
                moved[id(parameter)] = parameter
                parameter.data = parameter.data.to(device)
        buffers = own_buffers(module)
        for key, buffer in buffers.items():
            if buffer is not None:
                found = moved.get(id(buffer))
                new = buffer.to(device) if found is None else found
                moved[id(buffer)] = moved[id(new)] = buffers[key] = new


class Placed(NamedTuple):
    """The device and the size of a part of the model."""

    device: torch.device
    nbytes: int
    """Bytes of the part's parameters and buffers."""

    def __str__(self) -> str:
        return f"{self.device} ({size_words(self.nbytes)})"


def placement_of(model: nn.Module) -> dict[str, Placed]:
    """Returns the placement that ``layers`` has made: the parts of the model by the name of the module that each begins
    with."""
    begins: dict[str, str] = {}
    sizes: dict[str, int] = {}
    devices: dict[str, torch.device] = {}
    counted: set[int] = set()
    for name, module in model.named_modules():
        above = begins.get(name.rpartition(".")[0], "")
        device = getattr(module, _PLACE, HOST)
        begins[name] = above if name and devices[above] == device else name
        devices.setdefault(begins[name], device)
        own = {
            id(t): t
            for t in (*own_parameters(module).values(), *own_buffers(module).values())
            if t is not None
        }
        sizes[begins[name]] = sizes.get(begins[name], 0) + sum(
            tensor.nbytes for key, tensor in own.items() if key not in counted
        )
        counted |= own.keys()
    return {clean_name(name): Placed(devices[name], nbytes) for name, nbytes in sizes.items()}


def in_parts(model: nn.Module) -> str:
    """Returns the placement as one line of text."""
    return ", ".join(f"{name or 'the model'} on {part}" for name, part in placement_of(model).items())


def moves_of(model: nn.Module) -> Moves:
    """Returns the counters of moves between the devices of a model that ``layers`` has placed."""
    found: Moves = getattr(model, _MOVES)
    return found


class OnSeveral(NoSync):
    """The synchronizer of a rank with gradients on several devices. It sums nothing, because there is no other rank."""

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner)
        self._model, self._home = learner.model, learner.session.device

    @property
    def words(self) -> str:  # type: ignore[override]
        parts = ", ".join(
            f"{name or 'the model'} on {part}" for name, part in placement_of(self._model).items()
        )
        return f"none: one rank, {parts}"

    def soundness(self) -> tuple[Readout, ...]:
        devices = {p.device for p in self._model.parameters()}
        numbers = [
            self._learner.look_at(p for p in self._model.parameters() if p.device == device)
            for device in sorted(devices, key=str)
        ]
        return tuple(read(async_copy.move_tensor(number.tensor, self._home)) for number in numbers)


class Gathering(TorchFunctionMode):
    """Moves the tensors of an operation to the device of its first tensor, if they are on several devices."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (args, kwargs or {})
        devices = [tensor.device for tensor in tensors_in(given)]
        if len(set(devices)) > 1:
            given = map_leaves(
                lambda leaf: move(leaf, devices[0]) if isinstance(leaf, Tensor) else leaf, given
            )
        return func(*given[0], **given[1])


def _lead_penalty(learner: Learner) -> None:
    """Wraps the task's penalty so that it may add tensors on several devices."""
    penalty = learner.task.penalty
    if penalty is None:
        return

    def gathered(model: nn.Module) -> Tensor:
        with Gathering():
            return penalty(model)

    learner.task = dataclasses.replace(learner.task, penalty=gathered)
