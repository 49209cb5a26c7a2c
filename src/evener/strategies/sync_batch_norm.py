"""BatchNorm over all ranks that divide the samples of a batch, or the positions of these; or by each rank's own."""

from __future__ import annotations

import warnings
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from evener.distributed.hosts import all_gather
from evener.distributed.mesh import DIVIDING_TERMS, Mesh
from evener.errors import ConfigurationError
from evener.nn.batch_norm import BatchNorm, exact_batch_norm, local_batch_norm
from evener.nn.batch_norm_peers import Peers, Ranks
from evener.strategies.batch_norm_shm import Neighbors
from evener.strategies.learner import Learner
from evener.torch_internals.layers import AnyBatchNorm

_peers: WeakKeyDictionary[Mesh, Peers] = WeakKeyDictionary()


def normalize_together(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Makes the model's BatchNorm modules exact, where it has any that are not to be local."""
    group = mesh.group(*DIVIDING_TERMS)  # of one rank where that is all there are
    if group is None or group.size() == 1 or not any(map(_is_meant, model.modules())):
        return model
    if mesh not in _peers:  # several strategies over one mesh ask in turn
        _peers[mesh] = _meet(mesh)
    return exact_batch_norm(model, _peers[mesh])


def _is_meant(module: nn.Module) -> bool:
    return isinstance(module, AnyBatchNorm) and getattr(module, "is_exact", True)


def _meet(mesh: Mesh) -> Peers:
    """The ranks that divide the terms; through shared memory if they are CPU ranks of one host. A collective call."""
    # A group of its own, so that its messages in backward never meet those of the buckets.
    group = mesh.group(*DIVIDING_TERMS, use="normalization")
    assert group is not None
    # Where hosts have different kinds of devices, gloo joins ranks with memory to share and ranks without.
    if dist.get_backend(group) != "gloo" or not all(all_gather(mesh.device_type == "cpu", group)):
        return Ranks(group)
    try:
        neighbors = Neighbors(group, mesh.timeout_seconds)
    except ConfigurationError:  # raised on every rank alike
        return Ranks(group)
    mesh.own(neighbors.close)
    return neighbors


def normalize_apart(model: nn.Module, learner: Learner, one_process: bool) -> None:
    """Has the model's BatchNorm modules normalize by the samples of each rank alone.

    Warns:
        UserWarning: On rank 0, if the model has none.

    Raises:
        ConfigurationError: If a rank has no samples of its own to normalize by.
    """
    if one_process:
        raise ConfigurationError(
            f"batch_norm=local is for ranks, and strategy {learner.name!r} has one, whose devices normalize together: "
            "leave it out, or use ddp with a rank for each device"
        )
    if learner.mesh.degree("context") > 1:
        raise ConfigurationError(
            "batch_norm=local normalizes by samples of one rank, and over the axis 'context' ranks have positions of "
            "the same samples: leave it out, or use a mesh without that axis"
        )
    if learner.mesh.rank == 0 and not any(isinstance(module, AnyBatchNorm) for module in model.modules()):
        warnings.warn(
            "batch_norm=local changes nothing: the model has no BatchNorm of torch.nn", stacklevel=2
        )
    local_batch_norm(model)


def words_of_normalization(learner: Learner) -> str:
    """How the model's BatchNorm normalizes, if not exactly; else nothing."""
    if learner.settings.batch_norm == "exact" or learner.data.degree == 1:
        return ""
    if not any(isinstance(module, BatchNorm) for module in learner.model.modules()):
        return ""
    return "BatchNorm by each rank's own samples (batch_norm=local): not the training of one device"
