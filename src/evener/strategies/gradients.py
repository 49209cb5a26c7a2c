"""Gradients, dense and sparse, whole and divided: their norm, clipping, and whether all of them are numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.borrowed.sparse_values import stored_values
from evener.hardware.stopwatch import waiting
from evener.runtime.mesh import Mesh
from evener.strategies.local import local, off_host
from evener.strategies.slices import by_axes


def clip(parameters: Iterable[nn.Parameter], max_norm: float, mesh: Mesh) -> None:
    """Scales the gradients so that the 2-norm of all of them, divided ones counted whole, is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``, which takes neither sparse gradients nor those of slices.
    """
    given = list(parameters)
    factor = (max_norm / (norm_over(given, mesh) + 1e-6)).clamp(max=1.0)
    for value in map(values, _with_gradient(given)):
        value.mul_(factor.to(value.device))


def norm_over(parameters: Iterable[nn.Parameter], mesh: Mesh) -> Tensor:
    """The 2-norm of all gradients together; a collective call where some are divided. No host waits for it."""
    groups = by_axes(parameters)
    whole = norm(groups.pop(()))
    if not groups:
        return whole
    square = whole.double().square()
    for axes in sorted(groups):
        square = square + _summed(norm(groups[axes]).double().square(), mesh, axes)
    return square.sqrt()


def norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of the gradients that this rank holds."""
    given = list(parameters)
    found = [values(parameter) for parameter in _with_gradient(given)]
    return nn.utils.get_total_norm(found) if found else torch.zeros((), device=_device_of(given))


def values(parameter: nn.Parameter) -> Tensor:
    """The numbers of a parameter's gradient that this rank holds, each place counted once."""
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return local(parameter.grad)
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad.values()


def sparse_weights(model: nn.Module) -> set[Tensor]:
    """Those whose gradients are sparse."""
    kinds = nn.Embedding | nn.EmbeddingBag
    return {module.weight for module in model.modules() if isinstance(module, kinds) and module.sparse}


def soundness(parameters: Iterable[nn.Parameter]) -> Tensor:
    """A number that is finite if all gradients are; the host does not wait for it."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return torch.zeros(())
    home = grads[0].device
    return torch.stack([sum_of(grad).to(home, non_blocking=True) for grad in grads]).sum()


def sum_of(gradient: Tensor) -> Tensor:
    """The sum of a gradient's numbers, finite if all of them are.

    No norm, whose squares may overflow where the gradient does not; nor in half precision, where a sum may.
    """
    numbers = stored_values(gradient) if gradient.is_sparse else local(gradient)
    numbers = torch.view_as_real(numbers) if numbers.is_complex() else numbers
    return numbers.sum(dtype=torch.promote_types(numbers.dtype, torch.float32))


def _device_of(parameters: list[nn.Parameter]) -> torch.device | None:
    """Other ranks have a gradient perhaps, and wait for this rank's number on its device."""
    return parameters[0].device if parameters else None


def _with_gradient(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.grad is not None]


def _summed(value: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
    group = mesh.group(*axes)
    if group is None:
        return value
    total = off_host(value.reshape(1).clone(), mesh)
    with waiting():
        dist.all_reduce(total, group=group)
    return total[0]
