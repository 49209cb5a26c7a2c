"""BatchNorm over all ranks that divide the samples of a batch, or the positions of these."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from evener.borrowed.layers import AnyBatchNorm
from evener.errors import ConfigurationError
from evener.nn.batch_norm import exact_batch_norm
from evener.nn.neighbors import Neighbors
from evener.nn.peers import Peers, Ranks
from evener.runtime.mesh import DIVIDING_TERMS, Mesh


def normalize_together(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Makes the model's BatchNorm modules exact, where it has any."""
    several = mesh.group(*DIVIDING_TERMS) is not None
    if not several or not any(isinstance(module, AnyBatchNorm) for module in model.modules()):
        return model
    return exact_batch_norm(model, _peers(mesh))


def _peers(mesh: Mesh) -> Peers:
    """The ranks that divide the terms; through shared memory if they are CPU ranks of one host. A collective call."""
    # A group of its own, so that its messages in backward never meet those of the buckets.
    group = mesh.group(*DIVIDING_TERMS, use="normalization")
    assert group is not None
    if mesh.device_type != "cpu" or dist.get_backend(group) != "gloo":
        return Ranks(group)
    try:
        neighbors = Neighbors(group, mesh.timeout_seconds)
    except ConfigurationError:  # raised on every rank alike
        return Ranks(group)
    mesh.own(neighbors.close)
    return neighbors
