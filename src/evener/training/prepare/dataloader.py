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
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from evener.balance.base import Balancer
from evener.core.config.run_config import RunConfig
from evener.data.batch import Batch, MicroBatch, map_leaves, move
from evener.data.division import own_slice
from evener.data.tensor_rows import RowBatches, as_read, rows_of
from evener.errors import ConfigurationError
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
    """

    def __init__(self, batches: Any, balancer: Balancer, place: LoopState) -> None:
        self._batches, self._balancer, self._place = batches, balancer, place
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
                self.drawn.append(CurrentBatch(batch, float(mark)))
                yield own
            position += len(indices)

    def of_stream(self, whole: WholeBatches, collate: Callable[[list[Any]], Any]) -> Iterator[Any]:
        """Yields this rank's share of each batch of a stream, collated."""
        skip, self.skip = self.skip, 0
        for index, position, digest, items in whole:
            if index >= skip:
                batch, own = self._share(list(range(position, position + len(items))), index, position)
                mark = zlib.crc32(f"{index} {len(items)} {digest}".encode())
                self.drawn.append(CurrentBatch(batch, float(mark)))
                yield collate([items[number - position] for number in own])

    def _share(self, indices: list[Any], index: int, position: int) -> tuple[Batch, list[Any]]:
        shares = self._balancer.shares(self.step, len(indices))
        self.step += 1
        own = indices[own_slice(shares, self._place.data.index)]
        samples = torch.tensor([_number(each) for each in own or indices[:1]], dtype=torch.int64)
        micro = MicroBatch(None, None, samples, int(bool(own)))
        batch = Batch(self.epoch, index, position, len(indices), tuple(shares), [micro], last=False)
        return batch, own or indices[:1]


def _number(index: Any) -> int:
    """Returns a sample's number, or a checksum: a user's sampler may yield other things than numbers."""
    return int(index) if hasattr(index, "__index__") else zlib.crc32(repr(index).encode())


class PreparedLoader:
    """Yields this rank's share of each batch, collated and on its device. ``len`` is the number of whole batches.

    Args:
        loader: The user's loader, with the batch size of all ranks together.

    Raises:
        ConfigurationError: If the loader cannot be divided.
    """

    def __init__(self, loader: DataLoader[Any], config: RunConfig, place: LoopState) -> None:
        _check(loader)
        self.given, self._place = loader, place
        self.dataset = loader.dataset
        self.batch_size, self.drop_last = loader.batch_size, loader.drop_last
        self.sampler, self.batch_sampler = loader.sampler, loader.batch_sampler
        ahead = loader.num_workers * (loader.prefetch_factor or 0)
        self.balancer = place.balancer(config, ahead + 2)
        self._shares = Shares(loader.batch_sampler, self.balancer, place)
        kept: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT}
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
        self._handed_out = self._passes = 0
        self._current_batch: CurrentBatch | None = None
        self._began = self._ordered = place.random.held()
        self._resumed: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.given)

    @property
    def epoch(self) -> int:
        """Number of complete epochs."""
        return self._shares.epoch

    def __iter__(self) -> Iterator[Any]:
        place, shares = self._place, self._shares
        if place.is_over:
            raise ConfigurationError(
                "this loader belongs to an earlier call of evener.prepare, which a later one with models has ended: "
                "use the one that the last call returned"
            )
        if self._current_batch is not None:
            place.leave(self._current_batch)  # of a pass that was abandoned, or ended by an error
        self._passes += 1
        shares.drawn.clear()
        self._handed_out, random = shares.skip, place.random
        random.follow()
        resumed, self._resumed = self._resumed, None
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
            self._handed_out += 1
            found = place.cut(found, current_batch)
            with place.at(current_batch):
                yield marked(
                    map_leaves(lambda leaf: move(leaf, place.session.device, True), found), current_batch
                )
            seconds = place.finish(current_batch)
            self.balancer.observe(shares.step - len(shares.drawn) - 1, current_batch.batch.shares, seconds)
        self._handed_out = 0
        shares.epoch += 1

    def _reading(self) -> Iterator[Any]:
        """Starts a new pass of the reader. Seeds workers as the plain loader would: persistent ones only once."""
        if self._passes == 1 or not (self.given.persistent_workers and self.given.num_workers):
            with self._place.random.drawn():
                seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.given.generator))
            part = self._place.data.index if self._stream is None else 0  # all ranks read the same stream
            self._generator.set_state(apart(seed, part).get_state())
        return (
            iter(self._reader)
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
        return {
            "epoch": self._shares.epoch,
            "batches": self._handed_out,
            "began": self._began,
            "ordered": self._ordered,
            "balancer": self.balancer.state_dict(),
            "step": self._shares.step - len(self._shares.drawn),
            "stream": self._stream.state_dict() if self._stream is not None and self._handed_out else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next pass begin at the position in ``state``. Batches of the epoch before it are not read."""
        self._shares.epoch, self._shares.skip = state["epoch"], state["batches"]
        self._shares.step = state["step"]
        self.balancer.load_state_dict(state["balancer"])
        self._resumed = (state["began"], state["ordered"]) if state["batches"] else None
        if self._stream is not None and state.get("stream") is not None:
            self._stream.load_state_dict(state["stream"])


_NOTHING = object()


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
