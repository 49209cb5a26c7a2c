"""The samples and the experts divided over the same ranks; all else is replicated, as with ``ddp``.

Each rank holds some of the experts of every :class:`~evener.nn.Experts` and has tokens for all of them. An expert's
gradient is whole on the rank that holds it, for the tokens of all ranks have come there; the others' are summed::

    rank 0   samples 0 1 2 ─▶ layers ─▶ router ─┐  ┌▶ experts 0 1 ─┐  ┌─▶ layers ─▶ loss     layers: summed
                                                ├──┤               ├──┤
    rank 1   samples 3 4   ─▶ layers ─▶ router ─┘  └▶ experts 2 3 ─┘  └─▶ layers ─▶ loss     experts: whole as they are
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from evener.components.sharded_tensor.shard_spec import Slice, mark
from evener.distributed.mesh import AXES, Mesh
from evener.errors import ConfigurationError, TaskError
from evener.nn.experts import STACKED, Experts
from evener.strategies.ddp import Ddp
from evener.strategies.features import check_elementwise, check_untied
from evener.strategies.interfaces import Settings

AXIS = "data"
"""The axis of the mesh over which experts are divided."""


_OF_ITS_HOLDER = (
    "an expert's gradient is whole on the rank that holds it, and would have to be summed over another axis; leave "
    "'experts' out, and every rank holds all experts"
)


class ExpertParallel(Ddp):
    """The model's layers of experts divided over the ranks, as equally as can be.

    Raises:
        TaskError: If the model has none, or an expert's weight is another layer's too.
        ConfigurationError: If there are more ranks than experts in a layer.
    """

    divides_model = True
    combines = ()
    apart: ClassVar = dict.fromkeys(AXES, _OF_ITS_HOLDER)

    def parallelize(self, model: nn.Module, mesh: Mesh, settings: Settings) -> nn.Module:
        layers = _expert_layers(model)
        # A group of its own: the messages of forward and backward never meet those of the buckets.
        group = mesh.new_group(AXIS)
        if group is not None:
            for name, layer in layers.items():
                pieces = _pieces(name, layer, mesh.degree(AXIS))
                for stacked in STACKED:
                    _cut(layer, stacked, Slice(AXIS, 0, pieces, mesh.index(AXIS)))
                layer.divide(pieces, group)
        return super().parallelize(model, mesh, settings)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        check_elementwise(optimizer, "experts")


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


def _cut(layer: Experts, name: str, piece: Slice) -> None:
    whole = layer.get_parameter(name)
    setattr(layer, name, mark(nn.Parameter(piece.part(whole.detach()), whole.requires_grad), piece))
