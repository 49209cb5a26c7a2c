"""Updates of a prepared loop: watches every optimizer of the process before it steps, prepared or not.

An optimizer that was made after ``evener.prepare``, or never given to it, updates the same weights as any other. Its
inputs, learning rates among them, are compared at the next exchange between the ranks.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from evener.components.sharded_tensor.local import is_divided
from evener.components.sharded_tensor.shard_spec import shard_spec
from evener.distributed.loop_watch import loop_watch
from evener.errors import ConfigurationError
from evener.torch_internals.compiling import outside_of_graphs
from evener.training.consistency.replicas import digest, together
from evener.training.prepare.loop_state import LoopState
from evener.training.prepare.rank_checks import folded


class WatchedOptimizers:
    """Watches all optimizers of the process until it is closed."""

    def __init__(self, place: LoopState) -> None:
        self._place = place
        self._hooks = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )

    def close(self) -> None:
        """Stops watching."""
        for hook in self._hooks:
            hook.remove()

    @outside_of_graphs
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Checks an optimizer, prepared or not, before it steps."""
        closure = next((one for one in (*args[1:], kwargs.get("closure")) if one is not None), None)
        if self._place.is_over or self._place.division.is_part_of_step(optimizer):
            return
        self._place.division.end_failed_step()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        own = [p for p in parameters if self._place.mean.owns(p)]
        self._place.division.check_step(optimizer, own, closure)
        if closure is not None:
            return
        self._place.mean.shown.hide()
        if own and self._place.is_in_pass:
            raise ConfigurationError(
                "an optimizer stepped in the middle of a backward pass, before gradients were summed over the ranks: "
                "step when backward() has returned, or in a hook of register_post_accumulate_grad_hook"
            )
        self._place.mean.check_none_put_off(own)
        self._place.mean.check_all_summed("optimizer.step()", own)
        self._place.mean.check_sound(own, self._place.steps)
        if self._place.world_size > 1:
            strangers = [p for p in parameters if not self._place.mean.owns(p)]
            gradients = _gradients([p for p in strangers if not is_divided(p) and shard_spec(p) is None])
            rates = _rates(optimizer) if own and not self._place.session.mixed else 0
            self._place.strangers = folded(self._place.strangers, gradients, rates)
        self._place.learner.synchronizer.free_gathered()
        if own:
            self._place.division.begin_step(optimizer)

    @outside_of_graphs
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._place.is_over or self._place.division.is_part_of_step(optimizer):
            return
        with self._place.session.watchdog.explained():
            self._place.division.end_step(optimizer)
        self._place.mean.shown.show()
        if any(self._place.mean.owns(p) for group in optimizer.param_groups for p in group["params"]):
            self._place.took_step()
        loop_watch().stepped(optimizer)


def _gradients(tensors: list[Tensor]) -> int:
    """Returns a checksum of the tensors' gradients; 0 if there are none."""
    found = {str(n): digest(p.grad).item() for n, p in enumerate(tensors) if p.grad is not None}
    return int(together(found)) if found else 0


def _rates(optimizer: torch.optim.Optimizer) -> int:
    """Returns a checksum of the groups' learning rates. Ignores tensors, so that no device is waited for."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return crc32(" ".join(f"{rate:.9g}" for rate in rates if isinstance(rate, int | float)).encode()) or 1
