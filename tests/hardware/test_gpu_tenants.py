"""Other processes on a card, by a made-up NVML."""

from __future__ import annotations

import os

import pytest
import torch

from evener.hardware.gpu_tenants import CardUse, neighbours_on, uuid_of
from evener.hardware.survey.facts import Tenant
from tests.hardware.survey.fake_nvml import FakeCard, FakeNvml

GIB = 1 << 30


def fake(**settings: object) -> FakeNvml:
    mine = FakeCard(uuid="GPU-8F", free=2 * GIB, processes=[(os.getpid(), 9 * GIB), (4711, 3 * GIB)])
    return FakeNvml([FakeCard(uuid="GPU-7A"), mine], **settings)  # type: ignore[arg-type]


def test_others_of_the_same_card_are_found_by_its_name() -> None:
    nvml = fake()
    with neighbours_on("8f", nvml) as neighbours:
        assert neighbours is not None
        assert neighbours.read_usage() == CardUse(2 * GIB, 24 * GIB, (Tenant(4711, 3 * GIB),))
    assert nvml.open == 0, "closed"


def test_where_nobody_answers_nothing_is_told() -> None:
    with neighbours_on("8f", None) as neighbours:
        assert neighbours is None
    with neighbours_on("", fake()) as neighbours:
        assert neighbours is None
    with neighbours_on("8f", fake(broken="Driver Not Loaded")) as neighbours:
        assert neighbours is None
    for silent in (fake(unsupported=("nvmlDeviceGetMemoryInfo",)), fake(unsupported=("nvmlDeviceGetUUID",))):
        with neighbours_on("8f", silent) as neighbours:
            assert neighbours is not None
            assert neighbours.read_usage() is None


def test_a_cpu_has_none() -> None:
    assert uuid_of(torch.device("cpu")) == ""


@pytest.mark.gpu
def test_a_card_of_torchs_is_one_of_the_librarys() -> None:
    pynvml = pytest.importorskip("pynvml")
    with neighbours_on(uuid_of(torch.device("cuda", 0)), pynvml) as neighbours:
        assert neighbours is not None
        use = neighbours.read_usage()
        assert use is not None
        assert 0 < use.free <= use.total
