"""Ranks that are killed at random moments, again and again: the training is that of a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from evener.core.records import RunSummary
from evener.training.fit import fit
from tests.distributed.processes import end, start
from tests.faults import chaos

KILLS, SEED = 12, 7


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def journal(directory: Path) -> list[tuple[int, int, int, list[int]]]:
    lines = [line for path in directory.glob("journal-*") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("]]")]


def kill_at_random(launcher: subprocess.Popen[str], directory: Path, drawn: random.Random) -> int:
    """Kills one rank after another, each in a start of its own that has trained for a while; returns how many."""
    kills, seen = 0, -1
    while kills < KILLS and launcher.poll() is None:
        attempts = max((attempt for attempt, *_ in journal(directory)), default=-1)
        if attempts == seen:
            time.sleep(0.05)
            continue
        seen = attempts
        time.sleep(drawn.uniform(0.0, 0.6))
        ranks = children(launcher.pid)
        if ranks:
            with suppress(ProcessLookupError):
                os.kill(drawn.choice(ranks), signal.SIGKILL)
                kills += 1
    return kills


def undisturbed() -> RunSummary:
    """On a rank that is up already: how the run ends that nobody disturbs."""
    return fit(chaos.numbered, device="cpu", epochs=chaos.EPOCHS, show=False).summary


@pytest.mark.nightly
def test_a_dozen_deaths_leave_no_trace_in_the_weights(tmp_path: Path, ranks: Any) -> None:
    whole = ranks(chaos.PROCESSES).run(undisturbed)[0]
    program = start("-m", "tests.faults.chaos", tmp_path, str(KILLS + 5))
    kills = kill_at_random(program, tmp_path, random.Random(SEED))
    ended = end(program, timeout=600)
    assert ended.status == 0, ended.err
    assert kills == KILLS, "the run must last for all of them"
    assert ended.err.count("was killed by SIGKILL") == KILLS
    assert (tmp_path / "digest").read_text() == whole.weights_digest
    lines = map(json.loads, (tmp_path / "run" / "records.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(whole.steps))
    assert_every_epoch_is_complete(journal(tmp_path), whole.steps, whole.samples // chaos.EPOCHS)


def assert_every_epoch_is_complete(
    lines: list[tuple[int, int, int, list[int]]], steps: int, samples: int
) -> None:
    """Of each step, what the last start that took it had on all ranks."""
    last: dict[int, int] = defaultdict(int)
    for attempt, _, step, _ in lines:
        last[step] = max(last[step], attempt)
    assert sorted(last) == list(range(steps))
    trained = defaultdict(list)
    for attempt, _, step, numbers in lines:
        if attempt == last[step]:
            trained[step * chaos.EPOCHS // steps] += numbers
    for epoch in range(chaos.EPOCHS):
        assert sorted(trained[epoch]) == list(range(samples)), f"epoch {epoch}"
