"""Takes the steps of a section: this rank's worker, and on rank 0 the parameter server.

::

    open     the server takes the weights that all ranks have
    work     trade: weights of a range ─ forward, backward ─ gradients back, and the weights of the next range
    meet     all samples have merged: all ranks get the server's weights, buffers and optimizer state

Between two sections all ranks have the same state, as after a step of data parallelism. So checkpoints, evaluation and
signals need nothing special.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from evener.collectives.executor.subgroup import subgroup
from evener.components.clipping import Summed
from evener.components.fragments import cut_into_fragments
from evener.core.losses import Loss
from evener.data.batch import Batch
from evener.data.sections import SectionBatch, Sections
from evener.data.workers import seed_of
from evener.distributed.hosts import destroy
from evener.distributed.recovery.replacement import check_recall, may_be_recalled
from evener.distributed.signals import asked_to_stop
from evener.errors import ConfigurationError, DataError
from evener.hardware.async_read import DeferredValue, Readout, ReadyValue, read
from evener.hardware.profile_ranges import named_range
from evener.hardware.timers import waiting
from evener.strategies.asynchronous.buffers import WorkerBuffers
from evener.strategies.asynchronous.flat_parameters import FlatLayout
from evener.strategies.asynchronous.ledger import Ledger, Merges, Terms, check_whole
from evener.strategies.asynchronous.links import LocalLink, RemoteLink, ServerLink, Serving
from evener.strategies.asynchronous.recorded_ledger import RecordedLedger
from evener.strategies.asynchronous.server import ParameterServer, Pushed, Reply, SectionOutcome
from evener.strategies.asynchronous.server_log import ServerLog, ShardLinks, ShardServer
from evener.strategies.asynchronous.state import share_state
from evener.strategies.asynchronous.weight_shard import WeightShard
from evener.strategies.interfaces import StepOutcome
from evener.strategies.learner import Learner
from evener.strategies.single import NoSync
from evener.strategies.steppers.plain import Plain


class AsynchronousSteps(Plain):
    """Computes ranges of a section as they are leased, and on rank 0 serves the others.

    Args:
        recorded: The merges of each section, to repeat them. None to train.
        servers: The number of ranks that hold the weights.
    """

    updates = True
    before: SectionOutcome | None = None
    interrupted: SectionOutcome | None = None

    def __init__(
        self,
        learner: Learner,
        sections: Sections,
        terms: Terms,
        recorded: Iterable[Merges] | None = None,
        servers: int = 1,
    ) -> None:
        super().__init__(learner)
        self._recorded = None if recorded is None else iter(recorded)
        self._merges: Merges | None = None
        """The merges of the section that is repeated."""
        self._place: tuple[int, int] | None = None
        """The epoch and the position at which the next recorded section begins."""
        self._asked = 0
        """The number of the signal that has shortened the section; 0 for none."""
        self._sections, self._terms = sections, terms
        self._loss: Loss = learner.task.exact_loss()
        self._group = self._group_of_ranks()
        self._trained = [parameter for parameter in learner.names if parameter.requires_grad]
        fragments = cut_into_fragments(self._trained, servers, "servers")
        self._layouts = [FlatLayout(each) for each in fragments]
        self._gradients = [layout.empty(learner.session.device) for layout in self._layouts]
        self.outlives_ranks = servers == 1
        self._buffers = WorkerBuffers(learner.model)
        self._scale = float(sections.batch_size)
        self._seconds: dict[int, float] = {}
        self._server: ParameterServer | None = None
        self._log: ServerLog | None = None
        self._shard_server: ShardServer | None = None
        self._shards: ShardLinks | None = None
        self._make_servers(servers)
        self._serving: Serving | None = None
        self._link: ServerLink
        self._input_seconds = 0.0
        self._soundness: list[Readout] = []

    def _group_of_ranks(self) -> dist.ProcessGroup | None:
        """Returns a gloo group of all ranks for the messages with the server. A collective call."""
        ranks, session = self._learner.mesh.group("data"), self._learner.session
        if ranks is None:
            return None
        with waiting():
            made = subgroup(ranks, range(ranks.size()), session.group_timeout.total_seconds(), "gloo")
        assert made is not None
        self._learner.mesh.close_with_mesh(partial(destroy, made))
        return made

    def _make_servers(self, servers: int) -> None:
        """Makes the server of this rank, and the connections with those of other ranks. A collective call."""
        learner, group, rank = self._learner, self._group, self._learner.session.rank
        summed: Summed | None = None
        if servers > 1:
            assert group is not None
            with waiting():
                seconds = learner.session.group_timeout.total_seconds()
                of_servers = subgroup(group, range(servers), seconds, "gloo")
            if of_servers is not None:
                learner.mesh.close_with_mesh(partial(destroy, of_servers))
                summed = partial(_sum_over, of_servers)
        if rank < servers:
            shard = WeightShard(learner, self._trained, self._layouts[rank], self._terms.delayed, summed)
        if servers > 1 and group is not None:
            if 0 < rank < servers:
                self._shard_server = ShardServer(shard, self._layouts[rank], group)
            self._shards = ShardLinks(group, self._layouts, self._shard_server)
        if not rank:
            if servers > 1 and group is not None:
                edges = accumulate((len(layout.parameters) for layout in self._layouts), initial=0)
                self._log = ServerLog(group, [range(*ends) for ends in pairwise(edges)])
            number = len(self._trained)
            self._server = ParameterServer(learner, shard, number, self._terms, self._scale, self._log)

    def run(self, batch: Batch, divisor: Callable[[], float], step: int) -> StepOutcome:
        learner = self._learner
        if not isinstance(batch, SectionBatch) or batch.plan is None or batch.reader is None:
            raise ConfigurationError(
                f"strategy {learner.name!r} takes the sections that engine.batches() gives, and no other batch"
            )
        self._input_seconds, self._soundness, self._asked = 0.0, [], 0
        if self._recorded is not None:
            batch = self._next_recorded(batch, self._recorded)
        learner.updating = step  # from here on the weights are those of no step
        with learner.work_timer.step(step):
            outcome = self._section(batch, step)
            learner.work_timer.work_done()
        self._seconds = outcome.seconds
        if outcome.is_whole:
            check_whole(outcome.merges, outcome.size)
        return StepOutcome(
            totals=() if learner.session.rank else (ReadyValue(outcome.total),),
            missing=(),
            buffers_changed=False,
            compute_seconds=learner.work_timer.taken(),
            soundness=tuple(self._soundness),
            terms=outcome.terms,
            input_seconds=self._input_seconds,
            merges=outcome.merges,
            wasted=outcome.wasted,
            merge_bytes=0 if self._serving is None else self._serving.nbytes,
            batch=self._taken(batch, outcome),
            asked_to_stop=self._asked,
        )

    def _next_recorded(self, batch: SectionBatch, recorded: Iterator[Merges]) -> SectionBatch:
        """Returns the next section of the records in place of ``batch``. A signal has shortened some of them.

        Raises:
            DataError: If the records end before.
        """
        self._merges = next(recorded, None)
        if self._merges is None:
            raise DataError("the records end before this section")
        assert batch.plan is not None
        assert batch.reader is not None
        epoch, position = self._place or (batch.epoch, batch.position)
        size, whole = sum(each.size for held in self._merges for each in held), batch.reader.epoch_size
        last = position + size == whole
        self._place = (epoch + 1, 0) if last else (epoch, position + size)
        plan = replace(batch.plan, epoch=epoch, position=position, size=size, shares=(size,), last=last)
        return SectionBatch(
            epoch, batch.index, position, size, (size,), [], last, plan=plan, reader=batch.reader
        )

    def _taken(self, batch: Batch, outcome: SectionOutcome) -> Batch:
        """Returns what was computed of ``batch``, with the number of samples of each rank."""
        taken = batch.without_samples()
        if self._recorded is not None or not outcome.is_whole:
            return taken
        shares, is_all = _shares(outcome.merges, self._learner.session.world_size), outcome.size == batch.size
        return replace(taken, size=outcome.size, shares=shares, last=batch.last and is_all)

    def _section(self, batch: SectionBatch, step: int) -> SectionOutcome:
        """Computes a section together with the other ranks."""
        device = self._learner.session.device
        self._open(batch, step)
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                self._work(batch, step)
            self._learner.has_drawn()
            return self._meet(step)
        except BaseException:
            if self._server is not None:
                self._server.stop()
                outcome = self._server.close()
                can_go_on = self._server.error is None and self._shards is None
                self.interrupted = outcome if can_go_on else None
            raise

    def _open(self, batch: Batch, step: int) -> None:
        """Opens the section on the server, and this rank's connection with it."""
        if self._learner.session.rank:
            assert self._group is not None
            self._link = RemoteLink(self._group, self._layouts[0])
            if self._shard_server is not None:
                self._shard_server.open(step)
            return
        assert self._server is not None
        before, self.before = self.before or SectionOutcome(), None
        self._server.open(self._ledger(batch, before.merges), step, before)
        self._serving = None if self._group is None else Serving(self._server, self._group, self._layouts[0])
        self._link = LocalLink(self._server, 0)

    def _ledger(self, batch: Batch, before: Merges) -> Ledger:
        """Returns the ledger of a section: a new one, or that of the records."""
        if self._merges is not None:
            return RecordedLedger(batch.size, self._merges)
        workers = range(self._learner.session.world_size)
        return Ledger(batch.size, self._terms, workers, self._seconds, before)

    def _work(self, batch: SectionBatch, step: int) -> None:
        """Computes ranges until the section is over."""
        reader, plan, learner = batch.reader, batch.plan, self._learner
        assert reader is not None
        assert plan is not None
        self._buffers.open()
        reader.begin(plan, self._drawn if reader.ahead else lambda: None)
        pushed: Pushed | None = None
        while True:
            self._check_others()
            self._heed_signals()
            first = reader.first
            with waiting(), learner.session.watchdog.wait("weights of the parameter server", step):
                if pushed is not None and self._shards is not None:
                    self._shards.send(self._gradients)
                reply = self._link.trade(pushed, first)
                weights = self._all_weights(reply)
            pushed = None
            if reply.revoked:
                reader.read()
                continue
            if reply.lease is None:
                break
            if first is None:
                reader.lease(reply.lease.number, range(reply.lease.start, reply.lease.stop))
            # The same random numbers on whichever rank, also for a data set that draws them.
            torch.manual_seed(seed_of(learner.settings.seed, batch.epoch, batch.position + reply.lease.start))
            began = time.perf_counter()
            with waiting(), named_range("loading a batch"):
                passes = reader.read()
            self._input_seconds += time.perf_counter() - began
            pushed = self._compute(reply, weights, passes, step)
            learner.work_timer.work_done()
        reader.end()

    def _check_others(self) -> None:
        """Raises if this rank is recalled, or if a rank is lost and nobody will replace it."""
        check_recall()
        if self._serving is not None and not may_be_recalled():
            self._serving.check()

    def _heed_signals(self) -> None:
        """Ends the section early if the run was asked to stop."""
        number = asked_to_stop()
        if number and self._server is not None and not self._asked and self._server.shorten():
            self._asked = number

    def _drawn(self) -> tuple[int, range] | None:
        """Leases a range to read ahead."""
        lease = self._link.draw()
        return None if lease is None else (lease.number, range(lease.start, lease.stop))

    def _all_weights(self, reply: Reply) -> list[list[Tensor]]:
        """Returns the weights of all servers for a range; none if there is no range."""
        if reply.weights is None:
            return []
        return [reply.weights, *(self._shards.receive() if self._shards is not None else ())]

    def _compute(self, reply: Reply, weights: list[list[Tensor]], passes: list[Batch], step: int) -> Pushed:
        """Runs the passes of a range with the weights that came for it. Returns its gradients."""
        learner, lease = self._learner, reply.lease
        assert lease is not None
        assert reply.row is not None
        for layout, flats in zip(self._layouts, weights, strict=True):
            layout.read(flats)
        self._buffers.begin(reply.row)
        counts = [read(self._loss.count((each.on_host or each).micro_batches[0].targets)) for each in passes]
        totals = self._passes([each.micro_batches[0] for each in passes], lambda: self._scale, step)
        learner.synchronizer.complete()
        soundness = learner.synchronizer.soundness()
        pairs = zip(self._layouts, self._gradients, strict=True)
        has_gradient = [flag for layout, flats in pairs for flag in layout.gradients(flats)]
        for parameter in self._trained:
            parameter.grad = None
        row = torch.cat([torch.tensor(has_gradient, dtype=torch.float64), self._buffers.row(lease.size)])
        total = sum(each.value() for each in totals)
        if not all(math.isfinite(each.value()) for each in soundness):
            total = math.nan
        if not math.isfinite(total):
            self._soundness += [ReadyValue(math.nan), *soundness]
        return Pushed(lease.number, sum(count.value() for count in counts), total, row, self._gradients[0])

    def _meet(self, step: int) -> SectionOutcome:
        """Ends a section: all ranks get the state of the server."""
        learner, outcome = self._learner, None
        if self._server is not None:
            if self._serving is not None:
                with waiting(), learner.session.watchdog.wait("the other ranks' last requests", step):
                    self._serving.join()
                self._serving.check()
            if self._log is not None:
                self._log.end()
            if self._server.error is not None:
                raise self._server.error
            outcome = self._server.close()
        if self._shard_server is not None:
            with learner.session.watchdog.wait("the end of the section", step):
                self._shard_server.close()
        with waiting():
            outcome, self._asked = learner.session.control.broadcast_object((outcome, self._asked))
            if self._group is not None:
                group = learner.mesh.group("data")
                assert group is not None
                owners = {p: rank for rank, layout in enumerate(self._layouts) for p in layout.parameters}
                share_state(learner, group, owners, learner.settings.bucket_nbytes)
        assert isinstance(outcome, SectionOutcome)
        return outcome

    def elapsed(self, whole: Readout) -> Readout:
        seconds = self._input_seconds
        return DeferredValue(lambda: whole.value() - seconds)


