"""Expert parallelism: divides samples and experts over the same ranks. Everything else is replicated, as with ``ddp``.

Each rank holds some experts of every :class:`~evener.nn.Experts` layer and has tokens for all of them. The rank that
holds an expert gets its tokens from all ranks, so that the expert's gradient is complete there. All other gradients are
summed over the ranks::

    rank 0   samples 0 1 2 ─▶ layers ─▶ router ─┐  ┌▶ experts 0 1 ─┐  ┌─▶ layers ─▶ loss     layers: summed
                                                ├──┤               ├──┤
    rank 1   samples 3 4   ─▶ layers ─▶ router ─┘  └▶ experts 2 3 ─┘  └─▶ layers ─▶ loss     experts: whole as they are
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from evener.components.sharded_tensor.shard_spec import ShardSpec, set_shard_spec, take_attributes
from evener.distributed.mesh import AXES, Mesh
from evener.errors import ConfigurationError, TaskError
from evener.nn.experts import STACKED, Experts
from evener.strategies.ddp import Ddp
from evener.strategies.features import check_untied
from evener.strategies.interfaces import StrategySettings

AXIS = "data"
"""The mesh axis over which experts are divided."""


_OF_ITS_HOLDER = (
    "an expert's gradient is whole on the rank that holds it, and would have to be summed over another axis; leave "
    "'experts' out, and every rank holds all experts"
)


class ExpertParallel(Ddp):
    """Divides the model's expert layers over the ranks, as equally as possible.

    Raises:
        TaskError: If the model has no expert layers, or if an expert's weight is shared with another layer.
        ConfigurationError: If there are more ranks than experts in a layer.
    """

    divides_model = True
    sums_bits = False
    combines = ()
    apart: ClassVar = dict.fromkeys(AXES, _OF_ITS_HOLDER)

    def parallelize(self, model: nn.Module, mesh: Mesh, settings: StrategySettings) -> nn.Module:
        layers = _expert_layers(model)
        # A separate group, so that the messages of forward and backward cannot mix with gradient buckets.
        group = mesh.new_group(AXIS)
        if group is not None:
            for name, layer in layers.items():
                pieces = _pieces(name, layer, mesh.degree(AXIS))
                for stacked in STACKED:
                    _cut(layer, stacked, ShardSpec(AXIS, 0, pieces, mesh.index(AXIS)))
                layer.divide(pieces, group)
        return super().parallelize(model, mesh, settings)


def _expert_layers(model: nn.Module) -> dict[str, Experts]:
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    if not layers:
        raise TaskError(
            f"strategy 'experts' divides the layers that are evener.nn.Experts; {type(model).__name__} has none: use "
            "strategy 'ddp'"
        )
    check_untied(model, [layer.get_parameter(name) for layer in layers.values() for name in STACKED])
    return layers


def _pieces(name: str, layer: Experts, degree: int) -> tuple[range, ...]:
    if degree > layer.experts:
        raise ConfigurationError(
            f"{name or 'the model'} has {layer.experts} experts, which leave some of {degree} ranks without one: use "
            f"at most {layer.experts} ranks, or strategy 'ddp'"
        )
    cuts = [layer.experts * index // degree for index in range(degree + 1)]
    return tuple(map(range, cuts, cuts[1:]))


def _cut(layer: Experts, name: str, piece: ShardSpec) -> None:
    whole = layer.get_parameter(name)
    part = nn.Parameter(piece.part(whole.detach()), whole.requires_grad)
    setattr(layer, name, set_shard_spec(take_attributes(part, vars(whole)), piece))
