"""What a strategy has divided of a prepared loop: the model, or the updates of its optimizers, or nothing."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from evener.components.model_init import named_tensors
from evener.components.optim.elementwise import updated_whole
from evener.components.optim.fused import lay_out_state
from evener.components.optim.stand_ins import inner_optimizers
from evener.components.optim.whole_steps import WholeSteps
from evener.components.optim.whole_updates import WholeUpdates
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.hardware.timers import waiting
from evener.strategies.learner import Learner
from evener.strategies.sharded.divided_updates import UpdateOwners, check_closure
from evener.strategies.whole_matrices import terms_for
from evener.training.prepare.divided_model import DividedModel, DividedOptimizers, Meeting, check_undivided
from evener.training.prepare.learner_of_loop import LearnerOfLoop
from evener.training.prepare.numbers_of_parts import NumbersOfParts


class LoopDivision:
    """The division of one preparation.

    Args:
        meet: Called around a collective call.
        is_in_pass: Returns True during a backward pass.
        learner: Returns the learner of the loop.
    """

    def __init__(self, meet: Meeting, is_in_pass: Callable[[], bool], learner: Callable[[], Learner]) -> None:
        self._meet, self._is_in_pass, self._learner = meet, is_in_pass, learner
        self._model: DividedModel | None = None
        self._owners: UpdateOwners | None = None
        self._optimizers: DividedOptimizers | None = None
        self._numbers: NumbersOfParts | None = None
        self._check: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None
        self._steps: MutableMapping[torch.optim.Optimizer, WholeSteps] = WeakKeyDictionary()
        """Optimizers that update whole weights of which this rank has pieces."""
        self._stepping: torch.optim.Optimizer | None = None
        self._updated_by: MutableMapping[Tensor, tuple[str, bool]] = WeakIdKeyDictionary()
        """Parameters, the optimizer that updates each, and whether as a whole."""

    @property
    def divides_model(self) -> bool:
        """True if ranks hold parts of the model."""
        return self._model is not None

    def set_up(self, make: LearnerOfLoop, models: Sequence[nn.Module], session: Session) -> Learner:
        """Sets the models up on this rank, and divides them as their strategy says. A collective call."""
        check_undivided(models)
        if make.divides and len(models) > 1:
            raise ConfigurationError(
                f"strategy {make.strategy!r} divides one model, and evener.prepare got {len(models)}: put them into "
                "one module whose forward calls them, or use strategy 'ddp'"
            )
        before = named_tensors(models[0]) if make.divides else {}
        learner, self._check = make(models, session), make.check_optimizer
        earlier, self._owners = self._owners, make.owners(learner, self._owners)
        if earlier is not None:
            earlier.close()
        gather = learner.session.control.gather_objects
        if before:
            self._model = DividedModel(
                before, learner.model, learner.mesh, self._meet, gather, self._is_in_pass
            )
            self._optimizers = self._model
            self._numbers = NumbersOfParts(learner, self._meet)
        elif self._owners is not None and self._optimizers is not None:
            self._optimizers.renew(self._owners.spec, learner.mesh)
        elif self._owners is not None:
            self._optimizers = DividedOptimizers(self._owners.spec, learner.mesh, self._meet, gather)
        return learner

    def check_may_change(self, strategy: str) -> None:
        """Raises ConfigurationError if layers are to be added to a divided model."""
        if self.divides_model:
            raise ConfigurationError(
                f"strategy {strategy!r} has divided the model, and a later layer cannot be divided with it: put all "
                "layers in before evener.prepare, or use 'ddp'"
            )

    def take_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives a prepared optimizer the parts of the model in the places of what it had."""
        if self._model is not None:
            self._model.give_parts(optimizer)
        self.watch(optimizer)
        if self._model is not None:
            self._model.give_state(optimizer)

    def whole_states(self, objects: Sequence[Any]) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        """Returns the optimizers among ``objects`` of which ranks update parts of whole weights, with their whole
        states, for another division. A collective call."""
        divided = self._optimizers if self._model is None else None
        found = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
        return [(each, each.state_dict()) for each in found if divided and not divided.is_new(each)]

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the state of an optimizer whole where it is saved, once it is known to go with the strategy. All ranks
        must call this together.

        Raises:
            ConfigurationError: If it does not.
        """
        if self._optimizers is not None and self._optimizers.is_new(optimizer):
            self._check(optimizer)
            self._choose_owners(optimizer, self._optimizers)
            self._optimizers.watch(optimizer)

    def _choose_owners(self, optimizer: torch.optim.Optimizer, divided: DividedOptimizers) -> None:
        """Chooses the ranks that update weights as wholes, for an optimizer that looks at whole weights."""
        whole = {each for each in updated_whole(optimizer) if divided.is_divided(each)}
        held = [each for group in optimizer.param_groups for each in group["params"]]
        kind = type(optimizer).__name__
        for each in held:
            other, as_whole = self._updated_by.setdefault(each, (kind, each in whole))
            if as_whole != (each in whole):
                first, second = (other, kind) if as_whole else (kind, other)
                raise ConfigurationError(
                    f"{first} updates a weight of shape {tuple(each.shape)} as a whole, and {second} in parts: give "
                    "each weight to one optimizer, or use strategy 'ddp'"
                )
        learner = self._learner()
        names: dict[Tensor, str] = {each: name for each, name in learner.names.items() if each in whole}
        terms = terms_for(optimizer, names, learner)
        if not terms.names:
            return
        if self._model is not None and any(optimizer.state.get(each) for each in whole):
            raise ConfigurationError(
                f"{kind} looks at whole weights, and has state that it made for this rank's parts of them: make it "
                "before evener.prepare, and give it to that"
            )
        if self._owners is not None:
            divided.take_whole(self._owners.own_whole([each for each in held if each in names], terms))
            return
        control, device = learner.session.control, learner.session.device
        updates = WholeUpdates(
            learner.model, dict(learner.names), terms, learner.mesh, control.gather_objects, device
        )
        divided.take_whole(updates.parameters)
        self._steps[optimizer] = WholeSteps(updates)

    def check_step(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], closure: Any
    ) -> None:
        """Called before any optimizer steps that has ``parameters`` of the model.

        Raises:
            ConfigurationError: If it cannot: it has old parameters, does not go with the strategy, or calls a closure.
        """
        if self._model is not None:
            self._model.check_current([p for group in optimizer.param_groups for p in group["params"]])
        if parameters and self._optimizers is not None:
            check_closure(closure)
            self.watch(optimizer)

    def is_part_of_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns True if the optimizer is inside another, which is stepping."""
        outer = self._stepping
        if outer is None or outer is optimizer:
            return False
        return any(each is optimizer for each in inner_optimizers(outer))

    def end_failed_step(self) -> None:
        """Gives the optimizer its parameters back whose step ended with an error."""
        optimizer, self._stepping = self._stepping, None
        if optimizer is None:
            return
        if self._owners is not None:
            self._owners.put_back(optimizer)
        if optimizer in self._steps:
            self._steps[optimizer].put_back(optimizer)

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before an optimizer of the model steps."""
        self._stepping = optimizer
        if self._owners is not None:
            self._owners.begin(optimizer)
        if optimizer in self._steps:
            self._steps[optimizer].begin(optimizer)

    def lay_out_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Lays out a state that was loaded for fused updates, of this rank's rows if it updates these alone.

        Raises:
            ConfigurationError: If it has another shape.
        """
        if self._owners is not None:
            self._owners.begin(optimizer)
        try:
            lay_out_state(optimizer)
        finally:
            if self._owners is not None:
                self._owners.put_back(optimizer)

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after any optimizer has stepped. A collective call, if it was one of the model."""
        self._stepping = None
        if self._owners is not None:
            with waiting():
                self._owners.end(optimizer)
        if optimizer in self._steps:
            with waiting():
                self._steps[optimizer].end(optimizer)

    def close(self) -> None:
        """Releases everything, and drops the model."""
        for each in (self._optimizers, self._numbers, self._owners):
            if each is not None:
                each.close()
        self._model = self._optimizers = self._numbers = self._owners = None
