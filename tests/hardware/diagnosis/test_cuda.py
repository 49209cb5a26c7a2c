from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.hardware.diagnosis.cuda import (
    LEAST_DRIVERS,
    OWN_DRIVERS,
    code_for,
    least_driver,
    own_driver,
    version,
)


@pytest.mark.parametrize(
    ("cuda", "least", "own"),
    [
        ("11.0", "450.80.02", "450.51.06"),
        ("11.8", "450.80.02", "520.61.05"),
        ("12.0", "525.60.13", "525.60.13"),
        ("12.4", "525.60.13", "550.54.14"),
        ("12.6", "525.60.13", "560.28.03"),
        ("12.8", "525.60.13", "570.26"),
        ("13.0", "580", "580.65.06"),
        ("12.7", "525.60.13", None),
        ("99.1", None, None),
        ("", None, None),
    ],
)
def test_the_drivers_of_a_cuda(cuda: str, least: str | None, own: str | None) -> None:
    assert (least_driver(cuda), own_driver(cuda)) == (least, own)


def test_a_newer_cuda_never_has_an_older_driver() -> None:
    least = {int(major): version(driver) for major, driver in LEAST_DRIVERS.items()}
    own = {version(cuda): version(driver) for cuda, driver in OWN_DRIVERS.items()}
    assert len(own) == 21
    assert [own[cuda] for cuda in sorted(own)] == sorted(own.values())
    for (major, _), driver in own.items():
        assert driver >= least[major] or major == 11  # the first release of 11 came with an older one
        assert all(driver < least[later] for later in least if later > major)


def test_parts_of_a_version_are_numbers() -> None:
    assert version("570.124.06") > version("570.26")
    assert version("525.60.13") < version("525.125.6") < version("530")
    assert version("") == ()


@pytest.mark.parametrize(
    ("card", "architectures", "code"),
    [
        ("sm_86", "sm_80", "binary"),  # of its major version, from an older minor one
        ("sm_80", "sm_86", "none"),
        ("sm_89", "sm_80 sm_90", "binary"),
        ("sm_90", "sm_80 sm_86", "none"),
        ("sm_90", "sm_80 compute_80", "ptx"),
        ("sm_37", "sm_50 sm_60 compute_90", "none"),
        ("sm_120", "sm_90 sm_100 compute_90", "ptx"),
        ("sm_121", "sm_120", "binary"),
        ("sm_100", "sm_120", "none"),
        ("sm_90", "sm_90a", "binary"),  # made for one card alone
        ("sm_103", "sm_100a compute_100a", "none"),
        ("sm_103", "sm_100f", "binary"),  # made for a family
        ("sm_86", "", "none"),
        ("what", "sm_80", "none"),
        ("sm_80", "what sm_80", "binary"),
    ],
)
def test_the_code_that_a_card_can_run(card: str, architectures: str, code: str) -> None:
    assert code_for(card, tuple(architectures.split())) == code


@given(st.integers(5, 12), st.integers(0, 9), st.integers(5, 12), st.integers(0, 9))
def test_ptx_runs_wherever_a_binary_does_and_on_all_that_come_later(a: int, b: int, c: int, d: int) -> None:
    card = f"sm_{a}{b}"
    if code_for(card, (f"sm_{c}{d}",)) == "binary":
        assert code_for(card, (f"compute_{c}{d}",)) == "ptx"
    assert code_for(card, (f"compute_{c}{d}",)) == ("ptx" if (a, b) >= (c, d) else "none")
