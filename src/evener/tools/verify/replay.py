"""Repeats an asynchronous run on one device, in the order in which its records say that gradients merged.

The order of an asynchronous run is another one each time, so no run on one device can be its reference but the one that
repeats its order. The weights that this leads to must be those of the run's last checkpoint: to the bit where the
kernels are the same, and else within what rounding alone makes, which is measured by a second repetition with the last
bits of the first weights disturbed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evener.checkpoint.remote.fetch import fetched
from evener.checkpoint.weights_file import read_weights
from evener.core.complex_numbers import as_real
from evener.core.config.run_config import RunConfig
from evener.core.elsewhere import shown
from evener.core.records import RECORDS
from evener.core.task.task import Task, TaskLike, resolve
from evener.distributed.environment import Environment
from evener.distributed.launch.launch import is_launched
from evener.distributed.session import Session, threads_per_rank
from evener.errors import ConfigurationError, DataError
from evener.files import parsed, read_json, read_text
from evener.nn.fqn import clean_name
from evener.strategies.asynchronous.ledger import Contribution, Merges, ages
from evener.strategies.asynchronous.strategies import Asynchronous, RecordedAsynchronous
from evener.tools.verify.comparison import LIMIT
from evener.tools.verify.perturbation import disturb
from evener.tools.verify.rounding_floor import distance, norm
from evener.training.builtin_tasks import BUILT_IN
from evener.training.engine import Engine
from evener.training.factory import strategy_of
from evener.training.reporting.task_file import origin

REPEATED = (
    *(
        "batch_size",
        "epochs",
        "steps",
        "micro_batch",
        "seed",
        "clip_norm",
        "strategy",
        "strategy_option",
        "device",
    ),
    *(
        "dtype",
        "precision",
        "precision_of",
        *("exact", "grain", "block"),
        "batch_norm",
        "fused_optimizer",
        "recompute",
        "processes",
        "weights",
    ),
)
"""Settings of a run that decide what is computed."""


@dataclass(frozen=True)
class ReplayedRun:
    """The comparison of a run with its repetition on one device."""

    run: str
    task: str
    sections: int
    samples: int
    merges: int
    oldest: int
    """The largest age of gradients in a merge, in versions."""
    is_identical: bool
    """True if all weights and buffers have the same bits."""
    max_relative_error: float
    """The largest distance of a tensor from the run's, relative to its norm."""
    worst: str
    """The name of that tensor."""
    floor: float
    """The largest such distance that rounding alone makes; 0 if it was not measured, because all bits are the same."""
    passed: bool


def replay(
    run: Path, task: TaskLike | None = None, *, options: Mapping[str, Any] | None = None
) -> ReplayedRun:
    """Repeats an asynchronous run on one device, and compares the weights with those of its last checkpoint.

    Args:
        run: The run directory.
        task: The run's task. None takes the one that the directory names, if it comes with Evener or is installed.
        options: Arguments of the task's function. None takes those that the directory names.

    Raises:
        ConfigurationError: If the run was not asynchronous, or its records do not begin with its first step.
        DataError: If the records do not hold each sample once.
    """
    if is_launched():
        raise ConfigurationError("a run is repeated in one process: call this without torchrun or srun")
    config = _settings_of(fetched(run, records=True))
    chosen, arguments = origin(run).chosen(run, task, trust=False)
    strategy = strategy_of(config, 2)
    assert isinstance(strategy, Asynchronous)
    sections, ranks = _sections_of(run / RECORDS)
    recorded = RecordedAsynchronous(
        **vars(strategy) | {"servers": 1}, recorded=tuple(merges for merges, _ in sections), ranks=ranks
    )
    config = config.replace(
        strategy=recorded,
        strategy_option=(),
        processes=1,
        epochs=None,
        steps=strategy.sync_every * len(sections),  # at least: epochs end sections
        balance="equal",
        check_replicas=0,
    )
    built = resolve(chosen, BUILT_IN, arguments if options is None else options)
    expected = read_weights(run)
    found = _repeated(built, config, ranks, len(sections))
    _check_names(run, found, expected)
    error, worst = _farthest(found, expected)
    is_identical = all(torch.equal(value, expected[name]) for name, value in found.items())
    floor = 0.0
    if not is_identical:
        eps = max(torch.finfo(value.dtype).eps for value in found.values() if value.is_floating_point())
        others = [_repeated(built, config, ranks, len(sections), seed) for seed in (1, 2)]
        floor = max(eps, *(_farthest(other, found)[0] for other in others))
    merges = [merges for merges, _ in sections]
    return ReplayedRun(
        run=shown(run),
        task=built().name,
        sections=len(sections),
        samples=sum(samples for _, samples in sections),
        merges=sum(map(len, merges)),
        oldest=max((age for each in merges for age in ages(each)), default=0),
        is_identical=is_identical,
        max_relative_error=error,
        worst=worst,
        floor=floor,
        passed=is_identical or error <= LIMIT * floor,
    )


