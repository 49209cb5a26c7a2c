"""Falls back to the last checkpoint if numbers are not finite and ``non_finite=restore`` is set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from evener.core.config.run_config import RunConfig
from evener.core.records import Note
from evener.core.text import counted
from evener.errors import ConfigurationError, DataError, DivergenceError
from evener.training.engine import Engine
from evener.training.lifecycle.save_schedule import bearing

MOST_RETURNS = 3
"""Limit for one run: a cause that makes numbers non-finite each time does not go away by itself."""


def falling_back(train: Callable[[], None], engine: Engine, config: RunConfig) -> None:
    """Calls ``train`` until it ends without non-finite numbers, at most ``MOST_RETURNS`` + 1 times.

    Args:
        train: Takes all remaining steps; raises DivergenceError on all ranks alike.
        config: The settings of the run, whose checkpoints are used.
    """
    if config.run_dir is None:
        raise ConfigurationError(
            "non_finite=restore falls back to a checkpoint, and this run leaves none: give it a run_dir"
        )
    for _ in range(MOST_RETURNS):
        try:
            return train()
        except DivergenceError as error:
            with bearing(engine, config.on_full_disk):  # a save that is still being written, or has failed
                engine.finish_saving()
            _fall_back(engine, config.run_dir, error)
    return train()


def _fall_back(engine: Engine, run_dir: Path, error: DivergenceError) -> None:
    went_wrong = engine.steps_done
    try:
        engine.load(run_dir)
    except (ConfigurationError, DataError) as lacking:
        raise DivergenceError(f"{error}. There is no checkpoint to fall back to: {lacking}") from error
    reason = str(error).partition(";")[0]
    message = f"{reason}: back to the checkpoint after {counted(engine.steps_done, 'step')}"
    engine.observers.event(Note(went_wrong, message))
