"""The promises of an all-reduce, each tried on running ranks.

A rank that finds a promise broken must not leave the others waiting for it: it goes on to the end of the trial, and all
ranks tell each other what they saw before any of them raises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from evener.collectives.base import AllReduce
from evener.collectives.choose.bench import DTYPES
from evener.collectives.choose.measure import device_of
from evener.collectives.execute.subgroup import subgroup
from evener.collectives.registry import find, make_own
from evener.collectives.shared_memory.two_level import MakeAllReduce
from evener.errors import ConfigurationError, EvenerError
from evener.runtime.hosts import all_gather, destroy
from evener.runtime.launch import launch
from evener.runtime.session import Session
from evener.testing.promises import broken

SIZES = (0, 1, 7, 33_333)
LARGE = 1_500_007
"""Elements: more than any buffer that an implementation may have in between."""
MISSING_SECONDS = 2.0


def check_all_reduce(
    make: str | Callable[..., AllReduce],
    processes: int = 2,
    *,
    dtypes: Sequence[torch.dtype] = tuple(DTYPES.values()),
    device: str = "cpu",
    timeout_seconds: float = 60.0,
    missing_rank: bool = True,
) -> None:
    """Raises unless what ``make`` makes keeps every promise of :class:`evener.collectives.base.AllReduce`.

    Where ``torch.distributed`` is initialized already, it is a collective call of all ranks; else it starts ranks.

    Args:
        make: A name that ``--allreduce`` takes, or what such a name stands for: a class, or a function that names
            ``group`` and ``timeout_seconds`` or one of them.
        processes: Ranks to start, at least 2.
        dtypes: Those that it claims to sum.
        device: Of the ranks that are started.
        timeout_seconds: The longest wait.
        missing_rank: Whether to try what happens when a rank does not come; this takes some seconds.

    Raises:
        ConformanceError: Which promise is broken, on what input and rank.
        ConfigurationError: There is no such all-reduce, or it cannot be made on these ranks.
    """
    arguments = (make, tuple(dtypes), timeout_seconds, missing_rank)
    if dist.is_initialized():
        _check(*arguments)
    elif processes < 2:
        raise ConfigurationError(f"an all-reduce is tried on at least two ranks, not {processes}")
    else:
        launch(_check_on_rank, device, *arguments, processes=processes, device=device)


def _check_on_rank(device: str, *arguments: object) -> None:
    with Session(device=device):
        _check(*arguments)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Trial:
    """The ranks and the all-reduce that a promise is tried on."""

    name: str
    make: MakeAllReduce
    dtypes: tuple[torch.dtype, ...]
    timeout_seconds: float
    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.group)

    @contextmanager
    def opened(self) -> Iterator[AllReduce]:
        with self.make(self.group, self.timeout_seconds) as all_reduce:
            yield all_reduce

    def term(self, dtype: torch.dtype, numel: int, rank: int | None = None, seed: int = 0) -> Tensor:
        """A rank's small integers, whose sum over a few ranks every dtype holds exactly."""
        generator = torch.Generator().manual_seed(1000 * seed + (self.rank if rank is None else rank))
        return torch.randint(0, 9, (numel,), generator=generator).to(dtype).to(device_of(self.group))

    def total(self, dtype: torch.dtype, numel: int, seed: int = 0) -> Tensor:
        total = self.term(dtype, numel, 0, seed)
        for rank in range(1, self.world_size):
            total += self.term(dtype, numel, rank, seed)
        return total


Find = Callable[[Trial], str | None]
"""What is wrong, on this rank; None if nothing is."""


def _check(
    make: str | Callable[..., AllReduce],
    dtypes: tuple[torch.dtype, ...],
    timeout_seconds: float,
    missing_rank: bool,
) -> None:
    name = make if isinstance(make, str) else getattr(make, "__name__", repr(make))
    function = find(make) if isinstance(make, str) else partial(make_own, make, name)
    world = dist.group.WORLD
    assert world is not None
    trial = Trial(name, function, dtypes, timeout_seconds, world)
    for promise, attempt in PROMISES.items():
        _settle(trial, promise, attempt)
    if missing_rank and trial.world_size > 1:
        _settle(trial, NAMES_THE_MISSING, _is_silent_about_a_missing_rank)


def _settle(trial: Trial, promise: str, attempt: Find) -> None:
    """Raises on all ranks alike if any has found something."""
    try:
        seen = attempt(trial)
    except ConfigurationError:
        raise  # it cannot be made, on any rank
    except Exception as error:
        seen = f"it raised {type(error).__name__}: {error}"
    everyone = all_gather(seen, trial.group)
    found = next((rank for rank, seen in enumerate(everyone) if seen), None)
    if found is not None:
        raise broken(trial.name, promise, f"On rank {found} of {trial.world_size}: {everyone[found]}")


def _sums_wrongly(trial: Trial) -> str | None:
    cases = [(dtype, numel) for dtype in trial.dtypes for numel in SIZES]
    if torch.float32 in trial.dtypes:
        cases.append((torch.float32, LARGE))
    seen = None
    with trial.opened() as all_reduce:
        for dtype, numel in cases:
            tensor, expected = trial.term(dtype, numel), trial.total(dtype, numel)
            all_reduce(tensor).wait()
            if all_reduce.exact or not dtype.is_floating_point:
                seen = seen or _difference(tensor, expected, f"{numel} x {dtype}")
    return seen


