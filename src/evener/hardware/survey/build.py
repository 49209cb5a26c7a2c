"""Reads what torch was built for, the accelerators that it can use, and the libraries that it has loaded."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch

from evener.hardware.survey.facts import Card, Library, Software
from evener.hardware.survey.kernel import bare_uuid


def read_software(evener: str, *, libraries: bool = True, accelerators: bool = True) -> Software:
    """Reads the software versions, and the type of accelerator that torch finds.

    Args:
        evener: The version of Evener.
        libraries: Whether to load cuDNN and NCCL to read their versions.
        accelerators: Whether to look for accelerators, which initializes their driver.
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
        libraries=_libraries() if libraries else (),
    )


def _accelerator() -> tuple[str | None, str]:
    """Returns the device type of the accelerators, or None; and torch's message if it was built for one but finds
    none.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is not None:
            return found.type, ""
    refusal = " ".join(str(each.message) for each in said)
    if not refusal and torch.version.cuda:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except Exception as error:
            refusal = str(error)
    return None, " ".join(refusal.split())


def _libraries() -> tuple[Library, ...]:
    """Returns the libraries that torch loads for NVIDIA or AMD cards. torch has the same functions for both."""
    if torch.version.hip:
        return _library("MIOpen", "", lambda: str(_cudnn() or "")), _library("RCCL", "", _nccl)
    if torch.version.cuda:
        return (
            _library("cuDNN", "nvidia-cudnn", lambda: cudnn_text(_cudnn())),
            _library("NCCL", "nvidia-nccl", _nccl),
        )
    return ()


def _cudnn() -> int | None:
    return torch.backends.cudnn.version()  # type: ignore[no-untyped-call, no-any-return]


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _library(name: str, package: str, loaded: Callable[[], str]) -> Library:
    """Returns a library's loaded version, and the version of its pip package.

    The name of the package ends with the major version of CUDA.
    """
    packaged, major = "", (torch.version.cuda or "").partition(".")[0]
    with suppress(PackageNotFoundError):
        packaged = version(f"{package}-cu{major}") if package else ""
    try:
        return Library(name, loaded(), packaged)
    except (RuntimeError, AttributeError) as error:  # a build without NCCL has no such function
        return Library(name, "", packaged, " ".join(str(error).split()))


def cudnn_text(number: int | None) -> str:
    """Formats cuDNN's version number: ``91002`` as 9.10.2, ``8902`` as 8.9.2."""
    if not number:
        return ""
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def seen_cards(kind: str | None) -> tuple[Card, ...]:
    """Returns the cards that torch sees, in torch's order; empty if ``kind`` is None."""
    if kind is None:
        return ()
    return tuple(_seen_card(torch.device(kind, n)) for n in range(torch.accelerator.device_count()))


def _seen_card(device: torch.device) -> Card:
    """Describes a card by the properties that torch has for its device type; not all types have all of them."""
    module = torch.get_device_module(device)
    properties = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    return Card(
        name=getattr(properties, "name", device.type),
        kind={"cuda": "amd" if torch.version.hip else "nvidia"}.get(device.type, device.type),
        device=str(device),
        uuid=bare_uuid(str(getattr(properties, "uuid", ""))),
        architecture=_architecture(properties),
        memory_nbytes=getattr(properties, "total_memory", None),
    )


def _architecture(properties: object) -> str:
    """Returns the architecture: ``gfx90a`` from ``gfx90a:sramecc+:xnack-``, or ``sm_86``; empty if not known."""
    if torch.version.hip:
        return str(getattr(properties, "gcnArchName", "")).partition(":")[0]
    return (
        f"sm_{properties.major}{properties.minor}"
        if hasattr(properties, "major") and hasattr(properties, "minor")
        else ""
    )
