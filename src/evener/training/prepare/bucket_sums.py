"""Sums of gradients that begin while backward still runs, in a loop of the user's own.

A bucket is sent as soon as backward has left a gradient in each of its parameters, but never before those in front of
it, so that all ranks send in the same order. When the pass is over, a rank sends what is left, with zeros for what it
has not reached::

    backward      layer 4 ── layer 3 ── layer 2 ── layer 1 ──┐
    sent              bucket 0 ═══════╪═══ bucket 1 ═════════╪══ waits

Behind the gradients of a bucket lies a number for each parameter: how many ranks have a gradient of it. A parameter
that has none on any rank ends without one, as on one device.

A gradient becomes a view of its bucket when that is sent, as with DistributedDataParallel, so that it is in memory
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evener.collectives.base import AllReduce, Work, key_of
from evener.components.coalesce import in_buckets
from evener.errors import ConfigurationError
from evener.hardware.profile_ranges import named_range
from evener.hardware.timers import waiting

LEAST_NBYTES = 2**20
"""Bytes of gradients from which sums begin in backward. Below, the message that ranks exchange before takes longer."""


class BucketSums:
    """The sums of one model's gradients.

    Args:
        parameters: Dense parameters that require gradients, in the order of the model.
        nbytes: The size of a bucket.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], nbytes: int, all_reduce: AllReduce) -> None:
        self._all_reduce = all_reduce
        self._buckets = list(in_buckets(reversed(list(parameters)), nbytes, lambda parameter: parameter))
        self._place = {p: number for number, bucket in enumerate(self._buckets) for p in bucket}
        self.is_under_way = False
        """True from the beginning of a pass until its sums are there."""
        self._missing: list[set[nn.Parameter]] = []
        self._sent: list[tuple[Tensor, Work]] = []
        self._ends: list[Any] = []
        self._handles: list[RemovableHandle] = []
        for parameter in self._place:
            self._watch(parameter)

    @property
    def parameters(self) -> Iterable[nn.Parameter]:
        """The parameters whose gradients are summed."""
        return self._place

    def _watch(self, parameter: nn.Parameter) -> None:
        """Registers a hook where autograd accumulates the gradient. The user's hooks are others."""
        view = parameter.expand_as(parameter)
        assert view.grad_fn is not None
        end = view.grad_fn.next_functions[0][0]
        assert end is not None
        self._ends.append(end)  # autograd would make another one
        self._handles.append(end.register_hook(lambda *_: self._arrived(parameter)))

    @contextmanager
    def during(self) -> Iterator[None]:
        """Context of a backward pass, in which full buckets are sent."""
        self._missing, self._sent = [set(bucket) for bucket in self._buckets], []
        self.is_under_way = True
        try:
            yield
        except BaseException:
            self._missing, self.is_under_way = [], False
            raise

    def _arrived(self, parameter: nn.Parameter) -> None:
        if not self._missing:
            return
        place = self._place[parameter]
        if place < len(self._sent):
            raise ConfigurationError(
                "a gradient came once more after it was sent to the other ranks, as those of weights in several parts "
                "of torch.utils.checkpoint with use_reentrant=True do: say use_reentrant=False"
            )
        self._missing[place].discard(parameter)
        while len(self._sent) < len(self._missing) and not self._missing[len(self._sent)]:
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        number = len(self._sent)
        bucket = self._buckets[number]
        parts = [p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in bucket]
        # made on the device: for a copy to it the host would wait
        there, absent = bucket[0].new_ones(1), bucket[0].new_zeros(1)
        flat = torch.cat([*parts, *(absent if p.grad is None else there for p in bucket)])
        for parameter, rows in zip(bucket, _split(flat, bucket), strict=False):
            if parameter.grad is not None:
                parameter.grad = rows.view_as(parameter)
        with waiting(), named_range("all_reduce bucket", number):
            self._sent.append((flat, self._all_reduce(flat, key_of(bucket))))

    def send_rest(self) -> int:
        """Sends what is left. Returns the number of parameters that no pass on this rank has reached."""
        while len(self._sent) < len(self._buckets):
            self._send()
        return sum(parameter.grad is None for parameter in self._place)

    @torch.no_grad()
    def finish(self, are_all_reached: bool) -> None:
        """Waits, and gives the parameters the sums.

        Args:
            are_all_reached: True if each rank has a gradient of each parameter. Otherwise the host reads which have
                any.
        """
        for bucket, (flat, work) in zip(self._buckets, self._sent, strict=True):
            with waiting():
                work.wait()
            if are_all_reached:
                continue
            *sums, present = _split(flat, bucket)
            for parameter, total, is_there in zip(bucket, sums, present.tolist(), strict=True):
                if is_there and parameter.grad is None:
                    parameter.grad = total.view_as(parameter)
        self._missing, self._sent, self.is_under_way = [], [], False

    def close(self) -> None:
        """Removes the hooks."""
        while self._handles:
            self._handles.pop().remove()
        self._ends.clear()


def bucket_sums_of(
    models: Sequence[Sequence[nn.Parameter]], nbytes: int, all_reduce: AllReduce | None
) -> BucketSums | None:
    """Returns the sums that begin in backward. None where that would not help, or a pass reaches one of several models.

    Args:
        models: The parameters of each model, whose gradients are dense.
        nbytes: The size of a bucket.
    """
    trained = [p for model in models for p in model if p.requires_grad and p.numel()]
    small = sum(p.nbytes for p in trained) < LEAST_NBYTES
    if len(models) > 1 or small or all_reduce is None or all_reduce.waits or not all_reduce.exact:
        return None
    return BucketSums(trained, nbytes, all_reduce)


def _split(flat: Tensor, bucket: Sequence[nn.Parameter]) -> tuple[Tensor, ...]:
    """Returns the gradients in a bucket, and the numbers of ranks that have one of each."""
    return torch.split(flat, [*(parameter.numel() for parameter in bucket), len(bucket)])
