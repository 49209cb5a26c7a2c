"""Short names of Evener's strategies, apart from what finds them: the help of the command reads them, and is quick."""

from __future__ import annotations

STRATEGIES = {
    "single": "evener.strategies.single:Single",
    "ddp": "evener.strategies.ddp:Ddp",
    "dimension": "evener.strategies.features:FeatureParallel",
    "experts": "evener.strategies.experts:ExpertParallel",
    "tensor": "evener.strategies.tensor:TensorParallel",
    "sharded": "evener.strategies.sharded:Sharded",
    "pipeline": "evener.strategies.pipeline:Pipeline",
    "context": "evener.strategies.context:ContextParallel",
    "data_parallel": "evener.strategies.data_parallel:DataParallel",
    "layers": "evener.strategies.layers:Layers",
}
"""Those that Evener has, by their short names."""
