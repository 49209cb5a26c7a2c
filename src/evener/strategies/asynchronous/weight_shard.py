"""The weights that a parameter server holds: all of them, or a shard beside those of other servers.

While a section is open, the task's optimizer updates the server's weights, not those of the model with which the worker
of that rank computes. Parameters of other servers have no gradient in it, so it leaves them alone.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evener.components.clipping import Summed
from evener.components.sharded_tensor.shard_spec import take_attributes
from evener.errors import ConfigurationError
from evener.strategies.asynchronous.delayed_momentum import delay_momentum
from evener.strategies.asynchronous.flat_parameters import FlatLayout
from evener.strategies.learner import Learner
from evener.torch_internals.modules import own_parameters


class WeightShard:
    """Weights, and the sum of gradients for their next version.

    Args:
        trained: The trained parameters of the model.
        layout: Those that this server holds.
        delayed: The number of updates in which the optimizer's momentum changes once; 0 if it changes in each.
        summed: Sums the square of a norm over the servers. None if there is one server.
    """

    def __init__(
        self,
        learner: Learner,
        trained: Sequence[nn.Parameter],
        layout: FlatLayout,
        delayed: int,
        summed: Summed | None = None,
    ) -> None:
        self._learner, self._layout = learner, layout
        device = learner.session.device
        self._weights = layout.empty(device)
        self._parameters = [
            take_attributes(nn.Parameter(view), vars(parameter))
            for view, parameter in zip(layout.views(self._weights), layout.parameters, strict=True)
        ]
        self._sums = layout.empty(device, wide=True)
        self._swap = {parameter: nn.Parameter(parameter.detach().new_empty(0)) for parameter in trained}
        self._swap |= zip(layout.parameters, self._parameters, strict=True)
        self._aside: dict[Any, Any] = {}
        """The optimizer's state of parameters of other servers, which their updates change."""
        self._penalized = self._with_own_parameters() if learner.task.penalty is not None else None
        learner.clipping.summed = summed
        if delayed:
            delay_momentum(learner.optimizer, delayed)

    def _with_own_parameters(self) -> nn.Module:
        """Returns a copy of the model whose parameters are the server's, for the task's penalty."""
        copied = copy.deepcopy(self._learner.model)
        for original, module in zip(self._learner.model.modules(), copied.modules(), strict=True):
            for name, parameter in own_parameters(original).items():
                if parameter is not None:
                    own_parameters(module)[name] = self._swap.get(parameter, parameter)
        return copied

    @property
    def number(self) -> int:
        """The number of parameters."""
        return len(self._parameters)

    def open(self) -> None:
        """Begins a section with the weights that the model has now."""
        self._layout.write(self._weights)
        self._clear()
        optimizer = self._learner.optimizer
        _swap_parameters(optimizer, self._swap)
        elsewhere = set(self._swap.values()) - set(self._parameters)
        self._aside = {each: optimizer.state.pop(each) for each in elsewhere if each in optimizer.state}

    def close(self) -> None:
        """Ends a section: the model gets these weights. May be called more than once."""
        self._learner.optimizer.state.update(self._aside)
        _swap_parameters(self._learner.optimizer, {own: original for original, own in self._swap.items()})
        self._layout.read(self._weights)

    def version(self) -> list[Tensor]:
        """Returns copies of the weights as they are now."""
        return [flat.clone() for flat in self._weights]

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor], weight: float) -> None:
        """Adds flat gradients to those of the next version."""
        for total, flat in zip(self._sums, gradients, strict=True):
            total.add_(flat.to(total.device), alpha=weight)

    @torch.no_grad()
    def merge(self, step: int, factor: float, has_gradient: Sequence[float], schedule: int) -> None:
        """Makes the next version.

        Args:
            step: The number of the engine's step.
            factor: The number by which the sums are multiplied.
            has_gradient: For each parameter, 0 if it has no gradient.
            schedule: The number of steps of the task's schedule after the update.
        """
        for total in self._sums:
            total.mul_(factor)
        views = self._layout.views(self._sums)
        for parameter, view, has in zip(self._parameters, views, has_gradient, strict=True):
            parameter.grad = view.to(parameter.dtype) if has else None
        with torch.enable_grad():  # of the penalty
            self._learner.apply_gradients(
                step, held=(self._parameters, self._penalized or self._learner.model)
            )
        self._clear()
        scheduler = self._learner.stepper.scheduler
        for _ in range(schedule):
            if scheduler is not None:
                scheduler.step()

    def _clear(self) -> None:
        for total in self._sums:
            total.zero_()


def _swap_parameters(optimizer: torch.optim.Optimizer, swap: dict[nn.Parameter, nn.Parameter]) -> None:
    """Lets an optimizer update other parameters in place of its own.

    Raises:
        ConfigurationError: If it keeps its parameters elsewhere, too.
    """
    for name, value in vars(optimizer).items():
        held = value if isinstance(value, list | tuple) else ()
        if any(isinstance(each, nn.Parameter) and each in swap for each in held):
            raise ConfigurationError(
                f"{type(optimizer).__name__} keeps its parameters in {name!r} besides its groups, and the parameter "
                "server's cannot take their place: use another optimizer, or ddp"
            )
    for group in optimizer.param_groups:
        group["params"] = [swap.get(parameter, parameter) for parameter in group["params"]]
    others: Mapping[Any, nn.Parameter] = swap
    state = {others.get(parameter, parameter): entries for parameter, entries in optimizer.state.items()}
    optimizer.state = defaultdict(dict, state)
