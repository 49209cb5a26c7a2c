"""Gradients, dense and sparse, whole and divided: their values, their scale, and a check that all are finite.

The check looks at a rank's own gradients before they are summed over the ranks. One look at many small gradients, or
one sum over many elements, is cheap. The search for the parameter at fault costs thirty times as much; on a CPU it runs
only if a number is not finite::

    number is finite       ─▶ all are                                                     always, 0.1 ms a million
    number is not finite   ─▶ look at each; report the last in the order of the model,    once
                              which is the first that backward reached; or none, if
                              finite numbers overflow in the sum

The host must not wait for a GPU in the middle of a step. There, the device checks the largest element of each gradient,
and the position of a gradient that is not finite is read later, with the losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from evener.components.late_norms import LateNorms, LatePlace
from evener.components.sharded_tensor.local import local
from evener.core.complex_numbers import as_real
from evener.errors import DivergenceError
from evener.hardware.async_read import Readout, ReadyValue, is_late, kept
from evener.torch_internals.foreach import FiniteCheck
from evener.torch_internals.optimizers import largest
from evener.torch_internals.storages import stored_values


def scale(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiplies the gradients of ``parameters`` by ``factor``."""
    for value in map(values, with_gradient(parameters)):
        value.mul_(factor)


def values(parameter: nn.Parameter) -> Tensor:
    """Returns the values of a parameter's gradient that this rank holds. Coalesces a sparse gradient."""
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return local(parameter.grad)
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad.values()


def sparse_weights(model: nn.Module) -> set[Tensor]:
    """Returns the parameters of the model whose gradients are sparse."""
    kinds = nn.Embedding | nn.EmbeddingBag
    return {module.weight for module in model.modules() if isinstance(module, kinds) and module.sparse}


def sum_of(gradient: Tensor) -> Tensor:
    """Returns the sum of a gradient's values, which is finite if all of them are.

    A norm is not used, because squares may overflow when the gradient does not. Half precision is summed in float32,
    because the sum may overflow.
    """
    numbers = numbers_of(gradient)
    return numbers.sum(dtype=torch.promote_types(numbers.dtype, torch.float32))


_WIDE = (torch.float32, torch.float64)


def number_of(gradient: Tensor) -> float:
    """Returns the same sum as a Python number. The host waits for it."""
    plain = type(gradient) is Tensor and gradient.dtype in _WIDE and not gradient.is_sparse
    return (gradient.sum() if plain else sum_of(gradient)).item()


_SMALL = 2**12
"""Elements of a gradient up to which it is looked at together with others in less time than it is added up."""


def number_of_all(found: Sequence[Tensor]) -> float:
    """Returns a Python number that is finite if all of several gradients are. Small ones are looked at in one call, and
    large ones added up. The host waits for it."""
    small = [each for each in found if _is_small(each)]
    number = _number_of_small(small, FiniteCheck()) if small else 0.0
    return number + sum(number_of(each) for each in found if not _is_small(each))


def _is_small(gradient: Tensor) -> bool:
    plain = type(gradient) is Tensor and gradient.dtype in _WIDE and gradient.layout is torch.strided
    return plain and gradient.numel() <= _SMALL


def _number_of_small(gradients: Sequence[Tensor], check: FiniteCheck) -> float:
    try:
        return 0.0 if check.all_finite(gradients) else math.nan
    except RuntimeError:  # elements of a gradient are in the same place, so that nothing can be written
        return sum(map(number_of, gradients))


def numbers_of(gradient: Tensor) -> Tensor:
    """Returns the values of a gradient that this rank holds, as real numbers."""
    numbers = stored_values(gradient) if gradient.is_sparse else local(gradient)
    return as_real(numbers)


Named = Callable[[], Iterable[tuple[str, Tensor]]]
"""Returns gradients on one device, or pieces of them, with the names of their parameters."""


