"""Takes the steps of a round: every replica of this rank on its own samples, then the merge.

::

    begin    every replica starts from the merged weights
    warm-up  all replicas take a batch together: gradients are summed over them, as by data parallelism
    segment  local steps of one replica after the other ─ send the fragments whose time has come ─ merge others
             (or, if several ranks compute a replica, steps of data parallelism over these ranks, which may divide
             the replica's state as strategy ``sharded`` does, and then merge what each of them holds)
    end      buffers merge; the model holds the merged weights
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import islice

import torch
import torch.distributed as dist

from evener.collectives.base import AllReduce
from evener.components import gradients
from evener.core.losses import Loss
from evener.core.stop_signals import STOP_SIGNALS
from evener.data.batch import Batch, MicroBatch
from evener.data.rounds import LocalBatch, RoundBatch, Rounds
from evener.distributed.signals import asked_to_stop
from evener.errors import ConfigurationError
from evener.hardware.async_read import DeferredValue, Readout, ReadyValue, read
from evener.hardware.profile_ranges import named_range
from evener.hardware.timers import waiting
from evener.strategies.interfaces import StepOutcome
from evener.strategies.learner import Learner
from evener.strategies.local_steps.buffers import BufferMerge
from evener.strategies.local_steps.merge import Merge, MergeGroup, summed_numbers
from evener.strategies.local_steps.quorum import QuorumMerges, QuorumRules
from evener.strategies.local_steps.replicas import ReplicaSet
from evener.strategies.reducer import all_reduce_of, sum_in_buckets
from evener.strategies.steppers.plain import Plain
from evener.strategies.synchronizer import Synchronizer, SynchronizerAround


class LocalSteps(Plain):
    """Trains the replicas of this rank.

    Args:
        outer: The optimizer that applies merged differences.
        fragments: The parameters of each fragment.
        alpha: The part of a replica's own weights that stays in a merge.
        words: A description of the merge.
        quorum: Which replicas a merge needs. None if it needs all.
        divides: True if the ranks of a replica divide its state.
    """

    updates = True

    def __init__(
        self,
        learner: Learner,
        rounds: Rounds,
        outer: torch.optim.Optimizer,
        fragments: list[list[torch.nn.Parameter]],
        alpha: float,
        words: str,
        quorum: QuorumRules | None,
        divides: bool = False,
    ) -> None:
        super().__init__(learner)
        self._rounds, self._fragments = rounds, fragments
        self._group: dist.ProcessGroup | None = learner.mesh.group("data", "shard")
        team = learner.mesh.group("shard")
        alike = learner.mesh.group("data") if divides else self._group  # the ranks that hold the same weights
        all_reduce = None if alike is None else all_reduce_of(learner, alike)
        keeps_own = len(fragments) > 1 or alpha > 0
        self._weighs = divides or rounds.leads
        self.replicas = ReplicaSet(learner, self._weighs, rounds, keeps_own, outer, fragments, words)
        unit = float(rounds.size)
        self._everyone = MergeGroup(alike, all_reduce)
        self.merge = Merge(
            learner, self.replicas, outer, self._everyone, unit, alpha, team if divides else None
        )
        self._quorum = (
            None
            if quorum is None or self._group is None
            else QuorumMerges(learner, rounds, quorum, self._everyone, self.replicas, outer)
        )
        self._buffers = BufferMerge(learner, self.replicas, self._group, team, rounds)
        self._in_team = (
            None if team is None else SumOverRanks(learner, team, summed_by=None if divides else team)
        )
        self._over_all = SumOverRanks(learner, self._group, summed_by=alike)
        self._missing: set[str] = set()
        self._loss: Loss = learner.task.exact_loss()
        self.outer = outer
        self._input_seconds = 0.0
        self._soundness: list[Readout] = []
        self._terms = 0.0

    def run(self, batch: Batch, divisor: Callable[[], float], step: int) -> StepOutcome:
        learner, replicas = self._learner, self.replicas
        if not isinstance(batch, RoundBatch):
            raise ConfigurationError(
                f"strategy {learner.name!r} takes the rounds that engine.batches() gives, and no other batch"
            )
        plan, passes = self._rounds.plan(batch.shares, batch.done), iter(batch.passes)
        self._input_seconds, self._soundness = 0.0, []
        self.merge.spreads, self.merge.sent_nbytes = [], 0
        totals, self._terms = list[Readout](), 0.0
        with learner.work_timer.step(step):
            self._buffers.begin()
            replicas.begin(self.scheduler)
            if self._quorum is not None:
                self._quorum.begin(step)
            for together in plan.together:
                totals += self._together(together, passes, step, self._over_all)
            if plan.together:
                self._keep_warm()
            for segment in plan.segments:
                for local in segment.local:
                    totals += self._local(local, passes, step)
                learner.work_timer.work_done()
                over = self._who_merges(segment is plan.segments[-1], step)
                if over is None:
                    continue
                for fragment in segment.sent:
                    self.merge.send(fragment, self._fragments[fragment], over)
                if self._quorum is not None:
                    self._quorum.catch_up(over, step)
                for fragment in segment.merged:
                    if not self.merge.finish(fragment):
                        self._soundness.append(ReadyValue(math.nan))
                if segment.merged:
                    learner.synchronizer.updated(step)
            for replica in replicas.all:  # one without samples keeps to the schedule, too
                replicas.stepped(replica, plan.batches)
            learner.work_timer.work_done()
            self._buffers.merge(batch.shares)
            replicas.end()
            asked = asked_to_stop()
            terms, *heard = self._over_all.numbers(
                [self._terms, *(float(asked == number) for number in STOP_SIGNALS)]
            )
        return StepOutcome(
            totals=tuple(totals),
            missing=(),
            buffers_changed=False,
            compute_seconds=learner.work_timer.taken(),
            soundness=tuple(self._soundness),
            terms=terms,
            merge_spread=tuple(self.merge.spreads),
            merge_bytes=self.merge.sent_nbytes,
            merge_ranks=() if self._quorum is None else self._quorum.partial(step),
            input_seconds=self._input_seconds,
            asked_to_stop=next(
                (int(each) for each, times in zip(STOP_SIGNALS, heard, strict=True) if times), 0
            ),
        )

    def _who_merges(self, is_last: bool, step: int) -> MergeGroup | None:
        """Returns the ranks of a merge. None if it is left out, because others are through with the round."""
        if self._quorum is None:
            return self._everyone
        return self._quorum.all_ranks() if is_last else self._quorum.wait_for_quorum(step)

    def _local(self, local: LocalBatch, passes: Iterator[Batch], step: int) -> list[Readout]:
        """Takes one step of one replica."""
        if self._in_team is not None:
            return self._together([local], passes, step, self._in_team)
        replica = self.replicas.enter(local.replica)
        micro_batches, terms = self._next(passes, len(local.passes))
        totals = self._backward(micro_batches, terms, step)
        self._soundness += self._learner.synchronizer.soundness()
        self.replicas.take_step(partial(self._learner.apply_gradients, step))
        self._learner.trained.clear_never_updated()
        replica.terms += terms
        self._terms += terms
        replica.samples += sum(map(len, local.passes))
        self.replicas.stepped(replica, local.batches)
        return totals

    def _backward(self, micro_batches: Sequence[MicroBatch], terms: float, step: int) -> list[Readout]:
        self._missing = set()
        if not micro_batches:
            return []
        totals = self._passes(micro_batches, lambda: self._loss.divisor(terms) or 1.0, step)
        self._missing = set(self._learner.synchronizer.complete())
        return totals

    def _next(self, passes: Iterator[Batch], number: int) -> tuple[list[MicroBatch], float]:
        """Returns the next passes, and the number of the loss's terms in them."""
        began = time.perf_counter()
        with waiting(), named_range("loading a batch"):
            found = list(islice(passes, number))
        if len(found) < number:
            raise ConfigurationError(
                "the samples of this round cannot be read: it was trained on before, or the loop over engine.batches() "
                "that gave it has ended; take each step within that loop, once"
            )
        self._input_seconds += time.perf_counter() - began
        counted = [(each.on_host or each).micro_batches[0] for each in found]
        counts = [read(self._loss.count(micro.targets)) for micro in counted if micro.weight]
        return [each.micro_batches[0] for each in found], sum(count.value() for count in counts)

    def _together(
        self, local: Iterable[LocalBatch], passes: Iterator[Batch], step: int, over: SumOverRanks
    ) -> list[Readout]:
        """Takes one step as data parallelism does: each replica updates with the gradient of the whole batch.

        Args:
            local: The batches of this rank.
            over: The ranks that have the others.
        """
        learner, totals = self._learner, list[Readout]()
        read_ahead = [(each, *self._next(passes, len(each.passes))) for each in local]
        terms = over.numbers([sum(terms for _, _, terms in read_ahead)])[0]
        for each, micro_batches, own in read_ahead:
            replica = self.replicas.enter(each.replica)
            totals += self._backward(micro_batches, terms, step)
            self._terms += own
            if over is self._in_team:  # where all ranks of a team merge the same weights, one of them weighs
                own = terms if self._weighs else 0.0
            replica.terms += own
            replica.samples += sum(map(len, each.passes))
        self._soundness += learner.synchronizer.soundness()
        learner.work_timer.work_done()
        found = [(p, p.grad) for p in over.gradients(self._missing)]
        for each, _, _ in read_ahead:
            replica = self.replicas.enter(each.replica)
            for parameter, gradient in found:
                parameter.grad = None if gradient is None else gradient.clone()
            learner.apply_gradients(step)
            learner.trained.clear_never_updated()
            learner.synchronizer.updated(step)
            self.replicas.stepped(replica, each.batches)
        return totals

    def _keep_warm(self) -> None:
        """Lets the merged weights be those of the replicas, which are alike."""
        self.replicas.keep_as_merged()
        for replica in self.replicas.all:
            replica.sent = [replica.terms] * len(self._fragments)

    def close(self) -> None:
        """Frees the resources of the all-reduces."""
        for each in (self.merge, self._quorum, self._in_team, self._over_all):
            if each is not None:
                each.close()

    def elapsed(self, whole: Readout) -> Readout:
        seconds = self._input_seconds
        return DeferredValue(lambda: whole.value() - seconds)


