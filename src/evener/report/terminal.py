"""What a person sees of a run: one live line on a terminal, plain lines elsewhere, a summary at the end."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, TextIO

from tqdm import tqdm

from evener.observer import Observer
from evener.records import EvaluationRecord, RunStart, RunSummary, StepRecord
from evener.report.ranks import RecentSteps
from evener.report.width import fitted
from evener.sizes import size_words
from evener.streams import unheard

PLAIN_SECONDS = 5.0
"""Time between two plain lines."""
LIVE_SECONDS = 0.5
"""Time between two live lines about the ranks."""
_SHARES_IN_A_LINE = 8


class Terminal(Observer):
    """Follows a run on ``stream``; a live line if that is a terminal.

    Args:
        stream: Standard error if None.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._given = stream

    def start(self, run: RunStart) -> None:
        self._stream = unheard(self._given or sys.stderr)  # that nobody looks on is no reason to stop
        self._total = run.total_steps
        self._batch_size = run.batch_size
        self._first = run.steps_done
        self._began = self._last_line = time.monotonic()
        live = _is_live(self._stream, os.environ)
        self._bar = tqdm(
            total=run.total_steps,
            initial=run.steps_done,
            file=self._stream,
            disable=not live,
            unit="step",
            dynamic_ncols=True,
            bar_format=_bar_format(run.total_steps),
            colour="green" if _is_coloured(os.environ) else None,
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
        for line in header_lines(run):
            self._print(line)

    def step(self, record: StepRecord) -> None:
        done = record.step + 1
        self._recent.add(record)
        if self._live:
            self._bar.set_description_str(f", epoch {record.epoch + 1}", refresh=False)
            self._bar.set_postfix_str(self._state(record), refresh=False)
            self._bar.update(done - self._bar.n)
            if self._recent.several and self._due(LIVE_SECONDS):
                self._ranks.set_description_str(self._recent.each())
        elif self._due(PLAIN_SECONDS):
            self._print(f"{self.where(record)}, {self._state(record)}{self._left(done)}")
            if self._recent.several:
                self._print(f"  {self._recent.each()}")

    def _due(self, period_seconds: float) -> bool:
        """Whether it is time for the next line."""
        now = time.monotonic()
        if now - self._last_line < period_seconds:
            return False
        self._last_line = now
        return True

    def _state(self, record: StepRecord) -> str:
        slowest = f", {self._recent.slowest()}" if self._recent.several else ""
        speed = self._speed(record.step + 1)
        return f"train loss {record.loss:.4f}, {speed:,.0f} samples/s{_memory(record)}{slowest}"

    def event(self, record: Any) -> None:
        self._print(record.words)

    def evaluation(self, record: EvaluationRecord) -> None:
        values = ", ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
        self._print(f"epoch {record.epoch + 1}, evaluation: {values}")

    def where(self, record: StepRecord) -> str:
        """Where the run stands, in words."""
        of = f" of {self._total}" if self._total else ""
        return f"step {record.step + 1}{of}, epoch {record.epoch + 1}"

    def end(self, summary: RunSummary | None) -> None:
        self._ranks.close()
        self._bar.close()

    def _print(self, line: str) -> None:
        tqdm.write(fitted(line, self._stream), file=self._stream)
        self._stream.flush()

    def _speed(self, done: int) -> float:
        elapsed = max(1e-9, time.monotonic() - self._began)
        return (done - self._first) * self._batch_size / elapsed

    def _left(self, done: int) -> str:
        if self._total is None or done == self._first:
            return ""
        seconds = (time.monotonic() - self._began) / (done - self._first) * (self._total - done)
        return f", {tqdm.format_interval(seconds)} left"


def _is_live(stream: Any, environment: Mapping[str, str]) -> bool:
    """Whether lines can be written over; a CI that gives its jobs a terminal keeps every line all the same."""
    return bool(stream.isatty()) and environment.get("TERM") != "dumb" and not environment.get("CI")


def _is_coloured(environment: Mapping[str, str]) -> bool:
    """As no-color.org has it: not if NO_COLOR is something."""
    return not environment.get("NO_COLOR")


def _bar_format(total_steps: int | None) -> str:
    """What matters most comes first: a narrow terminal cuts the end off."""
    if total_steps is None:
        return "{n_fmt} steps{desc}{postfix}"
    return "{remaining} left |{bar:10}| {n_fmt}/{total_fmt} steps{desc}{postfix}"


def header_lines(run: RunStart) -> list[str]:
    """What the run is, each line for a terminal of 60 columns as far as names allow; nothing that is not known."""
    kinds = ", ".join(f"{n} × {name}" if n > 1 else name for name, n in Counter(run.devices).items())
    ranks = f"{run.world_size} rank{'s' * (run.world_size > 1)}"
    summed = [f"  gradients summed by {run.allreduce}"] if run.allreduce and run.world_size > 1 else []
    kept = f"records, weights and checkpoints in {run.run_dir}" if run.run_dir else "nothing is kept on disk"
    lines = [f"{run.task}: {run.parameters:,} parameters, {run.strategy}", f"  {ranks}: {kinds}"]
    lines += [f"  batches of {run.batch_size}{_steps_words(run)}", *_shares_line(run), *summed, f"  {kept}"]
    return lines if run.devices else []


def _shares_line(run: RunStart) -> list[str]:
    """How the first batch is divided; of many parts the ends alone."""
    if len(run.shares) < 2:
        return []
    least, most = min(run.shares), max(run.shares)
    several = f"from {least} to {most}" if least < most else f"{len(run.shares)} × {most}"
    each = " + ".join(map(str, run.shares)) if len(run.shares) <= _SHARES_IN_A_LINE else several
    return [f"  shares {each}{', then by speed' if run.learns else ''}"]


def _steps_words(run: RunStart) -> str:
    if run.steps_done:
        of = f" of {run.total_steps:,}" if run.total_steps else ""
        return f", goes on after step {run.steps_done}{of}"
    return f", {run.total_steps:,} steps" if run.total_steps else ""


def _memory(record: StepRecord) -> str:
    """Of the rank that had most in use, and how much of that were activations, by which micro-batches are chosen."""
    if not record.memory_peak:
        return ""
    most = max(record.memory_peak)
    activations = record.memory_parts.get("activations", (0,) * len(record.memory_peak))
    part = activations[record.memory_peak.index(most)]
    return f", memory {size_words(most)}" + (f" ({size_words(part)} activations)" if part else "")


def summary_text(summary: RunSummary) -> str:
    """The closing lines of a run."""
    devices = ", ".join(sorted(set(summary.devices)))
    skipped = f"; {summary.skipped_steps:,} steps were left out" if summary.skipped_steps else ""
    metrics = "".join(f"\n  {name:<9} {value:.4f}" for name, value in summary.metrics.items())
    lines = [
        f"{'stopped' if summary.interrupted else 'trained'} {summary.task} with {summary.strategy} "
        f"on {summary.world_size} rank{'s' * (summary.world_size > 1)} ({devices})",
        f"  {summary.steps:,} steps, {summary.epochs} epochs, {summary.samples:,} samples in {summary.seconds:.1f} s: "
        f"{summary.samples_per_second:,.0f} samples/s",
        f"  last loss {summary.final_loss:.4f}{skipped}{metrics}",
    ]
    if summary.world_size > 1:
        lines += ["  rank   share   compute      wait     input"]
        lines += [_rank_line(rank, share, times) for rank, (share, times) in _by_rank(summary)]
        lines += [f"  gradients summed by {summary.allreduce}"] if summary.allreduce else []
    lines += [f"  {summary.reading}"] if summary.reading else []
    lines += [_memory_line(summary)] if summary.memory else []
    if summary.skipped:
        lines += [f"  {summary.skipped:,} samples could not be read and count for nothing"]
    lines += [f"  computed in {summary.precision}"] if summary.precision else []
    lines += [f"  {summary.recompute}"] if summary.recompute else []
    lines += [f"  {summary.offload}"] if summary.offload else []
    lines += [f"  {summary.optimizer}"] if summary.optimizer else []
    lines += [f"  {summary.optimizer_state}"] if summary.optimizer_state else []
    lines += [f"  {summary.batch_norm}"] if summary.batch_norm else []
    lines += [f"  {summary.updates}"] if summary.updates else []
    lines += [_graphs_line(summary)] if summary.graphs else []
    if summary.emulation:
        lines += [f"  {summary.emulation}"]
    if summary.run_dir:
        lines += [f"  records, summary and weights in {summary.run_dir}"]
    return "\n".join(lines)


def _memory_line(summary: RunSummary) -> str:
    rank, most = max(enumerate(summary.memory), key=lambda pair: pair[1]["peak"])
    kinds = ", ".join(
        f"{name} {size_words(nbytes)}" for name, nbytes in most.items() if nbytes and name != "peak"
    )
    where = f" on rank {rank}" if len(summary.memory) > 1 else ""
    return f"  memory at most {size_words(most['peak'])}{where}: {kinds}"


def _graphs_line(summary: RunSummary) -> str:
    made = sorted(set(summary.graphs))
    number = f"{made[0]}" if len(made) == 1 else f"{made[0]} to {made[-1]}"
    breaks = f", with {summary.graph_breaks:,} breaks" if summary.graph_breaks else ""
    return f"  compiled {number} graphs on each rank{breaks}"


def _by_rank(summary: RunSummary) -> list[tuple[int, tuple[float, dict[str, float]]]]:
    return list(enumerate(zip(summary.shares, summary.ranks, strict=True)))


def _rank_line(rank: int, share: float, times: dict[str, float]) -> str:
    return (
        f"  {rank:>4} {share:>6.1%} {times['compute_seconds']:>8.2f} s {times['wait_seconds']:>7.2f} s "
        f"{times['input_seconds']:>7.2f} s"
    )
