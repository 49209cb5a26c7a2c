"""A user's own DataLoader, of which this rank reads its share of each batch.

Its batch sampler is unchanged and draws the whole batches. This rank reads one run of indices of each batch. Dataset,
collate function, workers and pinning are the loader's own::

    user's batch sampler ─▶ [7 2 9 4 1] ─▶ shares 3, 2 ─▶ rank 0: [7 2 9]   rank 1: [4 1] ─▶ torch's DataLoader

A rank without a share reads the batch's first sample, which does not count. The batches of a stream, which has no
indices, are read whole (:mod:`evener.training.prepare.stream`).
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, default_collate
from torch.utils.data.distributed import DistributedSampler

from evener.balance.base import Balancer
from evener.core.config.run_config import RunConfig
from evener.core.plugins import kind_of
from evener.core.task.task import Cost
from evener.core.text import printable, said
from evener.data.batch import Batch, MicroBatch, map_leaves, move
from evener.data.copy_stream import CopyStream
from evener.data.costs import CostDivision
from evener.data.division import own_slice
from evener.data.sample_names import unreadable
from evener.data.sampler import Ids
from evener.data.tensor_rows import RowBatches, as_read, rows_of
from evener.data.worker_deaths import awaited, begin_worker, begun
from evener.errors import ConfigurationError, DataError, EvenerError
from evener.hardware.accelerators import WITH_STREAMS
from evener.training.batches.agreed_costs import agreed_costs, cost_division
from evener.training.prepare.batch_tensors import marked
from evener.training.prepare.current_batch import CurrentBatch
from evener.training.prepare.loop_state import LoopState
from evener.training.prepare.rng import apart
from evener.training.prepare.stream import WholeBatches

_KEPT = (
    *("dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers"),
)
"""Options of a DataLoader that are copied to the new one."""
TWICE = (
    "a prepared loader was iterated anew before the pass at hand was over, and can be in one place of its data at a "
    "time: prepare a second DataLoader of the same data for the other loop"
)


class Shares:
    """Batch sampler that yields this rank's share of each batch that ``batches`` draws.

    Args:
        batches: The user's batch sampler.
        balancer: Decides the shares.
        by_cost: Divides batches by the costs of their samples; ``None`` divides them by numbers of samples.
    """

    def __init__(
        self, batches: Any, balancer: Balancer, place: LoopState, by_cost: CostDivision | None = None
    ) -> None:
        self._batches, self._balancer, self._place, self._by_cost = batches, balancer, place, by_cost
        self.drawn: deque[CurrentBatch] = deque()
        """Batches that were drawn but not yet yielded to the loop."""
        self.step = 0
        """Number of batches drawn, over all epochs."""
        self.epoch = 0
        self.skip = 0
        """Number of batches at the beginning of the epoch that are not read."""

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Any]]:
        random, position, mark = self._place.random, 0, 0
        skip, self.skip = self.skip, 0
        with random.drawn():
            source = iter(self._batches)
        for index in count():
            with random.drawn():
                found = next(source, None)
            if found is None:
                return
            indices = list(found)
            mark = zlib.crc32(repr(indices).encode(), mark)
            if index >= skip and indices:
                batch, own = self._share(indices, index, position)
                self.drawn.append(CurrentBatch(batch, float(mark), self.step - 1, own))
                yield own
            position += len(indices)

    def of_stream(self, whole: WholeBatches, collate: Callable[[list[Any]], Any]) -> Iterator[Any]:
        """Yields this rank's share of each batch of a stream, collated."""
        skip, self.skip = self.skip, 0
        for index, position, digest, items in whole:
            if index >= skip:
                batch, own = self._share(list(range(position, position + len(items))), index, position)
                mark = zlib.crc32(f"{index} {len(items)} {digest}".encode())
                self.drawn.append(CurrentBatch(batch, float(mark), self.step - 1))
                yield collate([items[number - position] for number in own])

    def _share(self, indices: list[Any], index: int, position: int) -> tuple[Batch, list[Any]]:
        shares: Sequence[int] = self._balancer.shares(self.step, len(indices))
        costs, instead = tuple[float, ...](), indices[:1]
        if self._by_cost is not None:
            ids, part = _whole_numbers(indices), self._place.data.index
            shares, ((read, _),), costs = self._by_cost.divided(ids, self.step, shares, None, part)
            instead = read[:1].tolist()
        self.step += 1
        own = indices[own_slice(shares, self._place.data.index)] or instead
        counts = int(bool(shares[self._place.data.index]))
        samples = torch.tensor([_number(each) for each in own], dtype=torch.int64)
        micro = MicroBatch(None, None, samples, counts)
        place = self.epoch, index, position, len(indices)
        return Batch(*place, tuple(shares), [micro], last=False, costs=costs), own

    def observe(self, current: CurrentBatch, seconds: Sequence[float]) -> None:
        """Tells the balancer the seconds that the parts of a batch took."""
        step, batch = current.step, current.batch
        if self._by_cost is None:
            self._balancer.observe(step, batch.shares, seconds)
        else:
            asked, mean = self._balancer.shares(step, batch.size), self._by_cost.costs.mean
            self._balancer.observe_costs(step, asked, [cost / mean for cost in batch.costs], seconds)