class SumOverRanks:
    """Sums gradients after backward over ranks that compute a batch together.

    Args:
        group: The ranks. None if this one is alone. All ranks of it must call the methods together.
        summed_by: Those of them over which gradients are summed here. None if backward has done that.
    """

    def __init__(
        self, learner: Learner, group: dist.ProcessGroup | None, summed_by: dist.ProcessGroup | None
    ) -> None:
        self._learner, self._group, self._summed_by = learner, group, summed_by
        self._sparse = gradients.sparse_weights(learner.model)

    @cached_property
    def _all_reduce(self) -> AllReduce | None:
        group = self._summed_by
        return None if group is None else all_reduce_of(self._learner, group, compresses=False)

    def numbers(self, own: list[float]) -> list[float]:
        """Returns the sums of numbers over the ranks."""
        return summed_numbers(own, self._group, self._learner.session.device)

    def gradients(self, missing: Collection[str]) -> list[torch.nn.Parameter]:
        """Sums the gradients. Returns the parameters that have one on any rank.

        Args:
            missing: Names of parameters to which this rank's samples gave none.
        """
        names = self._learner.names
        trained = [p for p in names if p.requires_grad]
        used = self.numbers([float(p.grad is not None and names[p] not in missing) for p in trained])
        for parameter, times in zip(trained, used, strict=True):
            parameter.grad = parameter.grad if times else None
        summed = [p for p, times in zip(trained, used, strict=True) if times]
        if self._all_reduce is not None:
            sum_in_buckets(summed, self._sparse, self._learner.settings.bucket_nbytes, self._all_reduce)
        return summed

    def close(self) -> None:
        """Frees the resources of the all-reduce."""
        # To make it now would be a message to all ranks.
        made: AllReduce | None = self.__dict__.get("_all_reduce")
        if made is not None:
            made.close()


class LocalSynchronizer(SynchronizerAround):
    """Sums gradients over the ranks of a replica if these divide its state, as ``inner`` does, and else none: each
    replica steps with its own. The replicas merge in `LocalSteps`."""

    follows = False

    def __init__(self, learner: Learner, inner: Synchronizer) -> None:
        super().__init__(inner)
        self._learner = learner
        self.stepper: LocalSteps | None = None

    @property
    def exchanges_in_passes(self) -> bool:  # type: ignore[override]
        return self._inner.exchanges_in_passes

    @property
    def words(self) -> str:  # type: ignore[override]
        return "none: one rank" if self.stepper is None else self.stepper.merge.words

    def hooked_in(self, passes: int) -> Sequence[torch.nn.Parameter]:
        return ()  # a rank steps with its own gradients

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        raise ConfigurationError(
            f"strategy {self._learner.name!r} takes steps of its own between two merges, and a loop of your own asks "
            "for a sum of gradients in each: use engine.step(batch) or fit, or strategy ddp"
        )

    def close(self) -> None:
        if self.stepper is not None:
            self.stepper.close()
        super().close()
