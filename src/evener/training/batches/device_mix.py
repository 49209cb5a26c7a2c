"""Checks if the ranks' devices are alike, which decides how a batch is divided if the settings name no balance."""

from __future__ import annotations

import torch
from torch.utils.data import IterableDataset

from evener.balance.throttle import Throttle
from evener.core.config.run_config import RunConfig
from evener.data.iterable import divides_itself
from evener.distributed.session import Session
from evener.hardware import accelerators
from evener.hardware.survey.host import processor_name
from evener.strategies.dataset_view import Reading
from evener.training.factory import balance_of


def settled(config: RunConfig, session: Session, reading: Reading) -> tuple[RunConfig, str]:
    """Returns the settings with a balance, and a message for the user, empty if there is none.

    A collective call if the settings name no balance. Shares stay equal for an iterable data set of which each rank
    reads a part, for then they decide which samples meet in a batch. They stay equal, too, if PyTorch is set to
    deterministic algorithms, with which the same bits are wanted again.
    """
    if config.balance is not None:
        return config, ""
    equal = config.replace(balance="equal")
    open_to_speed = balance_of(config, reading.ranks, unlike=True) == "auto" and reading.balanced
    in_parts = isinstance(reading.dataset, IterableDataset) and divides_itself(reading.dataset)
    if not open_to_speed or in_parts:
        return equal, ""
    why = why_by_speed(config, session)
    return (config.replace(balance="auto"), why) if why else (equal, "")


def why_by_speed(config: RunConfig, session: Session) -> str:
    """Returns the reason why shares follow the ranks' speed by default, or "" if they do not. A collective call."""
    said = session.control.gather_objects(
        (kind_of(session.device), torch.are_deterministic_algorithms_enabled())
    )
    why = difference([kind for kind, _ in said], config)
    if config.exact == "bits":
        return f"{why}: batches are divided by speed, as with balance auto" if why else ""
    if not why or any(wants_bits for _, wants_bits in said):
        return ""
    return (
        f"{why}: batches are divided by speed, as with balance auto. For bit-identical repeats use "
        "balance equal"
    )


def kind_of(device: torch.device) -> str:
    """Returns what is known of a device's speed without measuring it."""
    if accelerators.is_accelerator(device):
        return accelerators.name_of(device) or device.type
    return f"{torch.get_num_threads()} x {processor_name() or 'cpu'}"


def difference(kinds: list[str], config: RunConfig) -> str:
    """Returns a message that says why the ranks are unequal, or "" if nothing is known that makes them so."""
    if len(set(kinds)) > 1:
        return f"the ranks' devices are not alike ({', '.join(dict.fromkeys(kinds))})"
    return "the ranks are emulated to be unequal" if emulates(config) else ""


def emulates(config: RunConfig) -> bool:
    """Returns True if ranks are told to run at different speeds."""
    if config.throttle_at or config.throttle is None:
        return bool(config.throttle_at)
    factors = Throttle.parse(config.throttle, (), config.throttle.count(",") + 1).factors
    return len(set(factors)) > 1
