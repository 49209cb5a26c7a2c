"""Stand-ins for weights of other ranks' stages: the shape of the whole weight, without numbers.

This rank holds an empty shard of such a weight. The code around blocks would take the shard's size for the weight's. ::

    wte.weight.shape[0]   wte.weight.dtype   next(self.parameters()).device      answered
    wte.weight.norm()     x @ wte.weight                                         refused

Uses of numbers are refused here only as a last resort: a stage that used them in the trial run, by which the model was
cut, has the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evener.errors import TaskError
from evener.nn.weight_stand_in import SeenWeight
from evener.torch_internals.dispatch import active_fake_mode
from evener.torch_internals.modules import own_parameters


@dataclass(frozen=True)
class Away:
    """A weight of other stages, at one of the places where the model holds it."""

    module: nn.Module
    key: str
    name: str
    """Name in the model."""
    shape: tuple[int, ...]
    """Shape of the whole weight."""


@contextmanager
def whole_forms(away: Sequence[Away]) -> Iterator[None]:
    """Gives these weights the shape of the whole inside the block."""
    held = [(own_parameters(each.module), each.key) for each in away]
    before = [weights[key] for weights, key in held]
    made: dict[int, Tensor] = {}
    try:
        for each, (weights, key), own in zip(away, held, before, strict=True):
            if own is not None:
                weights[key] = made.setdefault(id(own), _form(own, each))  # type: ignore[assignment]
        yield
    finally:
        for (weights, key), own in zip(held, before, strict=True):
            weights[key] = own


class _OfAnotherStage(SeenWeight):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except TaskError:
            used = getattr(func, "__name__", "an operator")
            seen = next(each for each in (*args, *(kwargs or {}).values()) if isinstance(each, SeenWeight))
        raise TaskError(
            f"the code around the blocks uses numbers of {seen.layer} in {used}, a weight of another stage, and did "
            "not when the model was tried on the first samples: put what chooses between modules into a block of its "
            "own (--strategy-option blocks=), or use another strategy, such as 'sharded'"
        )


def _form(own: Tensor, each: Away) -> Tensor:
    form = torch.empty((), dtype=own.dtype, device=own.device).expand(each.shape)
    form.requires_grad_(own.requires_grad)
    if active_fake_mode() is not None:
        return form  # memory estimates use no numbers
    found = form.detach().as_subclass(_OfAnotherStage)
    found.layer, found.form = each.name, form
    return found
