"""What a strategy has divided of a prepared loop: the model, or the updates of its optimizers, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evener.components.model_init import named_tensors
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.hardware.timers import waiting
from evener.strategies.learner import Learner
from evener.strategies.sharded.divided_updates import UpdateOwners, check_closure
from evener.training.prepare.divided_model import DividedModel, DividedOptimizers, Meeting, check_undivided
from evener.training.prepare.learner_of_loop import LearnerOfLoop
from evener.training.prepare.numbers_of_parts import NumbersOfParts


class LoopDivision:
    """The division of one preparation.

    Args:
        meet: Called around a collective call.
        is_in_pass: Returns True during a backward pass.
    """

    def __init__(self, meet: Meeting, is_in_pass: Callable[[], bool]) -> None:
        self._meet, self._is_in_pass = meet, is_in_pass
        self._model: DividedModel | None = None
        self._owners: UpdateOwners | None = None
        self._optimizers: DividedOptimizers | None = None
        self._numbers: NumbersOfParts | None = None
        self._check: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None

    @property
    def divides_model(self) -> bool:
        """True if ranks hold parts of the model."""
        return self._model is not None

    def set_up(self, make: LearnerOfLoop, models: Sequence[nn.Module], session: Session) -> Learner:
        """Sets the models up on this rank, and divides them as their strategy says. A collective call."""
        before: dict[str, Tensor] = {}
        if make.divides:
            check_undivided(models, make.strategy)
            before = named_tensors(models[0])
        learner, self._check = make(models, session), make.check_optimizer
        earlier, self._owners = self._owners, make.owners(learner, self._owners)
        if earlier is not None:
            earlier.close()
        if before:
            self._model = DividedModel(before, learner.model, learner.mesh, self._meet, self._is_in_pass)
            self._optimizers = self._model
            self._numbers = NumbersOfParts(learner, self._meet)
        elif self._owners is not None:
            self._optimizers = DividedOptimizers(self._owners.spec, learner.mesh, self._meet)
        return learner

    def check_may_change(self, strategy: str) -> None:
        """Raises ConfigurationError if layers or models are to be added to a divided model."""
        if self.divides_model:
            raise ConfigurationError(
                f"strategy {strategy!r} has divided the model, and a later layer or model cannot be divided "
                "with it: put all layers in before evener.prepare, give it all models in one module, or use 'ddp'"
            )

    def take_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives a prepared optimizer the parts of the model in the places of what it had."""
        if self._model is not None:
            self._model.give_parts(optimizer)
        self.watch(optimizer)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the state of an optimizer whole where it is saved, once it is known to go with the strategy.

        Raises:
            ConfigurationError: If it does not.
        """
        if self._optimizers is not None and self._optimizers.is_new(optimizer):
            self._check(optimizer)
            self._optimizers.watch(optimizer)

    def check_step(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], closure: Any
    ) -> None:
        """Called before any optimizer steps that has ``parameters`` of the model.

        Raises:
            ConfigurationError: If it cannot: it has old parameters, does not go with the strategy, or calls a closure.
        """
        if self._model is not None:
            self._model.check_current([p for group in optimizer.param_groups for p in group["params"]])
        if parameters:
            self.watch(optimizer)
        if parameters and self._optimizers is not None:
            check_closure(closure)

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before an optimizer of the model steps."""
        if self._owners is not None:
            self._owners.begin(optimizer)

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after any optimizer has stepped. A collective call, if it was one of the model."""
        if self._owners is not None:
            with waiting():
                self._owners.end(optimizer)

    def close(self) -> None:
        """Releases everything."""
        for each in (self._optimizers, self._numbers, self._owners):
            if each is not None:
                each.close()
