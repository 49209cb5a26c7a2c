"""Numbers of a divided model in a loop: the norm in ``clip_grad_norm_``, and ``item()`` of a DTensor.

A rank has parts of some gradients. Their norms are combined over the ranks that hold the others; whole gradients count
once. All ranks must clip together, and read a number of a DTensor together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from evener.components.sharded_tensor.local import is_divided, local, off_host
from evener.components.sharded_tensor.shard_spec import shard_spec
from evener.errors import ConfigurationError
from evener.hardware.timers import waiting
from evener.strategies.learner import Learner
from evener.torch_internals.clip_grad import TotalNorm, replace_total_norm
from evener.training.prepare.divided_model import Meeting
from evener.training.prepare.gradient_part import NUMBER, greatest
from evener.training.prepare.sample_tensor import plain_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Axes = tuple[str, ...]
_READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda number: number,
    "__float__": float,
    "__int__": int,
    "__bool__": bool,
}
"""Methods that read the number in a tensor. A DTensor's are those of this rank's shard: a sum or a norm of shards is
marked as a part of a sum, and these methods do not look at the mark."""


class NumbersOfParts:
    """Makes these numbers those of the whole model until it is closed.

    Args:
        learner: Of the divided model.
        meet: Called around a collective call.
    """

    def __init__(self, learner: Learner, meet: Meeting) -> None:
        self._parameters, self._mesh, self._meet = learner.names, learner.mesh, meet
        self._restore = [replace_total_norm(self._replacing)]
        if any(map(is_divided, self._parameters)):
            from torch.distributed.tensor import DTensor  # not above: it takes a second, and is there by now

            patches = [mock.patch.object(DTensor, name, self._read_by(of)) for name, of in _READS.items()]
            for patch in patches:
                patch.start()
            self._restore += [patch.stop for patch in patches]

    def close(self) -> None:
        """Restores PyTorch's own functions."""
        while self._restore:
            self._restore.pop()()

    def _read_by(self, of: Callable[[Any], Any]) -> Callable[[DTensor], Any]:
        """Returns a method that reads a number as PyTorch's own does, and passes it to ``of``."""
        return lambda number: of(self._item(number))

    def _item(self, number: DTensor) -> Any:
        if all(placement.is_replicate() for placement in number.placements):
            return number.to_local().item()
        if self._mesh.degree("tensor") > 1:
            raise ConfigurationError(
                "a number of a tensor that is divided over the axis 'shard' was read, and others are divided over "
                "'tensor' besides: torch.nn.utils.clip_grad_norm_ and get_total_norm know of both"
            )
        with self._meet(NUMBER):
            return number.full_tensor().item()

    def _replacing(self, plain: TotalNorm) -> TotalNorm:
        @functools.wraps(plain)
        @torch.no_grad()
        def total_norm(
            tensors: Any,
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> Any:
            given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            axes = self._axes_of(given)
            found: list[Tensor] = plain_of(given)
            if not axes:
                return plain(found, norm_type, error_if_nonfinite, foreach)
            norm = self._norm(
                found, axes, float(norm_type), lambda part: plain(part, norm_type, False, foreach)
            )
            if error_if_nonfinite and not math.isfinite(norm):
                raise RuntimeError(
                    f"The total norm of order {norm_type} of the gradients is not finite, so that they cannot be "
                    "clipped; error_if_nonfinite=False scales them nevertheless"
                )
            return norm

        return total_norm

    def _axes_of(self, found: list[Tensor]) -> Mapping[int, Axes]:
        """Returns the mesh axes over which each gradient is divided, by its place in ``found``."""
        places = {id(gradient): place for place, gradient in enumerate(found)}
        axes: dict[int, Axes] = {}
        for parameter in self._parameters:
            spec = shard_spec(parameter)
            place = places.get(id(parameter.grad))
            if spec is not None and place is not None:
                axes[place] = tuple(sorted(spec.axes))
        return axes

    def _norm(
        self,
        found: list[Tensor],
        axes: Mapping[int, Axes],
        order: float,
        plain: Callable[[list[Tensor]], Tensor],
    ) -> Tensor:
        groups: dict[Axes, list[Tensor]] = {}
        for place, gradient in enumerate(found):
            groups.setdefault(axes.get(place, ()), []).append(local(gradient))
        device = next(iter(groups.values()))[0].device
        norms = [
            self._over(axes, plain([each for each in group if each.numel()]).double(), order).to(device)
            for axes, group in sorted(groups.items())
        ]
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
        return total.to(local(found[0]).dtype)

    def _over(self, axes: Axes, norm: Tensor, order: float) -> Tensor:
        """Returns the norm of the parts of all ranks of ``axes``, given that of this rank's."""
        group = self._mesh.group(*axes) if axes else None
        if group is None:
            return norm
        powers = norm if math.isinf(order) else norm.pow(order)
        total = off_host(powers.reshape(1).clone(), self._mesh)
        with waiting():
            if math.isinf(order):
                return greatest(total[0], group)
            dist.all_reduce(total, group=group)
        return total[0].pow(1 / order)
