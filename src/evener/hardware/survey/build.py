"""What this torch was built for and can use now, and which libraries it has loaded."""

from __future__ import annotations

import platform
import warnings
from importlib.metadata import PackageNotFoundError, version

import torch

from evener.hardware.survey.facts import Card, Library, Path, Software
from evener.hardware.survey.kernel import bare_uuid


def read_software(evener: str, *, libraries: bool = True, accelerators: bool = True) -> Software:
    """Versions, and the accelerator that torch finds.

    Args:
        evener: The version of Evener.
        libraries: Whether to load cuDNN and NCCL to ask for their versions.
        accelerators: Whether to look for any, which starts up their driver.
    """
    accelerator, refusal = _accelerator() if accelerators else (None, "")
    return Software(
        evener=evener,
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        xpu=getattr(torch.version, "xpu", None),
        architectures=tuple(torch.cuda.get_arch_list()),
        accelerator=accelerator,
        refusal=refusal,
        libraries=_libraries() if libraries and (torch.version.cuda or torch.version.hip) else (),
    )


def _accelerator() -> tuple[str | None, str]:
    """The kind of device that torch can use, and what it said if it was built for one and finds none."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is not None:
            return found.type, ""
    refusal = " ".join(str(each.message) for each in said)
    if not refusal and torch.version.cuda:
        refusal = _error_of_cuda()
    return None, " ".join(refusal.split())


def _error_of_cuda() -> str:
    """What torch raises when it is made to use a card."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:
        return str(error)
    return ""


def _libraries() -> tuple[Library, ...]:
    return (_miopen() if torch.version.hip else _cudnn(), _nccl())


def _miopen() -> Library:
    """What stands in cuDNN's place on AMD's cards, under its name in torch; the number is shown as it is."""
    try:
        return Library("MIOpen", str(torch.backends.cudnn.version() or ""))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return Library("MIOpen", "", error=" ".join(str(error).split()))


def _cudnn() -> Library:
    packaged = _packaged("nvidia-cudnn")
    try:
        number = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return Library("cuDNN", "", packaged, " ".join(str(error).split()))
    return Library("cuDNN", cudnn_text(number), packaged)


def cudnn_text(number: int | None) -> str:
    """``91002`` is 9.10.2, ``8902`` was 8.9.2."""
    if not number:
        return ""
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _nccl() -> Library:
    name, packaged = ("RCCL" if torch.version.hip else "NCCL"), _packaged("nvidia-nccl")
    try:
        found = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    except (RuntimeError, AttributeError) as error:  # a build without it has no such function
        return Library(name, "", packaged, " ".join(str(error).split()))
    return Library(name, ".".join(map(str, found)), packaged)


def _packaged(name: str) -> str:
    """The version that pip installed beside a torch for CUDA, which is in its package's name."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        return version(f"{name}-cu{major}")
    except PackageNotFoundError:
        return ""


def seen_cards(kind: str | None) -> tuple[Card, ...]:
    """The cards that torch sees, in its order; none on the CPU alone."""
    if kind is None:
        return ()
    return tuple(_seen_card(torch.device(kind, n)) for n in range(torch.accelerator.device_count()))


def _seen_card(device: torch.device) -> Card:
    """Kinds of devices differ in what they tell of themselves."""
    module = torch.get_device_module(device)
    told = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    return Card(
        name=getattr(told, "name", device.type),
        kind={"cuda": "amd" if torch.version.hip else "nvidia"}.get(device.type, device.type),
        device=str(device),
        uuid=bare_uuid(str(getattr(told, "uuid", ""))),
        architecture=_architecture(told),
        memory_nbytes=getattr(told, "total_memory", None),
    )


def _architecture(told: object) -> str:
    """``gfx90a`` of ``gfx90a:sramecc+:xnack-``, or ``sm_86``."""
    if torch.version.hip:
        return str(getattr(told, "gcnArchName", "")).partition(":")[0]
    return f"sm_{told.major}{told.minor}" if hasattr(told, "major") and hasattr(told, "minor") else ""


def peers(cards: tuple[Card, ...]) -> tuple[Path, ...]:
    """For each pair of ``cards`` that torch's CUDA or ROCm sees, whether one can read the other's memory."""
    seen = [(n, card.device) for n, card in enumerate(cards) if (card.device or "").startswith("cuda")]
    return tuple(
        Path(a, b, peer=torch.cuda.can_device_access_peer(first, second))
        for place, (a, first) in enumerate(seen)
        for b, second in seen[place + 1 :]
        if first is not None and second is not None
    )
