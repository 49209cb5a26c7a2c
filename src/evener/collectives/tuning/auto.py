"""The all-reduce "auto": for each call it uses the implementation that was measured to be fastest for the size."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

import torch.distributed as dist
from torch import Tensor

from evener.collectives.base import AllReduce, Key, Work
from evener.collectives.tuning.measure import SIZES, measured_costs
from evener.collectives.tuning.select import AllReduceChoice, MeasuredCosts, choose
from evener.core.config.time_limit import TIMEOUT_SECONDS


class Fastest(AllReduce):
    """Chooses among ``all_reduces`` by ``costs``, which must be the same on all ranks. Owns and closes ``all_reduces``.

    Raises:
        ValueError: ``costs`` cannot predict the time of one of them.
    """

    name = "auto"

    def __init__(
        self,
        all_reduces: Mapping[str, AllReduce],
        costs: MeasuredCosts,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        super().__init__(group, timeout_seconds)
        self._all_reduces = dict(all_reduces)
        self.costs = costs
        self._choices: dict[int, AllReduceChoice] = {}
        self.fastest_for(1)

    @property
    def words(self) -> str:
        """Describes which all-reduce runs up to which of the measured sizes; the last one also runs beyond them."""
        runs = [(what, list(sizes)[-1]) for what, sizes in groupby(SIZES, self._name_for)]
        borders = [f"{what} up to {_format_size(last)}" for what, last in runs[:-1]]
        last = runs[-1][0]
        ranges = ", ".join([*borders, f"{last} above"]) if borders else last
        return f"auto: {ranges}" + (f" ({self.note})" if self.note else "")

    @property
    def remembers(self) -> bool:
        return any(each.remembers for each in self._all_reduces.values())

    @property
    def held_nbytes(self) -> int:  # type: ignore[override]
        return sum(each.held_nbytes for each in self._all_reduces.values())

    @property
    def waits(self) -> bool:  # type: ignore[override]
        return any(each.waits for each in self._all_reduces.values())

    @property
    def exact(self) -> bool:
        return all(each.exact for each in self._all_reduces.values())

    def fastest_for(self, nbytes: int) -> AllReduce:
        """Returns the all-reduce for tensors of ``nbytes``."""
        return self._all_reduces[self.choice(nbytes).name]

    def choice(self, nbytes: int) -> AllReduceChoice:
        """Returns the name of the all-reduce for tensors of ``nbytes``, its segments and its predicted time."""
        found = self._choices.get(nbytes)
        if found is None:
            found = self._choices[nbytes] = choose(self.costs, max(nbytes, 1), self._all_reduces)
        return found

    def _name_for(self, nbytes: int) -> str:
        choice = self.choice(nbytes)
        cut = f" in {choice.segments} segments" if choice.segments > 1 else ""
        return self._all_reduces[choice.name].words + cut

    def expected_seconds(self, nbytes: int) -> float:
        return self.choice(nbytes).seconds

    def start(self, tensor: Tensor) -> Work:
        return self.start_for(tensor, None)

    def start_for(self, tensor: Tensor, key: Key) -> Work:
        choice = self.choice(tensor.nbytes)
        return self._all_reduces[choice.name].start_in(tensor, choice.segments, key)

    def start_lasting(self, tensor: Tensor, key: Key) -> Work:
        choice = self.choice(tensor.nbytes)
        chosen = self._all_reduces[choice.name]
        return chosen.start_lasting(tensor, key) if choice.segments == 1 else self.start_for(tensor, key)

    def close(self) -> None:
        for each in self._all_reduces.values():
            each.close()


def _format_size(nbytes: int) -> str:
    units = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
    unit, name = next(each for each in units if nbytes >= each[0])
    return f"{nbytes // unit} {name}"


def measured(
    all_reduces: Mapping[str, AllReduce],
    group: dist.ProcessGroup | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Fastest:
    """Builds a :class:`Fastest` from cached measurements of this topology, or measures now. All ranks must call this
    together."""
    whole = group if group is not None else dist.group.WORLD
    assert whole is not None
    return Fastest(all_reduces, measured_costs(all_reduces, whole), whole, timeout_seconds)
