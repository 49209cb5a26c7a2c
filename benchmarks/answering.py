"""How soon the command answers: help, version, and the first line of a training, in turns.

python -m benchmarks.answering --turns 15 [--other DIRECTORY]

DIRECTORY is the ``src`` of another version of Evener, measured in the same turns. A time is that of a whole process,
but for the training: from its start to the first line that it prints, after which it is ended.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.results import Cell, Table, cell, record, spread

COMMAND = [sys.executable, "-c", "import sys; from evener.cli.main import main; sys.exit(main())"]
WHOLE = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import evener": [sys.executable, "-c", "import evener"],
    "evener --help": [*COMMAND, "--help"],
    "evener train --help": [*COMMAND, "train", "--help"],
}
TRAIN = [*COMMAND, "train", "digits", "--processes", "2", "--device", "cpu", "--steps", "1"]


def whole(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Seconds until the process has ended, and seconds of a core that it took."""
    began = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, process.returncode, used = os.wait4(process.pid, 0)
    assert process.returncode == 0, command
    return time.perf_counter() - began, used.ru_utime + used.ru_stime


def first_line(environment: dict[str, str]) -> tuple[float, float]:
    """Seconds until a training has said something."""
    with tempfile.TemporaryDirectory() as home:
        began = time.perf_counter()
        process = subprocess.Popen(
            TRAIN, env=environment, cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        assert process.stderr is not None
        process.stderr.readline()
        seconds = time.perf_counter() - began
        process.terminate()
        process.communicate()
    return seconds, float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--other", type=Path)
    arguments = parser.parse_args()
    own = str(Path(__file__).parents[1] / "src")
    rest = os.environ.get("PYTHONPATH", "")
    places = {"this": own} | ({"other": str(arguments.other)} if arguments.other else {})
    environments = {
        name: {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (place, rest)))}
        for name, place in places.items()
    }
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(arguments.turns):
        for name, environment in environments.items():
            for what, command in WHOLE.items():
                taken.setdefault((what, name), []).append(whole(command, environment))
            taken.setdefault(("evener train digits: first line", name), []).append(first_line(environment))
    columns = [f"{name}, {of}" for name in environments for of in ("median", "least", "of a core")]
    names = dict.fromkeys(what for what, _ in taken)
    rows = [[what, *(each for name in environments for each in _cells(taken[what, name]))] for what in names]
    record("answering", "whole processes", Table(["command", *columns], rows))


def _cells(seconds: list[tuple[float, float]]) -> list[Cell | None]:
    """Median and least time, which others on the machine disturb the least, and the median of a core's."""
    times, of_core = ([each[part] * 1e3 for each in seconds] for part in (0, 1))
    used = statistics.median(of_core)
    median = cell(statistics.median(times), "ms", spread=spread(times))
    return [median, cell(min(times), "ms"), cell(used, "ms") if used == used else None]


if __name__ == "__main__":
    main()
