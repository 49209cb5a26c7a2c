"""Private names of optimizers: hooks on a step, its range for a profiler, and norms of many gradients.

- ``Optimizer._optimizer_step_pre_hooks`` and ``..._post_hooks`` show if hooks were registered; there is no public way
  to ask. Code that updates in place of the optimizer's ``step`` would silently skip them. A step in several parts must
  call them once.
- ``_global_optimizer_pre_hooks`` and ``..._post_hooks`` of ``torch.optim.optimizer`` are those of all optimizers. There
  is no public way to step without them.
- ``step`` of every class of optimizers is wrapped by ``Optimizer.profile_hook_step``, which sets ``hooked`` on it,
  opens a range for a profiler even if none records, and calls the hooks. A scheduler replaces ``step`` of the object by
  a function with ``_wrapped_by_lr_sched`` that sets ``_opt_called``, from which it knows the order of calls. The range
  costs a small step as much as the update itself, and there is no public way to step without it.
- ``torch._foreach_norm`` computes the largest absolute value of each of many tensors in one call.
  ``torch.linalg.vector_norm`` takes one tensor, and launching it on a GPU takes the host as long as launching the norms
  of a hundred tensors together. ``torch.nn.utils.get_total_norm`` launches them together, but returns the total norm.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from evener.torch_internals.profiling import is_profiling


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Returns True if the optimizer has hooks before or after its step."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def own_step(optimizer: Optimizer) -> Callable[[], object]:
    """Returns the optimizer's step, without the range for a profiler if no profiler records and no hook is to be
    called."""
    of_class, replaced = type(optimizer).step, vars(optimizer).get("step")
    is_seen = is_profiling() or not getattr(of_class, "hooked", False) or has_step_hooks(optimizer)
    if is_seen or optimizers._global_optimizer_pre_hooks or optimizers._global_optimizer_post_hooks:
        return optimizer.step
    bare = getattr(of_class, "__wrapped__", None)
    if bare is None:
        return optimizer.step
    if replaced is not None:
        if not getattr(replaced, "_wrapped_by_lr_sched", False) or replaced.__wrapped__ is not of_class:
            return optimizer.step
        optimizer._opt_called = True  # type: ignore[attr-defined]
    return partial(bare, optimizer)


def without_hooks(optimizer: Optimizer) -> Optimizer:
    """Returns an optimizer with the same parameters, state and options, and without hooks of its own. A scheduler
    replaces ``step``, which it does not have."""
    made: Any = object.__new__(type(optimizer))
    vars(made).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return made  # type: ignore[no-any-return]


def step_without_hooks(optimizer: Optimizer) -> None:
    """Steps the optimizer without its hooks and those of all optimizers, which learn nothing of it."""
    of_all: tuple[dict[int, Any], ...] = (
        optimizers._global_optimizer_pre_hooks,
        optimizers._global_optimizer_post_hooks,
    )
    kept = [dict(hooks) for hooks in of_all]
    try:
        for hooks in of_all:
            hooks.clear()
        without_hooks(optimizer).step()
    finally:
        for hooks, before in zip(of_all, kept, strict=True):
            hooks.update(before)


def largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the largest absolute value of each tensor; NaN for a tensor with a NaN. No tensor may be empty."""
    return list(torch._foreach_norm(list(tensors), math.inf))
