"""The request of ``evener resize``: a file in the run directory with the number of ranks that the run is to have."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from evener.core.config.process_range import ProcessRange
from evener.core.text import from_here
from evener.errors import ConfigurationError, RankTimeoutError
from evener.files import read_json, read_text, replace_text, write_json
from evener.training.reporting.run_dir import has_ended, is_held

RESIZE, _ANSWER = ".evener-resize", ".evener-resized"
_LOOK_SECONDS = 0.1
_LONGEST = 20
"""Most bytes of a request, which is a number of ranks."""
_START_SECONDS = 20.0
"""Longest time for which nobody holds the directory while ranks start again."""


def resize(run_dir: Path, ranks: int, timeout_seconds: float) -> str:
    """Asks the run in the directory to go on with so many ranks, and waits for its answer. Returns a message.

    Raises:
        ConfigurationError: If no run goes on there, or it refuses.
        RankTimeoutError: If the run takes no step in time. The request is withdrawn.
    """
    _check(run_dir, ranks)
    path, deadline = run_dir / RESIZE, time.monotonic() + timeout_seconds
    (run_dir / _ANSWER).unlink(missing_ok=True)
    replace_text(path, f"{ranks}\n")
    try:
        while path.exists():
            if has_ended(run_dir):
                raise RankTimeoutError(f"the run in {from_here(run_dir)} has ended, and was not asked")
            if time.monotonic() > deadline:
                raise RankTimeoutError(
                    f"the run in {from_here(run_dir)} took no step within {timeout_seconds:g} s, and was not asked"
                )
            time.sleep(_LOOK_SECONDS)
    finally:
        path.unlink(missing_ok=True)
    answer = read_json(run_dir / _ANSWER)
    (run_dir / _ANSWER).unlink(missing_ok=True)
    if not answer["accepted"]:
        raise ConfigurationError(f"the run in {from_here(run_dir)} stays as it is: {answer['words']}")
    return f"{from_here(run_dir)}: {answer['words']}, after step {answer['step']}"


def _check(run_dir: Path, ranks: int) -> None:
    try:
        processes = read_json(run_dir / "config.json").get("processes")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"{from_here(run_dir)} is not the directory of a run: {error}") from None
    if not _goes_on(run_dir):
        raise ConfigurationError(f"no run goes on in {from_here(run_dir)}: give --processes with --resume")
    if not isinstance(processes, str):
        raise ConfigurationError(
            f"the run in {from_here(run_dir)} has processes {processes}, and so many it keeps: start it with "
            "--processes MIN:MAX to change their number"
        )
    given = ProcessRange.parse(processes)
    if not given.least <= ranks <= given.most:
        raise ConfigurationError(
            f"the run in {from_here(run_dir)} may have {processes} ranks, and not {ranks}"
        )


def _goes_on(run_dir: Path) -> bool:
    """Returns True if a run writes to the directory, now or, while its ranks start again, soon."""
    deadline = time.monotonic() + _START_SECONDS
    while not (held := is_held(run_dir)) and not has_ended(run_dir) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return held


def resize_asked(run_dir: Path) -> int:
    """Returns the number of ranks that is asked for; 0 for none."""
    try:
        text = read_text(run_dir / RESIZE, _LONGEST).strip()
    except (OSError, ValueError):
        return 0
    return int(text) if text.isdecimal() else 0


def answer_resize(run_dir: Path, accepted: bool, words: str, steps: int) -> None:
    """Answers the request and removes it."""
    with suppress(OSError):
        write_json(run_dir / _ANSWER, {"accepted": accepted, "words": words, "step": steps})
        (run_dir / RESIZE).unlink(missing_ok=True)
