"""Helpers for a loop on several ranks: rank and world size, printing on one rank, gathering, drawing, means."""

from __future__ import annotations

import builtins
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor
from tqdm import tqdm

from evener.data.batch import detached, leaves_of, map_leaves
from evener.data.division import own_slice
from evener.distributed.environment import detect
from evener.distributed.loop_watch import loop_watch
from evener.errors import ConfigurationError
from evener.hardware.timers import waiting
from evener.torch_internals.compiling import outside_of_graphs
from evener.training.prepare import loss as losses
from evener.training.prepare.gather import gathered
from evener.training.prepare.loop_state import LoopState
from evener.training.prepare.loss import OverAll, is_torchs_own
from evener.training.prepare.positions import refuse_divided
from evener.training.prepare.prepare import current, place_or_none
from evener.training.prepare.rank_checks import check_marks

T = TypeVar("T")


def rank() -> int:
    """Returns this process's rank, from 0. Before ``prepare``, as the launcher says."""
    place = place_or_none()
    return detect().rank if place is None else place.rank


def world_size() -> int:
    """Returns the number of ranks."""
    place = place_or_none()
    return detect().world_size if place is None else place.world_size


def is_main() -> bool:
    """Returns True on rank 0, the rank that prints and writes."""
    return rank() == 0


def print(*values: Any, **options: Any) -> None:  # prints once, not once per rank
    """Prints on rank 0 alone, like Python's ``print``. A tqdm progress bar stays below.

    Warns if the numbers of other ranks are others than those that are printed, which are then of rank 0's samples.
    """
    place = place_or_none()
    if place is not None and place.world_size > 1:
        place.printed.note(*_line_of_caller(), values)
    if is_main():
        with tqdm.external_write_mode(options.get("file")):
            builtins.print(*values, **options)


def _line_of_caller() -> tuple[str, int]:
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame and frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def barrier() -> None:
    """Waits for all ranks. A rank that does not arrive in time is named in the error."""
    place = place_or_none()
    if place is None:
        if world_size() > 1:
            current("evener.barrier() of several ranks")
        return
    place.exchange("a barrier")


def device() -> torch.device:
    """Returns this rank's device."""
    return current("evener.device()").session.device


