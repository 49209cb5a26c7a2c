"""Whether torch, the driver and its libraries go together."""

from __future__ import annotations

from collections.abc import Iterator

from evener.hardware.diagnosis import findings as kinds
from evener.hardware.diagnosis.cards import named
from evener.hardware.diagnosis.cuda import code_for, least_driver, own_driver, text_of, version
from evener.hardware.diagnosis.findings import Finding
from evener.hardware.survey.facts import Card, Survey
from evener.hardware.survey.reading import HIDING

_MISMATCH = "version mismatch"
"""In what NVML and CUDA say of a module in the kernel that is older than the libraries."""
_MAKERS = {"nvidia": "NVIDIA's", "amd": "AMD's"}


def driver_findings(survey: Survey) -> Iterator[Finding]:
    """Of torch, driver, and which cards torch can see."""
    software = survey.software
    said = f"{software.nvml} {software.refusal}"
    if _MISMATCH in said.lower():
        yield kinds.DRIVER_MISMATCH.found(f"NVIDIA's driver says: {said.strip()}")
        return
    old = list(_too_old(survey))
    yield from old
    yield from _behind(survey) if not old else ()
    yield from _builds(survey)
    yield from _hidden(survey)
    if not old and not list(_hidden(survey)) and _usable(survey) and not survey.seen:
        yield kinds.NO_ACCESS.found(
            f"torch {software.torch} sees none of {_count(_usable(survey))}"
            + (f": {software.refusal}" if software.refusal else "")
        )
    if software.accelerator not in (None, "cuda"):
        yield kinds.UNUSED_KIND.found(
            f"torch sees {len(survey.seen)} of kind {software.accelerator}; they are left idle without --device"
        )
    if any(card.kind == "nvidia" for card in survey.cards) and software.nvml:
        yield kinds.NOT_ASKED.found(f"of NVIDIA's cards little is known: {software.nvml}")


def _too_old(survey: Survey) -> Iterator[Finding]:
    software = survey.software
    least = least_driver(software.cuda) if software.cuda else None
    if software.cuda and software.nvidia_driver and least and version(software.nvidia_driver) < least:
        yield kinds.DRIVER_TOO_OLD.found(
            f"driver {software.nvidia_driver} is older than {text_of(least)}, the oldest for CUDA {software.cuda}, "
            f"with which torch {software.torch} was built"
        )


def _behind(survey: Survey) -> Iterator[Finding]:
    software = survey.software
    if _is_behind(survey):
        known = f", and knows CUDA {software.driver_cuda}" if software.driver_cuda else ""
        yield kinds.DRIVER_BEHIND.found(
            f"driver {software.nvidia_driver} is older than CUDA {software.cuda} of torch {software.torch}{known}"
        )


def _is_behind(survey: Survey) -> bool:
    """Whether the driver is older than the CUDA of torch: by its own word, else by the table."""
    software = survey.software
    if software.cuda is None or software.nvidia_driver is None:
        return False
    if software.driver_cuda is not None:
        return version(software.driver_cuda)[:2] < version(software.cuda)[:2]
    own = own_driver(software.cuda)
    return own is not None and version(software.nvidia_driver) < own


def _builds(survey: Survey) -> Iterator[Finding]:
    """Cards of a maker that this torch was not built for."""
    built_for = {"nvidia": survey.software.cuda, "amd": survey.software.hip}
    for kind, build in built_for.items():
        cards = [card for card in survey.cards if card.kind == kind]
        if cards and build is None and not survey.seen:
            yield kinds.CPU_BUILD.found(
                f"torch {survey.software.torch} has no support for {_MAKERS[kind]} cards, of which there "
                f"{'is' if len(cards) == 1 else 'are'} {_count(cards)}"
            )


def _hidden(survey: Survey) -> Iterator[Finding]:
    usable, given = _usable(survey), _variables(survey)
    missing = [card for card in usable if card.device is None]
    if not given or not missing:
        return
    said = ", ".join(f"{name}={value!r}" for name, value in given.items())
    kind = kinds.SOME_HIDDEN if survey.seen else kinds.ALL_HIDDEN
    yield kind.found(f"with {said} torch sees {len(survey.seen)} of {_count(usable)}")


def _variables(survey: Survey) -> dict[str, str]:
    return {name: survey.variables[name] for name in HIDING if name in survey.variables}


def _usable(survey: Survey) -> list[Card]:
    """The cards of makers that this torch was built for."""
    built_for = {"nvidia": survey.software.cuda, "amd": survey.software.hip}
    return [card for card in survey.cards if built_for.get(card.kind) is not None]


def code_findings(survey: Survey) -> Iterator[Finding]:
    """Of cards that torch sees and may have no code for, or if it sees none, of those that it was built for."""
    if not survey.software.architectures:
        return
    for card in survey.seen or ([] if _variables(survey) else _usable(survey)):
        if card.architecture and card.kind == "nvidia":
            yield from _of_nvidia(card, survey)
        elif card.architecture and card.kind == "amd":
            yield from _of_amd(card, survey)


def _of_nvidia(card: Card, survey: Survey) -> Iterator[Finding]:
    architectures = survey.software.architectures
    code = code_for(card.architecture, architectures)
    if code == "none":
        yield _unsupported(card, survey)
    elif code == "ptx" and _is_behind(survey):
        yield kinds.PTX_TOO_NEW.found(
            f"{named(card)} is {card.architecture}, for which torch has PTX alone, made by CUDA "
            f"{survey.software.cuda}; driver {survey.software.nvidia_driver} is older"
        )


def _of_amd(card: Card, survey: Survey) -> Iterator[Finding]:
    """Code for one of AMD's architectures runs on no other, but where the user says that it does."""
    if (
        card.architecture not in survey.software.architectures
        and "HSA_OVERRIDE_GFX_VERSION" not in survey.variables
    ):
        yield _unsupported(card, survey)


def _unsupported(card: Card, survey: Survey) -> Finding:
    return kinds.CARD_UNSUPPORTED.found(
        f"{named(card)} is {card.architecture}, and torch {survey.software.torch} has code for "
        f"{' '.join(survey.software.architectures)}"
    )


def library_findings(survey: Survey) -> Iterator[Finding]:
    """Of cuDNN and NCCL, where cards are to train."""
    for library in survey.software.libraries if survey.seen else ():
        if library.error:
            yield kinds.LIBRARY_REFUSED.found(f"{library.name}: {library.error}")
        elif library.packaged and version(library.loaded)[:3] != version(library.packaged)[:3]:
            yield kinds.OTHER_LIBRARY.found(
                f"{library.name} {library.loaded} is loaded, {library.packaged} was installed with torch"
            )


def _count(cards: list[Card]) -> str:
    names = ", ".join(dict.fromkeys(card.name for card in cards))
    return f"{len(cards)} card{'s' if len(cards) > 1 else ''} ({names})"
