"""Functions for accelerators of all types, by PyTorch's device-independent interfaces.

``torch.accelerator`` counts accelerators, sets the current one, synchronizes with it and reads its memory. For other
functions, such as random generator states, each device type has a module with functions of the same names. Code that is
specific to CUDA stays where it is used: the data types of NVIDIA GPUs, driver and build, and streams of scheduled
all-reduces.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from evener.errors import ConfigurationError

WITH_STREAMS = ("cuda", "xpu")
"""Device types that have streams, events with timing, and asynchronous copies from pinned memory."""


def is_accelerator(device: torch.device) -> bool:
    """Returns True for any device but ``cpu`` and ``meta``."""
    return device.type not in ("cpu", "meta")


def kind_of(name: str) -> str:
    """Returns the device type of ``name``.

    Raises:
        ConfigurationError: If torch does not know it.
    """
    try:
        return torch.device(name).type
    except RuntimeError as error:
        raise ConfigurationError(
            f"torch {torch.__version__} knows no device of kind {name!r}: ask for cpu, cuda (also for AMD's), xpu, mps "
            "or another accelerator of PyTorch's, or for mixed, which lets each host take its own"
        ) from error


def count(kind: str) -> int:
    """Returns the number of devices of a type that this process sees."""
    try:
        return int(_module(kind).device_count())
    except (AttributeError, RuntimeError):  # this PyTorch knows only the name of this type
        return 0


def name_of(device: torch.device) -> str:
    """Returns the device's product name; empty if it is not known."""
    say = getattr(_module(device), "get_device_name", None) if is_accelerator(device) else None
    return "" if say is None else str(say(device))


def whole_memory_of(device: torch.device) -> int | None:
    """Returns the bytes of the device's memory by its properties, which takes none of it. None if they do not say."""
    say = getattr(_module(device), "get_device_properties", None) if is_accelerator(device) else None
    found = None if say is None else getattr(say(device), "total_memory", None)
    return None if found is None else int(found)


def memory_of(device: torch.device) -> tuple[int, int] | None:
    """Returns the free and the total memory in bytes. Returns None if the device does not report them, as MPS before
    torch 2.14, which uses the host's memory.
    """
    # The function of the device type's own module initializes a device that was not used yet.
    ask = getattr(_module(device), "mem_get_info", torch.accelerator.get_memory_info)
    try:
        free, total = ask(device)
    except RuntimeError:
        return None
    return int(free), int(total)


def synchronize(device: torch.device) -> None:
    """Waits until an accelerator has finished all queued work. Does nothing for a CPU."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def set_current(device: torch.device) -> None:
    """Makes an accelerator the current one of this thread: a new thread begins with the first one of the process. Does
    nothing for a CPU."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def has_float64(device: torch.device) -> bool:
    """Returns True if the device supports float64, which MPS does not."""
    try:
        torch.ones((), dtype=torch.float64, device=device).add_(1)
    except (RuntimeError, TypeError):
        return False
    return True


# Random numbers


def generator_states(device: torch.device) -> list[Tensor]:
    """Returns the states of the CPU's random generator and, for an accelerator, of the device's generator."""
    states = [torch.get_rng_state()]
    return [*states, _module(device).get_rng_state(device)] if is_accelerator(device) else states


def draw_from(states: list[Tensor], device: torch.device) -> None:
    """Restores the states that :func:`generator_states` returned."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        _module(device).set_rng_state(state, device)


def seed(device: torch.device, number: int) -> None:
    """Seeds the generator of an accelerator, which must be the current device. Does nothing for a CPU."""
    if is_accelerator(device):
        _module(device).manual_seed(number)


@contextmanager
def generators_kept(*devices: torch.device) -> Iterator[None]:
    """Restores the random generators of the CPU and of ``devices`` after the block."""
    cards = [device for device in devices if is_accelerator(device)]
    # fork_rng needs a device type even without devices.
    with torch.random.fork_rng(cards, device_type=cards[0].type if cards else "cuda"):
        yield


def all_of_process() -> list[torch.device]:
    """Returns all accelerators that this process sees."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return [torch.device(kind.type, n) for n in range(torch.accelerator.device_count())] if kind else []


def _module(device: torch.device | str) -> Any:
    return torch.get_device_module(device)


def description_of(device: torch.device) -> str:
    """Describes a device, as ``cuda:0 NVIDIA H100`` or ``cpu``."""
    return f"{device} {name_of(device)}".strip()
