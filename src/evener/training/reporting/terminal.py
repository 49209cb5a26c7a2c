"""Shows a run to the user: one live line on a terminal, plain lines elsewhere, and a summary at the end."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

from tqdm import tqdm

from evener.balance.shares import solve
from evener.balance.time_model import Line
from evener.core.config.sizes import size_words
from evener.core.observer import Observer
from evener.core.records import EvaluationRecord, RunStart, RunSummary, StepRecord
from evener.core.stdio import unheard
from evener.core.text import counted, from_here
from evener.distributed.watchdog.watchdog import current_watchdog
from evener.training.reporting.ranks import RecentSteps
from evener.training.reporting.width import fitted

PLAIN_SECONDS = ((60.0, 5.0), (1800.0, 30.0), (math.inf, 300.0))
"""Pairs of seconds since the start and the interval between two plain lines until then."""
LIVE_SECONDS = 0.5
"""Interval between two updates of the live line about the ranks, in seconds."""
_SHARES_IN_A_LINE = 8
_SAME_SHARES = 0.02
_WORTH_A_WORD = 1.15
_MOST_TOLD = 10
"""Largest speedup that is shown. Larger estimates are far from what was measured."""
_RECENT_STEPS = 20
"""Number of steps for the speed that is shown."""


class Terminal(Observer):
    """Shows a run on ``stream``, with a live line if that is a terminal.

    Args:
        stream: Standard error if None.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._given = stream

    def start(self, run: RunStart) -> None:
        self._stream = unheard(self._given or sys.stderr)  # a closed stream does not stop the run
        self._total = run.total_steps
        self._samples = 0
        self._began = self._last_line = time.monotonic()
        self._times = deque([(self._began, run.steps_done, 0)], maxlen=_RECENT_STEPS + 1)
        self._losses = _Mean()
        self._lr = math.nan
        live = _is_live(self._stream, os.environ)
        self._bar = tqdm(
            total=run.total_steps,
            initial=run.steps_done,
            file=self._stream,
            disable=not live,
            unit="step",
            dynamic_ncols=True,
            bar_format=_bar_format(run.total_steps),
            colour=None if os.environ.get("NO_COLOR") else "green",  # as no-color.org says
        )
        self._ranks = tqdm(
            file=self._stream,
            disable=not live,
            position=1,
            leave=False,
            dynamic_ncols=True,
            bar_format="{desc}",
        )
        self._recent = RecentSteps(run.parts)
        self._live = live
        self._hear_of_waits(self._waits if live else None)
        for line in header_lines(run):
            self._print(line)

    def step(self, record: StepRecord) -> None:
        done = record.step + 1
        self._recent.add(record)
        self._samples += record.samples
        self._times.append((time.monotonic(), done, self._samples))
        self._losses.add(record.loss, record.samples)
        self._lr = record.lr
        self.show(record)

    def show(self, record: StepRecord) -> None:
        """Shows the progress after a step, if it is time."""
        done = record.step + 1
        if self._live:
            self._bar.set_description_str(f", epoch {record.epoch + 1}", refresh=False)
            self._bar.set_postfix_str(self._state(record), refresh=False)
            self._bar.update(done - self._bar.n)
            if self._recent.several and self._due(LIVE_SECONDS):
                self._ranks.set_description_str(self._recent.each())
        elif self._due(self._plain_seconds()):
            self._print(self.progress_text(record))

    def progress_text(self, record: StepRecord) -> str:
        """Returns step, loss, speed, remaining time and the slowest rank in one line."""
        slowest = f", {self._recent.slowest()}" if self._recent.several else ""
        return f"{self.where(record)}, {self._state(record)}{self._left(record.step + 1)}{slowest}"

    def _plain_seconds(self) -> float:
        """Returns the interval between plain lines, which grows with the duration of the run."""
        elapsed = time.monotonic() - self._began
        return next(period for until, period in PLAIN_SECONDS if elapsed <= until)

    def _due(self, period_seconds: float) -> bool:
        """Returns True if it is time for the next line."""
        now = time.monotonic()
        if now - self._last_line < period_seconds:
            return False
        self._last_line = now
        return True

    def _state(self, record: StepRecord) -> str:
        return f"train loss {record.loss:.4f}, {self._speed()[1]:,.0f} samples/s"

    def event(self, record: Any) -> None:
        self._print(record.words)

    def evaluation(self, record: EvaluationRecord) -> None:
        values = ", ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
        trained = f" train loss {self._losses.value:.4f}, lr {self._lr:g};" if self._losses.weight else ""
        self._print(f"epoch {record.epoch + 1}:{trained} evaluation: {values}")
        self._losses = _Mean()
        self._times = deque([(time.monotonic(), record.step, self._samples)], maxlen=_RECENT_STEPS + 1)

    def where(self, record: StepRecord) -> str:
        """Returns step and epoch as text."""
        of = f" of {self._total}" if self._total else ""
        return f"step {record.step + 1}{of}, epoch {record.epoch + 1}"

    def _waits(self, message: str) -> None:
        """Shows which ranks wait for which, in place of the ranks' times, while nothing moves."""
        self._bar.refresh()  # shows the steps taken since it was last drawn
        self._ranks.set_description_str(message)

    @staticmethod
    def _hear_of_waits(line: Callable[[str], None] | None) -> None:
        watchdog = current_watchdog()
        if watchdog is not None:
            watchdog.show(line)

    def state_dict(self) -> dict[str, Any]:
        """Returns what the line at the end of an epoch says of its steps, for a run that resumes within the epoch."""
        return {"loss": [self._losses.total, self._losses.weight], "lr": self._lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with suppress(
            KeyError, TypeError, ValueError, OverflowError
        ):  # a line of text, for which no run ends
            total, weight, self._lr = map(float, (*state["loss"], state["lr"]))
            self._losses = _Mean(total, weight)

    def end(self, summary: RunSummary | None) -> None:
        self._hear_of_waits(None)
        self._ranks.close()
        self._bar.close()

    def _print(self, line: str) -> None:
        tqdm.write(fitted(line, self._stream), file=self._stream)
        self._stream.flush()

    def _speed(self) -> tuple[float, float]:
        """Returns the steps and the samples per second, over the last steps since an evaluation. A step may be a round
        of many batches."""
        (began, first, before), (now, done, samples) = self._times[0], self._times[-1]
        seconds = max(1e-9, now - began)
        return (done - first) / seconds, (samples - before) / seconds

    def _left(self, done: int) -> str:
        speed, _ = self._speed()
        if self._total is None or not speed:
            return ""
        return f", {tqdm.format_interval((self._total - done) / speed)} left"


def _is_live(stream: Any, environment: Mapping[str, str]) -> bool:
    """Returns True if lines can be overwritten. Not in CI, which may provide a terminal but keeps every line."""
    return bool(stream.isatty()) and environment.get("TERM") != "dumb" and not environment.get("CI")


def _bar_format(total_steps: int | None) -> str:
    """Returns the format of the bar. What matters most comes first, because a narrow terminal cuts off the end."""
    if total_steps is None:
        return "{n_fmt} steps{desc}{postfix}"
    return "{remaining} left |{bar:10}| {n_fmt}/{total_fmt} steps{desc}{postfix}"


def _summed_text(run: RunStart | RunSummary) -> str:
    return f"{'differences of weights' if run.merging else 'gradients'} summed by {run.allreduce}"


def header_lines(run: RunStart) -> list[str]:
    """Describes the run in lines that fit 60 columns if names allow it. Returns none if the devices are unknown."""
    kinds = ", ".join(f"{n} × {name}" if n > 1 else name for name, n in Counter(run.devices).items())
    ranks = counted(run.world_size, "rank")
    summed = [f"  {_summed_text(run)}"] if run.allreduce and run.world_size > 1 else []
    kept = (
        f"records, weights and checkpoints in {from_here(run.run_dir)}"
        if run.run_dir
        else "nothing is kept on disk"
    )
    lines = [f"{run.task}: {run.parameters:,} parameters, {run.strategy}", f"  {ranks}: {kinds}"]
    lines += [f"  batches of {run.batch_size}{_steps_text(run)}", *_shares_line(run), *summed, f"  {kept}"]
    return lines if run.devices else []


def _shares_line(run: RunStart) -> list[str]:
    """Describes how the first batch is divided; with many parts, only the least and the greatest share."""
    if len(run.shares) < 2:
        return []
    least, most = min(run.shares), max(run.shares)
    several = f"from {least} to {most}" if least < most else f"{len(run.shares)} × {most}"
    each = " + ".join(map(str, run.shares)) if len(run.shares) <= _SHARES_IN_A_LINE else several
    return [f"  shares {each}{', by cost' if run.by_cost else ''}{', then by speed' if run.learns else ''}"]


def _steps_text(run: RunStart) -> str:
    if run.total_steps is not None and run.steps_done >= run.total_steps:
        return f", nothing is left to train: {counted(run.steps_done, 'step')} done, of {run.total_steps:,}"
    if run.steps_done:
        of = f" of {run.total_steps:,}" if run.total_steps else ""
        return f", goes on after step {run.steps_done}{of}"
    return f", {counted(run.total_steps, 'step')}" if run.total_steps else ""


@dataclass
class _Mean:
    """A weighted mean."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float) -> None:
        """Adds one value."""
        self.total, self.weight = self.total + value * weight, self.weight + weight

    @property
    def value(self) -> float:
        """The mean so far."""
        return self.total / self.weight


def summary_text(summary: RunSummary) -> str:
    """Returns the closing lines of a run."""
    devices = ", ".join(sorted(set(summary.devices)))
    skipped = f"; {counted(summary.skipped_steps, 'step')} left out" if summary.skipped_steps else ""
    metrics = "".join(f"\n  {name:<9} {value:.4f}" for name, value in summary.metrics.items())
    trained = bool(summary.samples_in_seconds) or not math.isnan(summary.final_loss)
    taken = f"{counted(summary.steps, 'step')}, {counted(summary.epochs, 'epoch')}"
    lines = [
        f"{'stopped' if summary.interrupted else 'trained'} {summary.task} with {summary.strategy} "
        f"on {counted(summary.world_size, 'rank')} ({devices})",
    ]
    if trained:
        lines += [
            f"  {taken}, {_samples_text(summary)} "
            f"in {summary.seconds:.1f} s: {summary.samples_per_second:,.0f} samples/s",
            f"  last loss {summary.final_loss:.4f}{skipped}{metrics}",
        ]
    else:
        why = "none was taken" if summary.interrupted else "none was left to take"
        lines += [f"  {taken} were done before; {why}{metrics}"]
    if summary.world_size > 1 and trained:
        lines += ["  rank   share   compute      wait     input"]
        of_ranks = enumerate(zip(summary.shares, summary.ranks, strict=True))
        lines += [_rank_line(rank, share, times) for rank, (share, times) in of_ranks]
        lines += [f"  {_summed_text(summary)}"] if summary.allreduce else []
    unread = f"{counted(summary.skipped, 'sample')} could not be read and count for nothing"
    further = (
        *summary.updates_of_server.splitlines(),
        f"{size_words(summary.merge_bytes)} of messages for merges on rank 0" if summary.merge_bytes else "",
        summary.late_for_merges,
        summary.reading,
        _cost_text(summary) if summary.cost else "",
        _memory_text(summary) if summary.memory else "",
        unread if summary.skipped else "",
        f"computed in {summary.precision}" if summary.precision else "",
        summary.recompute,
        summary.offload,
        summary.optimizer,
        summary.optimizer_state,
        f"{summary.exact}; weights sha256 {summary.weights_digest}" if summary.exact else "",
        summary.batch_norm,
        summary.updates,
        _graphs_text(summary) if summary.graphs else "",
        summary.cuda_graphs,
        summary.emulation,
        summary.average,
        summary.profile,
        f"records, summary and weights in {from_here(summary.run_dir)}" if summary.run_dir else "",
        balance_text(summary),
    )
    return "\n".join([*lines, *(f"  {line}" for line in further if line)])


def _samples_text(summary: RunSummary) -> str:
    """Describes the samples of the reported time: after a resume, those since then, out of all."""
    if summary.samples_in_seconds in (0, summary.samples):
        return counted(summary.samples, "sample")
    return f"{summary.samples_in_seconds:,} of {counted(summary.samples, 'sample')}"


def balance_text(summary: RunSummary) -> str:
    """Describes the gain of unequal shares over equal ones, or the possible gain of shares by speed; "" if it is small.

    With equal shares, a step ends when the slowest rank has done its part. With shares by speed, all end together. If
    shares have differed, the fixed part of each rank's time is known. Else the time is taken to be in proportion to the
    samples, and what shares by speed would gain is the most that they may gain.
    """
    each, shares = summary.sample_seconds, summary.shares
    divided = len(each) == len(shares) > 1 and math.isclose(sum(shares), 1.0)
    divided = divided and not summary.updates_of_server  # there nobody waits for shares
    if not divided or not all((*each, *shares)):
        return ""
    known = len(summary.share_lines) == len(each)
    given = summary.share_lines if known else [(0.0, seconds) for seconds in each]
    lines, batch = [Line(*line) for line in given], summary.batch_size
    work = [line(share * batch) for line, share in zip(lines, shares, strict=True)]
    best = max(line(share) for line, share in zip(lines, solve(lines, batch), strict=True))
    equal, taken = max(line(batch / len(lines)) for line in lines), max(work)
    unequal = max(shares) - min(shares) > _SAME_SHARES
    if known and unequal and equal / taken >= _WORTH_A_WORD:
        return f"these shares: {_times_text(equal / taken)} of equal shares"
    if not unequal and best and taken / best >= _WORTH_A_WORD:
        gain = _times_text(taken / best) if known else f"up to {min(_MOST_TOLD, taken / best):.1f}x"
        return f"ranks waited for rank {work.index(taken)}: with --balance auto {gain}"
    return ""


def _times_text(gain: float) -> str:
    return f"about {gain:.1f}x" if gain <= _MOST_TOLD else f"more than {_MOST_TOLD}x"


def _cost_text(summary: RunSummary) -> str:
    rate = f": {summary.cost / summary.seconds:,.0f}/s" if summary.seconds else ""
    shares = summary.cost_shares
    each = f", shares of it {' + '.join(f'{share:.1%}' for share in shares)}" if 1 < len(shares) <= 8 else ""
    return f"cost {summary.cost:,.0f}{rate}{each}"


def _memory_text(summary: RunSummary) -> str:
    rank, most = max(enumerate(summary.memory), key=lambda pair: pair[1]["peak"])
    kinds = ", ".join(
        f"{name} {size_words(nbytes)}" for name, nbytes in most.items() if nbytes and name != "peak"
    )
    where = f" on rank {rank}" if len(summary.memory) > 1 else ""
    return f"memory at most {size_words(most['peak'])}{where}: {kinds}"


def _graphs_text(summary: RunSummary) -> str:
    made = sorted(set(summary.graphs))
    number = f"{made[0]}" if len(made) == 1 else f"{made[0]} to {made[-1]}"
    breaks = f", with {summary.graph_breaks:,} breaks" if summary.graph_breaks else ""
    shown = ", ".join(summary.uncompiled[:4]) + (", ..." if len(summary.uncompiled) > 4 else "")
    wrong = f"; uncompiled, for compiled code computed something else: {shown}" if shown else ""
    return f"compiled {number} graphs on each rank{breaks}{wrong}"


def _rank_line(rank: int, share: float, times: dict[str, float]) -> str:
    return (
        f"  {rank:>4} {share:>6.1%} {times['compute_seconds']:>8.2f} s {times['wait_seconds']:>7.2f} s "
        f"{times['input_seconds']:>7.2f} s"
    )
