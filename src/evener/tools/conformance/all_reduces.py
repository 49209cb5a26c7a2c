"""Conformance test of an all-reduce: checks each of its promises on running ranks.

Each rank first reports to the others what it found, errors included. Only after all reports have arrived does a rank
raise or close anything. If one rank fails early, the others may wait for its part of the sum until they time out. So
the all-reduce has a process group of its own, and reports go through another::

    rank 0   all-reduce ── waits for rank 1 ── timed out after 20.0 s ─┐
    rank 1   all-reduce ── raises after 0.1 s ── waits ────────────────┴─ reported: rank 1 was the first
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from evener.checkpoint import weights_digest
from evener.collectives.base import AllReduce
from evener.collectives.executor.subgroup import owned_subgroup
from evener.collectives.missing_ranks import RollCall
from evener.collectives.registry import find, make_own
from evener.collectives.shared_memory.multi_host import MakeAllReduce
from evener.collectives.tuning.bench import sent_between
from evener.collectives.tuning.measure import device_of
from evener.core.half_precision import HALVES
from evener.distributed.hosts import all_gather
from evener.distributed.launch.launch import launch
from evener.distributed.session import Session
from evener.distributed.watchdog.watchdog import BACKSTOP_SECONDS
from evener.errors import ConfigurationError, EvenerError
from evener.tools.conformance.errors import broken, difference, noting

SIZES = (0, 1, 7, 33_333)
LARGE = 1_500_007
"""Number of elements that exceeds any intermediate buffer of an implementation."""
MISSING_SECONDS = 2.0


def check_all_reduce(
    make: str | Callable[..., AllReduce],
    processes: int = 2,
    *,
    dtypes: Sequence[torch.dtype] | None = None,
    device: str = "cpu",
    timeout_seconds: float = 60.0,
    missing_rank: bool = True,
) -> None:
    """Checks that an all-reduce keeps every promise of :class:`evener.collectives.base.AllReduce`.

    If ``torch.distributed`` is initialized, all ranks must call this together, and it runs on them. Otherwise it starts
    ranks.

    Args:
        make: A name that ``--allreduce`` takes, or what such a name stands for: a class or function that has a
            parameter ``group``, ``timeout_seconds``, or both.
        processes: Ranks to start, at least 2.
        dtypes: Dtypes that the all-reduce claims to sum. None for all that the ranks' backend can send.
        device: Device of the ranks that are started.
        timeout_seconds: Longest wait for another rank. Also the timeout of the process group that ``make`` gets.
        missing_rank: True to test also that a missing rank is reported, which takes some seconds. Not tested on
            accelerators: waits are queued there, and the session's watchdog finds the missing rank.

    Raises:
        ConformanceError: If a promise is broken. Says which, on what input and rank.
        ConfigurationError: If there is no such all-reduce, it cannot be made on these ranks, or there are fewer than 2.
    """
    arguments = (make, dtypes, timeout_seconds, missing_rank)
    if dist.is_initialized():
        _check(*arguments)
        return
    _check_number(processes)
    launch(
        _check_on_rank,
        device,
        *arguments,
        processes=processes,
        device=device,
        timeout_seconds=timeout_seconds,
    )


def _check_on_rank(
    device: str,
    make: str | Callable[..., AllReduce],
    dtypes: Sequence[torch.dtype] | None,
    timeout_seconds: float,
    missing_rank: bool,
) -> None:
    with Session(device, timeout_seconds):
        _check(make, dtypes, timeout_seconds, missing_rank)


def _check_number(ranks: int) -> None:
    if ranks < 2:
        raise ConfigurationError(f"an all-reduce is tried on at least two ranks, not {ranks}")


@dataclass(frozen=True)
class AllReduceTrial:
    """The ranks and the all-reduce under test."""

    name: str
    make: MakeAllReduce
    dtypes: tuple[torch.dtype, ...]
    timeout_seconds: float
    group: dist.ProcessGroup
    """Process group of all ranks for the all-reduce alone. It may break."""
    table: dist.ProcessGroup
    """Process group of all ranks for their reports. Its timeout is longer than that of the all-reduce."""
    roll_call: RollCall
    """Finds ranks that are missing in ``table``."""
    kept: ExitStack = field(default_factory=ExitStack)
    """Resources that are closed after all ranks have reported."""

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.group)

    def opened(
        self, group: dist.ProcessGroup | None = None, timeout_seconds: float | None = None
    ) -> AllReduce:
        """Makes a new all-reduce, which stays open until all ranks have reported."""
        made = self.make(group or self.group, timeout_seconds or self.timeout_seconds)
        return self.kept.enter_context(made)

    def term(self, dtype: torch.dtype, numel: int, rank: int | None = None, seed: int = 0) -> Tensor:
        """Returns small random integers of one rank. Every dtype holds their sum over a few ranks exactly."""
        generator = torch.Generator().manual_seed(1000 * seed + (self.rank if rank is None else rank))
        return torch.randint(0, 9, (numel,), generator=generator).to(dtype).to(device_of(self.group))

    def total(self, dtype: torch.dtype, numel: int, seed: int = 0) -> Tensor:
        total = self.term(dtype, numel, 0, seed)
        for rank in range(1, self.world_size):
            total += self.term(dtype, numel, rank, seed)
        return total


Digests = Mapping[str, str]
"""Digests of tensors, by a description of the tensor."""
Attempt = Callable[[AllReduceTrial], str | Digests | None]
"""Tests one promise on a rank. Returns an error text, digests that all ranks must agree on, or None if all is well."""


@dataclass(frozen=True)
class TrialReport:
    """Report of one rank about one promise."""

    rank: int
    seconds: float
    """Seconds until the rank had its result."""
    wrong: str | None = None
    refused: bool = False
    """True if the all-reduce cannot be tested at all."""
    digests: Digests = field(default_factory=dict)


def _check(
    make: str | Callable[..., AllReduce],
    dtypes: Sequence[torch.dtype] | None,
    timeout_seconds: float,
    missing_rank: bool,
) -> None:
    world = dist.group.WORLD
    assert world is not None
    _check_number(dist.get_world_size(world))
    name = make if isinstance(make, str) else getattr(make, "__name__", repr(make))
    function = find(make) if isinstance(make, str) else partial(make_own, make, name)
    with ExitStack() as stack:
        table = _group_of_all(stack, world, timeout_seconds + BACKSTOP_SECONDS)
        group = _group_of_all(stack, world, timeout_seconds)
        claimed = tuple(dtypes or sent_between(group))
        trial = AllReduceTrial(name, function, claimed, timeout_seconds, group, table, RollCall(table))
        stack.enter_context(trial.kept)
        for promise, attempt in PROMISES.items():
            _settle(trial, promise, attempt)
        if missing_rank and device_of(group).type == "cpu":
            _settle(trial, NAMES_THE_MISSING, _is_silent_about_a_missing_rank)


def _group_of_all(stack: ExitStack, parent: dist.ProcessGroup, timeout_seconds: float) -> dist.ProcessGroup:
    group = owned_subgroup(stack, parent, range(dist.get_world_size(parent)), timeout_seconds)
    assert group is not None
    return group


def _settle(trial: AllReduceTrial, promise: str, attempt: Attempt) -> None:
    """Tests one promise, then closes what was opened. If any rank reports an error, all ranks raise it."""
    tried = _all_reports(trial, promise, partial(attempt, trial))
    closed = _all_reports(trial, promise, trial.kept.close)
    for reports in (tried, closed):
        _judge(trial, promise, reports)


def _all_reports(
    trial: AllReduceTrial, promise: str, act: Callable[[], str | Digests | None]
) -> list[TrialReport]:
    own = _report(trial.rank, act)
    try:
        return all_gather(own, trial.table)
    except RuntimeError as error:
        seen = f"On rank {own.rank}: {own.wrong}. " if own.wrong else ""
        raise broken(trial.name, promise, f"{seen}{trial.roll_call.explain(error)}") from error


def _report(rank: int, act: Callable[[], str | Digests | None]) -> TrialReport:
    start = time.monotonic()
    refused, seen = False, None
    try:
        seen = act()
    except Exception as error:
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        refused, seen = (
            isinstance(error, ConfigurationError),
            f"it raised {type(error).__name__}: {error}{notes}",
        )
    seconds = time.monotonic() - start
    if isinstance(seen, Mapping):
        return TrialReport(rank, seconds, digests=seen)
    return TrialReport(rank, seconds, seen, refused)


def _judge(trial: AllReduceTrial, promise: str, reports: Sequence[TrialReport]) -> None:
    """Raises the earliest error of any rank, for later ones may follow from it. Also raises if digests differ."""
    first = min((one for one in reports if one.wrong), key=lambda one: one.seconds, default=None)
    if first is not None:
        seen = f"On rank {first.rank} of {trial.world_size}: {first.wrong}"
        raise ConfigurationError(seen) if first.refused else broken(trial.name, promise, seen)
    for what in reports[0].digests:
        digests = [one.digests[what] for one in reports]
        if len(set(digests)) > 1:
            raise broken(trial.name, promise, f"{what} have the digests {digests} on the ranks")


def _sums_wrongly(trial: AllReduceTrial) -> str | None:
    cases = [(dtype, numel) for dtype in trial.dtypes for numel in SIZES]
    if torch.float32 in trial.dtypes:
        cases.append((torch.float32, LARGE))
    seen = None
    all_reduce = trial.opened()
    for dtype, numel in cases:
        tensor, expected = trial.term(dtype, numel), trial.total(dtype, numel)
        with noting(f"with {numel} x {dtype}"):
            all_reduce(tensor).wait()
        if all_reduce.exact or not dtype.is_floating_point:
            seen = seen or difference(tensor, expected, f"{numel} x {dtype}")
    return seen


def _adds_in_halves(trial: AllReduceTrial) -> str | None:
    """Sums a large number and small ones, which are lost if every addition is rounded to half precision."""
    seen, all_reduce = None, trial.opened()
    for dtype in [each for each in HALVES if each in trial.dtypes and all_reduce.exact]:
        large = 2.0 / torch.finfo(dtype).eps
        own = large if trial.rank == 0 else 1.0
        tensor = torch.full((5,), own, dtype=dtype, device=device_of(trial.group))
        all_reduce(tensor).wait()
        expected = torch.full_like(tensor, large + trial.world_size - 1)
        seen = seen or difference(tensor, expected, f"{large:g} and ones of {dtype}")
    return seen


def _bits(trial: AllReduceTrial) -> Digests:
    """Returns digests of sums whose last bits depend on the order of addition."""
    digests = {}
    all_reduce = trial.opened()
    for dtype in (dtype for dtype in trial.dtypes if dtype.is_floating_point):
        for numel in (5, 70_001, 600_000):
            tensor = _of_many_scales(trial, dtype, numel)
            all_reduce(tensor).wait()
            digests[f"{numel} x {dtype}"] = weights_digest({"sum": tensor})[:8]
    return digests


def _of_many_scales(trial: AllReduceTrial, dtype: torch.dtype, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(trial.rank)
    scales = 10.0 ** torch.randint(-3, 3, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator) * scales).to(dtype).to(device_of(trial.group))


def _confuses_calls(trial: AllReduceTrial) -> str | None:
    """Starts several calls at a time. For every second call, the future is tested too."""
    sizes = [3, 100_000, 1, 0, 40_000, 300_000, 8]
    seen = None
    all_reduce = trial.opened()
    for seed in range(3):
        tensors = [trial.term(torch.float32, size, seed=seed) for size in sizes]
        works = [all_reduce(tensor) for tensor in tensors]
        futures = [work.future() for work in works[::2]]
        for work in works:
            work.wait()
        results = [future.wait() for future in futures]
        for size, tensor in zip(sizes, tensors, strict=True):
            expected = trial.total(torch.float32, size, seed)
            if all_reduce.exact:
                seen = seen or difference(tensor, expected, f"{size} elements, one of {len(sizes)} calls")
        for tensor, result in zip(tensors[::2], results, strict=True):
            seen = seen or difference(result, tensor, "the future's value, which must be the tensor")
    return seen


def _fails_on_odd_tensors(trial: AllReduceTrial) -> str | None:
    ranks, device = float(trial.world_size), device_of(trial.group)
    matrix, every_other = torch.ones(6, 5, device=device), torch.ones(10, device=device)
    parameter, scalar = torch.ones(3, device=device, requires_grad=True), torch.tensor(2.0, device=device)
    negated = torch.tensor([1j], device=device).conj().imag  # -1, as a view that negates what is stored
    place = torch.tensor([[trial.rank]], device=device)
    sparse = torch.sparse_coo_tensor(
        place, torch.ones(1, device=device), (trial.world_size,), check_invariants=True
    ).coalesce()
    all_reduce = trial.opened()
    all_reduce(matrix.t()).wait()
    all_reduce(every_other[::2]).future().wait()
    all_reduce(parameter).wait()
    all_reduce(scalar).wait()
    all_reduce(negated).wait()
    all_reduce(sparse).wait()
    if not all_reduce.exact:
        return None
    interleaved = torch.tensor([ranks, 1.0] * 5, device=device)
    return (
        difference(matrix, torch.full_like(matrix, ranks), "a transposed matrix")
        or difference(every_other, interleaved, "every other element")
        or difference(parameter.detach(), torch.full((3,), ranks, device=device), "a parameter")
        or difference(scalar, torch.tensor(2.0 * ranks, device=device), "a tensor without dimensions")
        or difference(negated, torch.full((1,), -ranks, device=device), "a negated view")
        or difference(
            sparse.to_dense(), torch.ones(trial.world_size, device=device), "a sparse tensor, made dense"
        )
    )


def _cannot_close_twice(trial: AllReduceTrial) -> str | None:
    """Closes an all-reduce twice, and checks that another can be made afterwards."""
    for _ in range(2):
        all_reduce = trial.make(trial.group, trial.timeout_seconds)
        tensor = torch.ones(3, device=device_of(trial.group))
        all_reduce(tensor).wait()
        all_reduce.close()
        all_reduce.close()
    return None


def _fails_alone(trial: AllReduceTrial) -> str | None:
    alone = owned_subgroup(trial.kept, trial.table, [trial.rank], trial.timeout_seconds)
    assert alone is not None
    all_reduce = trial.opened(alone)
    tensor = trial.term(torch.float32, 1000)
    work = all_reduce(tensor)
    work.wait()
    work.future().wait()
    if not all_reduce.exact:
        return None
    return difference(tensor, trial.term(torch.float32, 1000), "1000 elements of the only rank")


def _is_silent_about_a_missing_rank(trial: AllReduceTrial) -> str | None:
    """Lets all ranks but the last call the all-reduce, in a process group with a short timeout."""
    group = _group_of_all(trial.kept, trial.table, MISSING_SECONDS)
    all_reduce = trial.opened(group, MISSING_SECONDS)
    missing = trial.world_size - 1
    return None if trial.rank == missing else _silence(all_reduce, missing)


def _silence(all_reduce: AllReduce, missing: int) -> str | None:
    tensor = torch.ones(5, device=device_of(all_reduce.group))
    try:
        all_reduce(tensor).wait()
    except Exception as error:
        if isinstance(error, EvenerError) and re.search(rf"\brank {missing}\b", str(error)):
            return None
        return f"rank {missing} did not come, and {type(error).__name__} says: {error}"
    return f"rank {missing} did not come, and the sum is said to be there"


PROMISES: dict[str, Attempt] = {
    "it can be made for one rank alone, and leaves the tensor as it is": _fails_alone,
    "the tensor is the sum over the ranks, for every dtype and size": _sums_wrongly,
    "float16 and bfloat16 are added in float32": _adds_in_halves,
    "all ranks hold the same bits": _bits,
    "calls are carried out in the order in which they were made": _confuses_calls,
    "tensors of any strides are summed in place, sparse ones too": _fails_on_odd_tensors,
    "closing twice does nothing, and another can be made then": _cannot_close_twice,
}
NAMES_THE_MISSING = "a wait for a rank that does not come ends with an EvenerError that names it"
