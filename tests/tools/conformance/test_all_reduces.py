"""The battery finds every broken promise, and names it and the input, on all ranks together."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future

from evener.collectives.base import AllReduce, Done, Work
from evener.collectives.native import Native
from evener.errors import ConfigurationError, EvenerError
from evener.testing import ConformanceError, check_all_reduce
from evener.tools.conformance import all_reduces
from tests.distributed.processes import call
from tests.tiers import NIGHTLY

DTYPES = [torch.float32]


class Gloo(AllReduce):
    """Right in everything; those below each break one promise."""

    name = "gloo"

    def start(self, tensor: torch.Tensor) -> Work:
        dist.all_reduce(tensor, group=self.group)
        return Done(tensor)


class Averages(Gloo):
    def start(self, tensor: torch.Tensor) -> Work:
        super().start(tensor)
        return Done(tensor.div_(self.world_size))


class LosesTheLastOfMany(Gloo):
    def start(self, tensor: torch.Tensor) -> Work:
        mine = tensor.view(-1)[-1:].clone()
        super().start(tensor)
        if tensor.numel() > 1_000_000:
            tensor.view(-1)[-1:] = mine
        return Done(tensor)


class FailsWithoutElements(Gloo):
    def start(self, tensor: torch.Tensor) -> Work:
        tensor[0]
        return super().start(tensor)


class AddsInAnotherOrderOnEachRank(Gloo):
    def start(self, tensor: torch.Tensor) -> Work:
        terms = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(terms, tensor, group=self.group)
        tensor.zero_()
        for step in range(self.world_size):
            tensor += terms[(self.rank + step) % self.world_size]
        return Done(tensor)


class SumsWhenWaitedFor(Gloo):
    """So the calls are carried out in the order of the waits."""

    def start(self, tensor: torch.Tensor) -> Work:
        return Late(self, tensor)


class Late(Work):
    def __init__(self, all_reduce: Gloo, tensor: torch.Tensor) -> None:
        self.all_reduce, self.tensor, self.done = all_reduce, tensor, False

    def wait(self) -> None:
        if not self.done:
            dist.all_reduce(self.tensor, group=self.all_reduce.group)
        self.done = True

    def future(self) -> Future[torch.Tensor]:
        future: Future[torch.Tensor] = Future()
        future.set_result(self.tensor.clone())
        return future


class IgnoresStrides(Gloo):
    def __call__(self, tensor: torch.Tensor, key: Any = None, *, lasting: bool = False) -> Work:
        return self.start(tensor.contiguous()) if tensor.layout is torch.strided else super().__call__(tensor)


class ClosesOnce(Gloo):
    def close(self) -> None:
        del self.world_size


class FailsAlone(Gloo):
    def start(self, tensor: torch.Tensor) -> Work:
        assert self.world_size > 1, "there is nobody to send to"
        return super().start(tensor)


class SaysNotWho(Native):
    """Gloo's own error, once its group's time is over."""

    def start(self, tensor: torch.Tensor) -> Work:
        try:
            dist.all_reduce(tensor, group=self.group)
        except RuntimeError as error:
            raise EvenerError("somebody is missing") from error
        return Done(tensor)


class RaisesOnRankOne(Gloo):
    """After the first call, so that the others wait for it in the second."""

    calls = 0

    def start(self, tensor: torch.Tensor) -> Work:
        self.calls += 1
        if self.world_size > 1 and self.rank == 1 and self.calls == 2:
            raise KeyError("no luck")
        return super().start(tensor)


class CannotBeMadeOnRankOne(Gloo):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        if self.world_size > 1 and self.rank == 1:
            raise ConfigurationError("no such cable")


class FailsToCloseOnRankOne(Gloo):
    closed = False

    def close(self) -> None:
        if self.world_size > 1 and self.rank == 1:
            raise OSError("the cable is stuck")


class NeverComesBack(Gloo):
    """Not on rank 1, and not before the others have given up."""

    def start(self, tensor: torch.Tensor) -> Work:
        if self.world_size > 1 and self.rank == 1:
            time.sleep(5)
        return super().start(tensor)


BROKEN = [
    (Averages, "the sum over the ranks", "1 x torch.float32: 1 elements are wrong, the first at 0"),
    (LosesTheLastOfMany, "the sum over the ranks", "1500007 x torch.float32: 1 elements are wrong"),
    (FailsWithoutElements, "the sum over the ranks", "dimension 0 with size 0, with 0 x torch.float32"),
    (AddsInAnotherOrderOnEachRank, "the same bits", "digests"),
    (SumsWhenWaitedFor, "in the order", "the future's value"),
    (IgnoresStrides, "of any strides", "a transposed matrix: 30 elements are wrong"),
    (ClosesOnce, "closing twice", "AttributeError"),
    (FailsAlone, "one rank alone", "there is nobody to send to"),
]


def found(
    kind: type[AllReduce],
    missing_rank: bool = False,
    timeout_seconds: float = 20,
    error: type[EvenerError] = ConformanceError,
) -> str:
    with pytest.raises(error) as raised:
        check_all_reduce(kind, dtypes=DTYPES, timeout_seconds=timeout_seconds, missing_rank=missing_rank)
    dist.barrier()  # the ranks' own group goes on working
    return str(raised.value)


def test_what_is_right_passes(ranks: Any) -> None:
    ranks(3).run(check_all_reduce, Gloo, dtypes=DTYPES, missing_rank=False)


@pytest.mark.parametrize(
    ("kind", "promise", "seen"), BROKEN, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_broken_promise_is_named_on_all_ranks(ranks: Any, kind: Any, promise: str, seen: str) -> None:
    for message in ranks(3).run(found, kind):
        assert message.startswith(f"{kind.__name__} breaks its promise: ")
        assert promise in message
        assert seen in message


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        pytest.param(SaysNotWho, "EvenerError says: somebody is missing", marks=NIGHTLY),
        (Gloo, "(RuntimeError|DistBackendError) says: .*"),
    ],
    ids=["an error of Evener", "the backend's own"],
)
def test_an_error_that_does_not_say_who_is_missing(ranks: Any, kind: Any, says: str) -> None:
    messages = ranks(2).run(found, kind, missing_rank=True)
    assert messages[0] == messages[1]
    assert re.search(f"On rank 0 of 2: rank 1 did not come, and {says}", messages[0]), messages[0]


@pytest.mark.parametrize(
    ("kind", "error", "seen"),
    [
        (
            RaisesOnRankOne,
            ConformanceError,
            "the sum over the ranks, for every dtype and size. On rank 1 of 2: it raised KeyError: 'no luck', "
            "with 1 x torch.float32",
        ),
        (
            CannotBeMadeOnRankOne,
            ConfigurationError,
            "On rank 1 of 2: it raised ConfigurationError: all-reduce 'CannotBeMadeOnRankOne': no such cable",
        ),
        (FailsToCloseOnRankOne, ConformanceError, "On rank 1 of 2: it raised OSError: the cable is stuck"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_one_rank_raises_all_ranks_say(ranks: Any, kind: Any, error: Any, seen: str) -> None:
    """Those that wait for it end by the timeout that was given, not by that of the ranks' own group."""
    messages = ranks(2).run(found, kind, timeout_seconds=3, error=error)
    assert messages[0] == messages[1]
    assert messages[0].endswith(seen), messages[0]


