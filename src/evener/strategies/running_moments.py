"""Merges the running moments of BatchNorm that several parts of the samples have led to.

The merged moments are those of all samples together, by the law of total variance. With ``n_i`` samples, a mean ``m_i``
and a variance ``v_i`` of part ``i``, and ``N = Σ n_i``,

    mean = Σ n_i m_i / N        variance = Σ n_i (v_i + (m_i - mean)²) / N

A mean of the variances alone would lose how far the means lie apart. PyTorch keeps unbiased variances, those of ``e``
elements times ``e / (e - 1)``, so the factor of a part's own batches is taken out before and that of all parts' batches
together put in after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evener.nn.context import current
from evener.torch_internals.modules import AnyBatchNorm, own_buffers

HeldBuffers = list[tuple[dict[str, Tensor | None], str, Tensor]]
"""Buffers, each with the dictionary that holds it and its name there."""


def held_buffers(model: nn.Module) -> HeldBuffers:
    """Returns the model's buffers as they are now."""
    return [
        (held, name, buffer)
        for held in map(own_buffers, model.modules())
        for name, buffer in held.items()
        if buffer is not None
    ]


class NormalizedElements:
    """Counts what each BatchNorm of a model normalizes in training: elements for each channel, and passes."""

    def __init__(self, model: nn.Module) -> None:
        self.counts: dict[nn.Module, list[int]] = {}
        """The counts of each BatchNorm. May be replaced, to count elsewhere."""
        for module in model.modules():
            if isinstance(module, AnyBatchNorm):
                module.register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if module.training and inputs and isinstance(inputs[0], Tensor) and inputs[0].ndim > 1:
            counted, scope = self.counts.setdefault(module, [0, 0]), current()
            if scope is None or scope.weight:  # else it is a placeholder
                counted[0] += inputs[0].numel() // inputs[0].shape[1]
            counted[1] += 1


@dataclass(frozen=True)
class RunningMoments:
    """The running moments of one BatchNorm, as places in the list of a model's buffers."""

    module: nn.Module
    mean: int
    variance: int
    count: int | None
    """The place of the number of batches. None if the module does not count them."""

    @property
    def places(self) -> list[int]:
        """The places of its buffers."""
        return [place for place in (self.mean, self.variance, self.count) if place is not None]

    def summand(
        self, now: Sequence[Tensor], batches: float, samples: int, counted: Sequence[float], like: Tensor
    ) -> Tensor:
        """Returns what a part adds to the sum over all parts, in one row: elements, batches, means, squares.

        Args:
            now: The part's buffers.
            batches: The number of batches that the module has counted.
            samples: The weight of the part.
            counted: The numbers of elements and of passes (`NormalizedElements`).
            like: A tensor of the type and on the device of the result.
        """
        elements, passes = counted
        each = elements / passes if passes else 0.0
        mean, variance = (now[at].to(like.device, like.dtype).flatten() for at in (self.mean, self.variance))
        biased = variance * ((each - 1) / each if each > 1 else 1.0)
        numbers = like.new_tensor([each, batches])
        return torch.cat([numbers, samples * mean, samples * (biased + mean.square())])

    def write(self, target: Sequence[Tensor], before: float, summed: Tensor, samples: int) -> None:
        """Writes the merged moments to buffers.

        Args:
            before: The number of batches before.
            summed: The sum of all parts' rows.
            samples: The sum of their weights.
        """
        elements, batches = summed[:2].tolist()
        if not elements:
            return  # it has normalized by its running moments, which have not changed
        mean, squares = (moment / samples for moment in summed[2:].chunk(2))
        factor = elements / (elements - 1) if elements > 1 else 1.0
        target[self.mean].copy_(mean.view_as(target[self.mean]))
        unbiased = (squares - mean.square()).clamp_min(0) * factor
        target[self.variance].copy_(unbiased.view_as(target[self.variance]))
        if self.count is not None:
            target[self.count].fill_(before + round(batches))


def running_moments(model: nn.Module, held: HeldBuffers) -> list[RunningMoments]:
    """Returns the running moments of a model."""
    places = {(id(owner), name): place for place, (owner, name, _) in enumerate(held)}
    return [
        RunningMoments(
            module,
            places[id(own), "running_mean"],
            places[id(own), "running_var"],
            places.get((id(own), "num_batches_tracked")),
        )
        for module in model.modules()
        if isinstance(module, AnyBatchNorm) and (own := own_buffers(module)).get("running_mean") is not None
    ]
