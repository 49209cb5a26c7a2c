"""Verifies that a training that is exact in bits ends with the same bits on any division.

The same steps are taken on one rank and on several, with shares that are drawn at random in every step, through several
all-reduces and sizes of buckets, and after a resume on another number of ranks. After every step, the sha256 of each
weight and buffer is taken. All must be equal, and so must losses, metrics and the state of the optimizer at the end::

    one rank        ── reference, saves a checkpoint in the middle ──────────────┐
    several ranks   ── every division ── one resumed from there, one saves ──┐   │ one launch
    one rank        ── resumed from there ───────────────────────────────────┘◀──┘

If a tensor differs, both runs are repeated up to that step, to count the numbers that differ.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from evener.balance.base import Balancer
from evener.checkpoint import weights_digest
from evener.core.config.kwargs import Settings
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task, TaskLike, resolve
from evener.distributed.environment import Environment, kind_taken
from evener.distributed.launch.launch import is_launched, launch
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.strategies.exact_bits import words_of
from evener.training.builtin_tasks import BUILT_IN
from evener.training.engine import Engine
from evener.training.factory import strategy_of
from evener.training.fit import check_plan

STEPS = 20
END = 2**62
"""Stands for a step after all others: what is compared at the end."""
LOSS, WEIGHTS, STATE = "the loss", "the weights", "the optimizer's state"
SMALL_BUCKET_MB = 0.001
"""The size of small buckets, which most gradients exceed, so that each parameter has one of its own."""
DRAWN = "evener.tools.verify.bits:DrawnShares"
ALL_REDUCES = {"cpu": ("shared-memory", "native", "ring", "tree"), "cuda": ("native", "ring", "tree")}
"""The all-reduces that are tried, by kind of device."""


class DrawnShares(Balancer):
    """Draws the shares of every step at random, alike on all ranks. A rank may get no samples."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def shares(self, step: int, batch_size: int) -> list[int]:
        generator = np.random.default_rng((step, batch_size, self._world_size))
        parts = generator.dirichlet(np.full(self._world_size, 0.7))
        return [int(share) for share in generator.multinomial(batch_size, parts)]


@dataclass(frozen=True)
class TracedDivision:
    """One way of dividing the training."""

    words: str
    config: RunConfig
    saves: Path | None = None
    """Directory for a checkpoint in the middle."""
    resumes: Path | None = None
    """Directory of a checkpoint from which the run begins."""
    kept: tuple[int, str] | None = None
    """Step and name of a tensor to return; the run ends after that step."""


@dataclass(frozen=True)
class BitsTrace:
    """What one rank has found of a division."""

    words: str
    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    """For each step, the digests of its loss, and of each weight and buffer after it; those at :data:`END`."""
    about: str = ""
    """What the bits depend on: grain, block, grid and device."""
    kept: Tensor | None = None


@dataclass(frozen=True)
class BitsVerification:
    """Result of comparing the bits of a training over several divisions."""

    task: str
    """Name of the task."""
    strategy: str
    """Strategy of the divided runs."""
    processes: int
    """Number of ranks of the divided runs."""
    steps: int
    """Steps of each run."""
    batch_size: int
    """Samples per step over all ranks."""
    about: str
    """What the bits depend on: grain, block, grid and device."""
    divisions: dict[str, str]
    """For each division, in words, the sha256 of its weights and buffers at the end."""
    optimizers: dict[str, str]
    """For each division, the sha256 of its optimizer's state at the end."""
    passed: bool
    """True if all divisions have the same bits."""
    difference: str = ""
    """The first difference: which division, step and tensor, and in how many numbers. Empty if there is none."""

    @property
    def digest(self) -> str:
        """The sha256 of the weights and buffers of one rank."""
        return next(iter(self.divisions.values()))


