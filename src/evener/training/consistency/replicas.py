"""Checks that ranks which must hold the same tensors do: compares digests every N steps and at the end.

If weights diverge between ranks, training continues and nobody notices. Causes are a flipped bit in memory, a device
that rounds differently, or an ``if rank == 0`` in a model. So each rank computes one number from all that it holds, and
the ranks exchange these numbers. Only if they differ, a second message tells which tensor it is::

    every N steps   digest of weights and buffers ─ one number of each rank ─▶ equal
    at the end      the same with the optimizer's state                     └▶ numbers of every tensor ─ which differ,
                                                                               and on which ranks ─ an error, or healed

The mesh tells which ranks must be equal: a tensor that is divided over some axes is the same on ranks that differ only
along the other axes.

A digest reads all numbers once and sums their bits, part by part; this takes 0.3 ms per million numbers. Unless the
user sets N, it is chosen so that digests take 0.5 % of the time, from the measured times of a comparison (waiting
included) and of a step. All ranks choose the same N.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evener.components.coalesce import broadcast_together
from evener.components.optim.stand_ins import states_of
from evener.components.sharded_tensor.local import local, off_host
from evener.components.sharded_tensor.shard_spec import shard_spec
from evener.core.complex_numbers import as_real
from evener.core.config.run_config import RunConfig
from evener.core.records import Note
from evener.data.rounds import Rounds
from evener.distributed.mesh import AXES
from evener.errors import ConfigurationError, DivergenceError
from evener.hardware import accelerators
from evener.hardware.async_read import read
from evener.hardware.timers import waiting
from evener.nn.fqn import clean_name
from evener.strategies.learner import Learner
from evener.torch_internals.modules import own_buffers
from evener.torch_internals.quantized_state import codes_of, is_quantized
from evener.training.consistency.rounding import is_rounding
from evener.training.step.exchange import Exchange

SHARE = 0.005
"""Part of the time of all steps that comparing may take."""
FIRST = 10
"""Step of the first comparison, and least distance between comparisons, if the user sets none."""
_PARTS = 8
_BITS = 2**52 - 1

Axes = tuple[str, ...]


@dataclass(frozen=True)
class ReplicaPart:
    """A tensor, or a rank's part of one."""

    name: str
    numbers: Tensor
    axes: Axes
    """Mesh axes over which the tensor is divided."""


def digest(numbers: Tensor) -> Tensor:
    """Returns an integer below 2**52 from all bits of ``numbers``, on their device. It changes if parts are swapped."""
    dense = numbers if numbers.layout is torch.strided else numbers.to_dense()  # sparse buffers are small
    flat = as_real(dense.detach()).contiguous().reshape(-1).view(torch.uint8)
    words = flat.numel() // (8 * _PARTS) * _PARTS
    whole, rest = flat[: 8 * words], flat[8 * words :]
    if whole.storage_offset() % 8:
        whole = whole.clone()
    weights = _weights(flat.device)
    sums = whole.view(torch.int64).view(_PARTS, -1).sum(1) * weights[:_PARTS]
    total = sums.sum() + (rest * weights[: len(rest)]).sum()
    return (total ^ total >> 12) & _BITS


@cache
def _weights(device: torch.device) -> Tensor:
    """Returns odd numbers, one for each part and for each remaining byte."""
    return torch.arange(8 * _PARTS, device=device) * 2 + 1


def parts_of(learner: Learner, everything: bool) -> Iterator[ReplicaPart]:
    """Yields this rank's weights and buffers and, with ``everything``, the optimizer's state."""
    yield from (_part(name, weight, weight) for weight, name in learner.names.items())
    yield from (_part(f"the average of {name}", *pair) for name, pair in learner.average.pairs().items())
    for at, module in learner.model.named_modules():
        for name, buffer in own_buffers(module).items():
            if buffer is not None:
                yield _part(clean_name(f"{at}.{name}" if at else name), buffer, buffer)
    alike = everything and not isinstance(learner.rounds, Rounds)  # replicas have states of their own
    for parameter, entries in states_of(learner.optimizer) if alike else ():
        for key, value in entries.items():
            if isinstance(value, Tensor) and parameter in learner.names:
                yield from _parts(f"the optimizer's {key} of {learner.names[parameter]}", value, parameter)


