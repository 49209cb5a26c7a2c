"""Devices that are no CPU, of whatever kind, by what PyTorch has for all of them.

``torch.accelerator`` counts them, sets the current one, waits for it and reads its memory. For what it lacks, such as
the states of random generators, each kind has a module with functions of the same names. What is CUDA's own stays where
it is used: what a card of NVIDIA's can compute in, its driver and build, and the streams of scheduled all-reduces.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from evener.errors import ConfigurationError

WITH_STREAMS = ("cuda", "xpu")
"""Kinds whose work is queued in streams with events that tell time, and that read pinned memory by themselves."""


def is_accelerator(device: torch.device) -> bool:
    """Whether it is a device beside the CPU; ``meta`` is none."""
    return device.type not in ("cpu", "meta")


def kind_of(name: str) -> str:
    """The kind of device that ``name`` names.

    Raises:
        ConfigurationError: If torch knows none of it.
    """
    try:
        return torch.device(name).type
    except RuntimeError as error:
        raise ConfigurationError(
            f"torch {torch.__version__} knows no device of kind {name!r}: ask for cpu, cuda (also for AMD's), xpu, mps "
            "or another accelerator of PyTorch's, or for mixed, which lets each host take its own"
        ) from error


def count(kind: str) -> int:
    """How many there are of a kind, for this process."""
    try:
        return int(_module(kind).device_count())
    except (AttributeError, RuntimeError):  # a kind that this PyTorch knows by its name alone
        return 0


def name_of(device: torch.device) -> str:
    """What the maker calls it; empty where nobody says."""
    say = getattr(_module(device), "get_device_name", None) if is_accelerator(device) else None
    return "" if say is None else str(say(device))


def memory_of(device: torch.device) -> tuple[int, int] | None:
    """Bytes that are free, and all; None where it does not tell: MPS before torch 2.14, whose memory is the host's."""
    # Those of the kind's own module start up a device that was not used yet.
    ask = getattr(_module(device), "mem_get_info", torch.accelerator.get_memory_info)
    try:
        free, total = ask(device)
    except RuntimeError:
        return None
    return int(free), int(total)


def synchronize(device: torch.device) -> None:
    """Waits until an accelerator has done all that was queued."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def has_float64(device: torch.device) -> bool:
    """Whether it computes in float64, as MPS does not."""
    try:
        torch.ones((), dtype=torch.float64, device=device).add_(1)
    except (RuntimeError, TypeError):
        return False
    return True


# Random numbers


def generator_states(device: torch.device) -> list[Tensor]:
    """That of the host's generator and, of an accelerator, its own."""
    states = [torch.get_rng_state()]
    return [*states, _module(device).get_rng_state(device)] if is_accelerator(device) else states


def draw_from(states: list[Tensor], device: torch.device) -> None:
    """Sets what :func:`generator_states` gave."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        _module(device).set_rng_state(state, device)


def seed(device: torch.device, number: int) -> None:
    """Seeds the generator of an accelerator, which is the current one; no other has one of its own."""
    if is_accelerator(device):
        _module(device).manual_seed(number)


@contextmanager
def generators_kept(*devices: torch.device) -> Iterator[None]:
    """What is drawn in the block, on the host and on ``devices``, moves no generator."""
    cards = [device for device in devices if is_accelerator(device)]
    # A kind must be said also where there is no device of it.
    with torch.random.fork_rng(cards, device_type=cards[0].type if cards else "cuda"):
        yield


def all_of_process() -> list[torch.device]:
    """Every accelerator that this process sees."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return [torch.device(kind.type, n) for n in range(torch.accelerator.device_count())] if kind else []


def _module(device: torch.device | str) -> Any:
    return torch.get_device_module(device)


def words_of(device: torch.device) -> str:
    """``cuda:0 NVIDIA H100``, or ``cpu``."""
    return f"{device} {name_of(device)}".strip()
