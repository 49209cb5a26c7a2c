"""Finds the first difference between two runs and derives its likely cause.

A step is forward, backward, synchronization, update. So the first difference says which part to suspect:

==================================================  =====================================================
loss of the first step, statistic of BatchNorm      the forward pass: the model, the loss, the samples
gradients of a step whose loss agrees               the exchange of gradients: the strategy
loss of a later step, gradients before it agree     the update before it, or the samples of that step
weights or buffers at the end alone                 the last update, or what writes these buffers
==================================================  =====================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from evener.tools.verify.rounding_floor import ComparedPlace, Numbers, PlaceKind
from evener.tools.verify.trajectory import Sketches, Trajectory

_SHOWN = 3
_ALIKE = 0.01
"""Relative tolerance for factors, and for the part of a difference that a factor leaves unexplained."""


@dataclass(frozen=True)
class Evidence:
    """Data about two runs that differ."""

    reference: Trajectory
    divided: Sequence[Trajectory]
    """The divided run, by rank."""
    times: Numbers
    """Differences as multiples of their floors."""
    limit: float
    """Largest multiple of the floor that passes."""
    reordered: bool
    """True if the order of a batch's samples makes no difference on one device."""
    own_loss: bool
    """True if the loss is the user's own and counts its terms itself."""

    @property
    def first(self) -> list[ComparedPlace]:
        """Places of the first difference: those of the first step and of its first stage, the worst first."""
        beyond = [place for place, value in self.times.items() if not value <= self.limit]
        if not beyond:
            return []
        step, order = min((place.step, _STAGE[place.kind]) for place in beyond)
        chosen = [place for place in beyond if (place.step, _STAGE[place.kind]) == (step, order)]
        return sorted(chosen, key=lambda place: -self.times[place])


_STAGE = {
    PlaceKind.LOSS: 0,
    PlaceKind.STATISTIC: 0,
    PlaceKind.GRADIENT: 1,
    PlaceKind.BUFFER: 2,
    PlaceKind.WEIGHT: 2,
}


def hint(evidence: Evidence, own_statistics: bool = False) -> str:
    """Returns what to look at, in words.

    Args:
        own_statistics: True if BatchNorm was set to normalize by each rank's own samples.
    """
    reference, divided = evidence.reference, evidence.divided[0]
    if own_statistics:
        return (
            "batch_norm=local has BatchNorm normalize by each rank's own samples, which is not the training of one "
            "device: leave it out to see whether anything else differs"
        )
    if len({trajectory.digest for trajectory in evidence.divided}) > 1:
        return "the replicas differ from each other: something in the model draws or computes differently on each rank"
    if reference.drawing_apart:
        return (
            f"the model has {reference.drawing_apart} modules with dropout of torch.nn, which draw other masks on each "
            "rank; evener.nn.Dropout draws them by sample"
        )
    if len(reference.losses) != len(divided.losses):
        return f"one device took {len(reference.losses)} steps, the divided run {len(divided.losses)}"
    first = evidence.first
    if not first:
        return "rounding explains the difference, but the tolerance that was given is smaller"
    if divided.other_blocks and first[0].step:
        return (
            "the optimizer keeps its state in few bits, with a scale for so many numbers in a row, and ranks that hold "
            "pieces of a weight have other rows than one device: the numbers differ by that much. Where a piece is a "
            "multiple of 256 numbers they do not; else say what may pass with tolerance"
        )
    explain = {PlaceKind.LOSS: _forward, PlaceKind.STATISTIC: _forward, PlaceKind.GRADIENT: _exchange}.get(
        first[0].kind, _end
    )
    return explain(evidence, first)


def _forward(evidence: Evidence, first: list[ComparedPlace]) -> str:
    step = first[0].step
    a, b = evidence.reference.losses[step], evidence.divided[0].losses[step]
    told = f"in step {step} the loss is {b:.9g}, on one device {a:.9g}"
    if step:
        return (
            f"{told}, while the gradients of the steps before agree: look at the update of step {step - 1} (optimizer, "
            f"scheduler, clipping) and at the samples of step {step}"
        )
    return f"{told}, before any gradient was exchanged, so the forward pass differs: {_suspects(evidence, first)}"


def _suspects(evidence: Evidence, first: list[ComparedPlace]) -> str:
    statistics = [
        place.name for place in evidence.times if place in first and place.kind is PlaceKind.STATISTIC
    ]
    if statistics:
        return (
            f"the first buffer to differ is {statistics[0]}, so look for a layer there or shortly before that takes "
            "statistics over its rank's samples alone"
        )
    if not evidence.reordered:
        return (
            "on one device, too, the loss depends on the order of a batch's samples: some layer draws random numbers "
            "by their places, or the loss does not treat samples alike"
        )
    if evidence.own_loss:
        return (
            "look at the loss's `count`, which must be the number of terms that `total` adds up; a total that is a "
            "mean, or that compares samples with each other, cannot be divided"
        )
    return (
        "a loss that compares samples with each other, a layer that draws random numbers or mixes samples, or a "
        "dataset that does not return the same sample twice"
    )


