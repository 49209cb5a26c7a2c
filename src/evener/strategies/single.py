"""Training on one device: the reference that every distributed strategy must match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from evener.components.exact_sum.gradients import ExactGradients
from evener.components.gradients import check_sound
from evener.distributed.mesh import Layout
from evener.errors import ConfigurationError
from evener.hardware.async_read import Readout
from evener.strategies.base import Strategy
from evener.strategies.exact_sums import add_block, exact_gradients
from evener.strategies.interfaces import Stepper, StrategySettings
from evener.strategies.learner import Learner
from evener.strategies.steppers.oom_retry import plain_or_piecewise, wants_pieces
from evener.strategies.synchronizer import Synchronizer
from evener.torch_internals.autograd import HookedTensors


class NoSync(Synchronizer):
    """The synchronizer of a rank that has no other rank to sum gradients with."""

    exchanges_in_passes = False

    follows = True

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        learner.exact = exact_gradients(learner)
        self._hooked = HookedTensors(lambda: learner.names)

    def hooked_in(self, passes: int) -> Sequence[nn.Parameter]:
        return self._hooked.now() if passes > 1 or wants_pieces(self._learner) else ()

    def end_block(self) -> None:
        add_block(self._learner, self._trained)

    def complete(self) -> tuple[str, ...]:
        if self._learner.exact is not None:
            self._take_sums(self._learner.exact)
        self._learner.work_timer.work_done()
        return ()

    def _take_sums(self, exact: ExactGradients) -> None:
        """Adds the last block, and puts the sums in place of its gradients."""
        trained = self._trained
        last = {name: p.grad for name, p in trained.items() if p.grad is not None}
        for name, total in exact.of_one_rank(last).items():
            parameter = trained[name]
            if parameter.grad is None:  # in this block
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(total)

    @property
    def _trained(self) -> dict[str, nn.Parameter]:
        return {self._learner.names[p]: p for p in self._learner.trained.first}

    def completes_in_backward(self, parameter: nn.Parameter) -> bool:
        return True

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Checks that all gradients are finite. Where the model is divided, ranks have different gradients of the same
        samples, so that each rank must report. All ranks must call this together."""
        self._learner.look_at(p for p in parameters if p in self._learner.names)
        check_sound(self._learner.session.control.gather_objects(self._learner.unsound.name()))

    def soundness(self) -> tuple[Readout, ...]:
        learner = self._learner
        check, replays = learner.all_gradients.check, learner.replays
        return (check() if replays is None else check(replays.known_norms),)


class Single(Strategy):
    """Runs the whole batch on one device, in micro-batches if requested."""

    sums_bits: ClassVar[bool] = True
    replays: ClassVar[bool] = True

    def for_own_loop(self) -> Strategy:
        return self

    def layout(self, world_size: int, settings: StrategySettings) -> Layout:
        if world_size > 1:
            raise ConfigurationError(
                f"strategy 'single' runs on one rank, not on {world_size}; use 'ddp' or --processes 1"
            )
        return Layout({"data": 1})

    def synchronizer(self, learner: Learner) -> Synchronizer:
        return NoSync(learner)

    def stepper(self, learner: Learner) -> Stepper:
        return plain_or_piecewise(learner)
