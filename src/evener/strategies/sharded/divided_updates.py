"""ZeRO stage 1 in a training loop of the user's own: whole weights and gradients, and updates divided over the ranks.

A loop clips, scales and reads gradients between backward and update, so that these are whole, as with ``ddp``. Only
while an optimizer steps, it has this rank's rows of each parameter in the places of the parameters::

    backward             gradients   a b c     on all ranks, summed
    optimizer.step()     rows        a b       on rank 0, which has their state          c       on rank 1
    after it             weights     a b c     gathered from the owners

Between steps the optimizer has the parameters, and under them the state of this rank's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from evener.collectives.registry import make_owners
from evener.components import gradients
from evener.components.coalesce import in_buckets
from evener.components.optim.stand_ins import exchange_parameters
from evener.components.optim.whole_updates import OwnershipTerms
from evener.components.sharded_tensor.shard_spec import ShardSpec, set_shard_spec, take_attributes
from evener.distributed.mesh import Layout
from evener.errors import ConfigurationError
from evener.hardware.timers import waiting
from evener.strategies.ddp import Ddp
from evener.strategies.interfaces import StrategySettings
from evener.strategies.learner import Learner
from evener.strategies.sharded.owned_weight import AXIS
from evener.strategies.sharded.ownership import dim_of_rows, rows_of_owners


@dataclass(frozen=True)
class DividedUpdates(Ddp):
    """Data parallelism whose optimizers update only the rows that a rank owns.

    Args:
        parts: Returns the part of each of so many owners.
    """

    parts: Callable[[int], Sequence[float]]

    name: ClassVar[str] = "sharded"
    axis: ClassVar[str] = AXIS
    combines: ClassVar[tuple[str, ...]] = ("data",)

    def layout(self, world_size: int, settings: StrategySettings) -> Layout:
        self.parts(world_size)
        return Layout({AXIS: world_size})


class UpdateOwners:
    """The owners of the rows of a model's parameters. All ranks must make it together.

    Args:
        parts: The part that each rank of the axis owns.
        earlier: The owners of parameters that are divided already, and stay with them.
    """

    def __init__(self, learner: Learner, parts: Sequence[float], earlier: UpdateOwners | None = None) -> None:
        group = learner.mesh.new_group(AXIS)
        assert group is not None
        self._owners = make_owners(None, group, learner.session.timeout_seconds)
        self._index, self._nbytes = learner.mesh.index(AXIS), learner.settings.bucket_nbytes
        sparse = gradients.sparse_weights(learner.model)
        trained = [p for p in learner.model.parameters() if p.ndim and p.numel() and p not in sparse]
        known: Mapping[Tensor, ShardSpec] = {} if earlier is None else earlier._specs
        dims: dict[Tensor, int] = {p: dim_of_rows(p) for p in trained if p not in known}
        new = rows_of_owners(dims, parts)
        self._specs: dict[Tensor, ShardSpec] = {p: known[p] for p in trained if p in known} | {
            parameter: ShardSpec(AXIS, dims[parameter], rows, self._index) for parameter, rows in new.items()
        }
        self._whole: dict[Tensor, bool] = {} if earlier is None else dict(earlier._whole)
        """Parameters that one rank updates as wholes, and whether it is this one."""
        self._mesh, self._parts = learner.mesh, tuple(parts)
        self._pieces: dict[nn.Parameter, nn.Parameter] = {}
        """The rows that an optimizer has at the moment."""

    def own_whole(self, parameters: Sequence[Tensor], terms: OwnershipTerms) -> dict[Tensor, bool]:
        """Gives each parameter to one owner, unless it has one. Returns whether it is this rank."""
        new = [each for each in parameters if each not in self._whole]
        sizes = [(tuple(each.shape), each.nbytes) for each in new]
        able = terms.along(self._mesh.layout, (AXIS,), self._mesh.ranks(AXIS))
        if len(set(self._parts)) > 1:
            able = replace(able, speeds=self._parts)
        for parameter, owner in zip(new, able.owners(sizes, held=1.0), strict=True):
            spec = self._specs[parameter]
            length, ranks = spec.pieces[-1].stop, range(len(spec.pieces))
            pieces = tuple(range(length * (rank > owner), length * (rank >= owner)) for rank in ranks)
            self._specs[parameter] = replace(spec, pieces=pieces)
            self._whole[parameter] = owner == self._index
        return {parameter: self._whole[parameter] for parameter in parameters}

    def spec(self, parameter: Tensor) -> ShardSpec | None:
        """Returns the rows of ``parameter`` that this rank owns; None if all ranks update it."""
        return self._specs.get(parameter)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts this rank's rows in the places of the parameters, before the optimizer steps."""
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._pieces = {each: self._piece(each, self._specs[each]) for each in held if each in self._specs}
        exchange_parameters(optimizer, self._pieces)

    def _piece(self, parameter: nn.Parameter, spec: ShardSpec) -> nn.Parameter:
        piece = nn.Parameter(_rows(parameter.data, spec), parameter.requires_grad)
        if parameter.grad is not None and self._whole.get(parameter, True):
            piece.grad = _rows(parameter.grad, spec)
        return set_shard_spec(take_attributes(piece, vars(parameter)), spec)

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts the parameters back, and gathers the rows that their owners have updated. A collective call."""
        self._gather(self.put_back(optimizer))

    def put_back(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Gives the optimizer its parameters back, and returns those that were to be updated."""
        exchange_parameters(optimizer, {piece: whole for whole, piece in self._pieces.items()})
        updated: list[Tensor] = [whole for whole in self._pieces if whole.grad is not None]
        self._pieces.clear()
        return updated

    @torch.no_grad()
    def _gather(self, parameters: Sequence[Tensor]) -> None:
        for bucket in in_buckets(parameters, self._nbytes, lambda parameter: parameter):
            specs = [self._specs[parameter] for parameter in bucket]
            of_ranks = [
                [_rows(parameter.data, spec, rank) for parameter, spec in zip(bucket, specs, strict=True)]
                for rank in range(len(specs[0].pieces))
            ]
            sizes = [sum(rows.numel() for rows in of_rank) for of_rank in of_ranks]
            flat = bucket[0].new_empty(sum(sizes))
            views = flat.split_with_sizes(sizes)
            _copy(of_ranks[self._index], views[self._index], into=True)
            with waiting():
                self._owners.gather(flat, sizes)
            for rank, of_rank in enumerate(of_ranks):
                if rank != self._index:
                    _copy(of_rank, views[rank], into=False)

    def close(self) -> None:
        """Releases the resources."""
        self._owners.close()


def _rows(tensor: Tensor, spec: ShardSpec, rank: int | None = None) -> Tensor:
    rows = spec.local_bounds if rank is None else spec.pieces[rank]
    return tensor.narrow(spec.dim, rows.start, len(rows))


def _copy(rows: Sequence[Tensor], flat: Tensor, *, into: bool) -> None:
    """Copies rows into a flat tensor, or back."""
    for own, part in zip(rows, flat.split_with_sizes([each.numel() for each in rows]), strict=True):
        if into:
            part.copy_(own.reshape(-1))
        else:
            own.copy_(part.view(own.shape))


def check_closure(closure: object) -> None:
    """Raises ConfigurationError if an optimizer is to call a function in its step, while it has this rank's parts."""
    if closure is not None:
        raise ConfigurationError(
            "an optimizer that calls a closure has only this rank's parts of weights or gradients while it does: call "
            "backward before step(), or use strategy 'ddp'"
        )