def _exchange(evidence: Evidence, first: list[ComparedPlace]) -> str:
    step = first[0].step
    told = f"the loss of step {step} agrees, but not its gradients, so look at how they are exchanged"
    reference, divided = evidence.reference.gradients[step], evidence.divided[0].gradients[step]
    names = [place.name for place in first]
    known = _of_penalty(evidence, step) or _of_factor(evidence, step, names)
    return f"{told}: {known or _named(reference, divided, names)}"


def _of_penalty(evidence: Evidence, step: int) -> str:
    """Returns a hint if the gradients differ by a multiple of the penalty's gradient; else an empty string."""
    penalty = evidence.reference.penalty
    if step or not penalty:
        return ""
    reference, divided = evidence.reference.gradients[0], evidence.divided[0].gradients[0]
    factor, rest = fit([_minus(divided, reference, name) for name in penalty], list(penalty.values()))
    if rest > _ALIKE:
        return ""
    return (
        f"they differ by {factor:.3g} times the gradient of the task's penalty, which counts once a step: does each of "
        f"the {len(evidence.divided)} ranks add it?"
    )


def _of_factor(evidence: Evidence, step: int, names: list[str]) -> str:
    """Returns a hint if all differing gradients are the same multiple of those of one device; else an empty string."""
    reference, divided = evidence.reference.gradients[step], evidence.divided[0].gradients[step]
    penalty = {} if step else evidence.reference.penalty
    sizes = {name: float(value.norm()) for name, value in reference.items()}
    told = [name for name in names if sizes.get(name) and name in divided]
    factor = common_factor(
        [(_minus(divided, penalty, name), _minus(reference, penalty, name)) for name in told]
    )
    if factor is None or len(told) < len(names):
        return ""
    agreeing = [name for name in sizes if name not in names and sizes[name] > _ALIKE * max(sizes.values())]
    which = f"those of {listed(names)}" if agreeing else "all of them"
    return f"{which} are {factor:.9g} times those of one device{_cause(factor, len(evidence.divided))}"


def _cause(factor: float, ranks: int) -> str:
    if abs(factor * ranks - 1) < _ALIKE:
        return f"; averaged over {ranks} ranks instead of summed?"
    if factor > 1 and abs(factor - round(factor)) < _ALIKE and round(factor) > 1:
        return f"; counted {round(factor)} times?"
    return ""


def _named(reference: Sketches, divided: Sketches, names: list[str]) -> str:
    absent = [name for name in names if name not in divided]
    if absent:
        return f"{listed(absent)} got none"
    surplus = [name for name in names if name not in reference]
    if surplus:
        return f"{listed(surplus)} got one, but not on one device"
    return f"the largest differences are in {listed(names)}"


def _end(evidence: Evidence, first: list[ComparedPlace]) -> str:
    names = [place.name for place in first]
    if first[0].kind is PlaceKind.BUFFER:
        return f"losses and gradients agree, but not the buffers {listed(names)}: look at what writes them"
    return (
        f"losses and gradients agree, but not the weights of {listed(names)} at the end: look at the update "
        "(optimizer, groups of parameters, scheduler)"
    )


def _minus(a: Mapping[str, Tensor], b: Mapping[str, Tensor], name: str) -> Tensor:
    nothing = torch.zeros(())
    return a.get(name, nothing) - b.get(name, nothing)


def fit(values: list[Tensor], basis: list[Tensor]) -> tuple[float, float]:
    """Returns the least-squares factor from ``basis`` to ``values``, and the relative norm of the remainder."""
    target, unit = torch.cat([v.expand_as(b) for v, b in zip(values, basis, strict=True)]), torch.cat(basis)
    if not unit.norm() or not target.norm():
        return 0.0, 1.0
    factor = float(target @ unit / (unit @ unit))
    return factor, float((target - factor * unit).norm() / target.norm())


def common_factor(pairs: list[tuple[Tensor, Tensor]]) -> float | None:
    """Returns the factor from the second to the first of each pair; None if it is not the same for all."""
    fits = [fit([value], [basis]) for value, basis in pairs]
    factor = median([factor for factor, _ in fits] or [0.0])
    if not fits or any(rest > _ALIKE or abs(own - factor) > _ALIKE * abs(factor - 1) for own, rest in fits):
        return None
    return factor


def listed(names: list[str]) -> str:
    """Returns the first names, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
