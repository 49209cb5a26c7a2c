from __future__ import annotations

import dataclasses
import fcntl
import io
import json
import os
import pty
import re
import struct
import sys
import termios
from contextlib import suppress
from typing import Any

import pytest

from evener.core.records import EvaluationRecord, Note, RunStart, RunSummary, StepRecord
from evener.training.reporting import terminal
from evener.training.reporting.terminal import Terminal, summary_text
from evener.training.reporting.width import fitted


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a person at a terminal, wherever the tests run."""
    for name in ("CI", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(terminal, "time", clock)
    return clock


def following(total_steps: int | None, stream: io.StringIO, done: int = 0) -> Terminal:
    shown = Terminal(stream)
    shown.start(RunStart("task", {}, 1, batch_size=8, total_steps=total_steps, steps_done=done))
    return shown


def step(number: int, epoch: int = 0, loss: float = 0.25) -> StepRecord:
    return StepRecord(number, epoch, loss, samples=8, seconds=0.1, shares=(8,), lr=0.1)


def summary(**changes: Any) -> RunSummary:
    values: dict[str, Any] = {
        "task": "digits",
        "strategy": "ddp",
        "world_size": 2,
        "devices": ["cpu", "cpu"],
        "steps": 460,
        "epochs": 20,
        "samples": 28740,
        "seconds": 6.5,
        "samples_per_second": 4421.5,
        "final_loss": 0.0123,
        "metrics": {"accuracy": 0.9917},
        "shares": [0.75, 0.25],
        "weights_digest": "0" * 64,
        "versions": {},
        "batch_size": 64,
        "seed": 0,
        "ranks": [{"compute_seconds": 3.0, "wait_seconds": 2.0, "input_seconds": 1.0}] * 2,
        "run_dir": "runs/digits",
    }
    return RunSummary(**(values | changes))


def test_the_digest_is_told_beside_what_it_depends_on() -> None:
    text = summary_text(summary(exact="exact in bits: grains of 4 samples, blocks of 1 grain; cpu, 1 thread"))
    assert (
        f"\n  exact in bits: grains of 4 samples, blocks of 1 grain; cpu, 1 thread; weights sha256 {'0' * 64}"
        in text
    )
    assert "sha256" not in summary_text(summary())


def test_a_live_line_is_rewritten_and_evaluations_stay(clock: Clock) -> None:
    screen = Screen()
    shown = following(40, screen)
    for number in range(10):
        clock.now += 0.2
        shown.step(step(number, loss=0.5))
    shown.evaluation(EvaluationRecord(10, 0, {"loss": 0.5, "accuracy": 0.75}, samples=9, seconds=0.1))
    shown.end(None)
    text = screen.getvalue()
    assert "10/40 steps" in text
    assert "train loss 0.5000, 40 samples/s" in text
    assert "\r" in text
    assert "epoch 1: train loss 0.5000, lr 0.1; evaluation: loss 0.5000, accuracy 0.7500\n" in text


def test_the_line_of_an_epoch_tells_of_its_steps_before_the_run_resumed_too() -> None:
    before = following(4, io.StringIO())
    for number in range(3):
        before.step(step(number, loss=1.0))
    resumed = following(4, io.StringIO(), done=3)
    resumed.load_state_dict(json.loads(json.dumps(before.state_dict())))
    resumed.step(step(3, loss=2.0))
    resumed.evaluation(EvaluationRecord(4, 0, {"loss": 0.5}, samples=9, seconds=0.1))
    assert "epoch 1: train loss 1.2500, lr 0.1;" in resumed._stream.getvalue()


@pytest.mark.parametrize(
    "state", [{}, {"loss": None, "lr": 1}, {"loss": [1, 2, 3], "lr": 1}, {"loss": ["a", []], "lr": 1}]
)
def test_a_state_that_is_none_of_a_terminal_does_not_end_a_run(state: dict[str, Any]) -> None:
    shown = following(4, io.StringIO(), done=3)
    shown.load_state_dict(state)
    shown.step(step(3, loss=2.0))
    shown.evaluation(EvaluationRecord(4, 0, {"loss": 0.5}, samples=9, seconds=0.1))
    assert "epoch 1: train loss 2.0000, lr 0.1;" in shown._stream.getvalue()


def test_an_epoch_whose_steps_were_all_taken_before_has_their_learning_rate() -> None:
    before = following(4, io.StringIO())
    before.step(step(3))
    resumed = following(4, io.StringIO(), done=4)
    resumed.load_state_dict(before.state_dict())
    resumed.evaluation(EvaluationRecord(4, 0, {"loss": 0.5}, samples=9, seconds=0.1))
    assert "epoch 1: train loss 0.2500, lr 0.1;" in resumed._stream.getvalue()


def test_without_a_terminal_there_are_whole_lines_now_and_then(clock: Clock) -> None:
    out = io.StringIO()
    shown = following(40, out)
    for number in range(20):
        clock.now += 1
        shown.step(step(number))
    shown.end(None)
    lines = out.getvalue().splitlines()
    assert lines == [
        "step 5 of 40, epoch 1, train loss 0.2500, 8 samples/s, 00:35 left",
        "step 10 of 40, epoch 1, train loss 0.2500, 8 samples/s, 00:30 left",
        "step 15 of 40, epoch 1, train loss 0.2500, 8 samples/s, 00:25 left",
        "step 20 of 40, epoch 1, train loss 0.2500, 8 samples/s, 00:20 left",
    ]


def test_speed_is_that_of_this_run_where_it_goes_on_from_another(clock: Clock) -> None:
    out = io.StringIO()
    shown = following(40, out, done=30)
    for number in range(30, 35):
        clock.now += 10 if number == 34 else 0
        shown.step(step(number, epoch=3))
    shown.end(None)
    assert out.getvalue() == "step 35 of 40, epoch 4, train loss 0.2500, 4 samples/s, 00:10 left\n"


def test_samples_are_those_of_steps_and_not_of_batches(clock: Clock) -> None:
    """A step may be a round of many batches, and the last batch of an epoch a small one."""
    out = io.StringIO()
    shown = following(40, out)
    for number in range(2):
        clock.now += 4
        shown.step(dataclasses.replace(step(number), samples=90 - 20 * number))
    assert "20 samples/s" in out.getvalue().splitlines()[-1]


def test_a_run_of_unknown_length_has_no_time_left(clock: Clock) -> None:
    for stream in (io.StringIO(), Screen()):
        shown = following(None, stream)
        clock.now += 6
        shown.step(step(2))
        shown.end(None)
        assert "3" in stream.getvalue()
    assert shown.where(step(2)) == "step 3, epoch 1"


def test_the_summary_says_what_was_trained_where_and_how_time_was_spent() -> None:
    text = summary_text(summary(allreduce="ring"))
    assert "\n  gradients summed by ring\n" in text
    assert "trained digits with ddp on 2 ranks (cpu)" in text
    assert "460 steps, 20 epochs, 28,740 samples in 6.5 s: 4,42" in text
    assert "accuracy" in text
    assert "0.9917" in text
    assert "runs/digits" in text
    rows = [line.split() for line in text.splitlines() if "%" in line]
    assert [row[:3] for row in rows] == [["0", "75.0%", "3.00"], ["1", "25.0%", "3.00"]]


def test_the_summary_of_one_rank_and_of_a_run_that_was_stopped() -> None:
    text = summary_text(summary(world_size=1, devices=["cpu"], interrupted=True, run_dir=None, shares=[1.0]))
    assert text.startswith("stopped digits with ddp on 1 rank (cpu)")
    assert "%" not in text


def test_who_waited_for_batches_is_said() -> None:
    assert "\n  rank 1 waited for" in summary_text(
        summary(reading="rank 1 waited for batches 40% of the time")
    )


def compared(number: int) -> StepRecord:
    """A step in which rank 0 waited for rank 1."""
    times = {"compute_seconds": (0.01, 0.04), "wait_seconds": (0.03, 0.0), "input_seconds": (0.0, 0.002)}
    return StepRecord(number, 0, 0.25, samples=8, seconds=0.05, shares=(6, 2), lr=0.1, **times)


@pytest.mark.parametrize("stream", [io.StringIO(), Screen()], ids=["lines", "live"])
def test_of_several_ranks_it_is_shown_which_is_slow(clock: Clock, stream: io.StringIO) -> None:
    shown = following(40, stream)
    for number in range(12):
        clock.now += 6
        shown.step(compared(number))
    shown._bar.refresh()
    shown.end(None)
    text = stream.getvalue()
    assert ", ," not in text
    assert "rank 1 slowest, others wait 76%" in text
    assert ("0: 75% 10.0+30.0+0.0 | 1: 25% 40.0+0.0+2.0" in text) == stream.isatty()


def test_a_wait_shows_the_steps_that_were_taken_before_it(clock: Clock) -> None:
    screen = Screen()
    shown = following(40, screen)
    for number in range(5):
        shown.step(step(number))  # sooner than the line is drawn again
    assert "5/40 steps" not in screen.getvalue()
    shown._waits("no progress for 10 s: rank 1 at a.py:3 in main")
    text = screen.getvalue()
    assert "5/40 steps" in text
    assert text.index("5/40 steps") < text.index("no progress for 10 s")
    shown.end(None)


def test_a_terminal_of_80_columns_shows_who_is_slow(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    screen = Screen()
    shown = following(690, screen)
    for number in range(144):
        clock.now += 0.35
        shown.step(compared(number))
    shown._bar.refresh()
    shown._ranks.refresh()
    shown.end(None)
    last = [line[:80] for line in re.split(r"[\r\n]+", screen.getvalue())]
    assert any("144/690 steps, epoch 1, train loss 0.2500" in line for line in last)
    assert any("rank 1 slowest, others wait 76%" in line for line in last)


def test_lines_of_a_file_become_fewer(clock: Clock) -> None:
    out = io.StringIO()
    shown = following(None, out)
    lines = []
    for minute in range(10 * 60):  # ten hours, a step a second
        for second in range(60):
            clock.now += 1
            shown.step(step(60 * minute + second))
        lines.append(len(out.getvalue().splitlines()))
    assert lines[0] == 12
    assert lines[1] - lines[0] == 2
    assert lines[-1] < 12 + 2 * 30 + 12 * 10


def test_speed_is_that_of_the_last_steps(clock: Clock) -> None:
    out = io.StringIO()
    shown = following(1000, out)
    for number in range(100):
        clock.now += 10 if number < 50 else 1
        shown.step(step(number))
    shown.end(None)
    assert "step 90 of 1000, epoch 1, train loss 0.2500, 8 samples/s, 15:10 left" in out.getvalue()


def test_a_run_that_goes_on_past_its_end_says_that_nothing_is_left() -> None:
    run = RunStart("digits", {}, 2, 64, 80, steps_done=162, devices=("cpu", "cpu"))
    assert "  batches of 64, nothing is left to train: 162 steps done, of 80" in terminal.header_lines(run)
    nothing: dict[str, Any] = {
        "steps": 162,
        "epochs": 2,
        "samples_per_second": 0.0,
        "final_loss": float("nan"),
    }
    text = summary_text(summary(**nothing, shares=[0.0, 0.0]))
    assert "\n  162 steps, 2 epochs were done before; none was left to take\n  accuracy  0.9917\n" in text
    assert "nan" not in text
    assert "%" not in text
    assert "none was taken" in summary_text(summary(**nothing, shares=[0.0, 0.0], interrupted=True))


def test_the_summary_ends_with_what_balancing_gains() -> None:
    equal = summary_text(summary(shares=[0.5, 0.5], sample_seconds=[0.02, 0.05]))
    assert equal.splitlines()[-1] == "  ranks waited for rank 1: with --balance auto up to 1.7x"
    by_speed = summary_text(
        summary(shares=[0.75, 0.25], sample_seconds=[0.01, 0.03], share_lines=[[0.0, 0.01], [0.0, 0.03]])
    )
    assert by_speed.splitlines()[-1] == "  these shares: about 2.0x of equal shares"
    far = summary_text(
        summary(shares=[0.5, 0.5], sample_seconds=[0.01, 7.0], share_lines=[[0, 0.01], [0, 7.0]])
    )
    assert far.splitlines()[-1] == "  ranks waited for rank 1: with --balance auto more than 10x"
    for alike in (
        summary(shares=[0.5, 0.5], sample_seconds=[0.02, 0.0205]),
        summary(shares=[0.75, 0.25], sample_seconds=[0.01, 0.03]),  # the fixed part may be all
        summary(shares=[0.75, 0.25], sample_seconds=[0.01, 0.03], share_lines=[[0.4, 0.001], [0.4, 0.001]]),
        summary(shares=[0.5, 0.5], sample_seconds=[0.02, 0.05], share_lines=[[0.1, 0.05], [2.0, 0.0]]),
        summary(shares=[1.0, 1.0], sample_seconds=[0.02, 0.05]),
        summary(shares=[0.5, 0.5], sample_seconds=[0.0, 0.0]),
        summary(shares=[0.5, 0.5], sample_seconds=[]),
        summary(shares=[1.0], sample_seconds=[0.02], ranks=summary().ranks[:1]),
        summary(shares=[0.75, 0.25], sample_seconds=[0.01, 0.03], updates_of_server="9 updates"),
        summary(shares=[0.5, 0.5], sample_seconds=[0.02, 0.05], updates_of_server="9 updates"),
    ):
        text = summary_text(alike)
        assert "equal shares" not in text
        assert "waited for rank" not in text
        assert "--balance" not in summary_text(alike)


def test_the_summary_says_how_much_was_sent_for_merges() -> None:
    assert "  3 MiB of messages for merges on rank 0" in summary_text(summary(merge_bytes=3 << 20))


def test_the_summary_says_the_cost_of_samples_and_who_computed_it() -> None:
    text = summary_text(summary(cost=1_234_567.0, cost_shares=[0.75, 0.25], seconds=10.0))
    assert "\n  cost 1,234,567: 123,457/s, shares of it 75.0% + 25.0%" in text
    assert "cost" not in summary_text(summary())


def test_the_summary_of_a_resumed_run_counts_one_period() -> None:
    text = summary_text(summary(samples=24000, samples_in_seconds=12000))
    assert "12,000 of 24,000 samples in 6.5 s" in text
    assert "  28,740 samples in 6.5 s" not in text
    assert ", 28,740 samples in 6.5 s" in summary_text(summary(samples_in_seconds=28740))


def test_an_emulation_is_noted_at_the_start_and_in_the_summary() -> None:
    out = io.StringIO()
    shown = following(40, out)
    shown.event(Note(0, "EMULATION of unequal devices"))
    shown.end(None)
    assert out.getvalue() == "EMULATION of unequal devices\n"
    assert "\n  EMULATION of" in summary_text(summary(emulation="EMULATION of unequal devices"))
    assert "EMULATION" not in summary_text(summary())


def test_memory_is_shown_by_what_it_is_for(clock: Clock) -> None:
    out = io.StringIO()
    shown = following(40, out)
    clock.now += 6
    parts = {"parameters": (1 << 20, 1 << 20), "activations": (0, 3 << 20)}
    record = dataclasses.replace(step(0), memory_peak=(2 << 20, 6 << 20), memory_parts=parts)
    shown.step(record)
    shown.end(None)
    assert "memory" not in out.getvalue(), "the records have it, and the summary"
    most = {"peak": 6 << 20, "parameters": 1 << 20, "gradients": 0, "activations": 3 << 20, "other": 2 << 20}
    text = summary_text(summary(memory=[{"peak": 1 << 20, "other": 1 << 20}, most]))
    assert "  memory at most 6 MiB on rank 1: parameters 1 MiB, activations 3 MiB, other 2 MiB\n" in text


def test_the_header_says_what_the_run_is_at_once() -> None:
    out = io.StringIO()
    run = RunStart(
        "digits", {}, 3, 64, 460, 0, (), ("cpu", "cpu", "cuda:0 H100"), 12345, "ddp", "ring", "runs/a"
    )
    shown = Terminal(out)
    shown.start(run)
    assert out.getvalue().splitlines() == [
        "digits: 12,345 parameters, ddp",
        "  3 ranks: 2 × cpu, cuda:0 H100",
        "  batches of 64, 460 steps",
        "  gradients summed by ring",
        "  records, weights and checkpoints in runs/a",
    ]
    shown.end(None)
    again = terminal.header_lines(dataclasses.replace(run, steps_done=90, run_dir=None, world_size=1))
    assert again[2:] == ["  batches of 64, goes on after step 90 of 460", "  nothing is kept on disk"]


@pytest.mark.parametrize(
    ("shares", "learns", "words"),
    [
        ((32, 21, 11), False, "  shares 32 + 21 + 11"),
        ((32, 32), True, "  shares 32 + 32, then by speed"),
        ((4,) * 16, False, "  shares 16 × 4"),
        ((*(4,) * 12, 3, 5, 6, 2), True, "  shares from 2 to 6, then by speed"),
    ],
)
def test_the_header_says_how_a_batch_is_divided(shares: tuple[int, ...], learns: bool, words: str) -> None:
    run = RunStart("digits", {}, 3, 64, 460, 0, devices=("cpu",), shares=shares, learns=learns)
    assert terminal.header_lines(run)[3] == words
    assert terminal.header_lines(dataclasses.replace(run, by_cost=True))[3].startswith(
        f"{words.removesuffix(', then by speed')}, by cost"
    )
    assert len(terminal.header_lines(dataclasses.replace(run, shares=()))) == 4


@pytest.mark.parametrize("name", ["CI", "TERM"])
def test_a_terminal_that_keeps_its_lines_gets_whole_ones(
    name: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, {"CI": "true", "TERM": "dumb"}[name])
    screen = Screen()
    shown = following(40, screen)
    clock.now += 6
    shown.step(step(9))
    shown.end(None)
    assert "\r" not in screen.getvalue()
    assert screen.getvalue().startswith("step 10 of 40")


def seen_at(columns: int, total_steps: int | None = 40, later: int | None = None, words: str = "") -> str:
    """What a pseudo terminal of so many columns is sent, and of ``later`` before it is told ``words``."""
    ours, theirs = pty.openpty()

    def resize(columns: int) -> None:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    resize(columns)
    with open(theirs, "w", encoding="utf-8") as stream:
        shown = Terminal(stream)
        shown.start(RunStart("task", {}, 2, 8, total_steps=total_steps, steps_done=0))
        if later is not None:
            resize(later)
        if words:
            shown.event(Note(3, words))
        shown._last_line -= 1  # so long ago that the line about the ranks is due
        shown.step(compared(9))
        shown._bar.refresh()
        shown.end(None)
    text = b""
    with suppress(OSError):  # by which Linux says that there is no more
        while more := os.read(ours, 1 << 16):
            text += more
    os.close(ours)
    return text.decode()


def drawn(text: str) -> list[str]:
    """The lines as they were written, each over the one before, without colours and moves."""
    return [part for part in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)) if part.strip()]


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_the_live_line_fits_any_width_and_says_the_time_left_first(columns: int) -> None:
    for total_steps in (40, None):
        lines = drawn(seen_at(columns, total_steps))
        assert max(map(len, lines)) <= columns
        assert any("10" in line and "steps" in line for line in lines)
    assert re.match(r"[0-9:?]+ left ", next(line for line in drawn(seen_at(columns)) if "10/40" in line))


def test_a_window_may_change_its_width_and_words_stay_whole() -> None:
    words = "step 19: shares 22/21/21 become 36/15/13 from step 22: ranks differ in speed, by runs/first/records.jsonl"
    assert words in seen_at(40, later=120, words=words)
    lines = drawn(seen_at(120, later=40, words=words))
    assert max(map(len, lines)) <= 40
    first = next(place for place, line in enumerate(lines) if line.startswith("step 19"))
    assert lines[first : first + 3] == [
        "step 19: shares 22/21/21 become 36/15/13",
        "  from step 22: ranks differ in speed,",
        "  by runs/first/records.jsonl",
    ]


def test_lines_of_files_and_of_terminals_that_do_not_say_their_width_are_whole() -> None:
    line = "words " * 30
    for stream in (io.StringIO(), Screen(), sys.stdout, None):
        assert fitted(line, stream) == line
    ours, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as stream:
        assert fitted(line, stream) == line
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 24, 0, 0))
        assert fitted("  one\n  two words and a/very/long/path/to/something", stream) == (
            "  one\n  two words and\n    a/very/long/path/to/something"
        )
    os.close(ours)


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    green = "\x1b[32m"
    assert green in seen_at(80)
    monkeypatch.setenv("NO_COLOR", "1")
    assert green not in seen_at(80)