def _whole_numbers(indices: Sequence[Any]) -> Ids:
    if not all(hasattr(each, "__index__") for each in indices):
        raise DataError(
            f"cost=... is of the indices of the data, and the sampler yields something {kind_of(indices[0])}: leave "
            "cost out, or let the sampler yield indices"
        )
    return np.array(indices, dtype=np.int64)


def _number(index: Any) -> int:
    """Returns a sample's number, or a checksum: a user's sampler may yield other things than numbers."""
    return int(index) if hasattr(index, "__index__") else zlib.crc32(repr(index).encode())


class PreparedLoader:
    """Yields this rank's share of each batch, collated and on its device. ``len`` is the number of whole batches.

    Args:
        loader: The user's loader, with the batch size of all ranks together.
        cost: The costs of its samples, by which batches are divided; see ``evener.Task.cost``.

    Raises:
        ConfigurationError: If the loader cannot be divided.
        TaskError, DataError: If the costs are not one positive number for each sample, the same on all ranks.
    """

    def __init__(
        self, loader: DataLoader[Any], config: RunConfig, place: LoopState, cost: Cost | None = None
    ) -> None:
        _check(loader)
        self.given, self._place = loader, place
        self.dataset = loader.dataset
        self.batch_size, self.drop_last = loader.batch_size, loader.drop_last
        self.sampler, self.batch_sampler = loader.sampler, loader.batch_sampler
        ahead = loader.num_workers * (loader.prefetch_factor or 0)
        self.balancer = place.balancer(config, ahead + 2 + place.session.runs_behind)
        self._shares = Shares(loader.batch_sampler, self.balancer, place, self._by_cost(config, cost))
        kept: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT}
        if loader.num_workers:
            kept["worker_init_fn"] = partial(begin_worker, loader.worker_init_fn)
        self._limit = f"the DataLoader has timeout={loader.timeout:g}"
        device = place.session.device
        self._copies = CopyStream(device) if device.type in WITH_STREAMS else None
        self._generator = apart(0, place.data.index)
        self._stream: WholeBatches | None = None
        self._collate = loader.collate_fn
        if isinstance(loader.dataset, IterableDataset):
            options = {name: value for name, value in kept.items() if name not in ("dataset", "collate_fn")}
            self._stream = WholeBatches(loader, options, self._generator, place)
        else:
            rows = None if loader.num_workers else rows_of(loader.dataset, loader.collate_fn)
            if rows is not None:
                kept |= {"dataset": RowBatches(rows), "collate_fn": as_read}
            drawn: dict[str, Any] = {"batch_sampler": self._shares}
            if rows is not None:
                drawn = {"sampler": self._shares, "batch_size": None}
            self._reader: DataLoader[Any] = DataLoader(generator=self._generator, **drawn, **kept)
        self._handed_out = self._passes = self._finished = 0
        self._current_batch: CurrentBatch | None = None
        self._untimed: CurrentBatch | None = None
        self._began = self._ordered = place.random.held()
        self._resumed: tuple[Tensor, Tensor] | None = None
        self._counted_in = dict[str, Any]()
        """What the position that was loaded counts in, until a pass begins from it; nothing between two epochs."""
        self._loaded: dict[str, Any] | None = None
        """The state that was loaded, until a pass begins from it."""

    def _by_cost(self, config: RunConfig, cost: Cost | None) -> CostDivision | None:
        """Returns how batches are divided by cost; None without costs. A collective call."""
        if cost is not None and isinstance(self.dataset, IterableDataset):
            raise ConfigurationError(
                "cost=... gives a cost for each index of the data, and an iterable data set has none: leave it out, or "
                "make batches of about the same cost"
            )
        costs = agreed_costs(cost, self.dataset, self._place.session.control, "cost=...")
        ranks, balancer = self._place.data.degree, self.balancer
        return (
            None if costs is None or ranks == 1 else cost_division(costs, config, ranks, balancer.fractions)
        )

    def __len__(self) -> int:
        return len(self.given)

    @property
    def epoch(self) -> int:
        """Number of complete epochs."""
        return self._shares.epoch

    def _units(self) -> dict[str, Any]:
        """Returns what a position in the middle of an epoch counts in."""
        plain = type(self.batch_sampler) is BatchSampler
        is_stream = isinstance(self.dataset, IterableDataset)
        return {
            "samples": None if is_stream or not isinstance(self.dataset, Sized) else len(self.dataset),
            "batch_size": getattr(self.batch_sampler, "batch_size", None),
            "sampler": type(self.sampler if plain else self.batch_sampler).__qualname__,
        }

    def __iter__(self) -> Iterator[Any]:
        """Begins a pass.

        Raises:
            ConfigurationError: If it would go on from a position of other data or batches.
        """
        place, shares = self._place, self._shares
        place.check_in_use("loader")
        if self._counted_in and self._counted_in != self._units():
            raise ConfigurationError(_other_units(shares.skip, self._counted_in, self._units()))
        self._counted_in = {}
        if self._current_batch is not None:
            place.leave(self._current_batch)  # of a pass that was abandoned, or ended by an error
        self._passes += 1
        shares.drawn.clear()
        shares.step = self._finished  # nobody told the balancer of batches that were drawn and left
        self._handed_out, random = shares.skip, place.random
        random.follow()
        resumed, self._resumed, self._loaded = self._resumed, None, None
        later = random.held()
        self._began = later if resumed is None else resumed[0]
        random.load_state(self._began)
        source = self._reading()
        if resumed is not None:
            random.load_state(later)
        return self._pass(self._passes, source, None if resumed is None else resumed[1])

    def _pass(self, number: int, source: Iterator[Any], ordered: Tensor | None) -> Iterator[Any]:
        """Runs pass ``number`` through the data. Its order is drawn from ``ordered``, or from the current state."""
        place, shares = self._place, self._shares
        later = place.random.held()
        self._ordered = later if ordered is None else ordered
        place.random.load_state(self._ordered)
        while True:
            if number != self._passes:
                raise ConfigurationError(TWICE)
            with place.session.watchdog.phase("loading a batch", step=place.steps):
                found = next(source, _NOTHING)
            if ordered is not None:
                place.random.load_state(later)  # the order is drawn: restore the loop's generator
                ordered = None
            if found is _NOTHING:
                break
            current_batch = self._current_batch = shares.drawn.popleft()
            current_batch.may_be_columns = self._collate is not default_collate
            self._handed_out += 1
            found = place.cut(found, current_batch)
            with place.at(current_batch):
                yield marked(self._on_device(found), current_batch)
            timed = self._untimed if place.session.runs_behind else current_batch
            self._untimed = current_batch
            seconds = place.finish(current_batch, timed)
            self._finished = current_batch.step + 1
            if timed is not None:
                shares.observe(timed, seconds)
        place.mean.settle()
        self._handed_out = 0
        shares.epoch += 1

    def _read(self, source: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of a reader.

        Raises:
            DataError: If a worker died, or if reading a sample raised StopIteration, which would end the pass unseen.
        """
        drawn = self._shares.drawn
        while True:
            try:
                found = awaited(source, _NOTHING, self._limit)
            except Exception as error:
                if drawn and not isinstance(error, EvenerError):
                    told = f"{type(error).__name__}: {said(error)}"
                    error.add_note(f"evener: failed while {self._reading_of(drawn[0], told)}")
                raise
            if found is _NOTHING:
                if drawn:
                    raise DataError(f"{self._reading_of(drawn[0], 'StopIteration')} raised StopIteration")
                return
            yield found

    def _reading_of(self, batch: CurrentBatch, told: str) -> str:
        return unreadable(self.dataset, batch.indices or (), told)

    def _on_device(self, found: Any) -> Any:
        """Returns the batch on this rank's device. On a GPU it is copied while earlier steps compute."""
        if self._copies is not None:
            return self._copies.start(partial(map_leaves, tree=found))()
        return map_leaves(lambda leaf: move(leaf, self._place.session.device, True), found)

    def _reading(self) -> Iterator[Any]:
        """Starts a new pass of the reader. Seeds workers as the plain loader would: persistent ones only once."""
        if self._passes == 1 or not (self.given.persistent_workers and self.given.num_workers):
            with self._place.random.drawn():
                seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.given.generator))
            part = self._place.data.index if self._stream is None else 0  # all ranks read the same stream
            self._generator.set_state(apart(seed, part).get_state())
        return self._read(
            begun(self._reader, self._limit)
            if self._stream is None
            else self._shares.of_stream(self._stream, self._collate)
        )

    def set_epoch(self, epoch: int) -> None:
        """Calls ``set_epoch`` of the user's samplers and data set, if they have it."""
        samplers: tuple[Any, ...] = (self.sampler, self.batch_sampler, self.dataset)
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the data: epoch, batches yielded, and the states from which its order was drawn."""
        if self._loaded is not None:
            return dict(self._loaded)
        return {
            "epoch": self._shares.epoch,
            "batches": self._handed_out,
            "began": self._began,
            "ordered": self._ordered,
            "balancer": self.balancer.state_dict(),
            "step": self._shares.step - len(self._shares.drawn),
            "stream": self._stream.state_dict() if self._stream is not None and self._handed_out else None,
            "counted_in": self._units(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next pass begin at the position in ``state``. Batches of the epoch before it are not read."""
        self._loaded = dict(state)
        self._shares.epoch, self._shares.skip = state["epoch"], state["batches"]
        self._shares.step = self._finished = state["step"]
        self.balancer.load_state_dict(state["balancer"])
        self._resumed = (state["began"], state["ordered"]) if state["batches"] else None
        self._counted_in = dict(state.get("counted_in", {})) if state["batches"] else {}
        if self._stream is not None and state.get("stream") is not None:
            self._stream.load_state_dict(state["stream"])


