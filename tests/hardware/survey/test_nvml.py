from __future__ import annotations

import os

import pytest
import torch

from evener.hardware.survey.facts import Tenant
from evener.hardware.survey.nvml import ask_brakes, ask_nvml, find_nvml
from tests.hardware.survey.fake_nvml import ANSWERS, CONSTANTS, FakeCard, FakeNvml

NEEDED = {"nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"}


def test_what_a_card_tells_of_itself() -> None:
    card = FakeCard(
        name=b"Tesla V100",
        uuid="GPU-AB",
        bus=b"00000000:3B:00.0",
        capability=(7, 0),
        width=8,
        mode=3,
        mig=True,
        errors=2,
        remapped=(5, 1, 1, 0),
        watts=(250, 300),
        processes=[(os.getpid(), 1 << 30), (77, 5 << 20), (78, None)],
    )
    nvml = FakeNvml([card])
    answers = ask_nvml(nvml)
    (found,) = answers.cards
    assert (answers.driver, answers.cuda, answers.refusal) == ("570.124.06", "12.8", "")
    assert (found.name, found.uuid, found.pci, found.architecture) == (
        "Tesla V100",
        "ab",
        "0000:3b:00.0",
        "sm_70",
    )
    assert (found.memory_nbytes, found.free_nbytes) == (24 << 30, 20 << 30)
    assert (found.pcie_generation, found.pcie_width, found.pcie_widest) == (4, 8, 16)
    assert (found.temperature, found.compute_mode, found.mig) == (61, "exclusive", True)
    assert found.memory_errors == 2 + 1
    assert (found.power_limit_watts, found.power_default_watts) == (250, 300)
    assert found.tenants == (Tenant(77, 5 << 20), Tenant(78, 0)), "this process is not another"
    assert found.device is None, "which is torch's to say"
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("reasons", "brakes"),
    [
        (0x0, ()),
        (0x1, ()),
        (0x4, ()),
        (0x20, ("heat",)),
        (0x48, ("heat",)),
        (0x88, ("power",)),
        (0xE8, ("heat", "power")),
        (0x8, ("heat or power",)),
    ],
    ids=["none", "idle", "cap", "software", "hardware", "brake", "both", "not told"],
)
def test_why_clocks_are_low(reasons: int, brakes: tuple[str, ...]) -> None:
    nvml = FakeNvml([FakeCard(reasons=reasons)])
    assert ask_nvml(nvml).cards[0].brakes == brakes
    assert ask_brakes(nvml) == {"0": brakes}


@pytest.mark.parametrize("name", sorted(ANSWERS.keys() - NEEDED))
def test_a_question_that_is_not_answered_is_left_open(name: str) -> None:
    """By the driver, or because this version of the module does not know it."""
    cards = [FakeCard(), FakeCard(bus="00000000:02:00.0")]
    for nvml in (FakeNvml(cards, unsupported=(name,)), FakeNvml(cards, without=(name,))):
        answers = ask_nvml(nvml)
        assert len(answers.cards) == 2
        assert not answers.refusal


def test_a_library_that_does_not_start_says_why() -> None:
    nvml = FakeNvml([FakeCard()], broken="Driver/library version mismatch")
    assert ask_nvml(nvml).refusal == "Driver/library version mismatch"
    assert ask_nvml(nvml).cards == ()
    assert ask_brakes(nvml) == {}


def test_the_module_has_every_name_that_is_asked() -> None:
    nvml = pytest.importorskip("pynvml")
    assert not [name for name in (*ANSWERS, "NVMLError") if not hasattr(nvml, name)]
    assert {name: getattr(nvml, name) for name in CONSTANTS} == CONSTANTS
    assert find_nvml() is nvml


@pytest.mark.gpu
def test_a_real_card_says_the_same_as_torch() -> None:
    nvml = find_nvml()
    if nvml is None:
        pytest.skip("nvidia-ml-py is not installed")
    answers = ask_nvml(nvml)
    told = torch.cuda.get_device_properties(0)
    (card,) = [card for card in answers.cards if card.uuid == str(told.uuid).lower()]
    assert card.name == told.name
    assert card.architecture == f"sm_{told.major}{told.minor}"
    assert card.memory_nbytes is not None
    assert abs(card.memory_nbytes - told.total_memory) < 2 << 30
    assert card.temperature is not None
    assert answers.driver
