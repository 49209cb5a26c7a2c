"""Estimates all ranks, one after the other in this process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch

from evener.core.config.kwargs import Settings
from evener.core.config.process_range import one_number
from evener.core.config.run_config import RunConfig
from evener.core.config.sizes import size_words
from evener.core.task.task import Task, TaskLike, resolve
from evener.distributed.environment import default_processes, kind_taken
from evener.errors import EvenerError
from evener.hardware import accelerators
from evener.strategies.base import Strategy
from evener.strategies.composed import Composed
from evener.strategies.pipeline.pipeline import Pipeline
from evener.tools.estimate.fake_p2p import NotYetSentError, PostOffice
from evener.tools.estimate.rank import FakeRank, RankPeak, estimate_rank
from evener.tools.estimate.result import MemoryEstimate
from evener.tools.estimate.unknown import UnknownMemoryError, unknown_by_error
from evener.training.batches.device_mix import difference
from evener.training.builtin_tasks import BUILT_IN
from evener.training.factory import balance_of, strategy_of, suggested_processes

_GRADIENTS_OF_GRAPHS = 3
"""Those that a recorded pass leaves, and a copy after each of the two replays of a comparison."""


def estimate_memory(
    task: TaskLike,
    config: RunConfig | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    **settings: Unpack[Settings],
) -> MemoryEstimate:
    """Estimates the memory of a run on each rank, by category, without allocating it.

    The engine takes two steps as each rank, with the strategy's own code, on tensors that have shapes and no values.
    Some samples of the dataset are read. ``processes`` gives the number of ranks; this machine need not be able to run
    them.

    Args:
        task: As :func:`evener.fit` takes it.
        config: The settings. ``settings`` override single ones, as in ``estimate_memory("digits", processes=2)``.
        options: Keyword arguments of the task's function.

    Raises:
        ConfigurationError: If the settings cannot work together.
        UnknownMemoryError: If memory cannot be known before the run. Says why.
    """
    config = (config or RunConfig()).replace(**settings)
    kind = kind_taken(config.device)
    ranks = one_number(config.processes) or suggested_processes(config) or default_processes(kind)
    strategy = strategy_of(config, ranks)
    refuse_unknowable(config, strategy)
    built = resolve(task, BUILT_IN, options)()
    batch_size = config.batch_size or built.batch_size
    asked = settings_of_two_steps(config)
    found = estimate_ranks(built, asked, range(ranks), ranks, kind)
    return MemoryEstimate(
        task=built.name,
        strategy=str(strategy),
        device=kind,
        batch_size=batch_size,
        shares=found[0].shares,
        ranks=tuple(each.memory for each in found),
        notes=tuple(_notes(config, kind, found)),
    )


def settings_of_two_steps(config: RunConfig) -> RunConfig:
    """Returns the settings without those that do not affect the memory of a step and would need real values."""
    return config.replace(
        audit=0.0,
        epochs=None,
        workers=0,
        balance=balance_of(config, 1, unlike=False),
        weights=None,
        resume=None,
        check_replicas=0,
        on_replica_mismatch=None,
        check_data=None,
        throttle=None,
        throttle_at=(),
        memory_limit=None,
        memory_limit_at=(),
        micro_batch=config.samples_at_once,
        compile=None,
        compile_mode=None,
        compile_backend="inductor",
        compile_check="replace",
    )


def refuse_unknowable(config: RunConfig, strategy: Strategy) -> None:
    if config.compress == "powersgd":
        raise UnknownMemoryError(
            "what compress 'powersgd' holds depends on sums that are not there before the run: estimate without it; it "
            "keeps as much again as the gradients"
        )
    parts = strategy.parts if isinstance(strategy, Composed) else (strategy,)
    if any(part.one_process for part in parts):
        raise UnknownMemoryError(
            f"strategy {strategy.label!r} uses several devices in one process, of which no estimate is made: estimate "
            "the samples of one device with strategy single"
        )
    if any(part.batch_parts(1) is not None for part in parts):
        raise UnknownMemoryError(
            f"with strategy {strategy.label!r} ranks do not meet in every step, of which no estimate is made: estimate "
            "one process with a batch of batch_size / ranks samples, and add the weights three times, which are the "
            "merged ones, the momentum of an outer optimizer or the server's sum, and what is on its way"
        )
    if any(isinstance(part, Pipeline) and part.cut is None and part.balance == "time" for part in parts):
        raise UnknownMemoryError(
            "a pipeline is cut by the time that its layers take, which is measured in the run and not known before: "
            "say where it is cut, strategy_option cut=MODULE,..., or cut it by numbers of layers, strategy_option "
            "balance=equal"
        )


def estimate_ranks(
    task: Task, config: RunConfig, ranks: Sequence[int], world_size: int, kind: str
) -> list[RankPeak]:
    """Estimates some ranks of ``world_size``. Those of a pipeline need messages of each other, so they take turns until
    none is waiting."""
    place, mail, found = FakeRank.from_kind(kind), PostOffice(), dict[int, RankPeak]()
    waiting = list(ranks)
    while waiting:
        before = len(waiting), mail.sent
        for rank in tuple(waiting):
            try:
                with warnings.catch_warnings(action="ignore"):  # the run itself would show them
                    found[rank] = estimate_rank(task, config, rank, world_size, place, mail)
            except NotYetSentError:
                continue
            except EvenerError:
                raise
            except Exception as error:
                raise unknown_by_error(error) from error
            waiting.remove(rank)
        if (len(waiting), mail.sent) == before:
            raise UnknownMemoryError(
                f"ranks {waiting} of the pipeline wait for each other: no estimate can be made"
            )
        waiting.reverse()  # the last rank sends gradients back first
    return [found[rank] for rank in ranks]


def _unlike(config: RunConfig, kind: str, ranks: int) -> bool:
    """Returns True if a run on this machine would choose ``balance=auto`` by itself because its devices differ."""
    seen = [torch.device(kind, number) for number in range(min(ranks, accelerators.count(kind)))]
    kinds = [accelerators.name_of(device) for device in seen if accelerators.is_accelerator(device)]
    return bool(difference(kinds, config)) and balance_of(config, ranks, unlike=True) == "auto"


def _notes(config: RunConfig, kind: str, found: list[RankPeak]) -> list[str]:
    notes = []
    if config.balance == "auto" or (config.balance is None and _unlike(config, kind, len(found))):
        notes.append(
            "balance auto moves samples to faster ranks, which then take more; these are equal shares"
        )
    if FakeRank.from_kind(kind).device.type != kind:
        notes.append(
            f"this PyTorch has no {kind.upper()}: sizes are rounded as on a GPU, and operators are those of a CPU, "
            "which keep other things for backward here and there"
        )
    if config.exact == "bits":
        notes.append(
            "exact=bits takes more for a moment in a step whose gradients are 16 times as large as in the step before, "
            "or far smaller, as the first may be: there it adds them up once more, in several digits"
        )
    if config.cuda_graphs != "off" and kind == "cuda":
        notes.append(
            f"cuda_graphs={config.cuda_graphs} takes about {size_words(_of_graphs(found))} more, for the activations "
            "and gradients of a recorded pass and two copies of these gradients while it is compared; where there is "
            "no room, the run goes on without graphs"
        )
    if any(each.built_for_real for each in found):
        notes.append("the model could be built with numbers only, and took its memory while it was estimated")
    asked = sorted({line for each in found for line in each.asked})
    if asked:
        notes.append(
            f"numbers are asked for at {', '.join(asked)}; if code goes one way or another by them, it went one"
        )
    return notes


def _of_graphs(found: list[RankPeak]) -> int:
    """Returns the bytes that CUDA graphs take besides, on the rank where that is the most."""
    return max(
        each.memory.at_peak["activations"] + _GRADIENTS_OF_GRAPHS * each.memory.at_peak["parameters"]
        for each in found
    )
