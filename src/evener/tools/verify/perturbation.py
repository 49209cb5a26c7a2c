"""Disturbs a run by rounding alone: changes the last bit of its weights, and the order in which samples are added."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evener.data.batch import Batch, MicroBatch, leaves_of
from evener.data.rounds import RoundBatch
from evener.training.engine import Engine


@dataclass(frozen=True)
class Disturbance:
    """Disturbs every weight by units in its last place, up or down at random, then returns the run's batches.

    Args:
        seed: Seed of the signs and the sample orders.
        reorder: True to shuffle the samples of each micro-batch, each with its own sample number. Micro-batches are
            shuffled only if all inputs and targets are tensors with the samples along dimension 0, or None.
        strength: Number of units.
        eps: Smallest relative size of a unit. Use the eps of the compute dtype if the weights have a finer dtype.
    """

    seed: int
    reorder: bool = True
    strength: int = 1
    eps: float = 0.0

    def __call__(self, engine: Engine) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self.seed)
        disturb(engine.model, generator, self.strength, self.eps)
        return (reordered(batch, generator) if self.reorder else batch for batch in engine.batches())


@torch.no_grad()
def disturb(model: torch.nn.Module, generator: torch.Generator, strength: int = 1, eps: float = 0.0) -> None:
    """Multiplies each weight by 1 + strength * e or 1 - strength * e, where e is the eps of its dtype, but at least
    ``eps``. Zeros stay zero.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            signs = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
            factors = 1 + signs.to(parameter) * (strength * max(eps, torch.finfo(parameter.dtype).eps))
            parameter.mul_(factors)


def reordered(batch: Batch, generator: torch.Generator) -> Batch:
    """Returns the batch with the samples of each micro-batch in another order."""
    if isinstance(batch, RoundBatch):
        return dataclasses.replace(batch, passes=(reordered(each, generator) for each in batch.passes))
    micro_batches = [_shuffled(micro, generator) for micro in batch.micro_batches]
    return dataclasses.replace(batch, micro_batches=micro_batches)


def _shuffled(micro: MicroBatch, generator: torch.Generator) -> MicroBatch:
    size = len(micro.samples)
    order = torch.randperm(size, generator=generator)
    if not all(_has_samples(leaf, size) for leaf in leaves_of((micro.inputs, micro.targets))):
        return micro
    moved = micro.map(lambda leaf: leaf if leaf is None else leaf[order.to(leaf.device)])
    return dataclasses.replace(moved, samples=micro.samples[order])


def _has_samples(leaf: Any, size: int) -> bool:
    return leaf is None or (isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == size)
