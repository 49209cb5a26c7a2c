"""Feature parallelism: every rank reads all samples, but only a slice of their features. For very wide inputs.

The first layer is divided along its input features (:mod:`evener.nn.feature_parallel`). The rest of the model is
replicated, and every rank computes it for the whole batch::

    rank 0   x[:, 0:4] ─▶ W[:, 0:4] ─┐         ┌─▶ all other layers ─▶ loss
                                     ├─ sum ───┤
    rank 1   x[:, 4:7] ─▶ W[:, 4:7] ─┘         └─▶ all other layers ─▶ loss         the same on both

Communication:

- *Slices* and their gradients belong to one rank, and are not exchanged. Only the norm of all gradients needs a sum of
  squares over the ranks.
- *Replicated parameters* get the same gradient, for all samples, on every rank; it is not summed. Devices of different
  kinds round differently, so that replicas would drift apart: all ranks take the gradients of rank 0.

Buffers are taken from rank 0 too. Only the sum in the first layer moves activations: samples * out_features numbers per
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.collectives.registry import make
from evener.components import gradients
from evener.components.coalesce import sent_in_buckets
from evener.components.sharded_tensor.shard_spec import ShardSpec, set_shard_spec, slice_over
from evener.core.half_precision import added_in_float32
from evener.core.message_types import sendable
from evener.data.feature_slice import columns_of, divide_columns
from evener.distributed.mesh import Layout, Mesh
from evener.errors import ConfigurationError, TaskError
from evener.hardware.async_read import Readout, ReadyValue, is_late, read
from evener.nn.collectives_no_grad import largest
from evener.nn.feature_parallel import FeatureParallelLinear, divide_features
from evener.strategies.base import Strategy
from evener.strategies.ddp import summing
from evener.strategies.feature_trial import try_columns
from evener.strategies.interfaces import Stepper, StrategySettings
from evener.strategies.learner import Learner
from evener.strategies.steppers.plain import Plain
from evener.strategies.sync_batch_norm import normalize_together
from evener.strategies.synchronizer import Synchronizer, SynchronizerAround

T = TypeVar("T", bound=Tensor)

_ALIKE = ReadyValue(torch.ones(3))

AXIS = "tensor"
"""The mesh axis over which features are divided."""


class FeatureParallel(Strategy):
    """Divides the input features over the ranks: each rank holds a slice of the first layer and a replica of all
    others.

    The divided layers are the model's :class:`~evener.nn.FeatureParallelLinear` layers, or, without any, its first
    ``nn.Linear``. Fixed weights of ``balance`` set the ranks' shares of the features; otherwise the shares are equal.
    If the mesh has a data axis too, the samples are divided over it.

    Raises:
        TaskError: If no layer can be divided, or if its weight is shared with another layer.
        ConfigurationError: If there are more ranks than features, or a setting is not supported.
    """

    divides_model = True
    axis = AXIS
    combines = ("data", "shard")

    def layout(self, world_size: int, settings: StrategySettings) -> Layout:
        if settings.compression is not None:
            raise ConfigurationError(
                f"strategy 'dimension' sends no gradients that {settings.compression!r} could compress; leave it out"
            )
        return Layout({AXIS: world_size})

    def parallelize(self, model: nn.Module, mesh: Mesh, settings: StrategySettings) -> nn.Module:
        group, layers = mesh.group(AXIS), _feature_layers(model)
        if group is None:
            return normalize_together(model, mesh)
        all_reduce = make(settings.all_reduce, group, mesh.timeout_seconds)
        mesh.close_with_mesh(all_reduce.close)
        width = next(iter(layers.values())).in_features
        columns = divide_columns(width, settings.weights or [1.0] * mesh.degree(AXIS))
        piece = ShardSpec(AXIS, 1, tuple(columns), mesh.index(AXIS))
        for layer in layers.values():
            divided = divide_features(layer, piece.local_bounds, lambda partial: all_reduce(partial).wait())
            set_shard_spec(divided.get_parameter("weight"), piece)
        return normalize_together(model, mesh)

    def synchronizer(self, learner: Learner) -> Synchronizer:
        return self.around(learner, summing(learner))

    def around(self, learner: Learner, inner: Synchronizer) -> Synchronizer:
        return ReplicatedGradSync(learner, AXIS, inner)

    def stepper(self, learner: Learner) -> Stepper:
        return Plain(learner)

    def portion(self, dataset: Any, learner: Learner) -> Any:
        pieces = (slice_over(parameter, AXIS) for parameter in learner.model.parameters())
        piece = next((piece for piece in pieces if piece), None)
        return dataset if piece is None else columns_of(dataset, piece.local_bounds, piece.pieces[-1].stop)

    def try_model(self, learner: Learner) -> None:
        pieces = (slice_over(parameter, AXIS) for parameter in learner.model.parameters())
        piece, group = next((piece for piece in pieces if piece), None), learner.mesh.group(AXIS)
        if piece is not None and group is not None:
            try_columns(learner, dist.get_process_group_ranks(group), piece.pieces[-1].stop)


class ReplicatedGradSync(SynchronizerAround):
    """Gives the ranks of ``axis``, which compute the same samples, bitwise equal gradients of their replicated
    parameters.

    Args:
        inner: Sums the gradients over the other axes first.
    """

    def __init__(self, learner: Learner, axis: str, inner: Synchronizer) -> None:
        super().__init__(inner)
        self._learner, self._axis = learner, axis
        self._group = learner.mesh.group(axis)
        self._has_passed = False
        self._losses: Readout = _ALIKE

    def passed(self, totals: Sequence[Readout]) -> None:
        """In the first step, compares the losses of ranks that compute the same samples. What is added to the loss from
        a part of the features may leave all gradients of whole weights alike. On a GPU the result is known a step
        later."""
        self._inner.passed(totals)
        self._judge_losses()
        if self._group is None or self._has_passed:
            return
        self._has_passed, device = True, self._learner.session.device
        own = sum((total.tensor.double().sum() for total in totals), torch.zeros((), dtype=torch.float64))
        most, least = largest(torch.stack([own, -own]).to(device), self._group).unbind()
        least = -least
        bound = torch.finfo(self._learner.settings.precision.coarsest).eps ** 0.5
        alike = ~(most - least > bound * torch.maximum(most.abs(), least.abs()))
        self._losses = read(torch.stack([alike.double(), most, least]))
        if not is_late(device):
            self._judge_losses()

    def _judge_losses(self) -> None:
        (alike, most, least), self._losses = self._losses.values(), _ALIKE
        if not alike:
            raise TaskError(
                f"the losses of the first step add up to between {least:g} and {most:g} on ranks that compute the same "
                "samples, so that somewhere a part of the features is taken for all of them: what lies between divided "
                "layers, and a module has kept or returned, say, is added to the loss. Leave these layers out of the "
                "plan, or use strategy 'ddp'"
            )

    def complete(self) -> tuple[str, ...]:
        missing = self._inner.complete()
        self._share_whole(self._learner.model.parameters())
        return missing

    def sum_thawed(self, without: Collection[str]) -> None:
        self._inner.sum_thawed(without)
        self._share_whole(self._learner.trained.thawed)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        self._inner.sum_gradients(parameters)
        self._share_whole(parameters)

    def make_alike(self, parameters: Iterable[nn.Parameter]) -> None:
        self._inner.make_alike(parameters)
        self._share_whole(parameters)

    def share_buffers(self, buffers: Sequence[Tensor], part: int) -> None:
        self._inner.share_buffers(buffers, part)
        self._share(self._whole(buffers))

    def _share_whole(self, parameters: Iterable[nn.Parameter]) -> None:
        self._share(gradients.values(p) for p in self._whole(parameters) if p.grad is not None)

    def _whole(self, tensors: Iterable[T]) -> Iterator[T]:
        """Yields the tensors that are not divided over the axis."""
        return (tensor for tensor in tensors if slice_over(tensor, self._axis) is None)

    def _share(self, tensors: Iterable[Tensor]) -> None:
        """Broadcasts the tensors of the first rank to all ranks of the axis."""
        self._together(
            tensors, lambda tensor: dist.broadcast(sendable(tensor), group=self._group, group_src=0)
        )

    def _sum(self, tensors: Iterable[Tensor]) -> None:
        """Sums the tensors over the ranks of the axis."""
        self._together(tensors, lambda tensor: added_in_float32(tensor, self._all_reduce))

    def _all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self._group)

    def _together(self, tensors: Iterable[Tensor], send: Callable[[Tensor], Any]) -> None:
        """Applies ``send`` to the tensors in place, in buckets."""
        if self._group is not None:
            sent_in_buckets(
                (tensor.detach() for tensor in tensors), send, self._learner.settings.bucket_nbytes
            )


def _feature_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns the layers that read the input features, by name.

    Raises:
        TaskError: If there are none, or if their input sizes differ.
    """
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    marked = {name: layer for name, layer in linear.items() if isinstance(layer, FeatureParallelLinear)}
    layers: dict[str, nn.Linear] = {**marked} or dict(list(linear.items())[:1])
    if not layers:
        raise TaskError(
            f"strategy 'dimension' divides the first torch.nn.Linear by its features; {type(model).__name__} has none"
        )
    _check_alike(layers)
    check_untied(model, [layer.weight for layer in layers.values()])
    return layers


def _check_alike(layers: Mapping[str, nn.Linear]) -> None:
    widths = {name: layer.in_features for name, layer in layers.items()}
    if len(set(widths.values())) > 1:
        raise TaskError(
            f"the FeatureParallelLinear layers read different numbers of features, {widths}; let the others be "
            "torch.nn.Linear"
        )


def check_untied(model: nn.Module, divided: Iterable[Tensor]) -> None:
    """Raises TaskError if one of the parameters to divide has several names in the model (tied weights)."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for weight in divided:
        if weight not in names:
            raise TaskError(
                "the weight of the layer that would be divided is computed from other parameters (parametrized, "
                "weight_norm): leave that out, or mark the layers that read the features as "
                "evener.nn.FeatureParallelLinear"
            )
        if len(names[weight]) > 1:
            raise TaskError(
                f"{' and '.join(names[weight])} are one weight, of which each rank would hold a slice; give each "
                "layer its own"
            )
