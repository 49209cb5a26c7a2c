from __future__ import annotations

from pathlib import Path

import pytest

from evener.hardware.survey.kernel import bare_uuid, nvidia_cards, nvidia_driver

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs@u22)\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC version:  12.2.0\n"


def written(place: Path, text: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


@pytest.mark.parametrize(
    ("text", "version"),
    [(OPEN, "580.95.05"), (CLOSED, "535.104.05"), ("", None), ("NVRM version: none", None)],
)
def test_the_driver_says_its_version(text: str, version: str | None, tmp_path: Path) -> None:
    written(tmp_path / "version", text)
    assert nvidia_driver(tmp_path) == version
    assert nvidia_driver(tmp_path / "absent") is None


def test_cards_of_nvidias_driver(tmp_path: Path) -> None:
    written(
        tmp_path / "gpus/0000:C1:00.0/information",
        "Model: \t\t NVIDIA GeForce RTX 3090\nGPU UUID: \t GPU-8F1c\nBus Location: \t 0000:c1:00.0\n",
    )
    written(tmp_path / "gpus/0000:01:00.0/information", "")
    first, second = nvidia_cards(tmp_path)
    assert (first.name, first.pci, first.uuid) == ("NVIDIA card", "0000:01:00.0", "")
    assert (second.name, second.pci, second.uuid) == ("NVIDIA GeForce RTX 3090", "0000:c1:00.0", "8f1c")
    assert first.device is None
    assert nvidia_cards(tmp_path / "absent") == ()


def test_a_uuid_is_the_same_for_driver_and_torch() -> None:
    assert bare_uuid("GPU-FFC79498-8ff3") == bare_uuid("ffc79498-8ff3") == "ffc79498-8ff3"
