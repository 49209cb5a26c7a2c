"""A batch that the loop makes itself, without a DataLoader, divided among the ranks.

All ranks make the same whole batch, and each gets its own samples. A function that draws is called with the generator
that all ranks have in common. Tensors that each rank drew by itself are detected by their checksums and refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from evener.core.config.run_config import RunConfig
from evener.data.batch import Batch, MicroBatch, leaves_of, map_leaves, move
from evener.data.division import own_slice
from evener.data.fingerprint import digest_if_any
from evener.errors import ConfigurationError, DataError
from evener.training.prepare.batch_tensors import marked
from evener.training.prepare.current_batch import CurrentBatch
from evener.training.prepare.loop_state import LoopState
from evener.training.prepare.prepare import current, settings

_AHEAD = 2
_DIFFERENT = (
    "evener.batch was given other tensors on rank {rank} than on rank 0: each rank drew its own. Give it the function "
    "that draws the batch, as evener.batch(get_batch, 'train'), which all ranks then call with one generator; what "
    "draws from NumPy, Python or an environment must be seeded alike on all ranks. Before a rollout, whose samples "
    "come in several batches, seed torch with the same number on all ranks, as torch.manual_seed(update)"
)
_NO_ROWS = (
    "evener.batch divides tensors with the samples along dimension {dim}, and got {shapes}. Divide before they are "
    "flattened, or say dim=1 where the samples come second. A graph as a whole is one sample, whose nodes need each "
    "other, and cannot be divided: make batches of several graphs or of sampled parts"
)


class Batches:
    """The batches that a loop makes itself, and their balancer. Its state is saved with that of the generator."""

    def __init__(self, config: RunConfig, place: LoopState) -> None:
        self._place = place
        self.balancer = place.balancer(config, _AHEAD + place.session.runs_behind)
        self.step = 0
        self._untimed: CurrentBatch | None = None

    @contextmanager
    def one(self, made: Any, dim: int) -> Iterator[Any]:
        """Context that yields this rank's part of ``made``, on its device. A collective call at both ends."""
        place = self._place
        size = _samples_in(made, dim)
        mark = _checksum([*leaves_of(made), dim]) if place.world_size > 1 else 0.0
        rows = place.exchange("a batch", mark, float(size))
        other = [rank for rank, row in enumerate(rows) if row != rows[0]]
        if other:
            raise ConfigurationError(_DIFFERENT.format(rank=other[0]))
        current_batch, own = self._current_batch(size, mark, dim)
        self.step += 1
        part = place.cut(map_leaves(partial(self._part, own, dim), made), current_batch)
        with place.at(current_batch, lambda: _mark_of(made)):
            yield marked(part, current_batch)
        timed, self._untimed = (self._untimed if place.session.runs_behind else current_batch), current_batch
        seconds = place.finish(current_batch, timed)
        if timed is not None:
            self.balancer.observe(timed.step, timed.batch.shares, seconds)

    def _current_batch(self, size: int, mark: float, dim: int) -> tuple[CurrentBatch, slice]:
        shares = self.balancer.shares(self.step, size)
        part = self._place.data.index
        counts = bool(shares[part])
        own = own_slice(shares, part) if counts else slice(0, 1)
        micro = MicroBatch(None, None, torch.arange(own.start, own.stop), int(counts))
        batch = Batch(0, self.step, self.step * size, size, tuple(shares), [micro], last=False)
        return CurrentBatch(batch, mark, self.step, dim=dim, may_be_columns=dim > 0), own

    def _part(self, own: slice, dim: int, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return move(leaf.narrow(dim, own.start, own.stop - own.start), self._place.session.device)

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of batches so far, and what is known of the ranks' speeds."""
        return {"step": self.step, "balancer": self.balancer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of :meth:`state_dict`."""
        self.step = state["step"]
        self.balancer.load_state_dict(state["balancer"])


def _mark_of(made: Any) -> float:
    """Returns a number for a batch's samples. Of tensors of floating point only the shapes count: in reinforcement
    learning a model computed them, and rounding differs between one device and several."""
    parts = [
        str(leaf.shape) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
        for leaf in leaves_of(made)
    ]
    return _checksum(parts)


def _checksum(parts: Iterable[Any]) -> float:
    """Returns a number for the parts that have a digest: a tensor has one, an environment may have none."""
    return float(zlib.crc32("".join(map(digest_if_any, parts)).encode()))


def _samples_in(made: Any, dim: int) -> int:
    """Returns the number of samples along ``dim``.

    Raises:
        DataError: If the tensors do not have the same number of samples.
    """
    shapes = [tuple(leaf.shape) for leaf in leaves_of(made) if isinstance(leaf, Tensor)]
    sizes = {shape[dim] if dim < len(shape) else 0 for shape in shapes}
    if len(sizes) != 1 or 0 in sizes:
        listed = ", ".join(map(str, shapes)) or "no tensor"
        raise DataError(_NO_ROWS.format(dim=dim, shapes=listed))
    return sizes.pop()


@contextmanager
def batch(*made: Any, dim: int = 0) -> Iterator[Any]:
    """Context that yields this rank's samples of a batch that the loop makes itself, for a loop without a DataLoader.

    ::

        with evener.batch(get_batch, "train") as (x, y):        # get_batch("train") gives the batch of all ranks
            logits, loss = model(x, y)
            evener.global_mean(loss).backward()
            optimizer.step()

    Inside, all works as in a prepared loader's batch: losses, :func:`evener.gather`, :func:`evener.draw`, shares by
    speed. A collective call. :func:`evener.save` also saves the position in the sequence of random numbers.

    Args:
        made: A function and its arguments, called on all ranks with the same torch random numbers; or the tensors
            themselves, the same on all ranks. They may be nested in tuples, lists and dicts.
        dim: The dimension of the samples in the tensors: 1 if time comes first.

    Yields:
        The function's result, or the tensors, with this rank's samples, on its device. A rank without samples gets one,
        which does not count.

    Raises:
        ConfigurationError: If ranks have different tensors; on all of them.
        DataError: If the tensors do not have the same number of samples.
    """
    place = current("evener.batch")
    with batches_of(place).one(_made(made, place), dim) as own:
        yield own


def batches_of(place: LoopState) -> Batches:
    """Returns the batches that the loop makes itself."""
    if place.batches is None:
        place.batches = Batches(settings(), place)
    found: Batches = place.batches
    return found


def _made(given: Any, place: LoopState) -> Any:
    if given and callable(given[0]) and not isinstance(given[0], Tensor):
        return _called(given[0], given[1:], place)
    return given[0] if len(given) == 1 else given


def _called(function: Callable[..., Any], arguments: Any, place: LoopState) -> Any:
    with place.random.drawn():
        return function(*arguments)
