"""Checks of numbers that a device is still computing, which the host must not wait for.

Where a device runs behind the host, a check is made when its numbers are there. A turn begins to read the numbers of
all checks since the turn before, and makes the checks of that. There is a turn with the first sum of gradients of each
step, and at the end of a batch that had none::

    host      pass n ─ turn: read the numbers of n ─ update ─ pass n + 1 ─ turn: check the numbers of n ─ update
    device      ...    pass n ──────────────────────────────▶ update ─ pass n + 1 ...

On other devices a check is made at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor

from evener.distributed.session import Session
from evener.hardware.async_read import is_late, read
from evener.training.prepare.sample_tensor import plain_of

Number: TypeAlias = "float | Tensor"
Check = Callable[[list[float]], None]
"""Raises an error if something is wrong with the numbers, or keeps them."""


def sum_of_numbers(numbers: Sequence[Number]) -> Any:
    """Returns the sum of numbers that are all on a device, or all of the host."""
    return torch.stack(list(numbers)).sum() if isinstance(numbers[0], Tensor) else sum(numbers)  # type: ignore[arg-type]


def nonzero_or(number: Any, instead: float) -> Any:
    """Returns a number, or ``instead`` if it is zero, without waiting for a device."""
    if isinstance(number, Tensor):
        return number.masked_fill(number == 0, instead)
    return number or instead


def number_like(total: Tensor, number: Number) -> Tensor:
    """Returns a number as a new tensor like ``total``, without dimensions."""
    if isinstance(number, Tensor):
        return number.to(total.device, total.dtype, copy=True)
    return total.new_tensor(number).reshape(())


class LateChecks:
    """The checks of one preparation.

    Args:
        steps: Returns the number of updates so far.
    """

    def __init__(self, session: Session, steps: Callable[[], int]) -> None:
        self._session, self._steps, self._runs_behind = session, steps, session.runs_behind
        self._new: list[tuple[Check, Sequence[Number]]] = []
        self._begun: Callable[[], None] | None = None
        self._turned_in: int | None = None
        """The step of the last turn in this batch."""
        self.bad_losses = dict[int, str]()
        """What is known of losses that are not finite, by their step. A loop may leave out the update, so that an error
        waits for it."""

    def apart(self) -> LateChecks:
        """Returns others with turns of their own."""
        return LateChecks(self._session, self._steps)

    def is_late(self, number: Any) -> bool:
        """Returns True for a tensor whose numbers the host would have to wait for."""
        return self._runs_behind and isinstance(number, Tensor) and is_late(number.device)

    def kept(self, number: Tensor) -> Number:
        """Returns a number that may change later as it is now: one of the host, or a copy on its device."""
        number = plain_of(number).detach()
        return number.to(torch.float64, copy=True) if self.is_late(number) else float(number)

    def check(self, check: Check, *numbers: Number) -> None:
        """Calls ``check`` with the elements of ``numbers``, at once or after the next turn but one."""
        if any(map(self.is_late, numbers)):
            self._new.append((check, [each if self.is_late(each) else float(each) for each in numbers]))
        else:
            check([float(each) for each in numbers])

    @property
    def where(self) -> str:
        """Says the step for an error that may be told in a later one."""
        return f" in step {self._steps()}" if self._runs_behind else ""

    def turn(self) -> None:
        """Makes the checks of the turn before, and begins to read the numbers of those since."""
        finish, self._begun, self._new = self._begun, self._reading(self._new), []
        self._turned_in = self._steps()
        if finish is not None:
            try:
                finish()
            except BaseException:
                self.forget()
                raise

    def turn_in_step(self) -> None:
        """Makes a turn if there was none in this batch and step."""
        if self._turned_in != self._steps():
            self.turn()

    def end_batch(self) -> None:
        """Makes a turn if there was none in this batch."""
        if self._turned_in is None:
            self.turn()
        self._turned_in = None

    def forget(self) -> None:
        """Drops all checks: what they are of was given up."""
        self._new, self._begun = [], None
        self.bad_losses.clear()

    def settle(self) -> None:
        """Makes all checks. Waits for the device."""
        self.turn()
        self.turn()

    def _reading(self, checks: Sequence[tuple[Check, Sequence[Number]]]) -> Callable[[], None] | None:
        """Begins to read the numbers of ``checks``, with one copy. Returns a function that makes the checks."""
        tensors = [each for _, numbers in checks for each in numbers if isinstance(each, Tensor)]
        if not tensors:
            return None
        device = self._session.device
        found = read(torch.cat([each.detach().reshape(-1).to(device, torch.float64) for each in tensors]))

        def finish() -> None:
            values = iter(found.values())
            for check, numbers in checks:
                parts = [
                    islice(values, each.numel()) if isinstance(each, Tensor) else (each,) for each in numbers
                ]
                check([value for part in parts for value in part])

        return finish