class Unsound:
    """Records which of a rank's own gradients in one step are not finite.

    Args:
        names: The names of all parameters, in the order of the model.
        looks: False if no gradient is looked at, and all pass for finite.
    """

    def __init__(self, names: Iterable[str], looks: bool = True) -> None:
        self.looks = looks
        self._places = {name: float(place) for place, name in enumerate(names, 1)}
        self._constants: dict[tuple[float, ...], Tensor] = {}
        self.found: list[Readout] = []
        """For each check 0, or the position (from 1) of a parameter with a non-finite gradient. The largest counts."""

    def name(self) -> str | None:
        """Returns the name of a parameter whose gradient is not finite, or None. Waits for the device, and clears the
        records."""
        found = self.name_of([place.value() for place in self.found])
        self.found.clear()
        return found

    def name_of(self, found: Sequence[float]) -> str | None:
        """Returns the name for numbers of :attr:`found`."""
        place = int(max(found, default=0.0))
        return list(self._places)[place - 1] if place else None

    def places_of(self, names: Iterable[str]) -> list[float]:
        """Returns the positions of parameters among all, counted from 1."""
        return [self._places[name] for name in names]

    def check_gradients(self, gradients: Named) -> Readout:
        """Checks each of ``gradients``. Returns a number that is finite if all of them are."""
        return self.of_these([gradient for _, gradient in gradients()], gradients)

    def of_these(self, found: Sequence[Tensor], gradients: Named) -> Readout:
        """Checks the gradients ``found``. Calls ``gradients`` for the names: on a GPU always, on a CPU only if one is
        not finite."""
        if not self.looks:
            return ReadyValue(0.0)
        if not found or not is_late(found[0].device):
            return self.of_number(number_of_all(found), gradients)
        alike = [(name, gradient) for name, gradient in gradients() if numbers_of(gradient).numel()]
        return self._of_late(alike) if alike else ReadyValue(0.0)

    def of_flat(self, flat: Tensor, gradients: Named, number: float | None = None) -> Readout:
        """Checks gradients that are all in one tensor, ``flat``. ``number`` is the sum of ``flat``, if it is known."""
        if not self.looks:
            return ReadyValue(0.0)
        if not is_late(flat.device):
            return self.of_number(sum_of(flat).item() if number is None else number, gradients)
        alike = [each for each in gradients() if each[1].numel()]
        return self._of_late(alike) if alike else kept(sum_of(flat))

    def of_number(self, number: float, gradients: Named) -> Readout:
        """Checks gradients by their sum, which is known on the host."""
        if math.isfinite(number):
            return ReadyValue(number)
        bad = [self._places[name] for name, each in gradients() if not numbers_of(each).isfinite().all()]
        self.found.append(ReadyValue(max(bad, default=0.0)))
        return ReadyValue(math.nan if bad else 0.0)

    def of_late(
        self, found: Sequence[Tensor], places: Sequence[float], known: Tensor | None = None
    ) -> Readout:
        """Checks gradients on a device that runs behind the host, in one call; see :class:`LateNorms`.

        Args:
            found: The gradients, or their values; none is empty.
            places: The positions of their parameters among all, counted from 1.
            known: The largest absolute value of each gradient, in one tensor, if something has computed them.
        """
        if not self.looks:
            return ReadyValue(0.0)
        norms = LateNorms(largest(found) if known is None else known, places)
        self.found.append(LatePlace(norms, self._places_on))
        return norms

    def _of_late(self, gradients: Sequence[tuple[str, Tensor]]) -> Readout:
        found = [numbers_of(gradient) for _, gradient in gradients]
        return self.of_late(found, self.places_of(name for name, _ in gradients))

    def _places_on(self, device: torch.device, places: Sequence[float]) -> Tensor:
        """Returns the positions of parameters as a tensor. Built on the device once, because a copy to it would make
        the host wait."""
        key = tuple(places)
        if key not in self._constants:
            made = [torch.full((), place, dtype=torch.float64, device=device) for place in key]
            self._constants[key] = torch.stack(made)
        return self._constants[key]


KnownNorms = Callable[[Sequence[Tensor]], Tensor | None]
"""Returns the largest absolute value of each of some gradients, in one tensor. None if nothing has computed them."""


