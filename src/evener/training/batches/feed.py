"""Reads the batches of a run on this rank, and holds the balancer that divides them."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

from evener.balance.base import Balancer, Decision
from evener.balance.by_speed_large import BySpeedOfMany, SpeedReport
from evener.balance.registry import fixed_weights
from evener.balance.shares import parse_max_shares
from evener.core.config.run_config import RunConfig
from evener.core.records import MemoryRecord, Note
from evener.data.batch import Batch
from evener.data.grains import in_whole_blocks, padded
from evener.data.loader import Loader
from evener.data.sections import Sections
from evener.data.shard_order import ShardOrder
from evener.data.stream_state import StreamState
from evener.distributed.control_channel import Channel
from evener.errors import ConfigurationError
from evener.strategies.dataset_view import Reading
from evener.strategies.learner import Learner
from evener.training.batches.agreed_costs import agreed_costs, cost_division
from evener.training.batches.dataset_check import check_data
from evener.training.batches.device_mix import settled
from evener.training.batches.evaluation_options import EvaluationOptions
from evener.training.batches.progress import Progress, SampleOrder
from evener.training.batches.rounds_check import check_rounds
from evener.training.batches.skipped_samples import Skips, check_skipping
from evener.training.factory import balance_of, balancer_of
from evener.training.step.exchange import adds_up
from evener.training.step.oom_report import PieceSizes, noticed
from evener.training.step.step import Columns, Step


class BatchFeed:
    """Reads this rank's part of every global batch, once.

    Args:
        epochs: Number of epochs.
        steps_late: Number of steps after which the times of a step are known.
    """

    def __init__(
        self, learner: Learner, config: RunConfig, batch_size: int, epochs: int, steps_late: int
    ) -> None:
        self._learner = learner
        check_data(config, learner)
        self._batch_size, self._epochs, self._steps_late = batch_size, epochs, steps_late
        self._reading = Reading.from_learner(learner, learner.task.train, "training set", learner.task.order)
        if learner.rounds is not None:
            config = check_rounds(config, learner, learner.rounds)
            self._reading = replace(self._reading, ranks=learner.rounds.parts)
        self._listed = _agreed_order(self._reading, learner.session.control)
        self._arranged = _arranged(self._reading, config.seed, learner.session.control)
        if config.steps is None and getattr(self._reading.dataset, "endless", False):
            raise ConfigurationError(
                "the training set says that it is endless, and so is an epoch of it: give the run a number of steps "
                "(--steps N, or steps=N)"
            )
        self._config, self._unlike = settled(config, learner.session, self._reading)
        costs = agreed_costs(learner.task.cost, learner.task.train, learner.session.control)
        parts = self._config, self._reading.ranks, self._fractions
        self._by_cost = None if costs is None else cost_division(costs, *parts)
        self.skips = Skips(self._reading.size, learner.session) if check_skipping(config, learner) else None
        self._loader: Loader | None = None
        self._prepared: tuple[tuple[Any, ...], Loader] | None = None
        """The loader that is made but not open yet, after its key: start, steps, and identity of the balancer state."""
        self.balancer: Balancer | None = None
        self._alone: BySpeedOfMany | None = None
        """The balancer, if each rank knows only its own times; else None."""
        self.balancer_state: dict[str, Any] = {}
        self.stream_state: StreamState | None = None
        """The state of an iterable dataset at or before the progress that the run resumes from."""
        self._told, self._learns = 0, False
        self._graphs: tuple[int, ...] = ()
        self._columns: Columns = ()
        self._pieces, self._events = PieceSizes(), list[MemoryRecord | Note]()
        self.first_step = 0
        """Number of steps that were taken before this run."""
        self._start: Progress | None = None
        """The progress at the start, of which a step may have been another number of batches: with another
        ``sync_every``, with another strategy, or in a section that a signal has ended early."""
        self.input_seconds = 0.0
        """Seconds that this rank waited for the last batch."""

    @property
    def last_step(self) -> int | None:
        """Number of steps after which the run ends, if the settings say so. In local steps, the number of rounds."""
        rounds, steps, size = self._learner.rounds, self._config.steps, self._reading.size
        if steps is None or size is None:
            return steps if rounds is None or steps is None else rounds.count(steps)
        number, of_epoch, start = 0, math.ceil(size / self._batch_size), self._start
        if rounds is None:  # steps before may have been rounds or sections of several batches
            if start is None or self._reading.parts is not None:
                return steps
            done = start.epoch * of_epoch + math.ceil(start.position / self._batch_size)
            return steps - max(0, done - start.steps)
        if start is not None:
            steps -= start.epoch * of_epoch
            left = min(steps * self._batch_size, size) - start.position
            number, steps = start.steps + max(0, math.ceil(left / rounds.size)), max(0, steps - of_epoch)
        epochs, rest = divmod(steps, of_epoch)
        return number + epochs * math.ceil(size / rounds.size) + math.ceil(rest / rounds.batches)

    @cached_property
    def total_steps(self) -> int | None:
        """Number of steps of the whole run. None if the dataset has no known length."""
        size = self._reading.size
        if size is None:
            return self.last_step
        steps = math.ceil(size / self._size) * self._epochs
        return min(steps, self.last_step) if self.last_step else steps

    def sample_order(self) -> SampleOrder:
        """Returns the settings that decide which samples a step has."""
        parts = self._reading.parts
        sizes = None if parts is None else list(parts.sizes)
        orders = self._listed, self._arranged
        return SampleOrder(self._config.seed, self._batch_size, self._reading.size, sizes, *orders)

    def open(self, progress: Progress) -> Loader:
        """Returns a loader of the batches from ``progress`` on, which the caller must close."""
        if self._loader is not None:
            raise ConfigurationError("batches() is running already; one engine makes one pass over the run")
        self._loader = self._ready(progress)
        self._prepared = None
        if self._unlike:
            self._events.append(Note(progress.steps, self._unlike))
            self._unlike = ""
        assert self.balancer is not None
        self._learns = _learns(self.balancer)
        return self._loader

    def _ready(self, progress: Progress) -> Loader:
        """Makes the loader from ``progress`` on, and the balancer. Only once: a user's own might not allow more."""
        start = progress.epoch, progress.position
        place = (*start, progress.steps, id(self.balancer_state))
        if self._prepared is not None and self._prepared[0] == place:
            return self._prepared[1]
        config, reading = self._config, self._reading
        self._start = copy(progress)
        loader = Loader(
            reading.dataset,
            reading.shuffled(config.seed),
            name=reading.name,
            rank=reading.rank,
            world_size=reading.ranks,
            parts=reading.parts,
            agree=reading.agree,
            seed=config.seed,
            batch_size=self._batch_size,
            shares=self._shares,
            micro_batch=config.samples_at_once,
            by_cost=self._by_cost,
            collate=self._learner.task.collate,
            workers=config.workers,
            device=self._learner.session.device,
            convert=self._learner.convert,
            piece=self._learner.cut.trained if self._learner.cut.divides else None,
            epochs=self._epochs,
            start=start,
            first_step=progress.steps,
            skips=self.skips is not None,
            rounds=self._learner.rounds,
            bits=self._learner.settings.bits,
            equally_many=self._learner.synchronizer.gathers_in_passes,
            audit=config.audit,
            resume=self.stream_state,
            tell=lambda message: self._events.append(Note(progress.steps, message)),
        )
        # Besides the loader's read-ahead, a batch is looked at one step early, and times are known late.
        drawn_ahead = max(self._learner.session.control.gather_objects(loader.lookahead))
        bits = self._learner.settings.bits
        data = self._learner.data if adds_up(self._learner.session, bits is not None) else None
        self.balancer = balancer_of(config, reading, drawn_ahead + 1 + self._steps_late, data, bits)
        self._alone = self.balancer if isinstance(self.balancer, BySpeedOfMany) else None
        if self.balancer_state:
            self.balancer.load_state_dict(self.balancer_state)
        self._prepared = place, loader
        return loader

    def first_shares(self, progress: Progress) -> tuple[tuple[int, ...], bool]:
        """Returns the samples of the next batch for each part, and True if shares change with speed. A collective call.

        May be called before anything is read. Returns no shares if the data decide them, or there is only one part.
        """
        on_demand = isinstance(self._learner.rounds, Sections)
        if self._reading.parts is not None or self._reading.ranks == 1 or on_demand:
            return (), False
        if self._loader is None:
            self._ready(progress)
        assert self.balancer is not None
        return self._of_ranks(self._drawn(progress.steps)), _learns(self.balancer)

    @property
    def _size(self) -> int:
        """Number of samples that are divided at once: those of a batch, or of a round of local steps."""
        return self._batch_size if self._learner.rounds is None else self._learner.rounds.size

    def _of_ranks(self, shares: Sequence[int]) -> tuple[int, ...]:
        """Returns the shares of the parts of a batch. Those of replicas are added up for each rank."""
        return tuple(shares) if self._learner.rounds is None else self._learner.rounds.of_ranks(shares)

    def rewind(self) -> bool:
        """Allows batches to be opened again; earlier ones must be closed. Returns True if there were any."""
        loader, self._loader = self._loader, None
        return loader is not None

    def next(self, source: Iterator[Batch], step: int) -> Batch | None:
        """Returns the next batch, or None at the end."""
        began = time.perf_counter()
        with self._learner.session.watchdog.phase("loading a batch", step=step):
            batch = next(source, None)
        if batch is not None and self.skips is not None:
            self.skips.read(batch)
        self.input_seconds = time.perf_counter() - began
        return batch

    def _shares(self, step: int, size: int) -> list[int]:
        assert self.balancer is not None
        return self.balancer.shares(step, size)

    def _drawn(self, step: int) -> Sequence[int]:
        """Returns the shares of a whole batch, or round, in ``step``."""
        size, bits = self._size, self._learner.settings.bits
        given = self._shares(step, size if bits is None else padded(bits, size))
        return given if bits is None else in_whole_blocks(bits, size, given)

    def _fractions(self, step: int, size: int) -> Sequence[float]:
        assert self.balancer is not None
        return self.balancer.fractions(step, size)

    @property
    def divides_by_cost(self) -> bool:
        """True if shares are fractions of the cost of a batch."""
        return self._by_cost is not None and self._reading.ranks > 1

    def _asked(self, step: Step) -> tuple[Sequence[int], tuple[float, ...] | None]:
        """Returns the shares of a step as the balancer gave them and, if it was divided by cost, the costs of the parts
        in samples of mean cost."""
        batch = step.batch
        if self._by_cost is None:
            return batch.shares, None
        mean, bits = self._by_cost.costs.mean, self._learner.settings.bits
        size = batch.size if bits is None else padded(bits, batch.size)
        return self._shares(step.number, size), tuple(cost / mean for cost in batch.costs)

    def observe_step(self, step: Step) -> None:
        """Processes a step once all ranks know its times and its number of unreadable samples.

        A rank that compiled in the step, or repeated it after running out of memory, is not counted as slow.

        Raises:
            DataError: If too many samples were unreadable.
        """
        if self.skips is not None:
            self.skips.observe(step)
        self.observe_times(step)
        self._events += self._pieces.changes(step)
        if step.memory_columns is not self._columns:  # a rank that is alone tells a reading more than once
            self._columns = step.memory_columns
            self._events += noticed(step, self._learner.session.device.type)

    def observe_times(self, step: Step) -> None:
        """Gives the balancer the times of a step: those of all ranks, or this rank's own and the sum of all reports.

        The time of a part is that of its slowest rank. Only parts that had samples have one.
        """
        if self._alone is not None and step.speeds is not None:
            shares, costs = self._asked(step)
            own = None if costs is None else costs[self._learner.data.index]
            self._alone.hear(step.number, shares, _of_own_work(step), step.speeds, step.lines, own)
        elif self._learns:
            assert self.balancer is not None
            of_parts = self._learner.data.slowest(self._of_work_alone(step))
            known = [time if n else math.nan for n, time in zip(step.batch.shares, of_parts, strict=True)]
            shares, costs = self._asked(step)
            if costs is None:
                self.balancer.observe(step.number, shares, known)
            else:
                self.balancer.observe_costs(step.number, shares, costs, known)
            self._graphs = step.graphs

    def _of_work_alone(self, step: Step) -> Sequence[float]:
        """Returns the compute seconds of each rank; NaN for a rank that compiled or retried in the step."""
        if step.graphs == self._graphs and not any(step.retries):
            return step.compute_seconds
        before = self._graphs or (0,) * len(step.graphs)
        compiled = [now > then for now, then in zip(step.graphs, before, strict=True)]
        told = zip_longest(step.compute_seconds, compiled, step.retries, fillvalue=0)
        return [math.nan if compiling or retries else seconds for seconds, compiling, retries in told]

    # With many ranks

    def voice(self, step: Step | None) -> SpeedReport | None:
        """Returns this rank's speed report for a step. Returns None if all ranks know all times."""
        if self._alone is None:
            return None
        if step is None:
            return SpeedReport.silent()
        (shares, costs), index = self._asked(step), self._learner.data.index
        return self._alone.voice(shares[index], _of_own_work(step), None if costs is None else costs[index])

    def line(self) -> Sequence[float]:
        """Returns the line of this rank's speed model if all ranks are asked for theirs; otherwise nothing."""
        return self._alone.line() if self._alone and self._alone.asks else ()

    @property
    def wants_rows(self) -> bool:
        """True if the times of all ranks must be known for every step."""
        return self._learns and self._alone is None

    def new_events(self) -> Sequence[Decision | MemoryRecord | Note]:
        """Returns changes of shares and of piece sizes since the last call and, once, why shares are not equal."""
        decisions = self.balancer.decisions if self.balancer else ()
        if len(decisions) == self._told and not self._events:
            return ()
        new: list[Decision | MemoryRecord | Note] = [*decisions[self._told :], *self._events]
        self._told = len(decisions)
        self._events.clear()
        return new

    def speeds(self, steps_done: int) -> list[float] | None:
        """Returns the shares that the ranks took in the last step. None, before the first, means equal shares."""
        if self.balancer is None or steps_done == 0:
            return None
        shares = self._drawn(max(self.first_step, steps_done - 1))
        return [float(share) for share in self._of_ranks(shares)]

    def evaluation_options(self, steps_done: int) -> EvaluationOptions:
        """Returns the options for dividing an evaluation: with the shares of the last step. Before the first step, with
        weights that the settings name, or by speed if they say so."""
        config, ranks, weights = self._config, self._reading.ranks, self.speeds(steps_done)
        decides = self._reading.balanced and self._learner.rounds is None
        balance = balance_of(config, ranks, unlike=False)
        if weights is None and decides:
            weights = fixed_weights(balance, ranks)
        return EvaluationOptions(
            batch_size=self._batch_size,
            micro_batch=config.samples_at_once,
            workers=config.workers,
            skips=self.skips is not None,
            weights=weights,
            max_shares=parse_max_shares(config.max_shares, ranks) if decides else None,
            share_multiple_of=config.share_multiple_of if decides else 1,
            measures=decides and weights is None and balance == "auto" and ranks > 1,
        )

    def stream_at(self, progress: Progress) -> dict[str, Any] | None:
        """Returns the state of an iterable dataset at or before ``progress``. None if it has none."""
        place = progress.epoch, progress.position
        found = self.stream_state if self._loader is None else self._loader.stream_states.before(*place)
        return None if found is None or found.epoch != progress.epoch else found.as_plain()

    def state_dict(self) -> dict[str, Any]:
        """Returns what the balancer has learned."""
        return self.balancer.state_dict() if self.balancer else self.balancer_state


def _of_own_work(step: Step) -> float:
    """Returns the seconds of this rank's work; NaN if it did something else in that time."""
    return step.own_seconds.compute if step.only_work else math.nan


def _learns(balancer: Balancer) -> bool:
    return type(balancer).observe is not Balancer.observe


def _agreed_order(reading: Reading, control: Channel) -> int | None:
    """Returns the checksum of the task's order, or None if it has none. A collective call.

    Raises:
        ConfigurationError: If the ranks list different samples.
    """
    own = None if reading.listed is None else reading.listed.checksum()
    if len(set(control.gather_objects(own))) > 1:
        raise ConfigurationError(
            "Task.order lists other samples on one rank than on another: let it depend on the epoch alone, and seed "
            "what it draws"
        )
    return own


def _arranged(reading: Reading, seed: int, control: Channel) -> int | None:
    """Returns the checksum of what decides the order of a data set that has its own, on all ranks together. Returns
    None if it has none. A collective call."""
    order = None if reading.listed is not None else reading.shuffled(seed)
    found = control.gather_objects(order.checksum() if isinstance(order, ShardOrder) else None)
    if not any(found):
        return None
    return zlib.crc32(repr(found if reading.parts is not None else found[:1]).encode())