@outside_of_graphs
def gather(tree: T) -> T:
    """Returns the rows of all ranks in the order of the batch's samples, as on one device. A collective call.

    Each sample is there once, whatever the shares. So a metric is that of one device, and so is a loss that every rank
    computes from the gathered rows. Its gradient goes to each rank's own rows.

    Args:
        tree: A tensor with a row for each of this rank's samples, or tensors nested in tuples, lists and dicts.

    Raises:
        ConfigurationError: Outside of a prepared loader's batch, for a tensor with another number of rows, or on all
            ranks if their rows are of different shapes or types.
    """
    place = current("evener.gather")
    current_batch = place.current_batch("evener.gather was called", tree)
    place.gathered += 1
    expected = len(current_batch.micro.samples)
    if current_batch.micro.sequence is not None:
        tree = place.learner.cut.whole(map_leaves(detached, tree), current_batch.micro)

    def of_all(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.dim() or len(leaf) != expected:
            raise ConfigurationError(
                f"evener.gather takes tensors with a row for each of this rank's {expected} samples, not one of shape "
                f"{tuple(leaf.shape)}; a prepared loss is that of all ranks already, and of rows that are no samples, "
                "such as nodes or boxes, evener.global_mean(rows) is the mean over all ranks"
            )
        return gathered(leaf, current_batch.batch.shares, place)

    kinds = [(each.dtype, *each.shape[1:]) for each in leaves_of(tree) if isinstance(each, Tensor)]
    rows = place.exchange("evener.gather", current_batch.agreed, float(crc32(repr(kinds).encode())))
    check_marks([row[0] for row in rows])
    if len({row[1] for row in rows}) > 1:
        raise ConfigurationError(_unlike(place.session.control.gather_objects(kinds)))
    with place.session.watchdog.phase("evener.gather", explains=True), waiting():
        found: T = map_leaves(of_all, tree)
    return found


def _unlike(of_ranks: list[Any]) -> str:
    other = next(rank for rank, kinds in enumerate(of_ranks) if kinds != of_ranks[0])
    texts = [", ".join(f"{kind} {tuple(shape)}" for kind, *shape in of_ranks[rank]) for rank in (0, other)]
    return (
        f"evener.gather was given rows of another shape or type on rank {other} than on rank 0, {texts[1]} and "
        f"{texts[0]}: each rank may pad its share to a length of its own. Pad to one length on all ranks, as in the "
        "data set, or gather what is computed from them, with one shape for every sample"
    )


@outside_of_graphs
def draw(function: Callable[..., Tensor], *sizes: int, **options: Any) -> Tensor:
    """Draws random numbers for this rank's samples, as one device would for the batch: ``draw(torch.randn, 100)``.

    All ranks draw ``function(samples of the batch, *sizes)`` and keep their own rows.
    """
    place = current("evener.draw")
    current_batch = place.current_batch("evener.draw was called")
    refuse_divided("evener.draw draws for whole samples", current_batch)
    with place.random.drawn():
        whole = function(current_batch.batch.size, *sizes, **options)
    own = (
        whole[own_slice(current_batch.batch.shares, place.data.index)] if current_batch.samples else whole[:1]
    )
    return own.to(place.session.device)


@outside_of_graphs
def global_mean(value: Tensor | Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Returns the mean over the terms of all ranks, for a loss that the model computes itself. A collective call.

    ::

        evener.global_mean(loss)                        the mean over samples, from that over this rank's; of a cross
                                                        entropy, and of terms chosen by a mask, that over the terms
        evener.global_mean(loss, (y != -1).sum())       the mean over words, of which this rank has so many
        evener.global_mean(losses)                      the mean over all elements, from this rank's
        evener.global_mean(function, outputs, targets)  of all samples, of whatever kind the function is

    Must be called within a prepared loader's batch or :func:`evener.batch`. A number does not show how it was computed:
    a loss that compares samples with each other, such as a contrastive loss, is no mean over them. Give such a function
    and its arguments; it is then computed like a loss given to :func:`evener.prepare`.

    Args:
        value: This rank's mean, one number; the terms themselves; or a function.
        arguments: After a mean, the number of its terms, ``count``; None for the number of samples. After a function,
            its arguments.
        named: ``count``, or keyword arguments of the function.
    """
    place = current("evener.global_mean")
    current_batch = place.current_batch("evener.global_mean was called")
    if not isinstance(value, Tensor):
        return loop_watch().prepared("loss", value, _over_all(value, place))(*arguments, **named)
    count = _count_of(*arguments, **named)
    kind = "known"
    if count is None and not value.dim():
        count = place.terms.number(value, current_batch) if place.world_size > 1 else None
        kind = "over samples" if count is None else "over terms"
        if count is None:
            refuse_divided(
                "evener.global_mean of a mean weighs by samples unless it is given the count", current_batch
            )
            current_batch.is_counted, count = True, current_batch.samples
    mean = losses.global_mean(place, value, count, kind)
    loop_watch().mean(mean)
    return mean


def _count_of(count: float | Tensor | None = None) -> float | Tensor | None:
    """Binds the arguments that follow a tensor: a count alone, by place or by name."""
    return count


def _over_all(function: Callable[..., Any], place: LoopState) -> OverAll:
    """Returns the prepared loss of the function, the same one each time for a function from the same line of code."""
    key = _key_of(function)
    if key not in place.functions:
        place.functions[key] = OverAll(function, place)
    found: OverAll = place.functions[key]
    found.function = function
    return found


def _key_of(function: Any) -> Any:
    if isinstance(function, functools.partial) and not is_torchs_own(function):
        return _key_of(function.func), len(function.args), tuple(sorted(function.keywords))
    return getattr(function, "__code__", function)


def batch_size() -> int:
    """Returns the number of samples of all ranks in the current batch: what ``len(x)`` is on one device.

    For a sum over an epoch use ``total += loss.item() * evener.batch_size()``, because the loss is the mean over all.
    """
    return current("evener.batch_size()").current_batch("evener.batch_size was called").batch.size


@contextmanager
def no_sync(*_: Any) -> Iterator[None]:
    """Context in which backward passes keep their gradients local. The next pass outside sums them all at once."""
    with current("evener.no_sync").mean.delayed():
        yield
