"""What makes the result of a sum may run on another stream than the one that the memory is from.

There is no card here: tensors that say they are on one record what is asked of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.futures import Future

from evener.collectives.base import TIMED_EVERY, AllReduce, ChainedWork, Done, Work
from evener.collectives.compress import Half, Int8, TopK
from evener.collectives.executor import executor
from evener.collectives.registry import make
from evener.torch_internals.dispatch import fake_mode

Trace = dict[str, set[int]]


class OnCard(torch.Tensor):
    """A tensor in main memory that claims to be on a card, and tells which memory is used and recorded."""

    trace: Trace | None = None

    @property
    def is_cuda(self) -> bool:
        return True

    def record_stream(self, stream: Any) -> None:
        assert stream == "the callback's"
        assert OnCard.trace is not None
        OnCard.trace["recorded"].add(place(self))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if OnCard.trace is not None and func is not OnCard.is_cuda.fget:
            OnCard.trace["used"] |= {place(each) for each in args if isinstance(each, OnCard)} - OnCard.trace[
                "made"
            ]
            if isinstance(result, OnCard) and place(result) not in OnCard.trace["used"]:
                OnCard.trace["made"].add(place(result))
        return result


def place(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr()


class Later(Work):
    """A sum that is there when its future is told so."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.done = tensor, Future()

    def wait(self) -> None:
        pass

    def future(self) -> Future[Any]:
        return self.done


class Delayed(AllReduce):
    """Sums of one rank, each done when ``land`` is called."""

    name = "delayed"

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Later] = []

    def start(self, tensor: torch.Tensor) -> Work:
        self.works.append(Later(tensor))
        return self.works[-1]

    def land(self) -> None:
        for work in self.works:
            work.done.set_result(None)


def traced(wrap: Callable[[AllReduce], AllReduce], tensor: torch.Tensor, as_future: bool) -> Trace:
    """Which memory was used, and which recorded, while the result was made."""
    inner = Delayed()
    work = wrap(inner)(tensor.as_subclass(OnCard), "key")
    future = work.future() if as_future else None
    OnCard.trace = {"used": set(), "made": set(), "recorded": set()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda device: "the callback's")
        inner.land()
        (future or work).wait()
    trace, OnCard.trace = OnCard.trace, None
    return trace


WRAPPERS: dict[str, Callable[[AllReduce], AllReduce]] = {
    "a copy": lambda inner: inner,
    "fp16": lambda inner: Half(inner, torch.float16),
    "int8": Int8,
    "top-k": TopK,
}


@pytest.mark.parametrize("as_future", [True, False])
@pytest.mark.parametrize("name", WRAPPERS)
def test_memory_is_kept_for_the_stream_that_uses_it(ranks: Any, name: str, as_future: bool) -> None:
    tensor = torch.arange(600.0).view(30, 20).t() if name == "a copy" else torch.arange(600.0)
    (trace,) = ranks(1).run(traced, WRAPPERS[name], tensor, as_future)
    assert trace["used"]
    assert trace["used"] <= trace["recorded"]


class Stream:
    """In place of a card's: says who waited for whom."""

    def __init__(self, device: torch.device) -> None:
        self.waited_for: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited_for.append(other)

    def __eq__(self, other: object) -> bool:
        return other == "the callback's"


@contextlib.contextmanager
def a_card() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "current_stream", lambda device: "the caller's")
        patch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        patch.setattr(executor, "Future", lambda devices: Future())
        yield


def test_the_executor_keeps_the_tensor_for_its_stream(ranks: Any) -> None:
    def summed() -> tuple[list[float], bool, Any]:
        OnCard.trace = {"used": set(), "made": set(), "recorded": set()}
        tensor = torch.ones(5).as_subclass(OnCard)
        with make("ring", timeout_seconds=20) as all_reduce, a_card():
            all_reduce(tensor).wait()
            (stream,) = all_reduce._streams._made.values()
        trace, OnCard.trace = OnCard.trace, None
        return tensor.tolist(), place(tensor) in trace["recorded"], stream.waited_for

    assert ranks(2).run(summed) == [([2.0] * 5, True, ["the caller's"])] * 2


def test_the_result_is_made_once() -> None:
    made = []

    class Summed(Later):
        def future(self) -> Future[Any]:
            self.done.set_result(None)
            return self.done

    def finish() -> torch.Tensor:
        made.append(1)
        return torch.ones(2)

    for calls in (["wait", "wait", "future"], ["future", "wait", "future"]):
        made.clear()
        work = ChainedWork(Summed(torch.ones(2)), finish, ())
        values = [getattr(work, call)() for call in calls]
        assert made == [1]
        assert values[-1].wait().tolist() == [1.0, 1.0]


class Instant(AllReduce):
    """Sums of one rank, each done at once."""

    name = "instant"

    def start(self, tensor: torch.Tensor) -> Work:
        return Done(tensor)


def test_one_call_of_many_is_timed_until_its_sum_is_there(ranks: Any) -> None:
    def timed() -> list[Any]:
        instant, delayed = Instant(), Delayed()
        for _ in range(2 * TIMED_EVERY):
            instant(torch.ones(4)).wait()
            instant(torch.ones(2))
            work = delayed(torch.ones(4))
        later, future = delayed.works[-1], work.future()
        before = delayed.sizes[16].timed
        time.sleep(0.02)
        later.done.set_result(later.tensor)
        value = future.wait()
        work.wait()
        return [vars(instant.sizes[16]), vars(instant.sizes[8]), before, vars(delayed.sizes[16]), value]

    ((of_four, of_two, before, later, value),) = ranks(1).run(timed)
    assert (of_four["calls"], of_four["timed"], of_two["calls"]) == (2 * TIMED_EVERY, 2, 2 * TIMED_EVERY)
    assert 0 < of_four["least"] <= of_four["seconds"] / 2
    assert (before, later["timed"]) == (0, 1), "the first of the two was neither there nor waited for"
    assert later["least"] == later["seconds"] >= 0.02
    assert value.tolist() == [1.0] * 4


def test_a_timed_call_fails_as_any_other(ranks: Any) -> None:
    def failing() -> tuple[str, int]:
        delayed = Delayed()
        for _ in range(TIMED_EVERY):
            future = delayed(torch.ones(4)).future()
        delayed.works[-1].done.set_exception(ValueError("no sum"))
        with pytest.raises(Exception, match="no sum") as raised:
            future.wait()
        return str(raised.value), delayed.sizes[16].timed

    ((words, timed),) = ranks(1).run(failing)
    assert "no sum" in words
    assert timed == 0


def test_a_fake_tensor_of_an_estimate_is_of_no_device_that_could_be_waited_for() -> None:
    """On a machine with a GPU its future would look for memory there."""
    with fake_mode():
        tensor = torch.ones(3, device="cuda")
    assert tensor.is_cuda
    assert Done(tensor).future().wait() is tensor
    assert ChainedWork(Done(tensor), lambda: tensor, (tensor,)).future().wait() is tensor