def verify_bits(
    task: TaskLike,
    config: RunConfig | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    **settings: Unpack[Settings],
) -> BitsVerification:
    """Trains the same steps with ``exact="bits"`` in several divisions, and compares all bits.

    Args:
        task: As for :func:`evener.fit`. Building it and loading its data must be deterministic.
        config: Settings of the runs: processes (default: 2), strategy, steps (default: 20), batch_size, grain, block,
            precision and so on. Shares and all-reduce are tried besides those that are tried anyway.
        options: Keyword arguments of the task's function.

    Raises:
        ConfigurationError: If the settings cannot work together, or do not go with ``exact="bits"``.
    """
    config = (config or RunConfig()).replace(**settings | {"exact": "bits"})
    if config.resume is not None or is_launched():
        raise ConfigurationError(
            "verify --bits starts ranks of its own, from the first weights on: call it in one process, without "
            "torchrun or srun, and leave resume out"
        )
    processes = check_plan(config.replace(processes=config.processes or 2))
    steps = config.steps or STEPS
    config = config.replace(steps=steps, processes=processes, check_replicas=0, audit=0.0)
    if processes < 2 or steps < 2:
        raise ConfigurationError(
            f"there is nothing to verify with {processes} process and {steps} steps: give at least --processes 2 and "
            "--steps 2"
        )
    built = resolve(task, BUILT_IN, options)()
    config = config.replace(batch_size=config.batch_size or built.batch_size)
    with tempfile.TemporaryDirectory(prefix="evener-bits-") as directory:
        places = Path(directory) / "one", Path(directory) / "several"
        runs = _Runs(task, options, processes)
        one = _alone(config)
        reference = TracedDivision("1 rank", one, saves=places[0])
        back = TracedDivision(f"{processes} ranks, then 1 rank", one, resumes=places[1])
        divided = list(_divided(config, processes, *places))
        found = [*runs.alone(reference), *runs.several(divided), *runs.alone(back)]
        difference = first_difference(found[0], found[1:])
        counted = "" if difference is None else _described(runs, [reference, *divided, back], *difference)
    return BitsVerification(
        task=built.name,
        strategy=strategy_of(config, processes).label,
        processes=processes,
        steps=steps,
        batch_size=config.batch_size or 0,
        about=found[0].about,
        divisions={trace.words: trace.digests[END][WEIGHTS] for trace in found},
        optimizers={trace.words: trace.digests[END][STATE] for trace in found},
        passed=difference is None,
        difference=counted,
    )


def _alone(config: RunConfig) -> RunConfig:
    alike = {"balance": None, "max_shares": None, "throttle": None, "throttle_at": (), "allreduce": None}
    return config.replace(strategy="single", strategy_option=(), mesh=None, processes=1, **alike)


def _divided(config: RunConfig, processes: int, one: Path, several: Path) -> Iterator[TracedDivision]:
    """Yields the divisions over several ranks."""
    ranks, plain = f"{processes} ranks", config.replace(balance="equal")
    yield TracedDivision(f"{ranks}, equal shares", plain, saves=several)
    if config.balance not in (None, "equal"):
        yield TracedDivision(f"{ranks}, balance {config.balance}", config)
    drawn = config.replace(balance=DRAWN, max_shares=None)
    named = () if strategy_of(config, processes).label != "ddp" else _all_reduces(config)
    for at, name in enumerate(named or (config.allreduce,)):
        small = {"bucket_mb": SMALL_BUCKET_MB} if at % 2 else {}
        bucket = f", buckets of {SMALL_BUCKET_MB} MiB" if small else ""
        yield TracedDivision(
            f"{ranks}, shares drawn in each step, {name or 'the default all-reduce'}{bucket}",
            drawn.replace(allreduce=name, **small),
        )
    yield TracedDivision(f"1 rank, then {ranks}, shares drawn in each step", drawn, resumes=one)


def _all_reduces(config: RunConfig) -> tuple[str | None, ...]:
    known = ALL_REDUCES.get(kind_taken(config.device), ("native",))
    return tuple(dict.fromkeys((*known, *([config.allreduce] if config.allreduce else []))))


class _Runs:
    """Runs divisions, on one rank in this process and on several in one launch."""

    def __init__(self, task: TaskLike, options: Mapping[str, Any] | None, processes: int) -> None:
        self._task, self._options, self._processes = task, options, processes

    def alone(self, division: TracedDivision) -> list[BitsTrace]:
        return trace_bits(self._task, self._options, [division], Environment())

    def several(self, divisions: Sequence[TracedDivision]) -> list[BitsTrace]:
        """Returns the traces of rank 0, or of the first rank that differs from it."""
        config = divisions[0].config
        of_ranks = launch(
            trace_bits,
            self._task,
            self._options,
            divisions,
            processes=self._processes,
            timeout_seconds=config.timeout_seconds,
            device=config.device,
        )
        # A rank that differs from rank 0 is looked at, and else rank 0.
        return [
            next((trace for trace in ranks if trace.digests != ranks[0].digests), ranks[0])
            for ranks in zip(*of_ranks, strict=True)
        ]


