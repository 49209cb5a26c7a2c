"""Plans for machines that are not at hand: nothing is run there, everything is predicted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from evener.components.amp.policy import Precision, agreed
from evener.core.config.kwargs import Settings
from evener.core.config.process_range import one_number
from evener.core.config.run_config import RunConfig
from evener.core.config.sizes import size_words
from evener.core.task.task import Task, TaskLike, resolve
from evener.errors import ConfigurationError, EvenerError
from evener.tools.plan.analytic import all_reduces_of, costs_of_work
from evener.tools.plan.at_scale import CostAtScale
from evener.tools.plan.best_at_scale import MANY, cost_at_scale
from evener.tools.plan.candidates import (
    NEVER_TRIED,
    SPECIAL,
    Candidate,
    candidates_of,
    in_less_memory,
    numbers_of_ranks,
)
from evener.tools.plan.cluster import Cluster, PlannedCard
from evener.tools.plan.fitting import ROOM
from evener.tools.plan.local_steps_way import by_local_steps
from evener.tools.plan.plan import COST_IGNORED, predicted, samples_of, whole_batch
from evener.tools.plan.result import TrainingPlan, Way, best_all_reduce
from evener.tools.plan.trials import NO_TIME, quiet
from evener.tools.plan.work import StepWork, work_of
from evener.training.builtin_tasks import BUILT_IN
from evener.training.factory import balance_of

SECONDS = 50.0
"""About how long it may take."""
SLOW_MESSAGES = 0.2
"""Local steps are proposed if messages take more than this part of a step."""
_MOST_OWNERS = 1024
"""Over more ranks, weights are only divided within machines."""
_OF_OWNERS = {"zero=1", "zero=2"}
"""Options of ways in which ranks own parts of the weights, of any sizes. They have a message for each rank and bucket,
take long to predict, and come after the others."""


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
    batch_size, notes = whole_batch(built, config.batch_size or built.batch_size)
    if config.exact == "bits":
        raise ConfigurationError(
            "a plan for a cluster is made of numbers about cards, and what grains cost on them is not among these: "
            "leave exact out here, and plan with it on a machine with such cards, which is measured"
        )
    most = one_number(config.processes) or len(cluster.ranks)
    if most > len(cluster.ranks):
        raise ConfigurationError(f"processes is {most}, and the cluster has {len(cluster.ranks)} cards")
    precision = _precision(config, [card for _, card in cluster.ranks[:most]])
    # Nothing but the speed of products is different in TF32, which not every device has that is at hand.
    config = config.replace(precision=None if precision == "tf32" else precision)
    search = _Search(built, cluster, config, batch_size, began + seconds, precision, efficiency)
    for ranks in _in_order(most):
        search.compare(ranks)
    ways = sorted(search.ways, key=lambda way: (not way.fits, way.time.seconds))
    refused = search.refused
    if not ways:
        raise ConfigurationError(
            f"{built.name} can be trained in no way: "
            + "; ".join(f"{name}: {why}" for name, why in refused.items())
        )
    notes += [] if cluster.is_measured else ["speeds are those of a catalogue and not measured"]
    notes += [] if built.cost is None else [COST_IGNORED]
    plan = TrainingPlan(
        task=built.name,
        batch_size=batch_size,
        samples=samples_of(built),
        epochs=config.epochs or (None if config.steps else built.epochs),
        steps=config.steps,
        ways=tuple(ways),
        refused=refused,
        left_out=NEVER_TRIED,
        devices=tuple(card.name for _, card in cluster.ranks[:most]),
        seconds=time.monotonic() - began,
        notes=tuple(notes),
        at_scale=search.at_scale(ways),
    )
    return (
        plan
        if plan.best is None
        else replace(plan, price_per_hour=cluster.price_of(plan.best.candidate.ranks))
    )


class _Search:
    """Predicts one way after the other.

    What does not fit on a number of ranks is not tried on fewer, where each rank would hold more.
    """

    def __init__(
        self,
        task: Task,
        cluster: Cluster,
        config: RunConfig,
        batch_size: int,
        ends: float,
        precision: str | None,
        efficiency: float | None,
    ) -> None:
        self._task, self._cluster, self._config, self._batch_size = task, cluster, config, batch_size
        self._ends, self._precision, self._efficiency = ends, precision, efficiency
        self.ways: list[Way] = []
        self.refused: dict[str, str] = {}
        self._longest = 0.0
        """The longest time that the prediction of one rank took."""
        self._hopeless: set[str] = set()
        """Special strategies that refuse the task."""
        self._least: dict[Candidate, int] = {}
        """For each way, without its ranks, the bytes that a rank needs at least."""
        self._works: dict[Candidate, StepWork] = {}
        """What ways with many ranks do in a step."""
        self._replica = 0
        """Bytes of a replica: weights and optimizer state."""

    def compare(self, ranks: int) -> None:
        """Predicts the ways on a number of ranks."""
        queue = _candidates(ranks, self._config, len(self._cluster.machines[0].cards))
        queue = [self._by_memory(each) for each in queue]
        given = self._config.samples_at_once is not None or self._config.recompute is not None
        usual = queue[0] if len(queue) == 1 else Candidate(ranks, "sharded", ("zero=3",))
        queue.sort(key=lambda each: (_stages(each), not _OF_OWNERS.isdisjoint(each.options)))
        while queue:
            candidate = queue.pop(0)
            if candidate.strategy not in self._hopeless:
                self._predict(candidate)
            fits = any(way.fits for way in self.ways if way.candidate.ranks == ranks)
            if candidate == usual and not fits and not given:
                queue[:0] = in_less_memory(usual, self._batch_size)

    def at_scale(self, ways: Sequence[Way]) -> CostAtScale | None:
        """Simulates the best of the ways, if it has many ranks. The first ways are the fastest that fit."""
        best = next((way for way in ways if way.fits and not way.algorithm), None)
        work = self._works.get(replace(best.candidate, allreduce=None)) if best else None
        if best is None or work is None:
            return None
        try:
            return cost_at_scale(work, best, self._cluster, self._batch_size)
        except ValueError:  # replicas that lie across machines
            return None

    def _rooms(self, ranks: int) -> list[int]:
        """Returns the bytes that each rank has for tensors."""
        cards = [card for _, card in self._cluster.ranks[:ranks]]
        return [int((card.memory_nbytes - card.workspace_nbytes) * ROOM) for card in cards]

    def _by_memory(self, candidate: Candidate) -> Candidate:
        """Returns the way in which ranks with unequal memory own parts in proportion to it, if ranks own parts."""
        rooms = self._rooms(candidate.ranks)
        owned = candidate.strategy == "sharded" and len(candidate.options) == 1 and candidate.mesh is None
        if not owned or len(set(rooms)) == 1 or _OF_OWNERS.isdisjoint(candidate.options):
            return candidate
        sizes = ",".join(str(max(1, round(room / 2**30))) for room in rooms)
        return replace(candidate, options=(*candidate.options, f"shard_sizes={sizes}"))

    def _predict(self, candidate: Candidate) -> None:
        cards = [card for _, card in self._cluster.ranks[: candidate.ranks]]
        rooms = self._rooms(candidate.ranks)
        limit = min(rooms)
        began, words = time.monotonic(), candidate.words
        least = self._replica if candidate.strategy == "single" else self._least.get(_anywhere(candidate), 0)
        if least > limit:
            self.refused[words] = (
                f"needs at least {size_words(least - limit)} more than there is, as on more ranks"
            )
            return
        if began + self._longest * _stages(candidate) > self._ends:
            self.refused[words] = NO_TIME
            return
        try:
            with quiet():
                unequal = len(candidate.options) > 1 and not _OF_OWNERS.isdisjoint(candidate.options)
                looked_at = [rooms.index(room) for room in set(rooms)] if unequal else [0]
                works = {rank: self._work_at(candidate, rank) for rank in looked_at}
                work = max(works.values(), key=lambda each: each.ranks[0].optimizer)
                costs = costs_of_work(work, self._cluster, self._precision, self._efficiency)
                unlike = len({card.name for card in cards}) > 1
                config = self._config.replace(balance=balance_of(self._config, costs.parts, unlike))
                time_ = predicted(costs, candidate, config, self._batch_size)
                if max(time_.shares) - min(time_.shares) > 1 and len(work.ranks) == 1:
                    own = work.layout.data_axis(0).owners(time_.shares)
                    looked_at = [
                        max((rank for rank, each in enumerate(rooms) if each == room), key=own.__getitem__)
                        for room in set(rooms)
                    ]
                    works = {rank: self._work_at(candidate, rank, time_.shares) for rank in looked_at}
                    unequal = True
        except Exception as error:  # of the model, too, which may not bear to be divided so
            named = "" if isinstance(error, EvenerError) else f"{type(error).__name__}: "
            self.refused[words] = f"{named}{error}"
            self._hopeless |= {candidate.strategy} & set(SPECIAL)
            return
        self._longest = max(self._longest, (time.monotonic() - began) / len(work.ranks))
        needed = least = max(each.needed for each in work.ranks)
        if unequal:
            lacking = {rank: each.ranks[0].needed - rooms[rank] for rank, each in works.items()}
            worst = max(lacking, key=lambda rank: lacking[rank])
            needed, limit = works[worst].ranks[0].needed, rooms[worst]
            least = min(each.ranks[0].needed for each in works.values())
        self._least[_anywhere(candidate)] = least
        if candidate.ranks > MANY:
            self._works[candidate] = work
        if candidate.strategy == "ddp":
            self._replica = work.ranks[0].parameters + work.ranks[0].optimizer
        way = self._with_all_reduce(work, Way(candidate, time_, costs, needed, limit))
        self.ways.append(way)
        time_ = way.time
        if candidate.strategy == "ddp" and time_.communication > SLOW_MESSAGES * time_.seconds:
            timed = partial(predicted, config=config, batch_size=self._batch_size)
            self.ways.append(by_local_steps(way, timed))

    def _work_at(self, candidate: Candidate, rank: int, shares: Sequence[int] = ()) -> StepWork:
        """Returns what a rank does in a step, with the shares of the settings or with others."""
        config = self._config
        if shares:
            config = config.replace(balance=",".join(map(str, shares)), max_shares=None, share_multiple_of=1)
        kind = self._cluster.ranks[0][1].kind
        return work_of(self._task, candidate, config, self._batch_size, kind, rank)

    def _with_all_reduce(self, work: StepWork, way: Way) -> Way:
        """Returns the way with the fastest all-reduce, or with that of the settings."""
        wanted, slowest = self._config.allreduce, way.time.compute + way.time.waiting
        ways = [way]
        for name, costs in all_reduces_of(work, way.costs, self._cluster).items():
            before, after = (each.after_passes(self._batch_size, slowest) for each in (way.costs, costs))
            took = replace(way.time, communication=way.time.communication - before + after)
            ways.append(
                replace(way, candidate=replace(way.candidate, allreduce=name), time=took, costs=costs)
            )
        if wanted in (None, "auto"):
            best = best_all_reduce(ways)
            return best if wanted is None else replace(best, candidate=way.candidate)
        return next((each for each in ways if each.candidate.allreduce == wanted), way)


def _anywhere(candidate: Candidate) -> Candidate:
    """Returns the way without its number of ranks."""
    mesh = candidate.mesh and candidate.mesh.partition("=")[0]
    return replace(candidate, ranks=0, mesh=mesh, micro_batch=candidate.micro_batch and 0)


def _stages(candidate: Candidate) -> int:
    """Returns the number of stages, each of which is predicted by itself."""
    if candidate.strategy != "pipeline":
        return 1
    return candidate.ranks if candidate.mesh is None else 2


def _in_order(most: int) -> list[int]:
    """Returns numbers of ranks, those first that say the most: all, one, then the others."""
    numbers = numbers_of_ranks(min(most, MANY))
    return list(dict.fromkeys([most, 1, *reversed(numbers)]))


def _candidates(ranks: int, config: RunConfig, cards: int) -> list[Candidate]:
    if ranks <= MANY or config.strategy != "auto" or config.mesh is not None:
        return candidates_of(ranks, config)
    micro_batch, recompute = config.samples_at_once, config.recompute
    return [replace(each, micro_batch=micro_batch, recompute=recompute) for each in _many_ways(ranks, cards)]


def _many_ways(ranks: int, cards: int) -> Iterator[Candidate]:
    """Yields the ways to train on many ranks: samples are divided, and within a machine weights or layers, too."""
    yield Candidate(ranks, "ddp")
    if ranks % cards == 0 and cards > 1:
        yield Candidate(ranks, "sharded", ("zero=3",), f"data={ranks // cards},shard={cards}")
        yield Candidate(ranks, "tensor", (), f"data={ranks // cards},tensor={cards}")
    if ranks <= _MOST_OWNERS:
        yield Candidate(ranks, "sharded", ("zero=3",))


def _precision(config: RunConfig, cards: Sequence[PlannedCard]) -> str | None:
    """Returns the precision of a run on these cards, for which ``auto`` chooses by what they compute fast.

    Raises:
        ConfigurationError: If a card does not compute in the precision that is wanted, as far as is known.
    """
    return agreed(Precision.from_settings(config.precision, config.precision_of), [*map(_able, cards)]).name


def _able(card: PlannedCard) -> tuple[str, ...]:
    """Returns the precisions of a card, the one first that ``auto`` chooses, as in a run on it."""
    halves = {"bfloat16": ("bf16", "bf16-true"), "float16": ("fp16", "fp16-true")}
    known = [each for each in halves if card.flops.get(each, 0.0) > card.flops.get("float32", 0.0)]
    slow = [each for each in halves if each in card.flops and each not in known]
    names = [*(name for each in known for name in halves[each]), "fp32"]
    names += ["tf32"] if "tf32" in card.flops else []
    return (*names, *(name for each in slow for name in halves[each]))
