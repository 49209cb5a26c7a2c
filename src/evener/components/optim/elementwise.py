"""Tells how much of a model an optimizer looks at to update one number: the number's own element, its weight, or more.

::

    elements   SGD, AdamW, ...               a rank can update any piece of a weight
    weights    Muon, Adafactor, Shampoo      a rank can update whole weights alone     (whole_updates)
    more       Prodigy, LAMB of some         a rank can update nothing unless it has all

An optimizer that is not known counts as one that looks at whole weights: then its update is that of one device in any
case. An attribute of the optimizer says what it is.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from evener.torch_internals.optimizers import step_without_hooks, without_hooks

SAYS_ELEMENTWISE = "elementwise"
"""An attribute of an optimizer: True if it updates each element by itself, or a function of a group that tells."""
SAYS_ALONE = "updates_each_alone"
"""An attribute that an optimizer sets to True if it updates each parameter independently of the others."""
_ELEMENTWISE = (
    *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    "SparseAdam",
)
"""Optimizers of ``torch.optim`` that update each element by itself."""
ALONE = (*_ELEMENTWISE, "Adafactor", "Muon")
"""Optimizers of ``torch.optim`` that update each parameter independently."""
ELEMENTWISE_MODULES = ("torchao.optim.", "bitsandbytes.optim.")
_STEPS, _MOST, _SIDE = 8, 8, 3
"""The trial takes so many steps, with so many parameters of each group, each dimension at most so long."""
_ROUNDING = 1e-10
"""Largest relative difference in the trial, in float64, that counts as none. An optimizer that estimates its rate from
all weights begins with small changes."""


def is_elementwise(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Returns True if the optimizer is known to update each element of the group's parameters by itself."""
    says = getattr(optimizer, SAYS_ELEMENTWISE, None)
    if says is not None:
        return bool(says(group) if callable(says) else says)
    return _steps_as(optimizer, _ELEMENTWISE) or f"{type(optimizer).__module__}.".startswith(
        ELEMENTWISE_MODULES
    )


def updated_whole(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the parameters whose update may depend on several of their elements."""
    groups = (group for group in optimizer.param_groups if not is_elementwise(optimizer, group))
    return [parameter for group in groups for parameter in group["params"]]


def updates_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if the optimizer is known to update each parameter independently, however often it is stepped."""
    return _steps_as(optimizer, ALONE) or bool(getattr(optimizer, SAYS_ALONE, False))


def _steps_as(optimizer: torch.optim.Optimizer, names: Iterable[str]) -> bool:
    # PyTorch replaces the step of a class by a wrapper when its first optimizer is created. A subclass that only
    # changes defaults has the same step.
    known = [inspect.unwrap(found.step) for name in names if (found := getattr(torch.optim, name, None))]
    return inspect.unwrap(type(optimizer).step) in known


def looks_across(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if an update depends on which other parameters have a gradient, or on random numbers.

    Steps copies of the optimizer on small parameters: all of them together, and in two halves. They begin without
    state, or where that fails with the optimizer's. Returns False if both fail, as with one that runs on a GPU only.
    """
    for afresh in (True, False):
        with suppress(Exception):  # anything, in a user's optimizer that meets tensors it was not made for
            return _halves_differ(optimizer, afresh)
    return False


def _halves_differ(optimizer: torch.optim.Optimizer, afresh: bool) -> bool:
    held = [parameter for group in optimizer.param_groups for parameter in group["params"][:_MOST]]
    together = _stepped(optimizer, held, range(len(held)), afresh)
    for half in (0, 1):
        apart = _stepped(optimizer, held, range(half, len(held), 2), afresh)
        pairs = list(zip(together, apart, strict=True))[half::2]
        if not all(torch.allclose(one, other, rtol=_ROUNDING, atol=0) for one, other in pairs):
            return True
    return False


def _stepped(
    optimizer: torch.optim.Optimizer, held: Sequence[Tensor], with_gradients: Sequence[int], afresh: bool
) -> list[Tensor]:
    """Returns small parameters after steps of a copy of ``optimizer`` in which only some of them have gradients."""
    draws = torch.Generator().manual_seed(0)
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    small = {id(each): _small(each, draws) for each in every}
    made: Any = object.__new__(type(optimizer))  # deepcopy would drop attributes that PyTorch does not know
    state: dict[str, Any] = {"state": defaultdict(dict)} if afresh else {}
    plain = vars(without_hooks(optimizer))  # nothing of the process is told of the trial
    vars(made).update(copy.deepcopy(plain | state, dict(small)))
    found = [small[id(each)] for each in held]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(_STEPS):
            for place, each in enumerate(found):
                # Mostly the same gradient in all steps, as far from a minimum: then estimated rates rise.
                gradient = 10 + 3 * torch.randn(each.shape, dtype=each.dtype, generator=draws)
                each.grad = gradient if place in with_gradients else None
            step_without_hooks(made)
    return [each.detach() for each in found]


def _small(parameter: Tensor, draws: torch.Generator) -> Tensor:
    shape = [min(length, _SIDE) for length in parameter.shape]
    return torch.nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=draws))
