"""Small things that a loop on several ranks wants: who one is, what all have, and what only one should say."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from evener.collectives.rows import rows_of_all
from evener.data.batch import map_leaves
from evener.errors import ConfigurationError
from evener.hardware.stopwatch import waiting
from evener.prepared import losses
from evener.prepared.place import check_marks
from evener.prepared.preparing import current, place_or_none
from evener.runtime.environment import detect

T = TypeVar("T")


def rank() -> int:
    """This process's number among the ranks of the run, from 0; before ``prepare`` as the launcher says."""
    place = place_or_none()
    return detect().rank if place is None else place.rank


def world_size() -> int:
    """How many ranks there are."""
    place = place_or_none()
    return detect().world_size if place is None else place.world_size


def is_main() -> bool:
    """Whether this is the rank that prints and writes, rank 0."""
    return rank() == 0


def print(*values: Any, **options: Any) -> None:  # the loop's own print, said once
    """As Python's, on rank 0 alone; a progress bar of tqdm's stays below."""
    if is_main():
        with tqdm.external_write_mode(options.get("file")):
            builtins.print(*values, **options)


def barrier() -> None:
    """Waits for all ranks; one that does not come in time is named."""
    place = place_or_none()
    if place is None:
        if world_size() > 1:
            current("evener.barrier() of several ranks")
        return
    place.exchange("a barrier")


def device() -> torch.device:
    """Of this rank."""
    return current("evener.device()").session.device


def gather(tree: T) -> T:
    """The rows of all ranks, in the order of the batch's samples: as one device would have them, on every rank.

    Each sample is there once, whatever the shares, so that a metric is that of one device. A collective call.

    Args:
        tree: A tensor with a row for each of this rank's samples, or tensors nested in tuples, lists and dicts.

    Raises:
        ConfigurationError: Outside of a prepared loader's batch, or for a tensor of another number of rows.
    """
    place = current("evener.gather")
    turn = place.turn("evener.gather was called")
    shares, group = turn.batch.shares, place.session.world
    expected = len(turn.micro.samples)

    def of_all(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.dim() or len(leaf) != expected:
            raise ConfigurationError(
                f"evener.gather takes tensors with a row for each of this rank's {expected} samples, not one of shape "
                f"{tuple(leaf.shape)}; a prepared loss is that of all ranks already"
            )
        if place.world_size == 1:
            return leaf.detach()
        here = leaf.detach()[: turn.samples].to(place.session.device)  # whence the ranks' backend sends
        return rows_of_all(here, shares, group).to(leaf.device)

    check_marks([row[0] for row in place.exchange("evener.gather", turn.mark)])
    with place.session.watchdog.explained(), place.session.watchdog.phase("evener.gather"), waiting():
        found: T = map_leaves(of_all, tree)
    return found


def draw(function: Callable[..., Tensor], *sizes: int, **options: Any) -> Tensor:
    """Random numbers for this rank's samples, as one device would draw them for the batch: ``draw(torch.randn, 100)``.

    All ranks draw ``function(samples of the batch, *sizes)`` and keep their own rows.
    """
    place = current("evener.draw")
    turn = place.turn("evener.draw was called")
    with place.random.drawn():
        whole = function(turn.batch.size, *sizes, **options)
    shares = turn.batch.shares
    end = list(accumulate(shares))[place.rank]
    own = whole[end - shares[place.rank] : end] if turn.samples else whole[:1]
    return own.to(place.session.device)


def global_mean(value: Tensor, count: float | Tensor | None = None) -> Tensor:
    """The mean over all ranks' terms from that over this rank's, for a loss that the model computes itself.

    A collective call, within a prepared loader's batch.

    Args:
        value: This rank's mean, one number.
        count: Of how many terms; None for its samples. Words that are not padding, for a language model.
    """
    place = current("evener.global_mean")
    turn = place.turn("evener.global_mean was called")
    turn.is_counted |= count is None
    return losses.global_mean(place, value, turn.samples if count is None else count)


@contextmanager
def no_sync(*_: Any) -> Iterator[None]:
    """Backward passes inside leave their gradients to the next one outside, which sums them all at once."""
    with current("evener.no_sync").mean.delayed():
        yield