def _differs_between_ranks(trial: Trial) -> str | None:
    """Sums that depend on the order of addition, of the last bits of random numbers."""
    seen = None
    with trial.opened() as all_reduce:
        for dtype in (dtype for dtype in trial.dtypes if dtype.is_floating_point):
            for numel in (5, 70_001, 600_000):
                tensor = _of_many_scales(trial, dtype, numel)
                all_reduce(tensor).wait()
                digests = all_gather(_digest(tensor), trial.group)
                if len(set(digests)) > 1:
                    seen = seen or f"{numel} x {dtype} have the digests {digests} on the ranks"
    return seen


def _of_many_scales(trial: Trial, dtype: torch.dtype, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(trial.rank)
    scales = 10.0 ** torch.randint(-3, 3, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator) * scales).to(dtype).to(device_of(trial.group))


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:8]


def _confuses_calls(trial: Trial) -> str | None:
    """Several are under way at a time; every second one is also asked for its future."""
    sizes = [3, 100_000, 1, 0, 40_000, 300_000, 8]
    seen = None
    with trial.opened() as all_reduce:
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
                    seen = seen or _difference(
                        tensor, expected, f"{size} elements, one of {len(sizes)} calls"
                    )
            for tensor, result in zip(tensors[::2], results, strict=True):
                seen = seen or _difference(result, tensor, "the future's value, which must be the tensor")
    return seen


def _fails_on_odd_tensors(trial: Trial) -> str | None:
    ranks, device = float(trial.world_size), device_of(trial.group)
    matrix, every_other = torch.ones(6, 5, device=device), torch.ones(10, device=device)
    parameter, scalar = torch.ones(3, device=device, requires_grad=True), torch.tensor(2.0, device=device)
    place = torch.tensor([[trial.rank]], device=device)
    sparse = torch.sparse_coo_tensor(
        place, torch.ones(1, device=device), (trial.world_size,), check_invariants=True
    ).coalesce()
    with trial.opened() as all_reduce:
        all_reduce(matrix.t()).wait()
        all_reduce(every_other[::2]).future().wait()
        all_reduce(parameter).wait()
        all_reduce(scalar).wait()
        all_reduce(sparse).wait()
        if not all_reduce.exact:
            return None
    interleaved = torch.tensor([ranks, 1.0] * 5, device=device)
    return (
        _difference(matrix, torch.full_like(matrix, ranks), "a transposed matrix")
        or _difference(every_other, interleaved, "every other element")
        or _difference(parameter.detach(), torch.full((3,), ranks, device=device), "a parameter")
        or _difference(scalar, torch.tensor(2.0 * ranks, device=device), "a tensor without dimensions")
        or _difference(
            sparse.to_dense(), torch.ones(trial.world_size, device=device), "a sparse tensor, made dense"
        )
    )


def _cannot_close_twice(trial: Trial) -> str | None:
    """And another can be made when the first is gone."""
    for _ in range(2):
        all_reduce = trial.make(trial.group, trial.timeout_seconds)
        tensor = torch.ones(3, device=device_of(trial.group))
        all_reduce(tensor).wait()
        all_reduce.close()
        all_reduce.close()
    return None


def _fails_alone(trial: Trial) -> str | None:
    alone = subgroup(trial.group, [trial.rank], trial.timeout_seconds)
    assert alone is not None
    try:
        with trial.make(alone, trial.timeout_seconds) as all_reduce:
            tensor = trial.term(torch.float32, 1000)
            work = all_reduce(tensor)
            work.wait()
            work.future().wait()
            if not all_reduce.exact:
                return None
        return _difference(tensor, trial.term(torch.float32, 1000), "1000 elements of the only rank")
    finally:
        destroy(alone)


def _is_silent_about_a_missing_rank(trial: Trial) -> str | None:
    """The last rank makes it and does not call it; over a group of its own, which the fault may break."""
    group = subgroup(trial.group, range(trial.world_size), MISSING_SECONDS)
    assert group is not None
    all_reduce = trial.make(group, MISSING_SECONDS)
    missing = trial.world_size - 1
    seen = None if trial.rank == missing else _silence(all_reduce, missing)
    all_gather(None, trial.group)  # the missing rank is there until the others have noticed
    all_reduce.close()
    destroy(group)
    return seen


def _silence(all_reduce: AllReduce, missing: int) -> str | None:
    tensor = torch.ones(5, device=device_of(all_reduce.group))
    try:
        all_reduce(tensor).wait()
    except EvenerError as error:
        if f"rank {missing}" in str(error):
            return None
        return f"rank {missing} did not come, and {type(error).__name__} says: {error}"
    return f"rank {missing} did not come, and the sum is said to be there"


PROMISES: dict[str, Find] = {
    "it can be made for one rank alone, and leaves the tensor as it is": _fails_alone,
    "the tensor is the sum over the ranks, for every dtype and size": _sums_wrongly,
    "all ranks hold the same bits": _differs_between_ranks,
    "calls are carried out in the order in which they were made": _confuses_calls,
    "tensors of any strides are summed in place, sparse ones too": _fails_on_odd_tensors,
    "closing twice does nothing, and another can be made then": _cannot_close_twice,
}
NAMES_THE_MISSING = "a wait for a rank that does not come ends with an EvenerError that names it"


def _difference(tensor: Tensor, expected: Tensor, what: str) -> str | None:
    """The first element that is not as expected, in words."""
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        return (
            f"{what}: is {tuple(tensor.shape)} {tensor.dtype}, not {tuple(expected.shape)} {expected.dtype}"
        )
    wrong = (tensor != expected).reshape(-1)
    if not wrong.any():
        return None
    place = int(wrong.int().argmax())
    values = tensor.reshape(-1)[place].item(), expected.reshape(-1)[place].item()
    return (
        f"{what}: {int(wrong.sum())} elements are wrong, the first at {place}: {values[0]}, not {values[1]}"
    )
