"""Gradients, dense and sparse, whole and divided: their norm, clipping, and whether all of them are numbers.

Whether they are numbers is asked of what a rank adds, before it is lost in the sum of all. One sum over many elements
is cheap; that they are searched for the parameter at fault costs thirty times as much, and is done on a CPU only where
the sum says that there is one::

    sum is finite          ─▶ all are                                                     always, 0.1 ms a million
    sum is not finite      ─▶ look at each; the last in the order of the model, which     once
                              is the first that backward came to, is named; or none:
                              finite numbers may add up to more than their type holds

A GPU's host cannot ask in between. There the largest of each gradient is taken, and the place of the one that is not
finite travels with the sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.components.sharded_tensor.local import local, off_host
from evener.components.sharded_tensor.shard_spec import by_axes
from evener.distributed.mesh import Mesh
from evener.errors import DivergenceError
from evener.hardware.async_read import Here, Readout, is_late, kept
from evener.hardware.timers import waiting
from evener.torch_internals.norms import largest
from evener.torch_internals.sparse_values import stored_values


def clip(parameters: Iterable[nn.Parameter], max_norm: float, mesh: Mesh) -> Tensor:
    """Scales the gradients so that the 2-norm of all of them, divided ones counted whole, is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``, which takes neither sparse gradients nor those of slices; returns the norm
    that there was.
    """
    given = list(parameters)
    found = norm_over(given, mesh)
    factor = (max_norm / (found + 1e-6)).clamp(max=1.0)
    for value in map(values, _with_gradient(given)):
        value.mul_(factor.to(value.device))
    return found


class Clipping:
    """Clips the gradients of every update to one norm, and knows how large they were.

    Args:
        max_norm: None leaves them as they are.
    """

    def __init__(self, max_norm: float | None) -> None:
        self._max_norm = max_norm
        self.measures = max_norm is not None
        """Whether the norm is taken: set it to have it where nothing is clipped."""
        self.norm: Tensor | None = None
        """Of all gradients in the last update, before clipping; None if it was not taken, or the update left out."""

    def __call__(self, parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
        if self._max_norm is not None:
            self.norm = clip(parameters, self._max_norm, mesh)
        elif self.measures:
            self.norm = norm_over(parameters, mesh)


def scale(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiplies the gradients of ``parameters``."""
    for value in map(values, _with_gradient(parameters)):
        value.mul_(factor)


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
    numbers = numbers_of(gradient)
    return numbers.sum(dtype=torch.promote_types(numbers.dtype, torch.float32))


_WIDE = (torch.float32, torch.float64)


def number_of(gradient: Tensor) -> float:
    """The same on the host, which waits for it."""
    plain = type(gradient) is Tensor and gradient.dtype in _WIDE and not gradient.is_sparse
    return (gradient.sum() if plain else sum_of(gradient)).item()


def numbers_of(gradient: Tensor) -> Tensor:
    """The real numbers of a gradient that this rank holds."""
    numbers = stored_values(gradient) if gradient.is_sparse else local(gradient)
    return torch.view_as_real(numbers) if numbers.is_complex() else numbers


Named = Callable[[], Iterable[tuple[str, Tensor]]]
"""Gradients of one device, or pieces of them, by the names of their parameters."""


class Unsound:
    """Which of a rank's own gradients are not finite, in one step.

    Args:
        names: Of all parameters, in the order of the model.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._places = {name: float(place) for place, name in enumerate(names, 1)}
        self._constants: dict[tuple[str, ...], Tensor] = {}
        self.found: list[Readout] = []
        """0, or the place of a parameter, from 1 on; the largest is meant."""

    def name(self) -> str | None:
        """That of the parameter whose gradient is not finite, if one is; waits for the device, and forgets."""
        place = int(max((place.value() for place in self.found), default=0.0))
        self.found.clear()
        return list(self._places)[place - 1] if place else None

    def of(self, gradients: Named) -> Readout:
        """Looks at each of ``gradients``; a number that is finite if all of theirs are."""
        return self.of_these([gradient for _, gradient in gradients()], gradients)

    def of_these(self, found: Sequence[Tensor], gradients: Named) -> Readout:
        """The same of gradients that are at hand, whose names are asked for where one is not finite."""
        if not found or not is_late(found[0].device):
            return self._judged(sum(map(number_of, found)), gradients)
        alike = [(name, gradient) for name, gradient in gradients() if numbers_of(gradient).numel()]
        return self._of_late(alike) if alike else Here(0.0)

    def of_flat(self, flat: Tensor, gradients: Named, number: float | None = None) -> Readout:
        """The same where all lie in one tensor, ``flat``; with the ``number`` of that, if it is known."""
        if not is_late(flat.device):
            return self._judged(sum_of(flat).item() if number is None else number, gradients)
        alike = [each for each in gradients() if each[1].numel()]
        return self._of_late(alike) if alike else kept(sum_of(flat))

    def _judged(self, number: float, gradients: Named) -> Readout:
        if math.isfinite(number):
            return Here(number)
        bad = [self._places[name] for name, each in gradients() if not _is_finite(each)]
        self.found.append(Here(max(bad, default=0.0)))
        return Here(math.nan if bad else 0.0)

    def _of_late(self, gradients: Sequence[tuple[str, Tensor]]) -> Readout:
        norms = torch.stack([norm.float() for norm in largest([numbers_of(each) for _, each in gradients])])
        places = self._places_on(norms.device, tuple(name for name, _ in gradients))
        self.found.append(kept((places * norms.isfinite().logical_not()).amax()))
        return kept(norms.sum(dtype=torch.float64))

    def _places_on(self, device: torch.device, names: tuple[str, ...]) -> Tensor:
        """Made on the device once, for a copy to it would stop the host."""
        if names not in self._constants:
            made = [torch.full((), self._places[name], device=device) for name in names]
            self._constants[names] = torch.stack(made)
        return self._constants[names]


def check_sound(unsound: Sequence[str | None]) -> None:
    """Raises DivergenceError on all ranks alike, if one of them names a parameter whose gradient is not finite."""
    found = next(((rank, name) for rank, name in enumerate(unsound) if name), None)
    if found is not None:
        raise DivergenceError(
            f"a gradient is not finite on rank {found[0]}, that of {found[1]}; the run stops here"
        )


def _is_finite(gradient: Tensor) -> bool:
    return bool(numbers_of(gradient).isfinite().all())


def named(parameters: Iterable[tuple[str, nn.Parameter]]) -> Named:
    """The gradients that parameters have, by name."""
    given = list(parameters)
    return lambda: [(name, p.grad) for name, p in given if p.grad is not None]


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


def first_bad_weight(parameters: Iterable[nn.Parameter]) -> int:
    """Its place among them, from 1 on; 0 if all that is trained is finite."""
    for place, parameter in enumerate(parameters, 1):
        held = local(parameter.detach())
        sound = not parameter.requires_grad or bool(torch.isfinite(held.sum()))
        if not sound and not bool(torch.isfinite(held).all()):
            return place
    return 0