def trace_bits(
    task: TaskLike,
    options: Mapping[str, Any] | None,
    divisions: Sequence[TracedDivision],
    environment: Environment | None = None,
) -> list[BitsTrace]:
    """Trains each division on this rank."""
    config = divisions[0].config
    with Session(config.device, config.timeout_seconds, environment) as session:
        return [_traced(resolve(task, BUILT_IN, options)(), division, session) for division in divisions]


def _traced(task: Task, division: TracedDivision, session: Session) -> BitsTrace:
    steps, digests = division.config.steps or 0, dict[int, dict[str, str]]()
    with Engine(task, division.config, session=session) as engine:
        learner = engine.learner
        learner.synchronizer.alone()  # as in a real run
        if division.resumes is not None:
            engine.load(division.resumes)
        for batch in engine.batches():
            step = engine.step(batch)
            held = learner.tensors()
            digests[step.number] = {name: weights_digest({name: held[name]}) for name in held}
            digests[step.number] |= {LOSS: _digest_of_number(step.loss)}
            if division.kept is not None and step.number == division.kept[0]:
                return BitsTrace(division.words, digests, kept=held[division.kept[1]].detach().cpu().clone())
            if division.saves is not None and engine.steps_done == steps // 2:
                engine.save(division.saves)
        metrics = engine.evaluate() if engine.task.evaluate is not None else {}
        state = engine.state_dict()["optimizer"]["state"]
        digests[END] = {
            WEIGHTS: weights_digest(learner.tensors()),
            STATE: weights_digest(dict(_numbers_of(state))),
        }
        digests[END] |= {f"the metric {name}": _digest_of_number(value) for name, value in metrics.items()}
        return BitsTrace(division.words, digests, words_of(learner.settings.bits, session.device))


def _digest_of_number(number: float) -> str:
    return struct.pack("d", number).hex()


def _numbers_of(state: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the numbers of an optimizer's state by parameter and key."""
    for name, entries in state.items():
        for key, value in entries.items():
            if isinstance(value, Tensor | bool | int | float):
                yield f"{name}: {key}", torch.as_tensor(value)


def first_difference(reference: BitsTrace, others: Sequence[BitsTrace]) -> tuple[int, int, str] | None:
    """Returns the first difference: the number of the division, from 1, the step, and what differs; None if none."""
    found = (
        (step, number, name)
        for number, other in enumerate(others, 1)
        for step, digests in other.digests.items()
        for name, digest in digests.items()
        if digest != reference.digests.get(step, {}).get(name)
    )
    first = min(found, key=itemgetter(0), default=None)
    return None if first is None else (first[1], first[0], first[2])


def _described(runs: _Runs, divisions: Sequence[TracedDivision], number: int, step: int, name: str) -> str:
    """Describes a difference. If it is in a tensor, repeats both runs up to it, to count the numbers that differ."""
    one, other = divisions[0], divisions[number]
    if step == END:
        return f"{other.words}: {name} at the end is not that of {one.words}"
    if name == LOSS:
        return f"{other.words}: {name} of step {step} is not that of {one.words}"
    (expected,) = runs.alone(replace(one, kept=(step, name)))
    again = replace(other, kept=(step, name), saves=None)
    found = (runs.alone(again) if other.config.processes == 1 else runs.several([again]))[0]
    where = f"{other.words}: {name} after step {step} is not that of {one.words}"
    assert expected.kept is not None
    assert found.kept is not None
    ours, theirs = (tensor.reshape(-1, 1).view(torch.uint8) for tensor in (expected.kept, found.kept))
    apart = int((ours != theirs).any(1).sum())
    if not apart:
        return (
            f"{where}, and was the same when both were repeated: something in the task is not deterministic"
        )
    return f"{where}: {apart:,} of its {expected.kept.numel():,} numbers differ"
