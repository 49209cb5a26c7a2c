"""Makes a run directory of a script that ``evener run --observe`` runs, as if Evener had trained.

Each rank writes its steps to a file of its own, and a thread of the launcher puts them together as they come: the n-th
steps of all ranks are one record. So the directory can be read while the script runs, and holds what was done when a
rank dies::

    rank 0 ── steps-0-0 ─┐
    rank 1 ── steps-0-1 ─┴▶ StepMerger ──▶ records.jsonl and other observers

Nothing here ends the script: what cannot be written is said once.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from evener.core.attempts import ATTEMPTS, SaveRecord, StartRecord, append_attempt
from evener.core.observer import Observer
from evener.core.records import EvaluationRecord, Note, RunStart, RunSummary, StepRecord
from evener.core.stdio import to_stderr
from evener.core.text import counted, from_here, said
from evener.distributed.ddp_profiler.rank_file import RankFileReader, StepRow, step_files
from evener.distributed.ddp_profiler.report import DdpObserver, Observation, observations
from evener.distributed.environment import usable_cores
from evener.distributed.launch.fault_note import write_directory_note
from evener.errors import ConfigurationError, InterruptedRunError
from evener.training.reporting.loggers.prometheus import MetricsFile
from evener.training.reporting.run_dir import Records, RunDirectory
from evener.training.run_report import versions

POLL_SECONDS = 0.5
STRATEGY = "script"
"""The strategy of such a run in its summary."""
_SHOWN_STEPS = 3
_WORTH_NOTING = 1e-3
"""Seconds of a save that is written down."""


class ScriptRun(DdpObserver):
    """Profiles a script on every rank, prints a table at the end, and writes a run directory.

    Args:
        run_dir: The directory; None for none.
        settings: What the run was given, for its ``config.json``.
        overwrite: Whether the directory may hold a finished run, which is replaced.
        metrics_file: File for live figures, as Prometheus reads them; None for none.
        json_path: File for the observations; None for none.

    Raises:
        ConfigurationError: When the script starts, if the directory is another run's, or there is none for the metrics
            file.
    """

    def __init__(
        self,
        run_dir: Path | None,
        settings: dict[str, Any],
        overwrite: bool = False,
        metrics_file: Path | None = None,
        json_path: Path | None = None,
    ) -> None:
        super().__init__(json_path, records=run_dir is not None or metrics_file is not None)
        self._run_dir, self._settings, self._overwrite = run_dir, settings, overwrite
        self._metrics_file = metrics_file

    @contextmanager
    def following(self, directory: Path) -> Iterator[None]:
        observers: list[Observer] = []
        if self._metrics_file is not None:
            if not self._metrics_file.parent.is_dir():
                raise ConfigurationError(
                    f"the directory of the metrics file {self._metrics_file} does not exist"
                )
            observers.append(MetricsFile(self._metrics_file))
        if self._run_dir is None:
            with super().following(directory), _recording(directory, self._settings, None, observers):
                yield
            return
        with RunDirectory(self._run_dir, self._overwrite):
            write_directory_note(directory, directory)
            (directory / ATTEMPTS).touch()
            observers.insert(0, Records(self._run_dir, stops=False, replaces=self._overwrite))
            with (
                super().following(directory),
                _recording(directory, self._settings, self._run_dir, observers),
            ):
                yield
        to_stderr(f"evener: records in {from_here(self._run_dir)}")


@contextmanager
def _recording(
    directory: Path, settings: dict[str, Any], run_dir: Path | None, observers: list[Observer]
) -> Iterator[None]:
    """Puts the steps of the ranks together in a thread while the block runs."""
    recorder, over = StepMerger(directory, settings, run_dir, observers), threading.Event()
    thread = threading.Thread(target=recorder.follow, args=(over,), daemon=True)
    thread.start()
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        over.set()
        thread.join()
        recorder.end(error)


class StepMerger:
    """Tells observers of the steps that the ranks of a script have written.

    Args:
        directory: Where the ranks write.
        settings: What the run was given.
        run_dir: The directory of the run; None for none.
        observers: Told of the run.
    """

    def __init__(
        self, directory: Path, settings: dict[str, Any], run_dir: Path | None, observers: Sequence[Observer]
    ) -> None:
        self._directory, self._settings, self._run_dir = directory, settings, run_dir
        self._observers = list(observers)
        self._readers: dict[str, RankFileReader] = {}
        self._run: RunStart | None = None
        self._started = -1
        self._is_broken = False
        self._totals = _Totals()

    def follow(self, over: threading.Event) -> None:
        """Reads what the ranks write until ``over`` is set."""
        while not over.wait(POLL_SECONDS):
            self._go_on(self._read)

    def end(self, error: BaseException | None) -> None:
        """Reads the rest, and ends the run.

        Args:
            error: What ended the script; None if it came to its end.
        """
        self._go_on(self._read)
        ranks = observations(self._directory)
        if self._run is None:
            self._go_on(partial(self._begin, [], []))
        for words in _remarks(list(self._readers.values()), self._started, ranks):
            self._tell("event", Note(self._totals.steps, words))
        self._go_on(self._take_faults)
        interrupted = isinstance(error, InterruptedRunError | KeyboardInterrupt)
        summary = None if error is not None and not interrupted else self._summary(ranks, interrupted)
        self._tell("end", summary)
        for reader in self._readers.values():
            reader.close()

    def _go_on(self, act: Callable[[], None]) -> None:
        """Calls ``act``. An error ends the recording, and not the script."""
        if self._is_broken:
            return
        try:
            act()
        except Exception as error:
            self._is_broken = True
            to_stderr(f"evener: the script is no longer recorded: {said(error)}")

    def _tell(self, event: str, record: Any) -> None:
        """Calls a method of all observers. One that raises is left out from then on."""
        for each in [*self._observers]:
            try:
                getattr(each, event)(record)
            except Exception as error:
                to_stderr(f"evener: {type(each).__name__} no longer records the script: {said(error)}")
                self._observers.remove(each)
                with suppress(Exception):
                    each.end(None)

    def _read(self) -> None:
        for path in step_files(self._directory):
            if path.name not in self._readers:
                self._readers[path.name] = RankFileReader(path)
            self._readers[path.name].read()
        ordered = sorted(self._readers.values(), key=lambda reader: (reader.start, reader.rank))
        for start, group in groupby(ordered, key=lambda reader: reader.start):
            ranks = list(group)
            if len(ranks) < ranks[0].facts["local_world_size"]:
                return
            while all(rank.rows for rank in ranks):
                rows = [rank.rows.popleft() for rank in ranks]
                if start != self._started:
                    self._begin(ranks, rows)
                    self._started = start
                self._step(rows)

    def _begin(self, ranks: Sequence[RankFileReader], rows: Sequence[StepRow]) -> None:
        again, first = self._run is not None, [row.step.ended - row.step.times.seconds for row in rows]
        begun = min((rank.facts["began"] for rank in ranks), default=0.0)
        self._run = RunStart(
            task=str(self._settings["task"]),
            settings={**self._settings, "world_size": len(ranks), "batch_size": _samples(rows)},
            world_size=len(ranks),
            batch_size=_samples(rows),
            total_steps=None,
            steps_done=self._totals.steps,
            devices=tuple(rank.facts.get("device", "") for rank in ranks),
            strategy=STRATEGY,
            run_dir=None if self._run_dir is None else str(self._run_dir),
            shares=_shares(rows),
            hosts=tuple(rank.facts.get("host", "") for rank in ranks),
            threads=tuple(rank.facts.get("threads", 0) for rank in ranks),
            cores=(usable_cores(),) * len(ranks),
            versions=versions(),
            startup_seconds=max(0.0, min(first) - begun) if first else None,
        )
        if not again:
            self._tell("start", self._run)
        elif self._run_dir is not None:
            self._take_faults()
            append_attempt(self._run_dir, StartRecord.of_run(self._run, time.time()))

    def _take_faults(self) -> None:
        """Takes over the faults that the launcher has noted in its own directory: a fault may come before the begin."""
        noted = self._directory / ATTEMPTS
        if self._run_dir is not None and noted.exists():
            with (self._run_dir / ATTEMPTS).open("ab") as file:
                file.write(noted.read_bytes())
            noted.write_bytes(b"")

    def _step(self, rows: Sequence[StepRow]) -> None:
        times = [row.step.times for row in rows]
        number = self._totals.steps
        between = max(each.between_seconds for each in times)
        if between:
            self._tell("evaluation", EvaluationRecord(number, 0, {}, 0, between))
        saving = times[0].saving_seconds
        if saving >= _WORTH_NOTING and self._run_dir is not None:
            append_attempt(self._run_dir, SaveRecord(number, saving))
        record = StepRecord(
            step=number,
            epoch=0,
            loss=math.fsum(row.step.loss for row in rows) / len(rows),
            samples=_samples(rows),
            seconds=times[0].seconds - times[0].input_seconds - saving,
            shares=_shares(rows),
            lr=rows[0].step.lr,
            compute_seconds=tuple(each.compute_seconds for each in times),
            wait_seconds=tuple(each.exchange_seconds for each in times),
            input_seconds=tuple(each.input_seconds for each in times),
            forward_seconds=tuple(each.forward_seconds for each in times),
            memory_held=tuple(row.held for row in rows),
            memory_peak=tuple(row.peak for row in rows),
        )
        self._totals.add(record)
        self._tell("step", record)

    def _summary(self, ranks: Sequence[Observation], interrupted: bool) -> RunSummary:
        run, totals = self._run, self._totals
        assert run is not None
        return RunSummary(
            task=run.task,
            strategy=STRATEGY,
            world_size=run.world_size,
            devices=list(run.devices),
            steps=totals.steps,
            epochs=0,
            samples=totals.samples,
            samples_in_seconds=totals.samples,
            seconds=totals.seconds,
            samples_per_second=totals.samples / totals.seconds if totals.seconds else 0.0,
            final_loss=totals.loss,
            metrics={},
            shares=[share / max(1, sum(totals.shares)) for share in totals.shares],
            weights_digest="",
            versions=versions(),
            batch_size=run.batch_size,
            seed=0,
            ranks=[sums | _cpu_times(rank, ranks) for rank, sums in enumerate(totals.ranks)],
            interrupted=interrupted,
            run_dir=run.run_dir,
            memory=[{"peak": peak} for peak in totals.peaks],
            collectives=[
                {"algorithm": "", **kind} for rank in ranks if not rank.rank for kind in rank.collectives
            ],
        )


class _Totals:
    """Sums over the steps."""

    def __init__(self) -> None:
        self.steps = self.samples = 0
        self.seconds, self.loss = 0.0, math.nan
        self.shares: list[int] = []
        self.peaks: list[int] = []
        self.ranks: list[dict[str, float]] = []

    def add(self, record: StepRecord) -> None:
        """Adds a step. With another number of ranks than before, the sums by rank begin anew."""
        names = ("compute_seconds", "wait_seconds", "input_seconds", "forward_seconds")
        if len(self.ranks) != len(record.compute_seconds):
            self.ranks = [dict.fromkeys(names, 0.0) for _ in record.compute_seconds]
            self.shares, self.peaks = [0] * len(self.ranks), [0] * len(self.ranks)
        self.steps, self.samples = self.steps + 1, self.samples + record.samples
        self.seconds, self.loss = self.seconds + record.seconds + record.input_seconds[0], record.loss
        for rank, sums in enumerate(self.ranks):
            for name in names:
                sums[name] += getattr(record, name)[rank]
            self.shares[rank] += record.shares[rank] if record.shares else 0
            self.peaks[rank] = max(self.peaks[rank], record.memory_peak[rank])


def _cpu_times(rank: int, ranks: Sequence[Observation]) -> dict[str, float]:
    """Returns the CPU time of a rank, and the time for which its threads had no core; nothing if it has not ended."""
    found = (each for each in ranks if each.rank == rank)
    return next(
        ({"cpu_seconds": each.busy_seconds, "queued_seconds": each.queued_seconds} for each in found), {}
    )


def _samples(rows: Sequence[StepRow]) -> int:
    return int(sum(row.step.times.samples for row in rows))


def _shares(rows: Sequence[StepRow]) -> tuple[int, ...]:
    """Returns the samples of each rank; nothing if they are not known."""
    found = tuple(int(row.step.times.samples) for row in rows)
    return found if any(found) else ()


def _remarks(readers: Sequence[RankFileReader], start: int, ranks: Sequence[Observation]) -> Iterator[str]:
    """Says what the records do not show."""
    left = {reader.rank: len(reader.rows) for reader in readers if reader.start == start}
    for rank, steps in left.items():
        if steps > _SHOWN_STEPS:
            yield f"rank {rank} took {counted(steps, 'step')} more than another one, which are not in the records"
    for seen in ranks:
        if seen.failure:
            yield f"rank {seen.rank} was not observed to its end, because of an error in the profiler: {seen.failure}"
