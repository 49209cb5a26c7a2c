"""Updates each parameter during backward, as soon as its gradient is complete, and frees the gradient.

::

    usual          forward ─ backward: gradients 3, 2, 1 ─────────────────── update 1 2 3     all gradients at once
    in backward    forward ─ backward: gradient 3, update 3 ─ 2, 2 ─ 1, 1 ─ what is left     one, or those of a unit

The result is the same, because such an optimizer updates each parameter independently. PyTorch calls this fusing the
optimizer step into backward, and keeps an optimizer for each parameter. Here the task's own optimizer is given one
parameter at a time, so that its state, groups and scheduler stay as usual. Settings that need all gradients first are
refused: clipping to a norm, a penalty, an update that may be skipped, a step that may be retried, and several
micro-batches.

All other parameters are updated after backward, as usual: those whose gradients are summed over the ranks only then,
and those that this rank's samples did not use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from evener.components.optim.eight_bit import stepping
from evener.components.optim.elementwise import ELEMENTWISE_MODULES, SAYS_ALONE, updates_alone
from evener.components.optim.fused import lay_out
from evener.components.sharded_tensor.local import is_divided
from evener.data.batch import Batch
from evener.errors import ConfigurationError, TaskError
from evener.hardware.async_read import Readout
from evener.hardware.profile_ranges import named_range
from evener.strategies.interfaces import StepOutcome
from evener.strategies.learner import Learner
from evener.strategies.steppers.plain import Plain
from evener.torch_internals.optimizers import has_step_hooks

_SETTING = "update_in_backward"


class OneByOne:
    """Steps one parameter at a time, with the state, the options and the hooks of the optimizer ``whole``.

    Hooks before and after a step get an optimizer with one group of one parameter.
    """

    def __init__(self, whole: torch.optim.Optimizer) -> None:
        self._whole = whole
        self._one: torch.optim.Optimizer = object.__new__(type(whole))
        self._groups: dict[Tensor, dict[str, Any]] = {}

    def refresh(self) -> None:
        """Takes over the attributes of ``whole``: loading a state replaces them. A scheduler replaces ``step``, which
        is not taken over."""
        vars(self._one).clear()
        vars(self._one).update({name: value for name, value in vars(self._whole).items() if name != "step"})
        self._groups = {p: group for group in self._whole.param_groups for p in group["params"]}

    def step(self, parameter: Tensor) -> None:
        """Updates ``parameter`` alone."""
        self._one.param_groups = [{**self._groups[parameter], "params": [parameter]}]
        lay_out(self._one)
        self._one.step()


class InBackward(Plain):
    """Runs one forward and backward pass, and updates parameters during backward.

    Raises:
        ConfigurationError: If that would change the result or save no memory.
    """

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner)
        check_optimizer(learner.optimizer)
        _check_task(learner)
        held = [p for group in learner.optimizer.param_groups for p in group["params"] if p.requires_grad]
        early = [p for p in held if learner.synchronizer.completes_in_backward(p)]
        if not early:
            raise ConfigurationError(
                f"{_SETTING} would win nothing: with strategy {learner.name!r} gradients stay until backward is over, "
                "in the buckets in which they are summed or in wait for others; leave it out, or use sharded with "
                "zero=3, or single"
            )
        self._one, self._running = OneByOne(learner.optimizer), False
        self._step, self._sound = 0, list[Readout]()
        self.early = len(early)
        """The number of parameters that are updated during backward if they get a gradient."""
        for parameter in early:
            parameter.register_post_accumulate_grad_hook(self._complete)

    def run(self, batch: Batch, divisor: Callable[[], float], step: int) -> StepOutcome:
        if len(batch.micro_batches) > 1:
            raise ConfigurationError(
                f"{_SETTING} takes a batch in one pass, and this one is cut into {len(batch.micro_batches)} "
                "micro-batches, whose gradients add up: leave one out"
            )
        self._one.refresh()
        self._sound.clear()
        self._learner.updated_early.clear()
        self._step, self._running = step, True
        try:
            outcome = super().run(batch, divisor, step)
        finally:
            self._running = False
        return replace(outcome, soundness=(*outcome.soundness, *self._sound))

    def _complete(self, parameter: nn.Parameter) -> None:
        """Updates ``parameter`` in backward, when its gradient has been summed over all ranks."""
        learner = self._learner
        if not self._running or not learner.synchronizer.has_gradient(parameter):
            return
        if parameter in learner.updated_early:
            raise TaskError(
                f"the gradient of {learner.names[parameter]} comes in several parts, of which the first was taken for "
                f"all, so that {_SETTING} cannot be: the model goes backward several times in a pass, as "
                "torch.utils.checkpoint does with use_reentrant=True; say use_reentrant=False"
            )
        if not is_divided(parameter):  # otherwise FSDP2's reduction has checked this rank's gradient
            self._sound.append(learner.look_at([parameter]))
        learner.updating = self._step
        learner.updated_early.add(parameter)
        with stepping(learner.optimizer, learner.session.device), named_range("optimizer"):
            self._one.step(parameter)
        parameter.grad = None


def in_backward(learner: Learner, one_process: bool) -> InBackward:
    """Returns a stepper that updates in backward, to replace the learner's plain one.

    Raises:
        ConfigurationError: If the strategy needs several passes or several devices.
    """
    if type(learner.stepper) is not Plain or one_process:
        raise ConfigurationError(
            f"{_SETTING} goes with one pass through the whole model, and strategy {learner.name!r} takes several, or "
            "uses several devices: leave it out, or use sharded with zero=3, or single"
        )
    return InBackward(learner)


def updates_of(learner: Learner) -> str:
    """Returns a text for the record that tells how many parameters are updated in backward; "" if none are."""
    if not isinstance(learner.stepper, InBackward):
        return ""
    return f"updated in backward, {learner.stepper.early} of {len(learner.names)} parameters"


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigurationError if updates may depend on several parameters, or if the optimizer has step hooks."""
    kind = type(optimizer)
    if not f"{kind.__module__}.".startswith(ELEMENTWISE_MODULES) and not updates_alone(optimizer):
        raise ConfigurationError(
            f"{_SETTING} updates one parameter at a time, and whether {kind.__module__}.{kind.__name__} looks at each "
            f"alone is not known: if it does, let it say so by an attribute, {SAYS_ALONE} = True; else leave it out"
        )
    if has_step_hooks(optimizer):
        raise ConfigurationError(
            f"{_SETTING} updates one parameter at a time, and the hooks on the step of {kind.__name__} would be called "
            "for each: leave one of them out"
        )


def _check_task(learner: Learner) -> None:
    asks = {
        "a penalty of the task": learner.task.penalty is not None,
        "precision fp16": learner.scale is not None,
    }
    for what in (what for what, is_so in asks.items() if is_so):
        raise ConfigurationError(
            f"{_SETTING} frees gradients before all are there, and {what} looks at them together: leave one out"
        )
