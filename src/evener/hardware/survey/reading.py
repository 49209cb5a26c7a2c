"""Surveys this machine without measurements, by combining information of torch, the kernel and NVML."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from evener.hardware.survey import kernel
from evener.hardware.survey.build import read_software, seen_cards
from evener.hardware.survey.facts import Card, Plan, Software, Survey
from evener.hardware.survey.host import read_host
from evener.hardware.survey.nvml import Answers, ask_nvml, find_nvml

_OF_INTEREST = (
    "CUDA_",
    "HIP_",
    "HSA_",
    "ROCR_",
    "ZE_",
    "NCCL_",
    "TORCH_",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "ATEN_",
)
_SECRET = ("TOKEN", "KEY", "PASSWORD", "SECRET")


def read_survey(plan: Plan, evener: str, nvml: Any = None) -> Survey:
    """Reads everything that is known without measurements. Takes some seconds if there are cards.

    Args:
        plan: The planned use of the machine.
        evener: The version of Evener.
        nvml: The module ``pynvml``, or a replacement; None for the installed module.
    """
    software, of_kernel = read_software(evener), kernel.nvidia_cards()
    module, seen = find_nvml() if nvml is None else nvml, seen_cards(software.accelerator)
    answers = Answers(refusal="nvidia-ml-py is not installed") if module is None else ask_nvml(module)
    if not any(card.kind == "nvidia" for card in (*of_kernel, *answers.cards, *seen)):
        answers = Answers()  # without a card, a missing library is no problem
    cards = joined(answers.cards or of_kernel, seen)
    return _survey(plan, software, answers, [_with_free_memory(card) for card in cards])


def glance(plan: Plan, evener: str, *, accelerators: bool = True) -> Survey:
    """Takes a quick survey: loads no libraries, and initializes no card that the ranks do not use.

    Args:
        accelerators: Whether to look for accelerators. False for a run that must not use them.
    """
    software = read_software(evener, libraries=False, accelerators=accelerators)
    of_kernel = kernel.nvidia_cards() if accelerators else ()
    return _survey(plan, software, Answers(), joined(of_kernel, seen_cards(software.accelerator)))


def _survey(plan: Plan, software: Software, answers: Answers, cards: Sequence[Card]) -> Survey:
    driver = answers.driver or kernel.nvidia_driver()
    software = replace(software, nvidia_driver=driver, driver_cuda=answers.cuda, nvml=answers.refusal)
    return Survey(read_host(), software, plan, variables_of_interest(), tuple(cards))


def variables_of_interest() -> dict[str, str]:
    """Returns the relevant environment variables of this process. Leaves out secrets, since surveys may be shared."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_OF_INTEREST) and not any(word in name for word in _SECRET)
    }


def joined(there: Sequence[Card], seen: Sequence[Card]) -> tuple[Card, ...]:
    """Merges the cards that the driver reports (``there``) with those that torch sees. Cards that only torch sees come
    last.

    Cards are matched by UUID. If the driver or torch does not report some UUIDs, the remaining cards are matched by
    their order, provided that there are as many in both lists. Otherwise they cannot be matched.
    """
    by_uuid = {card.uuid: card for card in seen if card.uuid}
    found = [_as_seen(card, by_uuid.get(card.uuid)) for card in there]
    known = {card.device for card in found}
    rest = [card for card in seen if card.device not in known]
    unnamed = [n for n, card in enumerate(found) if card.device is None]
    if len(unnamed) == len(rest) and all(card.kind == "nvidia" for card in rest):
        for n, card in zip(unnamed, rest, strict=True):
            found[n] = _as_seen(found[n], card)
        return tuple(found)
    return (*found, *rest)


def _as_seen(card: Card, seen: Card | None) -> Card:
    if seen is None:
        return card
    return replace(
        card,
        name=seen.name or card.name,
        device=seen.device,
        uuid=card.uuid or seen.uuid,
        architecture=seen.architecture or card.architecture,
        memory_nbytes=seen.memory_nbytes or card.memory_nbytes,
    )


def _with_free_memory(card: Card) -> Card:
    """Adds the free memory that torch reports, if NVML did not report it. This initializes the card."""
    if card.device is None or card.free_nbytes is not None:
        return card
    try:
        free, total = torch.accelerator.get_memory_info(card.device)
    except RuntimeError:  # a device type, or a state of the device, without this information
        return card
    return replace(card, free_nbytes=free, memory_nbytes=card.memory_nbytes or total)