def _sum_over(group: dist.ProcessGroup, value: Tensor) -> Tensor:
    """Returns the sum of a number over the ranks of a gloo group, for a server: the clock of its rank's worker goes
    on."""
    total = value.detach().cpu().reshape(1).clone()
    dist.all_reduce(total, group=group)
    return total[0].to(value.device)


def _shares(merges: Merges, ranks: int) -> tuple[int, ...]:
    """Returns the number of samples that each rank has computed."""
    shares = [0] * ranks
    for contribution in (each for held in merges for each in held):
        shares[contribution.worker] += contribution.size
    return tuple(shares)


class AsynchronousSynchronizer(NoSync):
    """Sums no gradients: the parameter server adds them."""

    follows = False

    def __init__(self, learner: Learner, terms: Terms, servers: int) -> None:
        super().__init__(learner)
        more = "" if terms.staleness is None else f", at most {terms.staleness} versions old"
        more += f", weighted by (1 + age)^-{terms.damping:g}" if terms.damping else ""
        more += f"; momentum once in {terms.delayed} updates" if terms.delayed else ""
        where = (
            f"parameter servers on ranks 0 to {servers - 1}"
            if servers > 1
            else "a parameter server on rank 0"
        )
        self.holds_all = servers == 1  # with more, a death takes a part of the weights with it
        self.words = f"{where}, those of {terms.buffer} samples for an update{more}"

    def hooked_in(self, passes: int) -> tuple[()]:
        return ()  # a rank gives its own gradients to the server

    def sum_gradients(self, parameters: object) -> None:
        raise ConfigurationError(
            f"strategy {self._learner.name!r} gives ranks samples as they become free, and a loop of your own asks for "
            "a sum of gradients in each step: use engine.step(batch) or fit, or strategy ddp"
        )
