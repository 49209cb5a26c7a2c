"""BatchNorm over all ranks that divide a batch or its sequences (exact), or over each rank's own samples (local)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from evener.data.sections import Sections
from evener.distributed.hosts import all_gather
from evener.distributed.mesh import DIVIDING_TERMS, Mesh
from evener.errors import ConfigurationError
from evener.nn.batch_norm import BatchNorm, exact_batch_norm, local_batch_norm
from evener.nn.batch_norm_peers import PeerRanks, Peers
from evener.nn.grain_norm import GrainNorm
from evener.strategies.batch_norm_shm import Neighbors
from evener.strategies.learner import Learner
from evener.torch_internals.modules import AnyBatchNorm

_peers: WeakKeyDictionary[Mesh, Peers] = WeakKeyDictionary()


def normalize_together(model: nn.Module, mesh: Mesh, axes: Sequence[str] = DIVIDING_TERMS) -> nn.Module:
    """Makes the model's BatchNorm modules exact, except those that are set to be local. All ranks must call this
    together.

    Args:
        axes: The axes of the ranks that normalize together.
    """
    group = mesh.group(*axes)  # may consist of a single rank
    if group is None or group.size() == 1 or not any(map(_is_meant, model.modules())):
        return model
    if mesh not in _peers:  # several strategies over one mesh call this in turn
        _peers[mesh] = _meet(mesh, axes)
    return exact_batch_norm(model, _peers[mesh])


def _is_meant(module: nn.Module) -> bool:
    return isinstance(module, AnyBatchNorm) and getattr(module, "is_exact", True)


def _meet(mesh: Mesh, axes: Sequence[str]) -> Peers:
    """Returns the ranks along ``axes``, connected through shared memory if they are CPU ranks of one host. All
    ranks must call this together."""
    # A separate group, so that its messages in backward cannot mix with gradient buckets.
    group = mesh.group(*axes, use="normalization")
    assert group is not None
    # With mixed devices, gloo connects CPU ranks, which can share memory, with GPU ranks, which cannot.
    if dist.get_backend(group) != "gloo" or not all(all_gather(mesh.device_type == "cpu", group)):
        return PeerRanks(group)
    try:
        neighbors = Neighbors(group, mesh.timeout_seconds)
    except ConfigurationError:  # raised on all ranks or on none
        return PeerRanks(group)
    mesh.close_with_mesh(neighbors.close)
    return neighbors


def normalize_apart(model: nn.Module, learner: Learner, one_process: bool) -> None:
    """Makes the model's BatchNorm modules normalize over the samples of each rank alone.

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
    """Returns a text for the record that tells how BatchNorm normalizes if it is not exact. Returns "" otherwise."""
    if learner.rounds is not None and not learner.rounds.meets:
        if not any(isinstance(module, AnyBatchNorm) for module in learner.model.modules()):
            return ""
        each = "rank's" if isinstance(learner.rounds, Sections) else "replica's"
        return f"BatchNorm by each {each} own samples; running moments merge as those of all samples"
    if learner.settings.batch_norm == "grain":
        has_some = any(isinstance(module, GrainNorm) for module in learner.model.modules())
        return "BatchNorm by each grain's own samples (batch_norm=grain)" if has_some else ""
    if learner.settings.batch_norm == "exact" or learner.data.degree == 1:
        return ""
    if not any(isinstance(module, BatchNorm) for module in learner.model.modules()):
        return ""
    return "BatchNorm by each rank's own samples (batch_norm=local): not the training of one device"
