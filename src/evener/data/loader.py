"""The data loader: all batches of a training on one rank, from any position to the end of the last epoch.

::

    plans ──▶ requests ──▶ Workers (PyTorch's DataLoader) ──▶ Batch ──▶ Delivery ──▶ cut_to ──▶ training step
      ▲ shares(step, size)      read ahead, across epochs              to the device

One DataLoader serves all epochs, so workers stay alive and read ahead past the end of an epoch. The shares of a batch
are fixed when its plan is drawn, at most ``lookahead`` batches before the batch is returned. ``lookahead`` is the same
on every rank. New shares may take effect at ``step + lookahead + 1``, a batch that no rank has drawn yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import islice, tee
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from evener.core.config.exact_bits import ExactBits
from evener.data.batch import Batch, MicroBatch
from evener.data.batch_plan import BatchPlan, BatchPlanner, Shares, equal_shares, plans
from evener.data.collate import Collate
from evener.data.copy_stream import Convert
from evener.data.costs import CostDivision
from evener.data.fetch import Fetch
from evener.data.grains import GrainFetch, GrainPlanner, requests_of
from evener.data.iterable import Agree, StreamBatches, divides_itself
from evener.data.local_shards import LocalShards, part_plans
from evener.data.prefetch import Batches, Delivery, cut_to, delivery_to
from evener.data.rounds import RoundBatch, RoundPlanner, Rounds
from evener.data.sampler import ListedOrder, Order
from evener.data.sections import RangeReader, SectionBatches, SectionPlanner, Sections
from evener.data.stream_state import RecentStates, StreamState
from evener.data.workers import Workers, checked, seed_of
from evener.errors import ConfigurationError
from evener.hardware.accelerators import WITH_STREAMS
from evener.hardware.generators import all_kept


class Loader(Iterator[Batch]):
    """Iterates over this rank's part of every global batch, once. Close it, or use it in a ``with`` statement.

    For evaluation, use an unshuffled order and one epoch: exactly one rank gets each sample.

    Args:
        dataset: Map-style, or a ``torch.utils.data.IterableDataset`` (limits in ``evener.data.iterable``).
        order: The order of a map-style data set; ``None`` for unshuffled. Iterable data sets have no order.
        batch_size: Samples over all ranks in one step.
        rank: This rank, from 0 to ``world_size - 1``.
        shares: ``shares(step, size)`` is called once for each global batch, in order, when the batch is drawn. It must
            return the same on every rank. ``None`` for equal shares.
        micro_batch: Samples over all ranks in one micro-batch; ``None`` makes the whole batch one micro-batch.
        by_cost: Divides batches by the costs of their samples; ``None`` divides them by numbers of samples.
        collate: Makes ``(inputs, targets)`` of a list of items; ``None`` for the default in ``evener.data.collate``.
        workers: Processes that read; 0 to read in this process.
        device: The device of inputs and targets. For CUDA they are pinned, and copied ahead on a stream of their own.
        convert: Applied to every leaf of inputs and targets on the device; ``None`` leaves them as they are.
        piece: Cuts each micro-batch to what this rank computes of it; ``None`` for all of it.
        epochs: The end of training: epochs ``start[0]`` to ``epochs - 1`` are read.
        start: The epoch of the first batch, and the position in that epoch.
        first_step: The step that ``shares`` gets for the first batch.
        parts: Set if each rank owns a part of the samples. Then ``dataset`` and ``order`` are those of this rank's
            part, the sizes of the parts give the shares, and ``shares`` is not called.
        seed: Seed of random numbers in the workers. They also depend on the rank, the worker, and where reading begins:
            of a map-style data set at the start, of an iterable one in each epoch.
        agree: Gathers an integer from every rank; needed for iterable data sets on several ranks.
        name: The name of the data set in error messages.
        prefetch_factor: Micro-batches that each worker reads ahead.
        start_method: The start method of the workers; ``None`` for Python's default.
        timeout_seconds: The longest wait for a worker.
        skips: If True, samples that cannot be read are left out and listed in ``Batch.skipped``.
        rounds: Makes every batch a round of local steps (``RoundBatch``) or a section of asynchronous training
            (``SectionBatch``), which has its own batch size, micro-batch and number of parts.
        bits: Makes every micro-batch a grain, and every share whole blocks; ``None`` if the run is not exact in bits.
        equally_many: With ``bits``: True if all ranks need the same number of micro-batches.
        audit: With ``bits``: the part of all blocks that a second rank computes as well.
        resume: The state of an iterable data set at or before the start, if a checkpoint has one.
        tell: Called with messages about an iterable data set.

    Raises:
        ConfigurationError: If the data set is empty, its size differs from the order's, or an argument is invalid.
        ShareError: While iterating, if shares do not add up to the batch.
        DataError: While iterating, if the data set or the collate function fails.
    """

    def __init__(
        self,
        dataset: Any,
        order: Order | None,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        shares: Shares | None = None,
        micro_batch: int | None = None,
        by_cost: CostDivision | None = None,
        collate: Collate | None = None,
        workers: int = 0,
        device: torch.device | str = "cpu",
        convert: Convert | None = None,
        piece: Callable[[MicroBatch], MicroBatch] | None = None,
        epochs: int = 1,
        start: tuple[int, int] = (0, 0),
        first_step: int = 0,
        parts: LocalShards | None = None,
        seed: int = 0,
        agree: Agree | None = None,
        name: str = "training set",
        prefetch_factor: int = 2,
        start_method: str | None = None,
        timeout_seconds: float = 600,
        skips: bool = False,
        rounds: Rounds | Sections | None = None,
        bits: ExactBits | None = None,
        equally_many: bool = False,
        audit: float = 0.0,
        resume: StreamState | None = None,
        tell: Callable[[str], object] = lambda message: None,
    ) -> None:
        device = torch.device(device)
        self._batches: Batches | _Rounds | SectionBatches
        if rounds is not None:
            batch_size, world_size = rounds.size, rounds.parts
        shares = shares or equal_shares(world_size)
        if isinstance(rounds, Rounds):
            cut: BatchPlanner = RoundPlanner(batch_size, shares, 0, world_size, rounds=rounds)
        elif isinstance(rounds, Sections):
            cut = SectionPlanner(batch_size, shares, 0, world_size)
            prefetch_factor = 1  # what is read ahead is leased, and keeps others from it
        elif bits is not None:
            if parts is not None or divides_itself(dataset):
                raise ConfigurationError(
                    f"exact=bits cuts the {name} by position, and each rank reads a part of its own: let every rank "
                    "read all samples, with partition batch and without a method shard"
                )
            cut = GrainPlanner(
                *(batch_size, shares, rank, world_size, None, by_cost),
                bits=bits,
                equally_many=equally_many,
                audit=audit,
                seed=seed,
            )
            rank = 0  # the workers of all ranks are seeded alike
        else:
            cut = BatchPlanner(batch_size, shares, rank, world_size, micro_batch, by_cost)
        pin_memory = device.type in WITH_STREAMS and workers > 0
        pool = Workers(
            workers, prefetch_factor, start_method, timeout_seconds, seed_of(seed, rank), pin_memory
        )
        # The engine asks for a batch one step early, local steps when they take it. What is leased is not read ahead.
        ahead = 2 if isinstance(rounds, Rounds) else 0 if isinstance(rounds, Sections) else 1
        delivery = delivery_to(device, convert, ahead)
        self.stream_states = RecentStates()
        """The states of an iterable data set that has any."""
        self.steps: int | None
        """Global batches from the start to the end of the last epoch; None for an iterable data set."""
        self.lookahead: int
        """The largest number of global batches that can have been drawn after the last one returned."""
        if isinstance(dataset, IterableDataset):
            if skips:
                raise ConfigurationError(
                    f"samples of the {name} cannot be skipped: an iterable data set ends with its first exception; "
                    "leave out in it what cannot be read, or use a map-style one"
                )
            agreement = _agreement(agree, world_size)
            stream = StreamBatches(dataset, cut, agreement, pool, collate, name, resume, tell)
            self.stream_states = stream.states
            batches = stream.batches(epochs, start, first_step, seed)
            self.steps, self.lookahead = None, 1 + delivery.ahead
        else:
            order = _checked(order, dataset, name)
            whole = order if parts is None else parts.whole
            if not 0 <= start[1] <= whole.size:
                message = f"position {start[1]} is not within the {whole.size} samples of the {name}"
                raise ConfigurationError(message)
            pool = pool.begun_at(*start)
            drawn = (
                plans(order, cut, epochs, start, first_step)
                if parts is None
                else part_plans(parts, order, cut, epochs, start)
            )
            fetch = Fetch(dataset, collate, name, skips)
            self.steps, self.lookahead = _steps(whole, batch_size, epochs, start), pool.ahead + delivery.ahead
            if isinstance(rounds, Rounds):
                self._batches = _Rounds(drawn, rounds, whole.size, fetch, pool, delivery)
                return
            if isinstance(rounds, Sections):
                reader = RangeReader(whole, rounds, fetch, pool, delivery)
                self._batches = SectionBatches(drawn, reader)
                return
            batches = (
                _read_grains(drawn, fetch, pool, cut, seed)
                if isinstance(cut, GrainPlanner)
                else _read(drawn, fetch, pool)
            )
        self._batches = cut_to(piece, delivery(batches))

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        """Ends the workers. The loader then yields no more batches."""
        self._batches.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _read(drawn: Iterator[BatchPlan], fetch: Fetch, workers: Workers) -> Batches:
    """Reads the batches of the plans. Each micro-batch is one request to the workers."""
    return _requested(drawn, fetch, workers, lambda plan: [ids for ids, _ in plan.reads])


def _read_grains(
    drawn: Iterator[BatchPlan], fetch: Fetch, workers: Workers, cut: GrainPlanner, seed: int
) -> Batches:
    """Reads the batches of the plans, each grain with random numbers of its own."""
    fetched = GrainFetch(fetch)
    with closing(_requested(drawn, fetched, workers, lambda plan: requests_of(plan, cut, seed))) as read:

        def following() -> Batch | None:
            with all_kept() if fetch.may_draw else nullcontext():  # where this process reads, it draws
                batch = next(read, None)
            return None if batch is None else cut.marked(batch)

        yield from iter(following, None)  # holds no batch while the step computes


def _requested(
    drawn: Iterator[BatchPlan],
    fetch: Dataset[Any],
    workers: Workers,
    asked_by: Callable[[BatchPlan], Sequence[Any]],
) -> Batches:
    if not workers.count:  # as below, but two generators less in every step
        for plan in drawn:
            yield plan.batch([checked(fetch[request]) for request in asked_by(plan)])
        return
    pending: deque[BatchPlan] = deque()

    def asked() -> Iterator[Any]:
        for plan in drawn:
            pending.append(plan)
            yield from asked_by(plan)

    with closing(workers.read(fetch, asked())) as values:
        for first in values:
            plan = pending.popleft()
            yield plan.batch([first, *islice(values, len(plan.all_reads) - 1)])


class _Rounds(Iterator[Batch]):
    """Reads the rounds of the plans. The passes of a round are read and delivered while it is trained on, which may be
    when later rounds have been drawn: so they can be read until this is closed.

    Args:
        size: The number of samples in an epoch.
    """

    def __init__(
        self,
        drawn: Iterator[BatchPlan],
        rounds: Rounds,
        size: int,
        fetch: Fetch,
        workers: Workers,
        delivery: Delivery,
    ) -> None:
        to_request, to_fill, self._to_return = tee(drawn, 3)
        self._rounds, self._size = rounds, size
        self._values = workers.read(fetch, (ids for plan in to_request for ids, _ in plan.reads))
        self._passes = delivery(self._filled(to_fill))

    def _filled(self, plans: Iterator[BatchPlan]) -> Batches:
        for plan in plans:
            for read in plan.reads:
                yield replace(plan, reads=[read]).batch([next(self._values)])

    def __next__(self) -> Batch:
        plan = next(self._to_return)
        place = (plan.epoch, plan.index, plan.position, plan.size, plan.shares)
        return RoundBatch(
            *place,
            [],
            plan.last,
            passes=islice(self._passes, len(plan.reads)),
            done=plan.epoch * self._size + plan.position,
            of_ranks=self._rounds.of_ranks(plan.shares),
        )

    def close(self) -> None:
        self._passes.close()
        self._values.close()


def _checked(order: Order | None, dataset: Any, name: str) -> Order:
    """Returns ``order``, or an unshuffled order if it is None.

    Raises:
        ConfigurationError: If the data set is empty, or its size differs from the order's.
    """
    size = len(dataset) if hasattr(dataset, "__len__") or order is None else order.size
    if size == 0:
        raise ConfigurationError(f"the {name} is empty: give at least one sample")
    order = order or Order(size, shuffle=False)
    if order.size != size and not isinstance(order, ListedOrder):
        raise ConfigurationError(f"the {name} has {size} samples, but its order is one of {order.size}")
    return order


def _steps(order: Order, batch_size: int, epochs: int, start: tuple[int, int]) -> int:
    """Returns the number of batches from ``start`` to the end of the last epoch."""
    left = epochs - start[0]
    if left <= 0:
        return 0
    return order.number_of_batches(batch_size, start[1]) + (left - 1) * order.number_of_batches(batch_size)


def _agreement(agree: Agree | None, world_size: int) -> Agree:
    if agree is None and world_size > 1:
        raise ConfigurationError(
            f"an iterable data set on {world_size} ranks needs agree=, a function that gathers an integer"
        )
    return agree or (lambda local_size: [local_size])
