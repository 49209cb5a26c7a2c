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

from evener.data.batch import map_leaves
from evener.distributed.environment import detect
from evener.distributed.loop_watch import loop_watch
from evener.errors import ConfigurationError
from evener.hardware.timers import waiting
from evener.training.prepare import loss as losses
from evener.training.prepare.gather import gathered
from evener.training.prepare.loop_state import Place
from evener.training.prepare.loss import OverAll
from evener.training.prepare.prepare import current, place_or_none
from evener.training.prepare.rank_checks import check_marks

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

    Each sample is there once, whatever the shares, so that a metric is that of one device, and so is a loss that every
    rank computes from the rows of all, whose gradient goes to each rank's own. A collective call.

    Args:
        tree: A tensor with a row for each of this rank's samples, or tensors nested in tuples, lists and dicts.

    Raises:
        ConfigurationError: Outside of a prepared loader's batch, or for a tensor of another number of rows.
    """
    place = current("evener.gather")
    turn = place.turn("evener.gather was called", tree)
    expected = len(turn.micro.samples)

    def of_all(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.dim() or len(leaf) != expected:
            raise ConfigurationError(
                f"evener.gather takes tensors with a row for each of this rank's {expected} samples, not one of shape "
                f"{tuple(leaf.shape)}; a prepared loss is that of all ranks already"
            )
        return gathered(leaf, turn.batch.shares, place)

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


def global_mean(value: Tensor | Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The mean over all ranks' terms from that over this rank's, for a loss that the model computes itself.

    ::

        evener.global_mean(loss)                        the mean over samples, from that over this rank's
        evener.global_mean(loss, (y != -1).sum())       the mean over words, of which this rank has so many
        evener.global_mean(losses)                      the mean over all elements, from this rank's
        evener.global_mean(function, outputs, targets)  of all samples, of whatever kind the function is

    A collective call, within a prepared loader's batch or :func:`evener.batch`. A number tells nobody how it was
    computed: one that compares samples with each other, as a contrastive loss, is no mean over them. Given the function
    and its arguments, it is computed as a loss that :func:`evener.prepare` was given.

    Args:
        value: This rank's mean, one number; the terms themselves; or a function.
        arguments: After a value, of how many terms it is the mean: ``count``, None for its samples. After a function,
            what it is called with.
        named: ``count``, or what the function is called with by name.
    """
    place = current("evener.global_mean")
    turn = place.turn("evener.global_mean was called")
    if not isinstance(value, Tensor):
        return _over_all(value, place)(*arguments, **named)
    count = _count_of(value, *arguments, **named)
    turn.is_counted |= count is None
    mean = losses.global_mean(place, value, turn.samples if count is None else count)
    loop_watch().mean(mean)
    return mean


def _count_of(value: Tensor, count: float | Tensor | None = None) -> float | Tensor | None:
    return value.numel() if count is None and value.dim() else count


def _over_all(function: Callable[..., Any], place: Place) -> OverAll:
    """The same each time that the function comes from the same line of the loop."""
    key = getattr(function, "__code__", function)
    if key not in place.functions:
        place.functions[key] = OverAll(function, place)
    found: OverAll = place.functions[key]
    found.function = function
    return found


def batch_size() -> int:
    """The samples of all ranks in the batch at hand: what ``len(x)`` is on one device.

    For a sum over an epoch, ``total += loss.item() * evener.batch_size()``, because the loss is the mean over all.
    """
    return current("evener.batch_size()").turn("evener.batch_size was called").batch.size


@contextmanager
def no_sync(*_: Any) -> Iterator[None]:
    """Backward passes inside leave their gradients to the next one outside, which sums them all at once."""
    with current("evener.no_sync").mean.delayed():
        yield
