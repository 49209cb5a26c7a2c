"""The batches of a run on this rank, and the balancer that divides them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any

from evener.balance.base import Balancer, Decision
from evener.balance.by_speed_large import BySpeedOfMany, Voice
from evener.core.config.run_config import RunConfig
from evener.core.records import MemoryRecord, Note
from evener.data.batch import Batch
from evener.data.loader import Loader
from evener.distributed.control_channel import Channel
from evener.errors import ConfigurationError
from evener.strategies.dataset_view import Reading
from evener.strategies.learner import Learner
from evener.training.batches.dataset_check import check_data
from evener.training.batches.device_mix import settled
from evener.training.batches.evaluation_options import EvaluationOptions
from evener.training.batches.progress import Progress, SampleOrder
from evener.training.batches.skipped_samples import Skips, check_skipping
from evener.training.batches.worker_processes import Readers
from evener.training.factory import balancer_of
from evener.training.step.exchange import adds_up
from evener.training.step.oom_report import Pieces, noticed
from evener.training.step.step import Step


class Feed:
    """Reads this rank's part of every global batch, once.

    Args:
        epochs: The epoch after the last one.
        steps_late: How many steps after its own the times of a step are known.
    """

    def __init__(
        self, learner: Learner, config: RunConfig, batch_size: int, epochs: int, steps_late: int
    ) -> None:
        self._learner = learner
        check_data(config, learner)
        self._batch_size, self._epochs, self._steps_late = batch_size, epochs, steps_late
        self._reading = Reading.of(learner, learner.task.train, "training set", learner.task.order)
        self._listed = _agreed_order(self._reading, learner.session.control)
        self._config, self._unlike = settled(config, learner.session, self._reading)
        self.skips = Skips(self._reading.size, learner.session) if check_skipping(config, learner) else None
        self.readers = Readers(config, learner.session)
        self._loader: Loader | None = None
        self._prepared: tuple[tuple[Any, ...], Loader] | None = None
        """From where on and with what it has learned before, until it is opened."""
        self.balancer: Balancer | None = None
        self.balancer_state: dict[str, Any] = {}
        self._told, self._learns, self._step = 0, False, 0
        self._graphs: tuple[int, ...] = ()
        self._pieces, self._events = Pieces(), list[MemoryRecord | Note]()
        self.first_step = 0
        """Steps that were taken before this run."""
        self.input_seconds = 0.0
        """How long the last batch was waited for."""

    @cached_property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None if the dataset does not tell its length."""
        size = self._reading.size
        if size is None:
            return self._config.steps
        steps = math.ceil(size / self._batch_size) * self._epochs
        return min(steps, self._config.steps) if self._config.steps else steps

    def sample_order(self) -> SampleOrder:
        """What decides which samples a step has."""
        parts = self._reading.parts
        sizes = None if parts is None else list(parts.sizes)
        return SampleOrder(self._config.seed, self._batch_size, self._reading.size, sizes, self._listed)

    def open(self, progress: Progress) -> Loader:
        """The batches that are left from ``progress`` on; to be closed."""
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
        """What reads from there on, made once with the balancer; a user's own may not bear to be made twice."""
        start = progress.epoch, progress.position
        place = (*start, progress.steps, id(self.balancer_state))
        if self._prepared is not None and self._prepared[0] == place:
            return self._prepared[1]
        config = self._config
        loader = self._reading.loader(
            self._reading.shuffled(config.seed),
            seed=config.seed,
            batch_size=self._batch_size,
            shares=self._shares,
            micro_batch=config.samples_at_once,
            collate=self._learner.task.collate,
            workers=self.readers.of_training(self._reading.dataset),
            ranks_beside=self.readers.beside,
            device=self._learner.session.device,
            epochs=self._epochs,
            start=start,
            first_step=progress.steps,
            skips=self.skips is not None,
        )
        # Besides what a loader draws ahead, a batch is looked at one step early, and times are known late.
        drawn_ahead = max(self._learner.session.control.gather_objects(loader.lookahead))
        self.balancer = self._balancer(drawn_ahead + 1 + self._steps_late)
        self._prepared = place, loader
        return loader

    def _balancer(self, lookahead: int) -> Balancer:
        """With what it has learned so far."""
        data = self._learner.data if adds_up(self._learner.session) else None
        made = balancer_of(self._config, self._reading, lookahead, data)
        if self.balancer_state:
            made.load_state_dict(self.balancer_state)
        return made

    def first_shares(self, progress: Progress) -> tuple[tuple[int, ...], bool]:
        """Samples of the next batch for each part, and whether shares change with speed; before any is read.

        Nothing where the data decide, or there is one part. A collective call.
        """
        if self._reading.parts is not None or self._reading.ranks == 1:
            return (), False
        if self._loader is None:
            self._ready(progress)
        assert self.balancer is not None
        return tuple(self.balancer.shares(progress.steps, self._batch_size)), _learns(self.balancer)

    def rewind(self) -> bool:
        """Batches may be opened again, those that were are closed; whether there were any."""
        loader, self._loader = self._loader, None
        return loader is not None

    def next(self, source: Iterator[Batch], step: int) -> Batch | None:
        """The next batch, on the device; None at the end."""
        began, self._step = time.perf_counter(), step
        with self._learner.session.watchdog.phase("loading a batch", step=step):
            batch = next(source, None)
            batch = batch and self._learner.own(self._learner.place(batch))
        if batch is not None and self.skips is not None:
            self.skips.read(batch)
        self.input_seconds = time.perf_counter() - began
        return batch

    def _shares(self, step: int, size: int) -> list[int]:
        assert self.balancer is not None
        return self.balancer.shares(step, size)

    def observe(self, number: int, batch: Batch, seconds: Sequence[float]) -> None:
        """Tells the balancer the time of each part of the batch that had samples, from that of each rank."""
        assert self.balancer is not None
        of_parts = self._learner.data.slowest(seconds)
        known = [time if n else math.nan for n, time in zip(batch.shares, of_parts, strict=True)]
        self.balancer.observe(number, batch.shares, known)

    def observe_step(self, step: Step) -> None:
        """All ranks know the times of the step, and how many of its samples could not be read.

        A rank that compiled in the step, or took it again for want of memory, was not as slow as it seemed.

        Raises:
            DataError: If they are too many.
        """
        if self.skips is not None:
            self.skips.observe(step)
        self.observe_times(step)
        self._events += self._pieces.changes(step)
        self._events += noticed(step, self._learner.session.device.type)

    def observe_times(self, step: Step) -> None:
        """All ranks know the times of the step, or what each tells of its own."""
        if self._alone is not None and step.speeds is not None:
            self._alone.hear(step.number, step.batch.shares, _of_own_work(step), step.speeds, step.lines)
        elif self._learns:
            self.observe(step.number, step.batch, self._of_work_alone(step))
            self._graphs = step.graphs

    def _of_work_alone(self, step: Step) -> Sequence[float]:
        """NaN where a rank did something else besides."""
        if step.graphs == self._graphs and not any(step.retries):
            return step.compute_seconds
        before = self._graphs or (0,) * len(step.graphs)
        compiled = [now > then for now, then in zip(step.graphs, before, strict=True)]
        told = zip_longest(step.compute_seconds, compiled, step.retries, fillvalue=0)
        return [math.nan if compiling or retries else seconds for seconds, compiling, retries in told]

    # Of many ranks

    @property
    def _alone(self) -> BySpeedOfMany | None:
        """The balancer, if each rank knows its own times alone."""
        return self.balancer if isinstance(self.balancer, BySpeedOfMany) else None

    def voice(self, step: Step | None) -> Voice | None:
        """What this rank tells of the time of its work in a step, if each knows its own alone."""
        if self._alone is None:
            return None
        if step is None:
            return Voice.silent()
        return self._alone.voice(step.batch.shares[self._learner.data.index], _of_own_work(step))

    def line(self) -> Sequence[float]:
        """What this rank tells of its line, if all are asked for theirs; else nothing."""
        return self._alone.line() if self._alone and self._alone.asks else ()

    @property
    def wants_rows(self) -> bool:
        """Whether the times of all ranks have to be known of every step."""
        return self._learns and self._alone is None

    def new_events(self) -> Sequence[Decision | MemoryRecord | Note]:
        """Changes of shares, of pieces and of workers since the last call, and once why shares are not equal."""
        decisions = self.balancer.decisions if self.balancer else ()
        new: list[Decision | MemoryRecord | Note] = [*decisions[self._told :], *self._events]
        new += [Note(self._step, words) for words in self.readers.new_words()]
        self._told = len(decisions)
        self._events.clear()
        return new

    def speeds(self, steps_done: int) -> list[float] | None:
        """Parts of a batch that the ranks took in the last step; None, which is equal parts, before the first."""
        if self.balancer is None or steps_done == 0:
            return None
        shares = self.balancer.shares(max(self.first_step, steps_done - 1), self._batch_size)
        return [float(share) for share in shares]

    def evaluation_options(self, steps_done: int) -> EvaluationOptions:
        """How ranks divide an evaluation: as they did the last step."""
        return EvaluationOptions(
            batch_size=self._batch_size,
            micro_batch=self._config.samples_at_once,
            workers=self.readers.of_evaluation,
            ranks_beside=self.readers.beside,
            skips=self.skips is not None,
            weights=self.speeds(steps_done),
        )

    def state_dict(self) -> dict[str, Any]:
        """What the balancer has learned."""
        return self.balancer.state_dict() if self.balancer else self.balancer_state


def _of_own_work(step: Step) -> float:
    """Seconds; NaN where this rank did something else besides."""
    return step.own_seconds.compute if step.only_work else math.nan


def _learns(balancer: Balancer) -> bool:
    return type(balancer).observe is not Balancer.observe


def _agreed_order(reading: Reading, control: Channel) -> int | None:
    """The checksum of the task's order, if it has one. A collective call.

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
