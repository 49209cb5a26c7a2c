"""What torch says of cards, with torch's own functions played where there are none."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evener.hardware.survey import build, reading
from evener.hardware.survey.build import read_software, seen_cards
from evener.hardware.survey.facts import Card, Library

ADA = SimpleNamespace(name="RTX 4090", major=8, minor=9, total_memory=24 << 30, uuid="FFC7-01")
INSTINCT = SimpleNamespace(
    name="MI250X", major=9, minor=0, total_memory=64 << 30, uuid="a1", gcnArchName="gfx90a:sramecc+:xnack-"
)


@pytest.fixture
def properties(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what each card tells of itself."""

    def put(*told: Any) -> None:
        module = SimpleNamespace(get_device_properties=lambda device: told[device.index])
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(told))

    return put


def test_cards_of_nvidia(properties: Any) -> None:
    properties(ADA, ADA)
    first, second = seen_cards("cuda")
    assert (first.device, second.device) == ("cuda:0", "cuda:1")
    assert (first.name, first.kind, first.architecture) == ("RTX 4090", "nvidia", "sm_89")
    assert (first.uuid, first.memory_nbytes) == ("ffc7-01", 24 << 30)


def test_cards_of_amd(properties: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    properties(INSTINCT)
    (card,) = seen_cards("cuda")
    assert (card.name, card.kind, card.architecture) == ("MI250X", "amd", "gfx90a")


def test_other_kinds_tell_what_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert seen_cards("mps") == (Card("mps", "mps", device="mps:0"),)
    assert seen_cards(None) == ()


def test_free_memory_is_torchs_where_nobody_else_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (5, 9))
    found = reading._with_free_memory(Card("a", "amd", device="cuda:0"))
    assert (found.free_nbytes, found.memory_nbytes) == (5, 9)
    told = Card("a", "nvidia", device="cuda:0", free_nbytes=7)
    assert reading._with_free_memory(told) == told

    def silent(device: str) -> None:
        raise RuntimeError

    monkeypatch.setattr(torch.accelerator, "get_memory_info", silent)
    assert reading._with_free_memory(Card("a", "xpu", device="xpu:0")).free_nbytes is None


def test_what_torch_says_when_it_finds_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)

    def warn(check_available: bool) -> None:
        warnings.warn("CUDA initialization:\n driver too old", stacklevel=1)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", warn)
    assert read_software("1").refusal == "CUDA initialization: driver too old"

    def refuse() -> None:
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert read_software("1").refusal == "", "a build for the CPU has nothing to say"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "init", refuse)
    found = read_software("1", libraries=False)
    assert (found.accelerator, found.refusal, found.libraries) == (None, "No CUDA GPUs are available", ())


def test_libraries_and_the_packages_that_they_came_in(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"nvidia-cudnn-cu12": "9.10.2.21", "nvidia-nccl-cu12": "2.27.3"}
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(build, "version", lambda name: packages[name])
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    assert read_software("1").libraries == (
        Library("cuDNN", "9.10.2", "9.10.2.21"),
        Library("NCCL", "2.27.3", "2.27.3"),
    )

    def refuse() -> None:
        raise RuntimeError("cuDNN version\n incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    monkeypatch.setattr(torch.cuda.nccl, "version", refuse)
    assert [library.error for library in read_software("1").libraries] == [
        "cuDNN version incompatibility"
    ] * 2


def test_libraries_of_rocm_have_their_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 3004000)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 22, 3))
    assert read_software("1").libraries == (Library("MIOpen", "3004000"), Library("RCCL", "2.22.3"))
