from __future__ import annotations

import math

import pytest

from evener.collectives.tuning.cost import Link


def test_a_message_pays_latency_and_bytes() -> None:
    assert Link(alpha_seconds=3.0, beta_seconds_per_byte=0.5).seconds(4) == 5


@pytest.mark.parametrize("values", [(-1e-6, 0.0), (0.0, -1e-9), (math.inf, 0.0), (0.0, math.nan)])
def test_links_cost_finite_amounts(values: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="finite costs"):
        Link(*values)