def hanging() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_reduces, "BACKSTOP_SECONDS", 1.0)
        with pytest.raises(ConformanceError) as raised:
            check_all_reduce(NeverComesBack, dtypes=DTYPES, timeout_seconds=0.5, missing_rank=False)
    return str(raised.value)


@pytest.mark.slow
def test_a_rank_that_does_not_end_the_trial_is_named(ranks: Any) -> None:
    message = ranks(2).run(hanging)[0]
    assert "On rank 0: it raised" in message
    assert "ended without rank 1" in message


@pytest.mark.slow
def test_ranks_are_started_where_there_are_none() -> None:
    with pytest.raises(ConformanceError, match="Averages breaks its promise: the tensor is the sum over"):
        call(check_all_reduce, Averages, processes=2, dtypes=DTYPES, missing_rank=False)


def test_one_rank_is_too_few() -> None:
    with pytest.raises(ConfigurationError, match="at least two ranks, not 1"):
        check_all_reduce("ring", processes=1)


def test_one_rank_of_a_group_is_too_few(ranks: Any) -> None:
    def refused() -> str:
        with pytest.raises(ConfigurationError) as raised:
            check_all_reduce("ring")
        return str(raised.value)

    assert ranks(1).run(refused) == ["an all-reduce is tried on at least two ranks, not 1"]
