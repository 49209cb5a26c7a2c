"""ZeRO-3 whose sums have the same bits on any division of the samples.

FSDP2 passes the gradients of a unit to a reduce-scatter of Evener's after each backward pass. Here that one adds them
up, block by block, and sends only in the last pass of a step::

    pass 1     unit's gradients ─ float32 sum of the block ─ ends a block ─ rounded, added in float64 ─ zeros to FSDP2
    pass 2     unit's gradients ─ float32 sum of the block ─ last pass ──── rounded, added in float64 ─┐
                                                                  rows and counts to their owners ◀── reduce-scatter

FSDP2 adds what it gets in all passes, which is the sum. A rank holds float64 sums of whole weights for that time;
weights and optimizer state stay divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.components.exact_sum.gradients import ExactGradients
from evener.components.sharded_tensor.local import local
from evener.hardware.timers import waiting
from evener.nn.context import current
from evener.strategies.exact_sums import add_block, check_kernels, exact_gradients
from evener.strategies.learner import Learner
from evener.strategies.sharded.exchange_order import Scatter
from evener.strategies.sharded.fsdp import AXIS, Fsdp, FsdpSum
from evener.strategies.sharded.units import divided_places


class ExactScatter(Scatter):
    """Adds up the gradients of a unit, and sums them over the ranks in the last pass of a step.

    Args:
        rest: The arguments of a :class:`Scatter`.
        sizes: For each parameter of the unit, in the order of FSDP2, the number of elements of a rank, with padding.
        is_last: Returns True in the last pass of a step.
    """

    def __init__(
        self, *rest: Any, sizes: Mapping[str, int], exact: ExactGradients, is_last: Callable[[], bool]
    ) -> None:
        super().__init__(*rest)
        self._names, self._sizes = list(sizes), list(sizes.values())
        self._exact, self._is_last = exact, is_last
        self._block: Tensor | None = None

    def forget(self) -> None:
        """Drops the gradients of a block that was not ended."""
        self._block = None

    def end_block(self) -> None:
        """Adds the gradients since the last call, those of a block."""
        if self._block is not None:
            parts = self._block.split_with_sizes(self._sizes, 1)
            self._exact.add(dict(zip(self._names, parts, strict=True)))
            self._block = None

    def _reduce(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup) -> None:
        rows = input_tensor.view(group.size(), -1)
        self._block = rows.clone() if self._block is None else self._block.add_(rows)
        if not self._is_last():
            output_tensor.zero_()
            return
        self.end_block()
        flat = self._packed(group.size(), output_tensor.numel())
        self._look(flat)
        self._work_done()
        own = flat.new_empty(flat.shape[1])
        with waiting():
            self._sum(own, flat.view(-1), group)
        output_tensor.copy_(own[: output_tensor.numel()])
        self._exact.take_counts(self._names, own[output_tensor.numel() :])

    def _packed(self, ranks: int, length: int) -> Tensor:
        """Returns the sums of this rank, ``(ranks, length + parameters)``: for each owner its rows, then all counts."""
        counts = self._exact.counts(self._names)
        flat = counts.new_zeros((ranks, length + len(counts)))
        views = dict(zip(self._names, flat[:, :length].split_with_sizes(self._sizes, 1), strict=True))
        for name, total in self._exact.named(self._names):
            views[name].copy_(total)
        flat[:, length:] = counts
        return flat


class ExactFsdpSum(FsdpSum):
    """Sums units, and whole parameters after backward, to the same bits on any division."""

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner)
        self._last = False
        sizes = {name: dict(self._sizes_in(unit)) for name, unit in self._units.items()}
        wholes: dict[str, Tensor] = {learner.names[p]: p for p in self._trained}
        for name, size in chain.from_iterable(each.items() for each in sizes.values()):
            like = torch.empty((), dtype=learner.parameter(name).dtype, device=learner.session.device)
            wholes[name] = like.expand(learner.mesh.degree(AXIS), size)
        exact = learner.exact = exact_gradients(learner, wholes)
        assert exact is not None
        check_kernels(learner.optimizer)
        self._scatters: list[ExactScatter] = []
        for number, (name, unit) in enumerate(self._units.items()):
            look = partial(self._look_at_sums, list(sizes[name]))
            parts = self._turns, number, self._others, look, self._work_done
            scatter = ExactScatter(*parts, sizes=sizes[name], exact=exact, is_last=lambda: self._last)
            unit.set_custom_reduce_scatter(scatter)
            self._scatters.append(scatter)

    def _sizes_in(self, unit: Any) -> Iterator[tuple[str, int]]:
        """Yields the trained parameters of a unit, each with the elements of its rows on one rank."""
        degree = self._learner.mesh.degree(AXIS)
        for held, key, name in divided_places(unit, self._learner.names):
            rows, *rest = held[key].shape
            if held[key].requires_grad:
                yield name, -(-rows // degree) * math.prod(rest)

    def _look_at_sums(self, names: list[str], flat: Tensor) -> None:
        exact = self._learner.exact
        assert exact is not None
        self._sound.append(self._learner.unsound.of_flat(flat, lambda: exact.named(names)))

    def _note(self, unit: str, name: str, weight: Tensor) -> None:
        scope = current()
        if scope is None or scope.weight:  # what a placeholder uses depends on the division
            self._used.add(name)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self._last = last
        with super().micro_batch(last):
            yield
        scope = current()
        if scope is not None and not scope.weight and not last:
            for parameter in self._trained:
                parameter.grad = None  # the zeros of a placeholder

    def end_block(self) -> None:
        for scatter in self._scatters:
            scatter.end_block()
        add_block(self._learner, self._whole())

    def updated(self, step: int) -> None:
        for scatter in self._scatters:
            scatter.forget()

    def _whole(self) -> dict[str, nn.Parameter]:
        return {self._learner.names[p]: p for p in self._trained}

    def complete(self) -> tuple[str, ...]:
        learner, exact, whole = self._learner, self._learner.exact, self._whole()
        assert exact is not None
        learner.work_timer.work_done()
        self.free_gathered()
        absent = self._unused(p for p in learner.names if p.requires_grad)
        missing = tuple(name for name in absent if name not in whole or name not in exact.given)
        add_block(learner, whole)
        flat = exact.packed(list(whole))
        self._look_at_sums(list(whole), flat)
        sums = {name: torch.zeros_like(parameter) for name, parameter in whole.items()}
        with waiting():
            self._all_reduce(flat).wait()
            exact.unpack(flat, sums)
            again = exact.finish(lambda limbs: self._all_reduce(limbs).wait())
        for name, parameter in whole.items():
            parameter.grad = sums[name]
        for name, total in again.items():
            gradient = learner.parameter(name).grad
            if gradient is not None:
                held = local(gradient)
                own = total if name in whole else total[learner.mesh.index(AXIS)].view(-1)[: held.numel()]
                held.copy_(own.view_as(held))
        return missing


class ExactFsdp(Fsdp):
    """Divides parameters, gradients and optimizer state, with sums of the same bits on any division."""

    sums_bits: ClassVar[bool] = True

    def sums(self, learner: Learner) -> FsdpSum:
        return ExactFsdpSum(learner)
