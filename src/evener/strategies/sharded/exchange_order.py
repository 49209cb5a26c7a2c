"""Keeps the exchanges of sharded units in the same order on all ranks.

Gathering a unit's weights and summing its gradients are messages between ranks. A rank whose samples take another way
through the model would meet the others in the wrong message. With blocks of one shape nobody would notice: half of
block 1 and half of block 2 make a block. So ranks compare their first pass of every kind, unit by unit. Afterwards each
rank checks its own passes against that order, without a message::

    pass 1      gather model    gather blocks.0   gather blocks.1        compared between the ranks
    pass 2      gather model    gather blocks.1                          TaskError, before a number is exchanged

Both exchanges count as waiting, not as the rank's own work. The gradients of this rank alone are checked right before
they are summed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from evener.core.half_precision import added_in_float32
from evener.distributed.hosts import all_gather_single
from evener.errors import TaskError
from evener.hardware.memory import made_as
from evener.hardware.memory.counters import BUCKETS
from evener.hardware.timers import waiting

# The new name if torch has it: torch 2.13 warns about the old one.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_WEIGHTS, _GRADIENTS = 0, 1
_WORDS = ("weights", "gradients")


class Turns:
    """Records and checks the order of a rank's exchanges.

    Args:
        units: Names of the units.
        group: Ranks that must keep to one order.
    """

    def __init__(self, units: list[str], group: dist.ProcessGroup) -> None:
        self._units, self._group = units, group
        self._known: dict[str, list[int]] = {}
        self._order, self._place = list[int](), 0

    def start(self, kind: str) -> None:
        """Begins a pass. All passes of the same ``kind`` must have the same order."""
        self._order, self._place = self._known.setdefault(kind, []), 0

    def ended(self) -> None:
        """Ends a forward or backward pass.

        Raises:
            TaskError: If the pass left out a unit that other passes of its kind went through.
        """
        if self._place < len(self._order):
            self._refuse("nothing more", self._order[self._place])
        self._order, self._place = [], 0

    def take_turn(self, unit: int, what: int, device: torch.device) -> None:
        """Checks that the weights (``what`` 0) or gradients (1) of ``unit`` come next.

        Raises:
            TaskError: If another exchange comes next, in this pass or on another rank.
        """
        turn = 2 * unit + what
        if self._place == len(self._order):
            self.compare(turn, device)
            self._order.append(turn)
        if self._order[self._place] != turn:
            self._refuse(self._named(turn), self._order[self._place])
        self._place += 1

    def compare(self, turn: int, device: torch.device) -> None:
        """Raises TaskError if another rank has another turn. All ranks must call this together; the host waits."""
        own = torch.tensor([turn], device=device)
        rows = own.new_empty(self._group.size(), 1)
        with waiting():
            dist.all_gather(list(rows.unbind()), own, group=self._group)
        other = next((int(row) for row in rows if int(row) != turn), turn)
        if other != turn:
            self._refuse(self._named(turn), other, "another rank's")

    def _named(self, turn: int) -> str:
        return f"the {_WORDS[turn % 2]} of {self._units[turn // 2]}"

    def _refuse(self, own: str, other: int, whose: str = "the first") -> NoReturn:
        raise TaskError(
            f"the order of the units differs: this rank's pass has {own} where {whose} has {self._named(other)}. All "
            "ranks gather a unit together, so that every pass must go through the same ones, whatever its samples: let "
            "the option 'wrap' leave out modules between which samples choose (with an empty 'wrap' all are one unit)"
        )


class Gather:
    """Gathers the weights of a unit, as FSDP2's ``AllGather``. Checks the unit's turn, and is timed as waiting."""

    def __init__(self, turns: Turns, unit: int) -> None:
        self._turns, self._unit = turns, unit

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for data that is sent or received."""
        with made_as(BUCKETS):
            return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._turns.take_turn(self._unit, _WEIGHTS, input_tensor.device)
        with waiting():
            work: dist.Work | None = all_gather_single(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
        return work


class Scatter(Gather):
    """Sums the gradients of a unit, of which each rank keeps its part, as FSDP2's ``ReduceScatter``.

    Args:
        others: Ranks that hold the same part, over which it is summed too; None if there are none.
        look: Called with the gradients of this rank alone.
        work_done: Called when the rank's own work is done up to here.
    """

    def __init__(
        self,
        turns: Turns,
        unit: int,
        others: dist.ProcessGroup | None,
        look: Callable[[Tensor], None],
        work_done: Callable[[], None],
    ) -> None:
        super().__init__(turns, unit)
        self._others, self._look, self._work_done = others, look, work_done

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: Any
    ) -> None:
        self._turns.take_turn(self._unit, _GRADIENTS, input_tensor.device)
        self._reduce(output_tensor, input_tensor, group)

    def _reduce(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup) -> None:
        self._look(input_tensor)
        self._work_done()
        with waiting():
            added_in_float32(output_tensor, lambda wide: self._sum(wide, input_tensor.to(wide.dtype), group))

    def _sum(self, own: Tensor, terms: Tensor, group: dist.ProcessGroup) -> None:
        _reduce_scatter(own, terms, group=group)
        if self._others is not None:
            dist.all_reduce(own, group=self._others)
