"""The plain stepper for ranks whose memory may run out: a step is taken again, in smaller pieces.

A sum does not care into how many terms it is cut. As long as the ranks exchange nothing before all of them have their
gradients, each may cut its samples as its memory wants, without asking the others, who only wait a little longer for
its term::

    rank 0, 24 GB    forward ─ backward ─────────────────────────────────────────────┐
    rank 1, 12 GB    forward ─✗  (forgets)  [forward ─ backward] [forward ─ backward] ┴─ sum ─ update

So gradients are summed when backward is over, and not while it runs. A model whose passes wait for other ranks, such as
one with a BatchNorm over all of them, cannot be taken again by one rank alone.

Pieces that were too large are halved at once. They are tried twice as large after a number of steps that went well,
which doubles with every failure: what made memory short may have passed.
"""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable, Sequence
from itertools import chain

import torch

from evener.borrowed.layers import AnyBatchNorm
from evener.data.batch import Batch, MicroBatch
from evener.errors import ConfigurationError, OutOfMemoryError
from evener.hardware.readout import Readout
from evener.nn.names import clean_name
from evener.strategies.learner import Learner
from evener.strategies.parts import StepOutcome
from evener.strategies.plain import Plain
from evener.strategies.staged.pieces import pieces_of

PATIENCE = 50
"""Steps after which larger pieces are tried again, at first."""
MOST_PATIENCE = 10_000


class PieceSize:
    """The most samples of one forward and backward pass, learned from what went well."""

    def __init__(self, patience: int | None = None) -> None:
        self.most: int | None = None
        """None for all that a micro-batch has."""
        self._patience, self._good = patience or PATIENCE, 0
        self._trying = False

    def ran_out(self, size: int) -> bool:
        """Pieces of ``size`` were too large; False if there are none smaller."""
        if size < 2:
            return False
        if self._trying:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self.most, self._good, self._trying = size // 2, 0, False
        return True

    def went_well(self, wanted: int) -> None:
        """A step with micro-batches of ``wanted`` samples at most had enough memory."""
        self._good += 1
        if self.most is not None and self._good >= self._patience:
            self.most = 2 * self.most if 2 * self.most < wanted else None
            self._good, self._trying = 0, True


class Piecewise(Plain):
    """One piece of a micro-batch after the other.

    Raises:
        OutOfMemoryError: If there is no room for a single sample.
    """

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner)
        learner.may_leave_out = True
        self._device = learner.session.device
        self.size = PieceSize()

    def run(self, batch: Batch, divisor: Callable[[], float], step: int) -> StepOutcome:
        self._retries = 0
        outcome = super().run(batch, divisor, step)
        return dataclasses.replace(outcome, retries=self._retries, piece=self.size.most or 0)

    def _passes(
        self, micro_batches: Sequence[MicroBatch], divisor: Callable[[], float], step: int
    ) -> list[Readout]:
        drawn = _state_of(self._device)
        wanted = max(len(micro.samples) for micro in micro_batches)
        while True:
            try:
                totals = super()._passes(self._cut(micro_batches), divisor, step)
            except torch.OutOfMemoryError as error:
                seen = str(error)
            else:
                self.size.went_well(wanted)
                return totals
            self._start_again(seen, min(wanted, self.size.most or wanted), step)
            _draw_from(drawn, self._device)

    def _cut(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        most = self.size.most
        if most is None:
            return micro_batches
        wanted = (math.ceil(len(micro.samples) / most) for micro in micro_batches)
        return list(chain.from_iterable(map(pieces_of, micro_batches, wanted)))

    def _start_again(self, seen: str, size: int, step: int) -> None:
        """Outside of the handler of the error, whose traceback holds what the passes have made."""
        self._retries += 1
        if not self.size.ran_out(size):
            raise OutOfMemoryError(
                f"there is no room for a single sample in step {step}: {seen.splitlines()[0]}. Use a "
                "strategy that divides the model (sharded, tensor, pipeline), a lower precision, or a device with more "
                "memory"
            )
        self._learner.undo(step)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def wants_pieces(learner: Learner) -> bool:
    """Whether steps should be taken again in pieces: where memory may run out, and that changes no result.

    Raises:
        ConfigurationError: If it is asked for, and would change the result.
    """
    settings = learner.settings
    if not settings.fits and settings.limits is None:
        return False
    named = (name for name, module in learner.model.named_modules() if isinstance(module, AnyBatchNorm))
    normalizes = next(named, None)
    if normalizes is not None and settings.fits:
        raise ConfigurationError(
            f"micro_batch=auto takes samples in pieces of any size, and {clean_name(normalizes)} normalizes those that "
            "are computed together, over all ranks: the training would depend on the memory. Say the micro_batch "
            "yourself, which is part of the training then, or use a norm of single samples, such as nn.GroupNorm"
        )
    return normalizes is None


def plain_or_piecewise(learner: Learner) -> Plain:
    """The stepper of ranks that exchange nothing in their passes."""
    able = not learner.synchronizer.exchanges_in_passes and wants_pieces(learner)
    return Piecewise(learner) if able else Plain(learner)


def check_pieces(learner: Learner) -> None:
    """Raises ConfigurationError if pieces are asked for, and the strategy takes none."""
    if learner.settings.fits and not isinstance(learner.stepper, Piecewise):
        raise ConfigurationError(
            "micro_batch=auto goes with strategies whose ranks meet for the sum of gradients alone, 'ddp' and "
            f"'single': with {learner.name!r} others would wait for a rank that takes its samples again. Give "
            "micro_batch a number"
        )


def _state_of(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _draw_from(states: list[torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
