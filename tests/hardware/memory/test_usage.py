"""What is in use, and was at most since the last time."""

from __future__ import annotations

import sys

import pytest
import torch

from evener.hardware.memory.usage import CudaUsage, ProcessPeakUsage, Resident, gauge_of

MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_a_peak_is_told_once() -> None:
    """64 MiB, which the C library gives back to the system at once."""
    gauge = Resident()
    gauge.lap()
    before = gauge.lap()
    large = torch.ones(16 * MIB)
    held = gauge.lap()
    del large
    at_last, after = gauge.lap(), gauge.lap()
    assert held.held - before.held >= 60 * MIB
    assert at_last.peak - before.held >= 60 * MIB
    assert after.peak - before.held <= 30 * MIB
    assert after.reserved == 0


def test_elsewhere_the_most_of_a_life_is_known() -> None:
    assert ProcessPeakUsage().lap().peak >= 10 * MIB


@pytest.mark.gpu
def test_a_card_is_read_by_its_allocator() -> None:
    gauge = gauge_of(torch.device("cuda", 0))
    assert isinstance(gauge, CudaUsage)
    gauge.lap()
    kept = torch.ones(MIB, device="cuda")
    use = gauge.lap()
    assert use.reserved >= use.held >= kept.nbytes
    assert use.peak >= use.held