def _parts(name: str, value: Tensor, owner: Tensor) -> Iterator[ReplicaPart]:
    """Yields a tensor, or the codes and scales of a quantized one. These are what the rank holds, and can be healed."""
    held = local(value.detach())
    if not is_quantized(held):
        yield _part(name, value, owner)
        return
    for kind, numbers in codes_of(held).items():
        yield _part(f"{name}, {kind}", numbers, owner)


def _part(name: str, value: Tensor, owner: Tensor) -> ReplicaPart:
    piece = shard_spec(owner)
    return ReplicaPart(name, local(value.detach()), tuple(sorted(piece.axes)) if piece else ())


Digests = dict[Axes, dict[str, float]]
"""Digests by the axes over which tensors are divided, and by name."""


def digests_of(parts: Sequence[ReplicaPart], device: torch.device) -> Digests:
    """Returns the digests of this rank's tensors. Waits for ``device``, which may still be copying some to the host."""
    found: Digests = {}
    accelerators.synchronize(device)
    numbers = [digest(part.numbers).to(device) for part in parts]
    for part, number in zip(parts, read(torch.stack(numbers)).values() if parts else (), strict=True):
        found.setdefault(part.axes, {})[part.name] = number
    return found


def together(digests: Mapping[str, float]) -> float:
    """Combines digests of many tensors into one number."""
    text = repr(sorted(digests.items()))
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()))


def majority(values: Sequence[float]) -> int | None:
    """Returns the first index of the value that more than half of the entries have, or None if there is none."""
    value, times = Counter(values).most_common(1)[0]
    return values.index(value) if 2 * times > len(values) else None


def steps_between(digest_seconds: float, step_seconds: float) -> int:
    """Returns a number of steps in which digests take :data:`SHARE` of the time."""
    return max(FIRST, math.ceil(digest_seconds / (SHARE * max(step_seconds, 1e-6))))


