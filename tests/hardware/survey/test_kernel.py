from __future__ import annotations

from pathlib import Path

import pytest

from evener.hardware.survey.kernel import amd_cards, bare_uuid, numa_of, nvidia_cards, nvidia_driver

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


def test_cards_of_amds_driver_are_nodes_that_are_no_cpus(tmp_path: Path) -> None:
    written(tmp_path / "0/properties", "cpu_cores_count 32\nsimd_count 0\n")
    for node, version in ((1, 90010), (10, 110001), (2, 100300)):
        written(
            tmp_path / f"{node}/properties",
            f"simd_count 440\ngfx_target_version {version}\nlocation_id 49409\ndomain 1\n",
        )
    found = amd_cards(tmp_path)
    assert [card.architecture for card in found] == ["gfx90a", "gfx1030", "gfx1101"]
    assert {(card.kind, card.pci) for card in found} == {("amd", "0001:c1:00.1")}


def test_the_node_that_a_card_is_near_to(tmp_path: Path) -> None:
    written(tmp_path / "0000:01:00.0/numa_node", "1\n")
    written(tmp_path / "0000:02:00.0/numa_node", "-1\n")
    assert numa_of("0000:01:00.0", tmp_path) == 1
    assert numa_of("0000:02:00.0", tmp_path) is None
    assert numa_of("0000:03:00.0", tmp_path) is None


def test_a_uuid_is_the_same_for_driver_and_torch() -> None:
    assert bare_uuid("GPU-FFC79498-8ff3") == bare_uuid("ffc79498-8ff3") == "ffc79498-8ff3"
