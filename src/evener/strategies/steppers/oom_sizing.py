"""How many samples a rank passes at once, where its memory decides: what fits is worked out, and not tried.

The first step grows its passes from a single sample on, and measures each. From then on what the device has left says
before every pass how many samples it may have. Gradients that are not there yet when a step begins are counted in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from evener.components.sharded_tensor.local import local
from evener.errors import ConfigurationError
from evener.hardware.memory.activation_model import Appetite
from evener.nn.experts import Experts
from evener.nn.fqn import clean_name
from evener.strategies.learner import Learner
from evener.torch_internals.layers import AnyBatchNorm

_GROWTH = 1.25
"""What was told to fit is told anew when so many times as much does, lest small changes be told in every step."""


class Sizing:
    """Of the passes of one rank."""

    def __init__(self, learner: Learner) -> None:
        self._learner, self._appetite = learner, Appetite()
        trained = (local(p) for p in learner.model.parameters() if p.requires_grad)
        self._gradients = sum(parameter.nbytes for parameter in trained)
        self._room = self._told = math.inf
        self._wanted = 0

    @property
    def has_learned(self) -> bool:
        """Whether a pass has been measured."""
        return self._appetite.has_learned

    def most(self, begun: bool) -> int:
        """The most samples that the next pass may have.

        Args:
            begun: Whether a pass of the step has made gradients already.
        """
        self._room = self._learner.room.left() - (0 if begun else self._gradients)
        return self._appetite.most(self._room)

    def fitting(self, wanted: int) -> int:
        """How many samples at once there was room for in a step, by what is known at its end; 0 for all that any step
        has wanted."""
        self._wanted = max(wanted, self._wanted)
        capacity = self._appetite.capacity(self._room)
        if capacity < self._told or capacity >= _GROWTH * self._told:
            self._told = capacity
        return 0 if self._told >= self._wanted else int(self._told)

    @contextmanager
    def measured(self, samples: int, begun: bool) -> Iterator[None]:
        """Around a pass; nothing is learned from one that fails."""
        before = self._learner.watch.part().held
        yield
        taken = self._learner.watch.part().peak - before
        if begun:
            self._appetite.learn(samples, taken)
        else:  # gradients were made while activations went, so that some of the peak was both
            self._appetite.learn(samples, taken - self._gradients, at_least=True)
        self._refuse_messages()

    def _refuse_messages(self) -> None:
        if sends_in_passes(self._learner):
            raise ConfigurationError(
                "micro_batch=auto takes samples in pieces of any size, and a loss or a layer of this model computes "
                "something of the samples of all ranks together (it asked for their process group): the training would "
                "depend on the memory. Say the micro_batch yourself"
            )


def sends_in_passes(learner: Learner) -> bool:
    """Whether a loss or a layer of the user's own has asked for the ranks that have the other samples."""
    return "data_group" in vars(learner)  # which is made when it is first asked for


def computed_together(learner: Learner) -> str:
    """Why pieces of a batch would be another training, for which module; empty where no module is known to be so."""
    for name, module in learner.model.named_modules():
        if isinstance(module, AnyBatchNorm):
            where = "over all ranks" if learner.settings.batch_norm == "exact" else "on each rank"
            return f"{clean_name(name)} normalizes those that are computed together, {where}"
        if isinstance(module, Experts):
            return f"{clean_name(name)} has a balance, and room, for those that are computed together, over all ranks"
    return ""


def refuse_together(learner: Learner) -> None:
    """Raises ConfigurationError if the result would depend on how samples are cut."""
    why = computed_together(learner)
    if why:
        raise ConfigurationError(
            f"micro_batch=auto takes samples in pieces of any size, and {why}: the training would depend on the "
            "memory. Say the micro_batch yourself, which is part of the training then, or use a layer of single "
            "samples, such as nn.GroupNorm for a BatchNorm"
        )