class ReplicaCheck:
    """Compares the tensors of the ranks, and heals them if asked to.

    Args:
        learner: Holds the tensors.
        control: Exchanges numbers between all ranks.
        config: Says how often to compare, and what to do if tensors differ.
        report: Called with a record of what was healed.

    Raises:
        ConfigurationError: For settings that would have no effect.
    """

    def __init__(
        self,
        learner: Learner,
        control: Exchange,
        config: RunConfig,
        report: Callable[[Any], None],
    ) -> None:
        every, remedy = config.check_replicas, config.on_replica_mismatch
        self._apart_by_kind = learner.session.mixed and remedy is None and every != 0
        if self._apart_by_kind and learner.synchronizer.keeps_equal:
            remedy = "rank0"
        self._learner, self._control, self._remedy, self._report = learner, control, remedy, report
        self._mesh, self._auto = learner.mesh, every is None
        self._every = FIRST if every is None else every
        self._keys: list[Axes] | None = None
        self._last_step, self._last_time, self._is_reported = 0, time.perf_counter(), False
        self._steps, self._last_cost = deque[float](maxlen=100), 0.0
        """Seconds of the last steps, and of the last comparison, waiting included."""
        if not learner.synchronizer.keeps_equal:
            self._refuse_needless(every)
            self._every = 0
        elif remedy is not None:
            self._check_remedy(remedy)

    def _refuse_needless(self, every: int | None) -> None:
        if every or self._remedy:
            raise ConfigurationError(
                f"strategy {self._learner.name!r} lets the ranks differ between steps, and says so: leave out "
                "check_replicas and on_replica_mismatch"
            )

    def _check_remedy(self, remedy: str) -> None:
        needed = 3 if remedy == "majority" else 2
        most = max(len(ranks) for part in parts_of(self._learner, False) for ranks in self._alike(part.axes))
        if most < needed:
            raise ConfigurationError(
                f"on_replica_mismatch={remedy} would do nothing: it takes {needed} ranks that hold the "
                f"same tensors, and here are {most}; leave it out"
            )

    def _alike(self, axes: Axes) -> list[tuple[int, ...]]:
        """Returns the sets of ranks that hold the same part of tensors divided over ``axes``."""
        return self._mesh.layout.slices(_free(axes))

    @property
    def _is_on(self) -> bool:
        return bool(self._every) and self._mesh.world is not None

    def after(self, step: int, settle: Callable[[], None]) -> None:
        """Called after each step. Compares if it is time to, on all ranks alike.

        Args:
            settle: Waits until it is known that all steps so far went well.
        """
        if not self._is_on:
            return
        now = time.perf_counter()
        self._steps.append(now - self._last_time)
        self._last_step = min(self._last_step, step - 1)  # the run may have gone back to an earlier state
        if step - self._last_step >= self._every:
            settle()
            self.check(step)
            self._last_cost = time.perf_counter() - now
        self._last_time = time.perf_counter()

    def check(self, step: int, everything: bool = False, again: bool = True) -> None:
        """Compares, and heals if asked to. A collective call.

        Args:
            step: Number of steps taken.
            everything: Includes the optimizer's state.
            again: If False, only if a step was taken since the last comparison.

        Raises:
            DivergenceError: On all ranks alike, if they differ and are not healed.
        """
        if not self._is_on or not (again or step > self._last_step):
            return
        own, took = self._timed(everything)
        rows = self._exchange(own, (max(took, self._last_cost), statistics.median(self._steps or [1.0])))
        if any(self._astray([row[place] for row in rows], key) for place, key in enumerate(self._known(own))):
            self._resolve(step, everything, own)
        if self._auto:
            self._every = steps_between(max(row[-2] for row in rows), min(row[-1] for row in rows))
        self._last_step = step

    def _timed(self, everything: bool) -> tuple[Digests, float]:
        if self._keys is None and self._auto:  # warm-up: allocates memory
            digests_of(self._parts(everything), self._learner.session.device)
        began = time.perf_counter()
        return digests_of(self._parts(everything), self._learner.session.device), time.perf_counter() - began

    def _parts(self, everything: bool) -> list[ReplicaPart]:
        return list(parts_of(self._learner, everything))

    def _known(self, own: Digests) -> list[Axes]:
        """Returns all ranks' sets of axes that divide tensors, so that all rows have the same length."""
        if self._keys is None:
            self._keys = sorted(set().union(*self._learner.session.control.gather_objects(list(own))))
        return self._keys

    def _exchange(self, own: Digests, seconds: tuple[float, float]) -> list[list[float]]:
        numbers = [together(own.get(key, {})) for key in self._known(own)]
        with waiting():
            return self._control.exchange([*numbers, *seconds]).wait()

    def _astray(self, values: Sequence[Any], axes: Axes) -> list[tuple[int, ...]]:
        """Returns the sets of ranks whose values should be the same but are not."""
        return [
            ranks for ranks in self._alike(axes) if any(values[rank] != values[ranks[0]] for rank in ranks)
        ]

    # If tensors differ

    def _resolve(self, step: int, everything: bool, own: Digests) -> None:
        everyone = self._learner.session.control.gather_objects(own)
        difference = self._difference(everyone)
        if self._remedy is None:
            raise DivergenceError(
                f"after step {step - 1} ranks that must hold the same do not: {difference}. They were last seen "
                f"equal after {self._last_step} steps. What can do it: a weight that the model writes in forward (a "
                "buffer would be shared), memory or a device at fault, devices that round otherwise, code that treats "
                "ranks differently, random numbers drawn in a model outside of evener.nn. Go on from the last "
                "checkpoint, or set on_replica_mismatch to give them the state of the majority or of rank 0"
            )
        strange = self._give(difference, step - self._last_step)
        if self._apart_by_kind:
            self._check_rounding(step, strange)
        again = self._learner.session.control.gather_objects(self._timed(everything)[0])
        if any(self._differing(again)):
            raise DivergenceError(f"after healing, ranks still differ: {self._difference(again)}")
        if self._apart_by_kind:
            self._report_rounding(step)
        else:
            self._report(Note(step, f"replicas differed after step {step - 1} and were healed: {difference}"))

    def _check_rounding(self, step: int, strange: str | None) -> None:
        """Raises an error on all ranks alike if a difference is too large for devices of different kinds."""
        said = self._learner.session.control.gather_objects(strange)
        found = [f"{name} of rank {rank}" for rank, name in enumerate(said) if name]
        if found:
            raise DivergenceError(
                f"after step {step - 1} {', '.join(found)} was farther from that of rank 0 than devices which round "
                f"differently come apart in the {step - self._last_step} steps since they were compared. What can do "
                "it: memory or a device at fault, code that treats ranks differently. Go on from the last checkpoint"
            )

    def _report_rounding(self, step: int) -> None:
        """Reports the first rounding difference. Later ones are not reported."""
        if not self._is_reported:
            self._report(
                Note(
                    step,
                    "devices of different kinds round differently, so that their weights come apart in the last bits: "
                    f"all have those of rank 0 again, as after every {self._every} steps; "
                    "on_replica_mismatch and check_replicas change that",
                )
            )
        self._is_reported = True

    def _differing(self, everyone: Sequence[Digests]) -> Iterator[tuple[Axes, str, tuple[int, ...]]]:
        """Yields the tensors that differ: axes, name, and the set of ranks."""
        for key in self._keys or ():
            names = dict.fromkeys(name for digests in everyone for name in digests.get(key, {}))
            for name in names:
                values = [digests.get(key, {}).get(name) for digests in everyone]
                for ranks in self._astray(values, key):
                    yield key, name, ranks

    def _difference(self, everyone: Sequence[Digests]) -> str:
        found = list(self._differing(everyone))
        axes, name, ranks = found[0]
        values = [everyone[rank].get(axes, {}).get(name) for rank in ranks]
        alike = [
            [rank for rank, other in zip(ranks, values, strict=True) if other == value]
            for value in dict.fromkeys(values)
        ]
        several = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return f"{name}{several} is one thing on {', another on '.join(map(_named, alike))}"

    def _give(self, difference: str, steps: int) -> str | None:
        """Sends all tensors, with the optimizer's state, from right ranks to the others.

        Returns:
            Name of the first tensor that differs by more than rounding in ``steps`` steps explains; None if there is
            none.
        """
        strange = None
        parts = sorted(self._parts(everything=True), key=lambda part: part.name)
        session = self._learner.session
        everyone = session.control.gather_objects(digests_of(parts, session.device))
        for key in self._keys or ():
            held = [digests.get(key, {}) for digests in everyone]
            if self._astray([sorted(digests) for digests in held], key):
                raise DivergenceError(f"ranks hold other tensors, which cannot be healed: {difference}")
            values = list(map(together, held))
            sources = {
                ranks: self._source([values[rank] for rank in ranks], difference)
                for ranks in self._alike(key)
            }
            group, ranks = self._mesh.group(*_free(key)), self._mesh.ranks(*_free(key))
            for part in parts if group is not None and self._astray(values, key) else ():
                if part.axes == key and part.numbers.layout is torch.strided:
                    right = self._right(part.numbers, group, sources[ranks])
                    if strange is None and not is_rounding(part.numbers, right, steps):
                        strange = part.name
                    part.numbers.copy_(right)
        self._learner.synchronizer.updated(0)
        return strange

    def _source(self, values: Sequence[float], difference: str) -> int:
        found = 0 if self._remedy == "rank0" else majority(values)
        if found is None:
            raise DivergenceError(
                f"replicas differ, and no majority of them holds the same: {difference}. Set "
                "on_replica_mismatch=rank0, or go on from the last checkpoint"
            )
        return found

    def _right(self, numbers: Tensor, group: dist.ProcessGroup | None, source: int) -> Tensor:
        """Returns the values of rank ``source`` of the group."""
        sent = off_host(numbers, self._mesh).clone(memory_format=torch.contiguous_format)
        broadcast_together([sent], group, source, sent.nbytes)
        return sent.to(numbers.device)


def _free(axes: Axes) -> list[str]:
    return [axis for axis in AXES if axis not in axes]


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
