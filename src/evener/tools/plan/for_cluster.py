"""Plans for machines that are not at hand: nothing is run there, everything is predicted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

from evener.core.config.kwargs import Settings
from evener.core.config.process_range import one_number
from evener.core.config.run_config import RunConfig
from evener.core.task.task import TaskLike, resolve
from evener.errors import ConfigurationError, EvenerError
from evener.tools.plan.analytic import costs_of_work
from evener.tools.plan.candidates import (
    NEVER_TRIED,
    SPECIAL,
    Candidate,
    candidates_for,
    in_less_memory,
    numbers_of_ranks,
)
from evener.tools.plan.cluster import Cluster
from evener.tools.plan.costs import StepCosts
from evener.tools.plan.plan import predicted, samples_of
from evener.tools.plan.result import TrainingPlan, Way
from evener.tools.plan.trials import NO_TIME, quiet
from evener.tools.plan.work import StepWork, work_of
from evener.training.builtin_tasks import BUILT_IN

SECONDS = 50.0
"""About how long it may take."""
SYNC_EVERY = 50
"""Batches between two merges of local steps, if these are proposed."""
SLOW_MESSAGES = 0.2
"""Local steps are proposed if messages take more than this part of a step."""
ROOM = 0.95
"""The part of a card's memory that a plan uses: PyTorch's allocator leaves gaps."""


def plan_for_cluster(
    task: TaskLike,
    cluster: Cluster,
    config: RunConfig | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    seconds: float = SECONDS,
    efficiency: float | None = None,
    **settings: Unpack[Settings],
) -> TrainingPlan:
    """Predicts the time and the memory of a step for each way to train a task on a cluster.

    Each way takes two steps as one rank on tensors without memory, which gives its operations, messages and bytes.
    Times follow from the speeds of cards and links.

    Args:
        task: As :func:`evener.fit` takes it.
        config: The settings. ``settings`` override single ones.
        options: Keyword arguments of the task's function.
        seconds: About how long this may take.
        efficiency: The part of the cards' peak that passes reach, if it is known from a run.

    Raises:
        ConfigurationError: If the task cannot be trained in any way, or a number about a card is missing.
    """
    began, config = time.monotonic(), (config or RunConfig()).replace(**settings)
    built = resolve(task, BUILT_IN, options)()
    batch_size = config.batch_size or built.batch_size
    most = one_number(config.processes) or len(cluster.ranks)
    if most > len(cluster.ranks):
        raise ConfigurationError(f"processes is {most}, and the cluster has {len(cluster.ranks)} cards")
    ways, refused, hopeless = list[Way](), dict[str, str](), set[str]()
    for ranks in _in_order(most):
        queue, fits = _candidates(ranks, config), False
        while queue:
            candidate = queue.pop(0)
            if time.monotonic() - began > seconds:
                refused[candidate.words] = NO_TIME
                continue
            if candidate.strategy in hopeless:
                continue
            try:
                with quiet():
                    work = work_of(built, candidate, config, batch_size, cluster.ranks[0][1].kind)
                costs = costs_of_work(work, cluster, _dtype(config), efficiency)
            except Exception as error:  # of the model, too, which may not bear to be divided so
                named = "" if isinstance(error, EvenerError) else f"{type(error).__name__}: "
                refused[candidate.words] = f"{named}{error}"
                hopeless |= {candidate.strategy} & set(SPECIAL)
                continue
            way = Way(
                candidate, predicted(costs, candidate, config, batch_size), costs, *_memory(work, cluster)
            )
            ways.append(way)
            fits = fits or way.fits
            if not queue and not fits and not candidate.recompute and not candidate.micro_batch:
                queue = list(in_less_memory(ranks, batch_size))
            if (
                candidate.strategy == "ddp"
                and way.time.terms["communication"] > SLOW_MESSAGES * way.time.seconds
            ):
                ways.append(_by_local_steps(way, config, batch_size))
    if not ways:
        raise ConfigurationError(
            f"{built.name} can be trained in no way: "
            + "; ".join(f"{name}: {why}" for name, why in refused.items())
        )
    return TrainingPlan(
        task=built.name,
        batch_size=batch_size,
        samples=samples_of(built),
        epochs=config.epochs or built.epochs,
        ways=tuple(sorted(ways, key=lambda way: (not way.fits, way.time.seconds))),
        refused=refused,
        left_out=NEVER_TRIED,
        price_per_hour=cluster.price_per_hour,
        devices=tuple(card.name for _, card in cluster.ranks[:most]),
        seconds=time.monotonic() - began,
        notes=() if cluster.is_measured else ("speeds are those of a catalogue and not measured",),
    )


def _in_order(most: int) -> list[int]:
    """Returns numbers of ranks, those first that say the most: all, one, then the others."""
    numbers = numbers_of_ranks(most)
    return list(dict.fromkeys([most, 1, *reversed(numbers)]))


def _candidates(ranks: int, config: RunConfig) -> list[Candidate]:
    strategy = config.strategy if isinstance(config.strategy, str) else "auto"
    found = candidates_for(ranks, strategy, config.strategy_option, config.mesh)
    return [replace(each, micro_batch=config.samples_at_once, recompute=config.recompute) for each in found]


def _dtype(config: RunConfig) -> str:
    """Returns the name of the type in which products are computed."""
    return {"bf16": "bfloat16", "fp16": "float16"}.get(config.precision or "", config.dtype or "float32")


def _memory(work: StepWork, cluster: Cluster) -> tuple[int, int | None]:
    """Returns the bytes that the fullest rank needs, and those that its card has for tensors."""
    needed = max(each.needed for each in work.ranks)
    cards = [card for _, card in cluster.ranks[: work.layout.world_size]]
    smallest = min(card.memory_nbytes - card.workspace_nbytes for card in cards)
    return needed, int(smallest * ROOM)


def _by_local_steps(way: Way, config: RunConfig, batch_size: int) -> Way:
    """Returns the way with merges of weights in place of a sum of gradients in each step."""
    rest, exposed = way.costs.rest.scaled(1 / SYNC_EVERY), way.costs.exposed / SYNC_EVERY
    costs: StepCosts = replace(way.costs, rest=rest, exposed=exposed, hidden=0.0)
    candidate = replace(way.candidate, strategy="diloco", options=(f"sync_every={SYNC_EVERY}",))
    words = f"replicas merge every {SYNC_EVERY} batches"
    return Way(candidate, predicted(costs, candidate, config, batch_size), costs, None, None, words)