def _settings_of(run: Path) -> RunConfig:
    """Returns the settings that decide what the run has computed."""
    path = run / "config.json"
    try:
        settings = dict(read_json(path))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{run} is no run directory: its config.json cannot be read; name the directory that a run has left"
        ) from error
    if settings.get("strategy") != "asynchronous":
        raise ConfigurationError(
            f"{run} was trained with strategy {settings.get('strategy')!r}, and --replay repeats the order of an "
            "asynchronous run: compare other strategies with one device by evener verify TASK --strategy ..."
        )
    found: dict[str, Any] = {}
    for name in REPEATED:
        value = settings.get(name)
        found |= {} if value is None else {name: tuple(value) if isinstance(value, list) else value}
    try:
        return RunConfig(**found)
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path} does not hold the settings of a run: {error}") from error


def _sections_of(path: Path) -> tuple[list[tuple[Merges, int]], int]:
    """Returns the merges and the number of samples of each section, and the number of ranks.

    Raises:
        ConfigurationError: If the first sections are missing.
        DataError: If the records cannot be read.
    """
    found: dict[int, tuple[Merges, int]] = {}
    ranks = 0
    try:
        for record in map(parsed, read_text(path, sys.maxsize).splitlines()):
            if record["kind"] != "step":
                continue
            merges = tuple(tuple(Contribution(*map(int, each)) for each in held) for held in record["merges"])
            found[int(record["step"])] = merges, int(record["samples"])
            ranks = len(record["shares"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} does not hold the records of an asynchronous run: {error}") from error
    if sorted(found) != list(range(len(found))) or not found:
        raise ConfigurationError(
            f"{path} does not hold all steps from the first on, as of a run that was resumed in another directory: "
            "only a whole run can be repeated"
        )
    return [found[step] for step in range(len(found))], ranks


def _repeated(
    built: Callable[[], Task], config: RunConfig, ranks: int, sections: int, seed: int | None = None
) -> dict[str, Tensor]:
    """Returns the weights and buffers after so many sections, repeated on this process.

    Args:
        seed: A seed to disturb the first weights. None leaves them.
    """
    threads = torch.get_num_threads()
    with (
        Session(device=config.device, environment=Environment()) as session,
        Engine(built(), config, session=session) as engine,
    ):
        torch.set_num_threads(threads_per_rank(ranks))  # as the ranks had, for bits depend on it
        try:
            if seed is not None:
                disturb(engine.model, torch.Generator().manual_seed(seed))
            for _, batch in zip(range(sections), engine.batches(), strict=False):
                engine.step(batch)
            return {
                clean_name(name): value.detach().cpu().clone()
                for name, value in engine.learner.tensors().items()
            }
        finally:
            torch.set_num_threads(threads)


def _check_names(run: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises:
    ConfigurationError: If the checkpoint is that of another model.
    """
    names = set(found) ^ set(expected)
    other = [name for name in set(found) & set(expected) if found[name].shape != expected[name].shape]
    if names or other:
        raise ConfigurationError(
            f"the checkpoint of {run} is that of another model: {sorted(names | set(other))[0]} differs"
        )


def _farthest(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """Returns the largest relative distance of a tensor, of which NaN is one, and its name."""

    def relative(name: str) -> float:
        ours, theirs = as_real(found[name].detach()), as_real(expected[name])
        return distance(ours, theirs) / (norm(theirs) or 1.0)

    return max(((relative(name), name) for name in found), key=lambda each: (math.isnan(each[0]), *each))
