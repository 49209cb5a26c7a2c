"""What a run reports of itself: lines before the first step, its start, and its summary.

Each part describes itself: the learner, the counters, and every rank. Here the descriptions are put together.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import torch
from torch import Tensor

from evener import checkpoint
from evener.collectives.hierarchical_sum import MOST_ROWS
from evener.collectives.tuning.measure import round_trip_seconds
from evener.components.model_init import whole_size
from evener.core.elsewhere import shown
from evener.core.records import RunStart, RunSummary
from evener.core.text import counted
from evener.distributed.environment import usable_cores
from evener.hardware import accelerators
from evener.hardware.cpu_time import CpuTime, cpu_time
from evener.strategies.cuda_graphs import words_of_ranks
from evener.strategies.description import describe
from evener.training.engine import Engine
from evener.training.profiling import ProfileOutcome, profile_text
from evener.training.reporting.summary_counters import Clock, SummaryCounters
from evener.version import evener_version

_MUCH, _LEAST_SECONDS = 0.2, 0.5
"""Links are measured if this part of the time, and at least so many seconds, went into communication."""
_OF_STEPS = ("compute_seconds", "wait_seconds", "input_seconds")
WAITING = 0.1
"""Part of its time from which on a rank is reported to wait for batches."""


@dataclass(frozen=True)
class RankPart:
    """What one rank contributes to the summary."""

    device: str
    times: dict[str, float]
    """Seconds, by the names that they have in the summary."""
    workers: int
    offloaded: dict[str, int]
    """The peak number of offloaded bytes, by kind."""
    graphs: int
    graph_breaks: int
    cuda_graphs: str = ""
    profile: ProfileOutcome | None = None

    @classmethod
    def of_engine(cls, engine: Engine, before: CpuTime) -> RankPart:
        """Returns the part of this rank.

        Args:
            before: The CPU time of this process when training began.
        """
        learner, times, now = engine.learner, engine.times, cpu_time()
        return cls(
            accelerators.description_of(engine.session.device),
            {
                "compute_seconds": times.compute,
                "wait_seconds": times.wait,
                "input_seconds": times.input,
                "forward_seconds": times.forward,
                "cpu_seconds": max(0.0, now.busy - before.busy),
                "queued_seconds": max(0.0, now.queued - before.queued),
            },
            engine.config.workers,
            learner.offloaded.peaks,
            learner.graphs.made,
            learner.graphs.breaks,
            learner.replays.words if learner.replays else "",
            engine.profiler.outcome,
        )


def waiting_message(parts: Sequence[RankPart], seconds: float) -> str:
    """Says which rank waited longest for its batches in ``seconds`` of training. Returns "" if none waited for long."""
    waited = [part.times["input_seconds"] for part in parts]
    rank = waited.index(max(waited))
    if not waited[rank] > WAITING * seconds > 0:
        return ""
    workers = parts[rank].workers
    using = f"with {counted(workers, 'worker')}" if workers else "without workers"
    hint = "" if workers else ": --workers N (workers=N) has N processes read meanwhile"
    return f"rank {rank} waited for batches {waited[rank] / seconds:.0%} of the time, {using}{hint}"


def _lean_text(limited: bool) -> str:
    """Says what a lean run does not watch. A memory limit on a CPU needs the count of its tensors."""
    if limited:
        return "lean: gradients are not watched, and memory for its limit alone"
    return "lean: neither gradients nor memory are watched"


class RunReport:
    """Reports of one run.

    Args:
        counters: An observer of the run's engine.
        clock: Measures the training.
        began: When the ranks were started, in seconds since the epoch. None if not known.
    """

    def __init__(
        self, engine: Engine, counters: SummaryCounters, clock: Clock, began: float | None = None
    ) -> None:
        self._engine, self._counters, self._clock, self._began = engine, counters, clock, began
        self._cpu = cpu_time()

    def part(self) -> RankPart:
        """Returns what this rank contributes to the summary."""
        return RankPart.of_engine(self._engine, self._cpu)

    @property
    def _run_dir(self) -> str | None:
        run_dir = self._engine.config.run_dir
        return None if run_dir is None else shown(run_dir)

    def header(self) -> tuple[str, ...]:
        """Returns lines that the user must see before the first step. Empty strings are not shown."""
        engine, learner = self._engine, self._engine.learner
        about, limits = describe(learner), learner.settings.limits
        chosen = ", chosen by the devices" if engine.config.precision == "auto" else ""
        return (
            f"precision {about['precision']}{chosen}" if about["precision"] else "",
            limits.description if limits else "",
            engine.recomputing.description,
            learner.offloaded.description,
            _lean_text(limits is not None) if learner.settings.lean else "",
            about["optimizer"],
            about["optimizer_state"],
            about["merging"],
            about["exact"],
            about["batch_norm"],
            about["updates"],
            learner.replays.words if learner.replays and learner.replays.reason else "",
            about["emulation"],
        )

    def start(self) -> RunStart:
        """Describes the run before its first step. A collective call."""
        engine, world_size, data = self._engine, self._engine.session.world_size, self._engine.learner.data
        resolved = {"task": engine.task.name, **engine.config.as_dict()}
        resolved |= {"batch_size": engine.batch_size, "world_size": world_size}
        facts = engine.session.control.gather_objects(self._facts())
        devices, hosts, threads, cores, limits = zip(*facts, strict=True)
        shares, learns = engine.feed.first_shares(engine.progress)
        about = describe(engine.learner)
        return RunStart(
            devices=devices,
            hosts=hosts,
            threads=threads,
            cores=cores,
            memory_limits=limits if any(limits) else (),
            versions=versions(),
            startup_seconds=None if self._began is None else max(0.0, time.time() - self._began),
            shares=shares,
            by_cost=engine.feed.divides_by_cost,
            learns=learns,
            parameters=whole_size(engine.model),
            strategy=about["strategy"],
            allreduce=about["allreduce"],
            merging=about["merging"],
            run_dir=self._run_dir,
            task=engine.task.name,
            settings=resolved,
            world_size=world_size,
            batch_size=engine.batch_size,
            total_steps=engine.total_steps,
            steps_done=engine.steps_done,
            parts=tuple(data.owners(range(data.degree))),
        )

    def _facts(self) -> tuple[str, str, int, int, int | None]:
        """Returns the device of this rank, its host, its threads and cores, and its memory limit in bytes."""
        session, limits = self._engine.session, self._engine.learner.settings.limits
        limit = limits.limit_for(session.rank, self._engine.steps_done) if limits else None
        limit = accelerators.whole_memory_of(session.device) if limit is None else limit
        device, host = accelerators.description_of(session.device), session.environment.host
        return device, host, torch.get_num_threads(), usable_cores(), limit

    def links(self, parts: Sequence[RankPart]) -> list[float]:
        """Measures the links between the ranks if communication took much of the time. A collective call.

        Returns:
            For each rank the seconds of a message to the next rank and back; empty if it was not measured.
        """
        world, times = self._engine.session.world, [part.times for part in parts]
        whole = sum(sum(each[name] for name in _OF_STEPS) for each in times) / len(times)
        least = min(each["wait_seconds"] for each in times)
        few = 2 < len(parts) <= MOST_ROWS
        if world is None or self._run_dir is None or not few or least < max(_MUCH * whole, _LEAST_SECONDS):
            return []
        with self._engine.session.watchdog.phase("measuring the links", step=self._engine.steps_done):
            return round_trip_seconds(world)

    def summary(
        self,
        parts: Sequence[RankPart],
        weights: Mapping[str, Tensor],
        interrupted: bool = False,
        links: Sequence[float] = (),
    ) -> RunSummary:
        """Describes the run at its end.

        Args:
            parts: The parts of all ranks.
            weights: All parameters and buffers by name, whole.
            links: The result of `links`.
        """
        engine, learner, seconds = self._engine, self._engine.learner, self._clock.seconds
        cost_shares = self._counters.cost_fractions()
        return RunSummary(
            **describe(learner),
            **self._counters.describe(seconds),
            task=engine.task.name,
            world_size=engine.session.world_size,
            devices=[part.device for part in parts],
            ranks=[part.times for part in parts],
            workers=[part.workers for part in parts],
            reading=waiting_message(parts, seconds),
            steps=engine.steps_done,
            epochs=engine.progress.epochs_begun,
            samples=engine.samples_done,
            seconds=seconds,
            shares=learner.data.owners(self._counters.fractions()),
            cost_shares=learner.data.owners(cost_shares) if cost_shares else [],
            weights_digest=checkpoint.weights_digest(weights),
            versions=versions(),
            batch_size=engine.batch_size,
            seed=engine.config.seed,
            interrupted=interrupted,
            run_dir=self._run_dir,
            recompute=engine.recomputing.description,
            offload=learner.offloaded.said([part.offloaded for part in parts]),
            graphs=[part.graphs for part in parts] if learner.graphs.names else [],
            cuda_graphs=words_of_ranks([part.cuda_graphs for part in parts]),
            uncompiled=learner.graphs.uncompiled,
            graph_breaks=sum(part.graph_breaks for part in parts),
            skipped_steps=engine.guard.skipped,
            average=learner.average.words,
            link_seconds=list(links),
            collectives=learner.synchronizer.collectives(),
            profile=profile_text([part.profile for part in parts]),
        )


def versions() -> dict[str, str]:
    """Returns the versions of the software that a result depends on."""
    return {
        "evener": evener_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
    }