_NOTHING = object()


def _other_units(batches: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    both = [", ".join(f"{name} {value}" for name, value in each.items()) for each in (before, now)]
    return (
        f"the loader was loaded after {batches} batches of an epoch with {printable(both[0])}, and has {both[1]}: "
        "samples would be repeated or lost. Use the same data and batches until the end of the epoch, or leave the "
        "loader out of evener.load, which begins the epoch anew"
    )


def _check(loader: DataLoader[Any]) -> None:
    if loader.batch_size is None and loader.batch_sampler is None:
        raise ConfigurationError(
            "evener.prepare divides batches, and this DataLoader has batch_size=None: give it the batch size of all "
            "devices together"
        )
    if hasattr(loader.dataset, "global_order") and isinstance(loader.sampler, RandomSampler):
        raise ConfigurationError(
            "a DataLoader that shuffles shards opens one for each sample: give it the batches in the order of shards, "
            "DataLoader(dataset, batch_sampler=dataset.batch_sampler(batch_size))"
        )
    parts = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(part, DistributedSampler) for part in parts):
        raise ConfigurationError(
            "the DataLoader has a DistributedSampler, which gives each rank samples of its own: leave it out, with "
            "shuffle=True in its place and the batch size of all devices together; evener.prepare divides each batch"
        )
