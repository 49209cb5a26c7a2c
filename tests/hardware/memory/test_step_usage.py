"""What a peak was made of, from what is read and what is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.hardware.memory import CATEGORIES
from evener.hardware.memory.step_usage import NOTHING, Lap, MemoryUse, use_of

KNOWN = {"parameters": 100, "optimizer": 200, "gradients": 100, "inputs": 10, "buckets": 30}
LARGER = {**KNOWN, "parameters": 5000}


@pytest.mark.parametrize(
    ("between", "passes", "known", "activations", "other"),
    [
        (Lap(315, 320), Lap(415, 1000), KNOWN, 555, 5),  # 585 came and went, of which 30 were buckets
        (Lap(315, 900), Lap(415, 700), KNOWN, 0, 460),  # the peak was in the update, or in an evaluation
        (Lap(0, 0), Lap(50, 60), LARGER, 0, 0),  # mapped, and not in memory
        (Lap(0, 0), Lap(0, 0), {}, 0, 0),
    ],
)
def test_what_a_peak_was_made_of(
    between: Lap, passes: Lap, known: dict[str, int], activations: int, other: int
) -> None:
    parts = use_of(between, passes, known).by_category()
    assert (parts["activations"], parts["other"]) == (activations, other)


sizes = st.integers(0, 10**12)
laps = st.builds(Lap, held=sizes, peak=sizes)


def test_what_was_freed_and_is_kept_were_activations() -> None:
    parts = use_of(Lap(315, 320), Lap(700, 700), KNOWN, kept=200).by_category()
    assert (parts["activations"], parts["other"]) == (170, 90)
    hidden = use_of(Lap(315, 720), Lap(700, 700), KNOWN, kept=200).by_category()
    assert (hidden["activations"], hidden["other"]) == (170, 110)


@given(laps, laps, st.dictionaries(st.sampled_from([*KNOWN]), sizes), sizes)
def test_the_parts_add_up_to_the_peak(between: Lap, passes: Lap, known: dict[str, int], kept: int) -> None:
    use = use_of(between, passes, known, kept)
    assert sum(use.parts) == use.peak == max(between.peak, passes.peak)
    assert min(use.parts) >= 0
    assert all(use.by_category()[name] <= nbytes for name, nbytes in known.items())


@given(sizes, sizes, sizes, st.tuples(*[sizes] * len(CATEGORIES)))
def test_a_row_tells_all(held: int, peak: int, reserved: int, parts: tuple[int, ...]) -> None:
    use = MemoryUse(held, peak, reserved, parts)
    assert MemoryUse.of_row([float(number) for number in use.row()]) == use
    assert len(use.row()) == len(NOTHING.row())
