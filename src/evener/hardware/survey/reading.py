"""A survey of this machine, without measuring: what torch, the kernel and NVIDIA's library say, as one."""

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
    """All there is to know without measuring; some seconds where there are cards.

    Args:
        plan: Who is to train here.
        evener: The version of Evener.
        nvml: The module ``pynvml``, or what stands in for it; what is installed if None.
    """
    software, of_kernel = read_software(evener), kernel.nvidia_cards()
    module, seen = find_nvml() if nvml is None else nvml, seen_cards(software.accelerator)
    answers = Answers(refusal="nvidia-ml-py is not installed") if module is None else ask_nvml(module)
    if not any(card.kind == "nvidia" for card in (*of_kernel, *answers.cards, *seen)):
        answers = Answers()  # nobody expects the library without a card
    cards = joined(answers.cards or of_kernel, seen)
    return _survey(plan, software, answers, [_with_free_memory(card) for card in cards])


def glance(plan: Plan, evener: str, *, accelerators: bool = True) -> Survey:
    """What costs next to nothing: no library is loaded for it, and no card woken that a rank does not use.

    Args:
        accelerators: Whether to look for any; not for a run that is told to keep away from them.
    """
    software = read_software(evener, libraries=False, accelerators=accelerators)
    of_kernel = kernel.nvidia_cards() if accelerators else ()
    return _survey(plan, software, Answers(), joined(of_kernel, seen_cards(software.accelerator)))


def _survey(plan: Plan, software: Software, answers: Answers, cards: Sequence[Card]) -> Survey:
    driver = answers.driver or kernel.nvidia_driver()
    software = replace(software, nvidia_driver=driver, driver_cuda=answers.cuda, nvml=answers.refusal)
    return Survey(read_host(), software, plan, variables_of_interest(), tuple(cards))


def variables_of_interest() -> dict[str, str]:
    """Of the environment of this process; a survey is sent to others, and holds nothing that is secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_OF_INTEREST) and not any(word in name for word in _SECRET)
    }


def joined(there: Sequence[Card], seen: Sequence[Card]) -> tuple[Card, ...]:
    """The cards that are there, each with what torch calls it and knows of it; those that only torch knows follow.

    A card is known by its uuid. If the driver or torch does not tell it of some, they are matched by their order where
    all of them are visible; else none can be told from the others.
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
    """As torch tells it, for cards that NVIDIA's library does not know; this wakes the card."""
    if card.device is None or card.free_nbytes is not None:
        return card
    try:
        free, total = torch.accelerator.get_memory_info(card.device)
    except RuntimeError:  # of a kind, or in a state, that does not tell
        return card
    return replace(card, free_nbytes=free, memory_nbytes=card.memory_nbytes or total)
