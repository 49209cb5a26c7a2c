"""Plans of runs that are exact in bits."""

from __future__ import annotations

import pytest

from evener.core.config.run_config import RunConfig
from evener.tools.plan.plan import with_grains


@pytest.mark.parametrize("given", [{}, {"grain": 8}, {"grain": 2, "block": 4}])
def test_trials_of_smaller_batches_have_the_grains_of_whole_ones(given: dict[str, int]) -> None:
    config = with_grains(RunConfig(exact="bits", **given), 64)
    assert (config.grain, config.block) == (given.get("grain", 4), given.get("block", 1))
    assert with_grains(config, 16) == config


def test_other_runs_have_none() -> None:
    assert with_grains(RunConfig(), 64) == RunConfig()
