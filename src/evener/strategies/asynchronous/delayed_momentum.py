"""Momentum that changes once in several updates, with plain steps in between.

Momentum repeats every gradient in the updates after it, so with old gradients it drives the weights too far. Delayed
Nesterov (Liu et al., 2024, arXiv:2401.09135) gives the mean of N gradients to the momentum at once::

    N - 1 updates   weights -= lr * gradient / N
    the N-th        momentum = beta * momentum + mean of the N gradients
                    weights -= lr * (gradient / N + beta * momentum)

So N updates are together one step of the optimizer with the mean of their gradients. It takes this step itself, from
the weights without the plain steps, so its other options keep their meaning.
"""

from __future__ import annotations

from typing import Any

import torch

from evener.errors import ConfigurationError

_COUNT, _SUM = "delayed_updates", "delayed_gradient"
_PLAIN = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
"""The options of a plain step."""


def check_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigurationError if the momentum of ``optimizer`` cannot be delayed."""
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else [{"momentum": 0}]
    if not all(each["momentum"] and not each["dampening"] and not each["maximize"] for each in groups):
        raise ConfigurationError(
            "delayed_nesterov is for torch.optim.SGD with momentum, without dampening and maximize, and the task has "
            f"{type(optimizer).__name__} with other options: use such an SGD, or leave delayed_nesterov out"
        )


def delay_momentum(optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Lets the momentum of ``optimizer`` change once in ``updates`` updates.

    What it adds to the state of the optimizer is saved with it: the sum of gradients, and the number of updates.
    """
    changed: list[tuple[dict[str, Any], dict[str, Any]]] = []

    @torch.no_grad()
    def begin(*_: object) -> None:
        for group in optimizer.param_groups:
            group[_COUNT] = group.get(_COUNT, 0) % updates + 1
            is_last = group[_COUNT] == updates
            for parameter in group["params"]:
                before = optimizer.state.get(parameter, {}).pop(_SUM, None)
                gradient = None if parameter.grad is None else parameter.grad / updates
                summed = gradient if before is None else before if gradient is None else before + gradient
                if is_last and before is not None:
                    parameter.add_(before * group["lr"])
                elif not is_last and summed is not None:
                    optimizer.state[parameter][_SUM] = summed
                parameter.grad = summed if is_last else gradient
            if not is_last:
                changed.append((group, {name: group[name] for name in _PLAIN}))
                group.update(_PLAIN)

    def end(*_: object) -> None:
        for group, options in changed:
            group.update(options)
        changed.clear()

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(end)