class AllGradients:
    """Checks the gradients of all parameters of a model after each backward, as :class:`Unsound` does any.

    What does not change between steps is found once, so that Python does nothing for each small parameter.

    Args:
        names: The parameters with their names, in the order in which ``unsound`` knows them.
    """

    def __init__(self, names: Mapping[nn.Parameter, str], unsound: Unsound) -> None:
        self._names, self._unsound = names, unsound
        trained = [(p, float(place)) for place, p in enumerate(names, 1) if p.requires_grad]
        self._trained, self._places = [p for p, _ in trained], [place for _, place in trained]
        self._frozen = [p for p in names if not p.requires_grad]
        self._small = [p for p in self._trained if p.numel() <= _SMALL and p.dtype in _WIDE]
        small = set(self._small)
        self._others = [p for p in self._trained if p not in small]
        self._check, self._is_late = FiniteCheck(), bool(trained) and is_late(trained[0][0].device)
        self._are_plain = all(
            type(p) is nn.Parameter and p.numel() and not p.is_complex() for p in self._trained
        )

    def check(self, known: KnownNorms = lambda gradients: None) -> Readout:
        """Returns a number that is finite if all gradients are.

        Args:
            known: Returns the largest absolute value of each gradient, if something has computed them.
        """
        if not self._unsound.looks:
            return ReadyValue(0.0)
        if self._are_plain and not any(p.grad is not None for p in self._frozen):
            try:
                return self._check_plain(known)
            except (TypeError, RuntimeError):
                pass  # a gradient is missing, or sparse
        found = [gradient for p in self._names if (gradient := p.grad) is not None]
        return self._unsound.of_these(found, self._named)

    def _check_plain(self, known: KnownNorms) -> Readout:
        if self._is_late:
            found = list(map(_GRADIENT, self._trained))
            return self._unsound.of_late(found, self._places, known(found))
        number = _number_of_small(list(map(_GRADIENT, self._small)), self._check) if self._small else 0.0
        for p in self._others:
            number += number_of(p.grad) if p.grad is not None else 0.0
        return self._unsound.of_number(number, self._named)

    def _named(self) -> Iterable[tuple[str, Tensor]]:
        return named((name, p) for p, name in self._names.items())()


_GRADIENT: Callable[[nn.Parameter], Tensor] = attrgetter("grad")


def check_sound(unsound: Sequence[str | None]) -> None:
    """Raises DivergenceError if a rank names a parameter whose gradient is not finite. ``unsound`` has a name or None
    for each rank."""
    found = next(((rank, name) for rank, name in enumerate(unsound) if name), None)
    if found is not None:
        raise DivergenceError(
            f"a gradient is not finite on rank {found[0]}, that of {found[1]}; the run stops here"
        )


def named(parameters: Iterable[tuple[str, nn.Parameter]]) -> Named:
    """Returns a function that returns the existing gradients of the parameters, by name."""
    given = list(parameters)
    return lambda: [(name, p.grad) for name, p in given if p.grad is not None]


def with_gradient(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Returns the parameters that have a gradient."""
    return [parameter for parameter in parameters if parameter.grad is not None]


def first_bad_weight(parameters: Iterable[nn.Parameter]) -> int:
    """Returns the position (from 1) of the first trained parameter that is not finite. Returns 0 if all are finite."""
    for place, parameter in enumerate(parameters, 1):
        held = local(parameter.detach())
        sound = not parameter.requires_grad or bool(torch.isfinite(held.sum()))
        if not sound and not bool(torch.isfinite(held).all()):
            return place
    return 0


def check_weights(places: Sequence[int], names: Sequence[str], steps: int) -> None:
    """Raises DivergenceError if a rank found a weight that is not finite after ``steps`` steps.

    Args:
        places: What :func:`first_bad_weight` returned on each rank.
        names: The names of the weights.
    """
    for rank, place in enumerate(places):
        if place:
            raise DivergenceError(
                f"after step {steps - 1} the weight {names[place - 1]} is not finite on rank {rank}, though its "
                "gradient was: the update went too far. Nothing of it was saved. Try a lower learning rate or clip_norm"
            )
