"""The results of a step on a device that runs behind the host: how they are brought together there, and read.

A rank alone stacks the losses of its passes and the largest element of each gradient, or of many whether one is not
finite, copies them to the host, and finds there, a step later, what they say. Ranks that send their results from device
to device reduce them to three numbers first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor

from evener.components.late_norms import LateNorms, LatePlace
from evener.hardware.async_read import Readout, ReadyValue, read
from evener.strategies.interfaces import StepOutcome
from evener.training.step.step import Results


def results_alone(outcome: StepOutcome, device: torch.device) -> Callable[[], Results]:
    """Returns what waits for the results of a run of one rank."""
    looks, others, places = _sorted(outcome)
    scalars = [each.tensor.reshape(()) for each in (*outcome.totals, *others, *places)]
    many, few = [look for look in looks if look.are_many], [look for look in looks if not look.are_many]
    groups = [
        *([scalar] for scalar in scalars),
        *([look.are_sound] for look in many),
        *(look.norms for look in few),
    ]
    found = read(_together(groups, device)) if groups else ReadyValue(torch.zeros(0))
    first, second = len(outcome.totals), len(outcome.totals) + len(others)
    last = len(scalars) + len(many)

    def results() -> Results:
        values = found.values()
        total, are_sound, norms = sum(values[:first]), values[len(scalars) : last], values[last:]
        loss = None if math.isfinite(total) else (0, total)
        sound = math.isfinite(sum(values[first:second]))
        place = max(values[second : len(scalars)], default=0.0)
        known = [each for look in few for each in look.places]
        for look in (look for look, is_sound in zip(many, are_sound, strict=True) if not is_sound):
            known, norms = [*known, *look.places], [*norms, *look.stacked.tolist()]
        if not math.isfinite(sum(norms)):
            bad = [each for each, norm in zip(known, norms, strict=True) if not math.isfinite(norm)]
            sound, place = sound and not bad, max(bad, default=place)
        return Results(total, loss, None if sound else (0, place))

    return results


def row_on_device(outcome: StepOutcome, device: torch.device) -> Tensor:
    """Returns the total, a number that is finite if the gradients are, and the place of one that is not: three numbers
    in float64 on the device."""
    looks, others, places = _sorted(outcome)
    totals, sound = _on(device, outcome.totals), _on(device, others)
    placed = _on(device, places)
    for look in looks:
        of_look = next(each for each in outcome.unsound if isinstance(each, LatePlace) and each.norms is look)
        marks = look.stacked - look.stacked  # 0, or NaN where a norm is not finite
        sound.append(marks.sum(dtype=torch.float64).to(device, non_blocking=True))
        placed.append((of_look.places * marks.isnan()).amax().to(device, non_blocking=True))
    row = [_added(totals, device), _added(sound, device), _added(placed, device, torch.amax)]
    return torch.stack(row)


def _sorted(outcome: StepOutcome) -> tuple[list[LateNorms], list[Readout], list[Readout]]:
    """Returns the looks at several gradients each, and other numbers of soundness and places, which are of no look."""
    looks = [each for each in outcome.soundness if isinstance(each, LateNorms)]
    others = [
        each for each in outcome.soundness if not (isinstance(each, LateNorms) or _is_known_sound(each))
    ]
    known = set(map(id, looks))
    places = [
        each for each in outcome.unsound if not (isinstance(each, LatePlace) and id(each.norms) in known)
    ]
    return looks, others, places


def _is_known_sound(number: Readout) -> bool:
    """Returns True for a finite number of the host, which needs no copy to the device to say so."""
    return isinstance(number, ReadyValue) and number.is_of_host and math.isfinite(number.value())


def _together(groups: Sequence[list[Tensor]], device: torch.device) -> Tensor:
    """Returns the numbers of all groups in one tensor on ``device``. A group has scalars of one type and device, or one
    tensor of several numbers."""
    dtype = reduce(torch.promote_types, (number.dtype for group in groups for number in group[:1]))
    pieces: list[list[Tensor]] = []
    for group in groups:
        if pieces and _kind(pieces[-1][0]) == _kind(group[0]):
            pieces[-1] += group
        else:
            pieces.append(list(group))
    made = [_joined(piece).to(device, dtype, non_blocking=True) for piece in pieces]
    return made[0] if len(made) == 1 else torch.cat(made)


def _joined(piece: list[Tensor]) -> Tensor:
    if len(piece) == 1:
        return piece[0].reshape(-1)
    return torch.cat(piece) if piece[0].dim() else torch.stack(piece)


def _kind(number: Tensor) -> tuple[torch.dtype, torch.device, int]:
    return number.dtype, number.device, number.dim()


def _on(device: torch.device, numbers: Iterable[Readout]) -> list[Tensor]:
    return [number.tensor.reshape(()).to(device, torch.float64, non_blocking=True) for number in numbers]


def _added(
    numbers: Sequence[Tensor], device: torch.device, reduced: Callable[[Tensor], Tensor] = torch.sum
) -> Tensor:
    if len(numbers) == 1:
        return numbers[0]
    return (
        reduced(torch.stack(list(numbers)))
        if numbers
        else torch.zeros((), dtype=torch.float64, device=device)
    )
