"""For each call the all-reduce that was measured to be fastest for its size."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from evener.collectives.base import DEFAULT_TIMEOUT_SECONDS, AllReduce, Work
from evener.collectives.measure import measured_costs
from evener.collectives.select import Choice, Costs, choose


class Auto(AllReduce):
    """Chooses among ``all_reduces`` by ``costs``, which must be the same on all ranks. Owns them, and closes them.

    Raises:
        ValueError: ``costs`` does not say how long one of them takes.
    """

    name = "auto"

    def __init__(
        self,
        all_reduces: Mapping[str, AllReduce],
        costs: Costs,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        super().__init__(group, timeout_seconds)
        self._all_reduces = dict(all_reduces)
        self.costs = costs
        self._chosen: dict[int, AllReduce] = {}
        self.chosen(1)

    @property
    def exact(self) -> bool:
        return all(each.exact for each in self._all_reduces.values())

    def chosen(self, nbytes: int) -> AllReduce:
        """The all-reduce for tensors of ``nbytes``."""
        found = self._chosen.get(nbytes)
        if found is None:
            found = self._chosen[nbytes] = self._all_reduces[self.choice(nbytes).name]
        return found

    def choice(self, nbytes: int) -> Choice:
        """The name of the all-reduce for tensors of ``nbytes``, and how long it is expected to take."""
        return choose(self.costs, max(nbytes, 1), self._all_reduces)

    def expected_seconds(self, nbytes: int) -> float:
        return self.choice(nbytes).seconds

    def start(self, tensor: Tensor) -> Work:
        return self.chosen(tensor.nbytes).start(tensor)

    def close(self) -> None:
        for each in self._all_reduces.values():
            each.close()


def measured(
    all_reduces: Mapping[str, AllReduce],
    group: dist.ProcessGroup | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> Auto:
    """An :class:`Auto` by measurements of this topology, made now if there are none yet. A collective call."""
    whole = group if group is not None else dist.group.WORLD
    assert whole is not None
    return Auto(all_reduces, measured_costs(all_reduces, whole), whole, timeout_seconds)
