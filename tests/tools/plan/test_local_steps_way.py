"""What local steps would take is derived from data parallelism and from a single device."""

from __future__ import annotations

from functools import partial

import pytest

from evener.balance.time_model import Line
from evener.core.config.run_config import RunConfig
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.costs import StepCosts
from evener.tools.plan.local_steps_way import SYNC_EVERY, by_local_steps, fastest_by_local_steps
from evener.tools.plan.plan import predicted
from evener.tools.plan.result import Way

BATCH_SIZE = 40
CONFIG = RunConfig(device="cpu")
TIMED = partial(predicted, config=CONFIG, batch_size=BATCH_SIZE)


def way(ranks: int, rest: Line) -> Way:
    candidate = Candidate(ranks, "ddp" if ranks > 1 else "single")
    costs = StepCosts((Line(0.0, 0.01),) * ranks, ranks, rest=rest, spread=0.05, sizes=(BATCH_SIZE,))
    return Way(candidate, TIMED(costs, candidate), costs)


def test_what_a_single_device_does_after_its_passes_stays_and_the_rest_is_rare() -> None:
    found = by_local_steps(way(4, Line(0.5, 0.001)), TIMED, Line(0.02, 0.0))
    assert found.candidate.words == f"diloco --strategy-option sync_every={SYNC_EVERY} --processes 4"
    expected = 0.01 * BATCH_SIZE / 4 + 0.02 + (0.48 + 0.001 * BATCH_SIZE) / SYNC_EVERY
    assert found.time.seconds == pytest.approx(expected)
    assert found.time.spread > 0.05
    assert not found.costs.is_measured
    assert found.algorithm


@pytest.mark.parametrize("rest", [Line(0.9, -0.01), Line(-0.1, 0.015)])
def test_what_falls_or_rises_with_the_batch_is_rare_too(rest: Line) -> None:
    """Both are 0.5 s after the passes. For a single device, less than nothing was measured after its own."""
    usual, found = way(4, rest), by_local_steps(way(4, rest), TIMED, Line(-0.01, 0.0))
    assert usual.time.communication == pytest.approx(0.5)
    assert 0 < found.time.communication < 2 * 0.9 / SYNC_EVERY


def test_it_is_shown_where_messages_take_much_of_a_step() -> None:
    slow = [way(1, Line(0.02, 0.0)), way(2, Line(0.5, 0.0)), way(4, Line(0.6, 0.0))]
    found = fastest_by_local_steps(slow, CONFIG, TIMED)
    assert found is not None
    assert found.candidate.ranks == 4
    fast = [way(1, Line(0.02, 0.0)), way(2, Line(0.03, 0.0)), way(4, Line(0.03, 0.0))]
    assert fastest_by_local_steps(fast, CONFIG, TIMED) is None


def test_it_is_not_shown_where_it_cannot_be() -> None:
    slow = [way(1, Line(0.02, 0.0)), way(2, Line(0.5, 0.0))]
    assert fastest_by_local_steps(slow[1:], CONFIG, TIMED) is None
    assert fastest_by_local_steps(slow[:1], CONFIG, TIMED) is None
    assert fastest_by_local_steps(slow, RunConfig(device="cpu", update_in_backward=True), TIMED) is None
