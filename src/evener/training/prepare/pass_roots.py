"""The numbers from which the ranks' backward passes began, which must be the same on all."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from evener.training.prepare.late_checks import LateChecks, Number
from evener.training.prepare.rank_checks import (
    UNLIKE,
    Exchange,
    check_factors,
    check_roots,
    check_rows,
    check_trained,
)


class PassRoots:
    """The roots of all passes since the last sum of gradients.

    They are compared when the sum begins. On a device that runs behind the host, those of the sum before are compared.

    Args:
        exchange: Exchanges numbers between all ranks, with a reason.
        later: Calls for the numbers when they are known.
    """

    def __init__(self, exchange: Exchange, later: LateChecks) -> None:
        self._exchange, self._later = exchange, later
        self._roots, self._incoming, self._tolerance = list[Number](), list[Number](), 0.0
        self._of_rows = list[Number]()
        self._known = deque[tuple[list[float], float, str]]()
        """Root, gradients at losses and at gathered rows, tolerance and step of sums that are to be compared."""

    def add(self, terms: Sequence[Number], tolerance: float) -> None:
        """Adds the root of a pass, a sum of ``terms``, that rounding may change by ``tolerance``, relatively."""
        self._roots += terms
        self._tolerance = max(self._tolerance, tolerance)

    def came(self, gradient: Tensor) -> None:
        """Adds the gradient that a pass brought to a prepared loss."""
        self._incoming.append(self._later.kept(gradient))

    def came_to_rows(self, gradient: Tensor) -> None:
        """Adds the gradient that a pass brought to rows of all ranks."""
        self._of_rows.append(self._later.kept(gradient.detach().abs().sum(dtype=torch.float64)))

    def compare(
        self, mask: int, absent: int, models: Sequence[Sequence[nn.Parameter]], ranks: int, mixed: bool
    ) -> list[list[float]]:
        """Compares the roots. Returns the rows of all ranks, which begin with ``mask`` and ``absent``. A collective
        call.

        Args:
            models: The parameters of each model, of which ranks must train the same.
            ranks: The number of ranks whose gradients are summed.
            mixed: True if ranks have unlike devices, which round differently.

        Raises:
            ConfigurationError: If the ranks' roots, factors or trained parameters differ.
            DivergenceError: If a number of an earlier step is not finite.
        """
        trained = zlib.crc32(bytes(p.requires_grad for model in models for p in model))
        tolerance, where = max(self._tolerance, UNLIKE) if mixed else self._tolerance, self._later.where

        def known(numbers: list[float]) -> None:
            self._known.append((numbers, tolerance, where))

        self._later.check(known, sum(self._roots), sum(self._incoming), sum(self._of_rows))
        self._roots, self._incoming, self._of_rows, self._tolerance = [], [], [], 0.0
        self._later.turn_in_step()
        return self._compared(ranks, float(mask), float(absent), float(trained))

    def settle(self, ranks: int) -> None:
        """Compares what is known since the last sum. A collective call, if there is any."""
        while self._known:
            self._compared(ranks, 0.0, 0.0, 0.0)

    def _compared(self, ranks: int, *others: float) -> list[list[float]]:
        numbers, tolerance, where = self._known.popleft() if self._known else ([0.0, 0.0, 0.0], 0.0, "")
        rows = self._exchange("the sum of gradients", *others, *numbers)
        check_roots([row[3] for row in rows], tolerance, where)
        check_factors([row[4] * ranks for row in rows], tolerance, where)
        check_rows([row[5] for row in rows], tolerance, where)
        check_trained([row[2] for row in rows])
        return rows
