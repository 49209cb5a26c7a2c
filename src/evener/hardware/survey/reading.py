"""A survey of this machine, without measuring: what torch, the kernel and NVIDIA's library say, as one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from evener.hardware.survey import kernel
from evener.hardware.survey.build import peers, read_software, seen_cards
from evener.hardware.survey.facts import Card, Path, Plan, Software, Survey
from evener.hardware.survey.host import read_host
from evener.hardware.survey.nvml import Answers, ask_nvml, find_nvml

HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables by which torch sees fewer cards than there are."""
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
    software = read_software(evener)
    of_kernel, of_amd = kernel.nvidia_cards(), kernel.amd_cards()
    answers = _answers(find_nvml() if nvml is None else nvml, bool(of_kernel) or _uses_nvidia(software))
    cards = joined((*(answers.cards or of_kernel), *of_amd), seen_cards(software.accelerator))
    return Survey(
        host=read_host(),
        software=_with_drivers(software, answers),
        plan=plan,
        variables=variables_of_interest(),
        cards=tuple(_with_free_memory(card) for card in cards),
        paths=merged(_moved(answers.paths, answers.cards, cards), peers(cards)),
    )


def glance(plan: Plan, evener: str, *, accelerators: bool = True) -> Survey:
    """What costs next to nothing: no library is loaded for it, and no card woken that a rank does not use.

    Args:
        accelerators: Whether to look for any; not for a run that is told to keep away from them.
    """
    software = read_software(evener, libraries=False, accelerators=accelerators)
    of_kernel = (*kernel.nvidia_cards(), *kernel.amd_cards()) if accelerators else ()
    cards = joined(of_kernel, seen_cards(software.accelerator))
    return Survey(
        host=read_host(),
        software=_with_drivers(software, Answers()),
        plan=plan,
        variables=variables_of_interest(),
        cards=cards,
        paths=peers(cards),
    )


def _answers(nvml: Any, expected: bool) -> Answers:
    """What NVIDIA's library says; that it is missing matters only where it is ``expected``."""
    answers = Answers(refusal="nvidia-ml-py is not installed") if nvml is None else ask_nvml(nvml)
    return answers if expected or answers.cards else Answers()


def _uses_nvidia(software: Software) -> bool:
    return software.accelerator == "cuda" and software.cuda is not None


def _with_drivers(software: Software, answers: Answers) -> Software:
    return replace(
        software,
        nvidia_driver=answers.driver or kernel.nvidia_driver(),
        driver_cuda=answers.cuda,
        amd_driver=kernel.amd_driver(),
        nvml=answers.refusal,
    )


def variables_of_interest() -> dict[str, str]:
    """Of the environment of this process; a survey is sent to others, and holds nothing that is secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_OF_INTEREST) and not any(word in name for word in _SECRET)
    }


def joined(there: Sequence[Card], seen: Sequence[Card]) -> tuple[Card, ...]:
    """The cards that are there, each with what torch calls it and knows of it; those that only torch knows follow.

    A card is known by its uuid. Where one side has none (AMD's driver), all of a maker's are visible, or none can be
    told from the others.
    """
    by_uuid = {card.uuid: card for card in seen if card.uuid}
    found = [_as_seen(card, by_uuid.pop(card.uuid, None)) for card in there]
    known = {card.device for card in found}
    rest = [card for card in seen if card.device not in known]
    for kind in {card.kind for card in rest}:
        unnamed = [n for n, card in enumerate(found) if card.kind == kind and card.device is None]
        alike = [card for card in rest if card.kind == kind]
        if len(unnamed) == len(alike):
            for n, card in zip(unnamed, alike, strict=True):
                found[n] = _as_seen(found[n], card)
            rest = [card for card in rest if card.kind != kind]
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


def _moved(paths: Sequence[Path], before: Sequence[Card], after: Sequence[Card]) -> tuple[Path, ...]:
    """The paths, by the cards' numbers in another list; those that are not in it are left out."""
    places = {card.uuid: n for n, card in enumerate(after)}
    ends = [(places.get(before[p.a].uuid), places.get(before[p.b].uuid), p) for p in paths]
    return tuple(replace(p, a=a, b=b) for a, b, p in ends if a is not None and b is not None)


def merged(paths: Sequence[Path], told: Sequence[Path]) -> tuple[Path, ...]:
    """What two sources know of the same pairs; the second of peer access alone."""
    peer = {(path.a, path.b): path.peer for path in told}
    found = [replace(path, peer=peer.pop((path.a, path.b), None)) for path in paths]
    return (*found, *(Path(a, b, peer=known) for (a, b), known in peer.items()))
