"""The numbers from which the ranks' backward passes began, which must be the same on all."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from torch import Tensor, nn

from evener.hardware.async_read import Readout, read_now
from evener.training.prepare.rank_checks import UNLIKE, Exchange, check_factors, check_roots, check_trained


class PassRoots:
    """The roots of all passes since the last sum of gradients.

    They are read from the device as they are computed, and compared when the sum begins: the device then still goes
    backward, so that it has work while the host waits for these numbers.

    Args:
        exchange: Exchanges numbers between all ranks, with a reason.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._roots, self._incoming, self._tolerance = list[Readout](), list[Readout](), 0.0

    def add(self, terms: Sequence[Readout], tolerance: float) -> None:
        """Adds the root of a pass, a sum of ``terms``, that rounding may change by ``tolerance``, relatively."""
        self._roots += terms
        self._tolerance = max(self._tolerance, tolerance)

    def came(self, gradient: Tensor) -> None:
        """Adds the gradient that a pass brought to a prepared loss."""
        self._incoming.append(read_now(gradient))

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
        """
        trained = zlib.crc32(bytes(p.requires_grad for model in models for p in model))
        root, incoming = (sum(each.value() for each in found) for found in (self._roots, self._incoming))
        tolerance = max(self._tolerance, UNLIKE) if mixed else self._tolerance
        self._roots, self._incoming, self._tolerance = [], [], 0.0
        rows = self._exchange(
            "the sum of gradients", float(mask), float(absent), float(trained), root, incoming
        )
        check_roots([row[3] for row in rows], tolerance)
        check_factors([row[4] * ranks for row in rows], tolerance)
        check_trained([row[2] for row in rows])
        return rows
