"""Computes how many samples fit into one pass of a rank, from measurements of earlier passes.

The first step begins with a pass of a single sample, increases the size pass by pass, and measures each. Later, the
free memory before every pass determines its size. Memory for gradients that do not exist yet at the start of a step is
set aside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from evener.components.sharded_tensor.local import local
from evener.errors import ConfigurationError
from evener.hardware.memory.activation_model import ActivationModel
from evener.nn.experts import Experts
from evener.nn.fqn import clean_name
from evener.strategies.learner import Learner
from evener.torch_internals.modules import AnyBatchNorm

_GROWTH = 1.25
"""The reported size is updated only when the capacity has grown by this factor, to avoid a new report in every step."""


class Sizing:
    """Sizes the passes of one rank."""

    def __init__(self, learner: Learner) -> None:
        self._learner, self._appetite = learner, ActivationModel()
        trained = (local(p) for p in learner.model.parameters() if p.requires_grad)
        self._gradients = sum(parameter.nbytes for parameter in trained)
        self._room = self._told = math.inf
        self._wanted = 0

    @property
    def has_learned(self) -> bool:
        """True if a pass has been measured."""
        return self._appetite.has_learned

    def most(self, begun: bool) -> int:
        """Returns the maximum number of samples for the next pass.

        Args:
            begun: True if an earlier pass of the step has already allocated gradients.
        """
        self._room = self._learner.room.left() - (0 if begun else self._gradients)
        return self._appetite.most(self._room)

    def fitting(self, wanted: int) -> int:
        """Returns how many samples fitted into one pass of the step. Returns 0 if everything that any step wanted fits.

        Args:
            wanted: The number of this rank's samples in the step.
        """
        self._wanted = max(wanted, self._wanted)
        capacity = self._appetite.capacity(self._room)
        if capacity < self._told or capacity >= _GROWTH * self._told:
            self._told = capacity
        return 0 if self._told >= self._wanted else int(self._told)

    @contextmanager
    def measured(self, samples: int, begun: bool) -> Iterator[None]:
        """Measures the pass in the block. A pass that fails is not recorded."""
        before = self._learner.watch.part().held
        yield
        taken = self._learner.watch.part().peak - before
        if begun:
            self._appetite.learn(samples, taken)
        else:  # gradients were allocated while activations were freed: the peak may contain both
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
    """Returns True if a loss or a layer of the user's has used the process group of the ranks with the other
    samples."""
    return "data_group" in vars(learner)  # the cached property exists after its first use


def computed_together(learner: Learner) -> str:
    """Returns why cutting a batch into pieces would change the training, with the module's name. Returns "" if no such
    module is known."""
    for name, module in learner.model.named_modules():
        if isinstance(module, AnyBatchNorm):
            where = "over all ranks" if learner.settings.batch_norm == "exact" else "on each rank"
            return f"{clean_name(name)} normalizes those that are computed together, {where}"
        if isinstance(module, Experts):
            return f"{clean_name(name)} has a balance, and room, for those that are computed together, over all ranks"
    return ""


def refuse_together(learner: Learner) -> None:
    """Raises ConfigurationError if the result would depend on how samples are cut into pieces."""
    why = computed_together(learner)
    if why:
        raise ConfigurationError(
            f"micro_batch=auto takes samples in pieces of any size, and {why}: the training would depend on the "
            "memory. Say the micro_batch yourself, which is part of the training then, or use a layer of single "
            "samples, such as nn.GroupNorm for a BatchNorm"
        )
