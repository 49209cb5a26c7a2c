"""Parses the devices of one process, such as ``cuda:0,cuda:1``.

PyTorch has only one CPU device, and CPU tensors keep no device index. ``cpu:0,cpu:1`` are *logical* devices: each gets
a part of the work like any other device, so that code for several devices can be tried without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evener.errors import ConfigurationError
from evener.hardware import accelerators

Devices = tuple[torch.device, ...]


def parse_devices(names: Sequence[str]) -> Devices:
    """Returns the devices with these names.

    Raises:
        ConfigurationError: If a name is no device, or is given twice.
    """
    try:
        found = tuple(map(_device, names))
    except RuntimeError as error:
        raise ConfigurationError(
            f"devices {','.join(names)!r}: {str(error).splitlines()[0]}; write them as cuda:0,cuda:1 or cpu:0,cpu:1"
        ) from error
    twice = [str(device) for device in found if found.count(device) > 1]
    if twice:
        raise ConfigurationError(
            f"devices {','.join(names)!r}: {twice[0]} stands there twice, each is used once"
        )
    return found


def _device(name: str) -> torch.device:
    """Parses one device. Adds index 0 to a GPU named without index, because GPU tensors always have an index."""
    found = torch.device(name.strip())
    numbered = accelerators.is_accelerator(found) and found.index is None
    return torch.device(found.type, 0) if numbered else found


def devices_of(own: str | None, named: Sequence[str] | None, home: torch.device) -> Devices:
    """Returns the devices of a run that provides the model and the batches on device ``home``.

    Args:
        own: The devices given as an option of the strategy.
        named: The devices given in the settings. If neither is given, all GPUs of this process are used.

    Raises:
        ConfigurationError: If there are no devices, or ``home`` is not among them.
    """
    names = own.split(",") if own is not None else named
    if names is None and not accelerators.is_accelerator(home):
        raise ConfigurationError(
            f"on {home} the devices of one process have to be named, as in devices='cpu:0,cpu:1'"
        )
    found = parse_devices(names if names is not None else list(map(str, accelerators.all_of_process())))
    if home_of(found, home) is None:
        raise ConfigurationError(
            f"the devices {shown(found)} leave out {home}, on which this process works; name it too, or choose by "
            "CUDA_VISIBLE_DEVICES which GPUs the process sees"
        )
    return found


def home_of(devices: Devices, home: torch.device) -> int | None:
    """Returns the index of the first device that is physically ``home``. Returns None if there is none."""
    return next((place for place, device in enumerate(devices) if same(device, home)), None)


def same(one: torch.device, other: torch.device) -> bool:
    """Returns True if tensors on both devices are in the same memory."""
    if one.type != other.type:
        return False
    return one.type in ("cpu", "meta") or (one.index or 0) == (other.index or 0)


def shown(devices: Devices) -> str:
    """Returns the names of the devices for messages."""
    return ",".join(map(str, devices))


def refuse_ranks(strategy: str, world_size: int) -> None:
    """Raises ConfigurationError if there are several ranks."""
    if world_size > 1:
        raise ConfigurationError(
            f"strategy {strategy!r} is for one process with several devices, and there are {world_size} ranks, each "
            "with a device of its own: use 'ddp', or --processes 1"
        )
