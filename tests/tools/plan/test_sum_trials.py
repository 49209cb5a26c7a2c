"""Other all-reduces as terms of a step that was tried with the default one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evener.core.config.run_config import RunConfig
from evener.tools.plan import Calibration, chosen_way, compared_step
from evener.tools.plan.at_scale import BACKWARD_SHARE
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.costs import StepCosts, step_time
from evener.tools.plan.plan import ways_of
from evener.tools.plan.sum_trials import SumTimes, with_all_reduces
from tests.tools.estimate.test_estimate import small
from tests.tools.plan.test_choice import DDP, SHARDED, calibration, costs, run_of

SUMS = SumTimes(
    2,
    "shared-memory",
    100,
    250,
    {
        "shared-memory": {100: 2e-3, 50: 1e-3},
        "ring": {100: 20e-3, 50: 1e-3},
        "tree": {100: 2e-3, 50: 0.5e-3},
    },
)
USUAL = costs(2, 1e-3, 40e-3)


def found(usual: StepCosts = USUAL, sums: SumTimes = SUMS) -> dict[Candidate, StepCosts]:
    return with_all_reduces({DDP: usual, SHARDED: usual}, {2: sums}, 64)


def test_what_is_left_after_backward_is_the_difference() -> None:
    """Backward takes 21 ms and fills buckets of 100 bytes after 8.5 and 17 ms."""
    backward = BACKWARD_SHARE * 32e-3
    assert SUMS.exposed_seconds("shared-memory", 32e-3) == pytest.approx(1e-3)
    assert SUMS.exposed_seconds("ring", 32e-3) == pytest.approx(100 / 250 * backward + 41e-3 - backward)
    ring, tree = (step_time(found()[replace(DDP, allreduce=name)], 64) for name in ("ring", "tree"))
    usual = step_time(USUAL, 64)
    assert ring.compute == tree.compute == usual.compute
    assert usual.communication - tree.communication == pytest.approx(0.5e-3)
    assert ring.communication > usual.communication + 20e-3


def test_only_what_sums_the_gradients_of_ddp_has_a_choice() -> None:
    assert {each for each in found() if each.strategy != "ddp"} == {SHARDED}
    assert set(found(sums=replace(SUMS, ranks=3))) == set(found())
    assert with_all_reduces({DDP: USUAL}, {4: SUMS}, 64) == {DDP: USUAL}
    unknown = replace(SUMS, default="native")
    assert set(found(sums=unknown)) == {DDP, SHARDED}


def saved(path: Path, seconds: float) -> Path:
    """A plan in which a tree saves some seconds of a step of 72 ms."""
    slow = {100: 2e-3, 50: 0.5e-3 + seconds}
    sums = replace(SUMS, seconds=SUMS.seconds | {"shared-memory": slow})
    calibration(costs=with_all_reduces({DDP: USUAL}, {2: sums}, 64)).save(path / "plan.json")
    return path / "plan.json"


def test_the_run_gets_an_all_reduce_that_is_worth_naming(tmp_path: Path) -> None:
    config, way = chosen_way(saved(tmp_path, 10e-3), RunConfig(), lambda: small(name="small"))
    assert (config.strategy, config.allreduce) == ("ddp", "tree")
    assert way.candidate.words == "ddp --allreduce tree --processes 2"
    assert way.all_reduces["default"] - way.all_reduces["tree"] == pytest.approx(10e-3)
    config, way = chosen_way(saved(tmp_path, 1e-3), RunConfig(), lambda: small(name="small"))
    assert (config.allreduce, way.candidate) == (None, DDP)
    assert set(way.all_reduces) == {"default", "ring", "tree"}


def test_ways_that_differ_in_it_alone_are_one(tmp_path: Path) -> None:
    ways = ways_of(Calibration.read(saved(tmp_path, 10e-3)), RunConfig(), 64)
    assert [way.candidate.allreduce for way in ways] == ["tree"]


def test_a_run_is_compared_with_its_own_all_reduce(tmp_path: Path) -> None:
    plan = Calibration.read(saved(tmp_path, 10e-3))
    for name, candidate in ((None, DDP), ("tree", replace(DDP, allreduce="tree"))):
        run = run_of(tmp_path, 60e-3, (32e-3, 32e-3), config={"allreduce": name})
        assert compared_step(plan, run).candidate == candidate
