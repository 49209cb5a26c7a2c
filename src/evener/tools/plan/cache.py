"""Plans that were made earlier, in the user's cache directory: what ``evener train`` takes by itself.

``plans/KEY/BATCH.json`` in the cache directory is a calibration. The key is a hash of what is known without building
anything: the task's name and options, the machine, versions, and the settings that count. What the task builds (model,
optimizer, samples) is compared by a fingerprint in the file. A file is only data: it is read as JSON, its names must be
those of Evener's own parts, and it must belong to this user. Writers replace it as a whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path

from evener.collectives.registry import ALL_REDUCES
from evener.core.config.process_range import one_number
from evener.core.config.run_config import AUTO, RunConfig
from evener.core.config.strategy_names import STRATEGIES
from evener.core.os_errors import os_error_message
from evener.core.task.task import resolve
from evener.distributed.environment import default_processes, detect, kind_taken, usable_cores
from evener.errors import DataError
from evener.hardware import accelerators
from evener.tools.plan.calibration import Calibration, counted_settings, this_machine
from evener.tools.plan.choice import settings_by_plan
from evener.tools.plan.learning import is_busy
from evener.tools.plan.result import Way
from evener.tools.plan.structure import structure_of
from evener.training.builtin_tasks import BUILT_IN
from evener.version import evener_version


def cached_way(
    task: str, config: RunConfig, options: Mapping[str, Any] | None = None
) -> tuple[RunConfig, Way, Path] | None:
    """Returns the settings of a run in the fastest way of a plan that was kept for it, that way, and the file.

    None if there is no such plan, or if the settings leave nothing to choose. If they have a number of processes, ways
    on as many count, else all. Nothing is built unless there is a plan.

    Raises:
        DataError: If there is a file, and it cannot be used.
        ConfigurationError: If the plan has no way that counts.
    """
    if not _plans().is_dir() or not _is_open(config):
        return None
    home = _directory(task, config, options)
    if not home.is_dir():
        return None
    built = resolve(task, BUILT_IN, options)()
    batch_size = config.batch_size or built.batch_size
    path = home / f"{batch_size}.json"
    if not os.path.lexists(path):
        return None
    calibration = _read(path)
    wanted = one_number(config.processes)
    tried = max(each.ranks for each in calibration.costs)
    if calibration.structure != structure_of(built) or tried < (wanted or default_processes(config.device)):
        return None
    calibration.check(built.name, config)
    return *settings_by_plan(path, calibration, config, batch_size, wanted), path


def keep(
    calibration: Calibration, task: str, config: RunConfig, options: Mapping[str, Any] | None = None
) -> Path | str:
    """Writes a calibration where :func:`cached_way` finds it. Returns the file, or why it was not kept."""
    if not _is_open(config):
        return "the settings choose how to train"
    if not calibration.costs:
        return "no way was tried"
    if is_busy(calibration.load):
        return "the machine was busy"
    built, made = resolve(task, BUILT_IN, options)(), datetime.now().isoformat(" ", "minutes")
    if calibration.structure != structure_of(built):
        return "the trials were of another model or other samples"
    path = _directory(task, config, options) / f"{calibration.batch_size}.json"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace(calibration, made=made).save(path)
    except OSError as error:
        return os_error_message(error)
    return path


def _is_open(config: RunConfig) -> bool:
    """Returns True if the settings leave the strategy to a plan, on this machine alone."""
    chosen = config.strategy != AUTO or config.mesh or config.strategy_option or config.allreduce
    limited = config.memory_limit or config.memory_limit_at
    elsewhere = config.device == "mixed" or ":" in str(config.processes) or detect().world_size > 1
    return not (chosen or limited or elsewhere)


def _directory(task: str, config: RunConfig, options: Mapping[str, Any] | None) -> Path:
    kind = kind_taken(config.device)
    cards = [accelerators.name_of(torch.device(kind, n)) for n in range(accelerators.count(kind))]
    what = [
        [task, "" if task in BUILT_IN else str(Path.cwd()), sorted((options or {}).items())],
        [evener_version(), this_machine(), usable_cores(), cards, torch.get_num_threads()],
        counted_settings(config),
    ]
    name = hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()[:24]
    return _plans() / name


def _plans() -> Path:
    return user_cache_path("evener") / "plans"


def _read(path: Path) -> Calibration:
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise DataError(f"{path} is no file of yours")
    try:
        calibration = Calibration.read(path)
    except DataError as error:
        why = error.__cause__
        raise DataError(f"{path} is no plan that can be used ({why}): delete it, or plan again") from error
    if not calibration.costs:
        raise DataError(f"{path} has no way to train: delete it, or plan again")
    for each in calibration.costs:
        if each.strategy not in STRATEGIES or each.allreduce not in (None, *ALL_REDUCES):
            raise DataError(f"{path} names parts that Evener does not have: {each.words}")
    return calibration
