"""Sets the models of a prepared loop up on a rank, divided as the strategy says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from evener.components.model_init import share_whole_weights
from evener.components.modes import modes_kept
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task, call_model
from evener.distributed.session import Session
from evener.strategies.base import set_up
from evener.strategies.composed import parts_of
from evener.strategies.learner import Learner
from evener.strategies.sharded.divided_updates import DividedUpdates, UpdateOwners
from evener.training.consistency.startup import agreement
from evener.training.factory import settings_of, strategy_of
from evener.training.prepare.positions import call_model_as


class LearnerOfLoop:
    """Sets models up on this rank, divided as the strategy of the settings says.

    Args:
        objects: What ``prepare`` was given, among it the data of which ranks compare samples.

    Raises:
        ConfigurationError: If a loop of the user's own cannot use the strategy or a setting.
    """

    def __init__(self, objects: Sequence[Any], config: RunConfig, world_size: int) -> None:
        self._data, self._config = _data_of(objects), config
        self._strategy = strategy_of(config, world_size).for_own_loop()
        self._settings = settings_of(config, self._strategy, world_size)
        self._divides_sequences = any(part.axis == "context" for part in parts_of(self._strategy))
        self.divides, self.strategy = self._strategy.divides_model, self._strategy.label

    def check_optimizer(self, optimizer: torch.optim.Optimizer, /) -> None:
        """Raises ConfigurationError for an optimizer that the strategy cannot divide."""
        self._strategy.check_optimizer(optimizer)

    def owners(self, learner: Learner, earlier: UpdateOwners | None) -> UpdateOwners | None:
        """Returns the owners of updates, if the strategy divides these alone. A collective call.

        Args:
            earlier: Those of a model of which something is still there: they keep their rows.
        """
        parts = [each for each in parts_of(self._strategy) if isinstance(each, DividedUpdates)]
        degree = learner.mesh.degree(DividedUpdates.axis)
        return UpdateOwners(learner, parts[0].parts(degree), earlier) if parts and degree > 1 else None

    def __call__(self, models: Sequence[nn.Module], session: Session) -> Learner:
        whole = models[0] if len(models) == 1 else nn.ModuleList(models)
        task = Task(
            model=lambda: whole,
            loss=nn.CrossEntropyLoss(),  # not used: the loop has its own
            forward=call_model_as if self._divides_sequences else call_model,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),  # not used either
            train=self._data,
        )
        agree = agreement(task, self._config, session)
        if self.divides:
            agree(whole)
            share_whole_weights(whole, session.world, session.device, session.rank == 0)
        with modes_kept(whole):  # the loop chooses between training and evaluation, also for a teacher
            return set_up(self._strategy, task, session, self._settings, agree, is_filled=self.divides)


def _data_of(objects: Sequence[Any]) -> Any:
    """Returns the first data set of a DataLoader among the objects, of which the ranks compare a few samples; a
    stand-in if none has items and a length.

    A ``DataLoader`` takes whatever has items, such as a tensor, which a task does not. ``Subset`` makes a data set of
    it.
    """
    for loader in [thing for thing in objects if isinstance(thing, DataLoader)]:
        found: Any = loader.dataset
        if hasattr(found, "__getitem__") and hasattr(found, "__len__"):
            return found if isinstance(found, Dataset) else Subset(found, range(len(found)))
    return [0]
