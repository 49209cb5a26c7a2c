"""The steps of one rank as a file: the rank writes them as they happen, and the launcher reads them meanwhile.

A file is a sequence of rows of numbers, which cost a rank little. The profiler passes a row on when its step ends, or
within 20 ms if steps are short, and it is written at once. So a rank that is killed leaves all of its steps but those
of the last 20 ms. Facts about the rank are in a file beside it.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from evener.distributed.ddp_profiler.step_times import ObservedStep, StepTimes
from evener.distributed.environment import detect
from evener.distributed.restart_count import generation
from evener.files import read_json, write_json
from evener.hardware.accelerators import description_of
from evener.hardware.cpu_time import CpuTime, cpu_time
from evener.hardware.memory.step_usage import Lap
from evener.hardware.memory.usage import PROCESS_SECONDS, gauge_of

_NUMBERS = len(fields(StepTimes))
ROW = struct.Struct(f"<{_NUMBERS + 5}d")
"""The fields of `StepTimes`, loss, learning rate, end, and the rank's memory: in use and peak, in bytes."""


class StepRow(NamedTuple):
    """A step with the memory of the rank in bytes: in use, and the maximum since the last row."""

    step: ObservedStep
    held: int
    peak: int


class RankFileWriter:
    """Writes the steps of this rank.

    Args:
        directory: The directory of the file, which is named by the start and the rank.
    """

    def __init__(self, directory: Path) -> None:
        environment = detect()
        self._name = f"{generation()}-{environment.rank}"
        self._directory = directory
        self._facts: dict[str, Any] = {
            "world_size": environment.world_size,
            "local_world_size": environment.local_world_size,
            "host": environment.host,
            "threads": torch.get_num_threads(),
            "began": psutil.Process().create_time(),
        }
        self._file = (directory / f"steps-{self._name}").open("ab", buffering=0)
        self._device: torch.device | None = None
        self._memory, self._read = Lap(0, 0), 0.0
        self._cpu: CpuTime | None = None

    def write(self, step: ObservedStep, device: torch.device) -> None:
        """Writes a step that ran on ``device``."""
        if device != self._device:
            self._device, self._gauge = device, gauge_of(device, resets=False)
            self._cpu = self._cpu or cpu_time()
            write_json(
                self._directory / f"facts-{self._name}", self._facts | {"device": description_of(device)}
            )
        highest, now = self._memory.peak, time.monotonic()
        if now - self._read >= PROCESS_SECONDS:
            self._memory, self._read = self._gauge.lap(), now
        # The counter of the peak is the script's own, and not reset: it tells a peak only where it has grown.
        held, peak = self._memory.held, self._memory.peak
        peak = peak if peak > highest else held
        self._file.write(ROW.pack(*step.numbers, step.loss, step.lr, step.ended, held, peak))

    def cpu_seconds(self) -> tuple[float, float]:
        """Returns the time since the first step in which threads had a core, and that in which they lacked one."""
        before, now = self._cpu or cpu_time(), cpu_time()
        return max(0.0, now.busy - before.busy), max(0.0, now.queued - before.queued)

    def close(self) -> None:
        self._file.close()


class RankFileReader:
    """Reads what a `RankFileWriter` has written so far.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        _, start, rank = path.name.split("-")
        self.start, self.rank = int(start), int(rank)
        self.facts: dict[str, Any] = read_json(path.with_name(f"facts-{start}-{rank}"))
        """World sizes, host, threads, device, and the start of the process as Unix time."""
        self.rows: deque[StepRow] = deque()
        """Steps that were read. Remove those that are used."""
        self._file, self._begun = path.open("rb"), b""

    def read(self) -> None:
        """Reads the rows that have come since the last call."""
        found = self._begun + self._file.read()
        whole = len(found) - len(found) % ROW.size
        self._begun = found[whole:]
        for row in ROW.iter_unpack(found[:whole]):
            numbers, (loss, lr, ended, held, peak) = row[:_NUMBERS], row[_NUMBERS:]
            self.rows.append(StepRow(ObservedStep(numbers, loss, lr, ended), int(held), int(peak)))

    def close(self) -> None:
        self._file.close()


def step_files(directory: Path) -> list[Path]:
    """Returns the files of all ranks of this launcher that have taken a step, in all starts."""
    return sorted(path for path in directory.glob("steps-*-*") if path.stat().st_size)
