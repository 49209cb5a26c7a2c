"""A toy strategy of two axes: samples over ``data``, features over ``tensor``, of which the last rank speaks.

::

                 tensor 0   tensor 1
    data 0       rank 0     rank 1, speaks for part 0
    data 1       rank 2     rank 3, speaks for part 1
"""

from __future__ import annotations

from evener.distributed.mesh import Layout
from evener.errors import ConfigurationError
from evener.strategies.features import FeatureParallel
from evener.strategies.interfaces import StrategySettings


class TwoAxes(FeatureParallel):
    name = "two-axes"

    def layout(self, world_size: int, settings: StrategySettings) -> Layout:
        if world_size % 2:
            raise ConfigurationError(f"strategy 'two-axes' runs on an even number of ranks, not {world_size}")
        return Layout({"data": world_size // 2, "tensor": 2}, speaks={"tensor": 1})
