"""Loops on a device that runs behind the host, where numbers of a step are known later. Played by a CPU here."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import evener
from evener.components import gradients
from evener.core.losses import torch_losses
from evener.distributed import session
from evener.errors import DivergenceError, EvenerError
from evener.hardware import async_read
from evener.training.prepare import late_checks, zero_loss
from evener.training.prepare.first_calls import FirstCalls
from evener.training.prepare.replicas import LoopReplicas
from tests.ids import placeless
from tests.tiers import ALWAYS, SLOW, crossed, spread
from tests.training.prepare import test_kinds_of_loss as kinds
from tests.training.prepare import test_losses_of_a_loop as of_a_loop
from tests.training.prepare import (
    test_prepare,
    test_refused_passes,
    test_refused_steps,
    test_silent_errors,
    test_strategies,
)
from tests.training.prepare import test_refused_losses as refused_losses
from tests.training.prepare.running import (
    Loop,
    Weights,
    divided,
    model_of,
    prepared,
    rows,
    said,
    sgd,
    with_settings,
)
from tests.training.prepare.test_strategies import TENSOR, ZERO1, ZERO3

LOOPS = (
    test_prepare.plainly,
    test_prepare.accumulating,
    test_prepare.with_a_closure,
    test_prepare.with_a_scaler,
    test_prepare.two_losses_of_a_batch,
    test_prepare.evaluating_within,
    test_silent_errors.against_an_adversary,
    test_silent_errors.weighing_by_uncertainty,
    test_strategies.clipping,
)


@contextmanager
def lateness() -> Iterator[None]:
    """The CPU is a device that runs behind the host."""
    with ExitStack() as stack:
        for module in (session, gradients, late_checks, zero_loss):
            stack.enter_context(patch.object(module, "is_late", lambda device: True))
        stack.enter_context(patch.object(torch_losses, "_has_all", lambda targets: False))  # looks at a CPU's
        yield


def late(loop: Callable[..., Any], *given: Any, **settings: Any) -> Any:
    with lateness():
        return prepared(loop, *given, **settings)


@pytest.mark.parametrize(("loop", "balance"), divided(((each.__name__, (each,)) for each in LOOPS), ("3,1",)))
def test_it_is_the_loop_of_one_device(ranks: Any, loop: Callable[[bool], Weights], balance: str) -> None:
    expected = loop(False)
    for found in ranks(2).run(late, loop, balance=balance):
        test_strategies.check(found, expected)


def of_any_kind(loss: Any, step: kinds.Step, balance: str) -> Any:
    with lateness():
        return kinds.together(loss, step, balance)


@pytest.mark.parametrize(
    ("loss", "step", "balance"),
    spread(
        divided(
            (
                *((each.__name__, (each, kinds.of_words)) for each in kinds.FUNCTIONS),
                *((f"{n}-{each[1].__name__}", each) for n, each in enumerate(kinds.KINDS)),
                *((each.__name__, (kinds.words, each)) for each in of_a_loop.OF_THE_LOOP),
            ),
            ("0,1",),
        ),
        *(ALWAYS, SLOW),
    ),
)
def test_a_loss_of_any_kind_is_that_of_one_device(
    ranks: Any, loss: Any, step: kinds.Step, balance: str
) -> None:
    with patch.object(kinds, "together", of_any_kind):
        kinds.check(ranks, loss, step, balance)


# Waits


class Reads(TorchDispatchMode):
    """Records who asks a tensor for a number of the step at hand, which on such a device stops the host."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.found = 0, list[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            self.found.append(f"step {self.step}: {_asking()}")
        return function(*args, **(kwargs or {}))

    def reader(self, numbers: Tensor) -> Any:
        """A readout, whose numbers may be asked for from the next step on."""
        return _Readout(self, numbers.clone())


class _Readout:
    def __init__(self, reads: Reads, numbers: Tensor) -> None:
        self._reads, self._step, self.tensor = reads, reads.step, numbers

    def values(self) -> list[float]:
        if self._step == self._reads.step:
            self._reads.found.append(f"step {self._step}: {_asking()}")
        values: list[float] = self.tensor.flatten().tolist()
        return values

    def value(self) -> float:
        return self.values()[0]


def _asking() -> str:
    """The line of Evener, or of a test, that asks."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not re.search(r"/(evener/(?!hardware)|tests/)", frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "?"


def one(loop: Loop, x: Tensor, y: Tensor, _: int) -> Tensor:
    return loop.backward(x, y)


def clipped(loop: Loop, x: Tensor, y: Tensor, _: int) -> Tensor:
    loss = loop.backward(x, y)
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3)
    return loss


def delayed(loop: Loop, x: Tensor, y: Tensor, step: int) -> Tensor:
    """Every other gradient stays with its rank until the next."""
    with nullcontext() if step % 2 else evener.no_sync():
        return (loop.loss(loop.model(x), y) / 2).backward() or loop.loss(loop.model(x), y).detach()


def scaled(loop: Loop, x: Tensor, y: Tensor, _: int) -> Tensor:
    """As a GradScaler does, whose own look at what has overflowed is left out."""
    scale = torch.full((), 1024.0)
    loss = loop.loss(loop.model(x), y)
    (loss * scale).backward()
    for p in loop.model.parameters():
        if p.grad is not None:
            p.grad.mul_(1 / 1024)
    return loss


def twice(loop: Loop, x: Tensor, y: Tensor, _: int) -> Tensor:
    outputs = loop.model(x)
    loss = loop.loss(outputs, y) + 0.5 * loop.loss(outputs * 2, y)
    loss.backward(retain_graph=True)
    (0.1 * loss).backward()
    return loss


def counting(loop: Loop, x: Tensor, y: Tensor, _: int) -> Tensor:
    """A mean over what a device counts, and another of the same batch without a gradient."""
    each = F.cross_entropy(loop.model(x), y, reduction="none")
    kept = y != 1
    loss: Tensor = evener.global_mean((each * kept).sum() / kept.sum(), kept.sum())
    loss.backward()
    with torch.no_grad():
        loop.loss(loop.model(x), y)
    return loss


PASSES = {each.__name__: each for each in (one, clipped, delayed, scaled, twice, counting)}


def tried_in_the_first_step(loop: Loop, x: Tensor, y: Tensor, _: int) -> Tensor:
    """Functions that are sums over all ranks, and one that each rank computes from the rows of all."""
    loss: Tensor = evener.global_mean(masked, loop.model(x), y) + evener.global_mean(alike, loop.model(x), y)
    loss.backward()
    return loss


def masked(o: Tensor, y: Tensor) -> Tensor:
    each, kept = F.cross_entropy(o, y, reduction="none"), (y != 1) + 0.5
    return (each * kept).sum() / kept.sum() + o.detach().abs().max() * 0


def alike(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o @ o.T, torch.arange(len(o)))


def read_in(_: bool, run: Callable[..., Tensor]) -> list[str]:
    """Who reads what in five steps of a loop."""
    reads = Reads()
    with (
        patch.dict(async_read.READERS, cpu=reads.reader),
        patch.object(LoopReplicas, "own_row", lambda *_: (0.0, 0.0, 0.0)),  # rare, and waits
        patch.object(FirstCalls, "try_samples", lambda *_: None),  # waits in the first call
    ):
        loop = Loop(True, sgd)
        total, batches = torch.zeros((), dtype=torch.float64), iter(loop.loader)
        x, y = next(batches)  # begins the pass, with random numbers of the host
        with reads:
            for reads.step in range(5):
                loss = run(loop, x, y, reads.step)
                total += loss.detach()
                torch.isfinite(loss)
                if run is not delayed or reads.step % 2:
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
                if reads.step < 4:
                    x, y = next(batches)
    hosts = (
        "exchange_order.py",
        "hosts.py",
    )  # once, in FSDP2's first pass; and the lengths of objects for other hosts
    return [each for each in reads.found if not any(host in each for host in hosts)]


WAYS: dict[str, Any] = {"ddp": {}, "zero1": ZERO1, "zero3": ZERO3}


@pytest.mark.parametrize(("run", "way"), crossed(PASSES, [*WAYS], lambda _: (ALWAYS, SLOW, SLOW)))
def test_no_step_reads_a_number_of_its_own(ranks: Any, run: str, way: str) -> None:
    assert ranks(2).run(late, read_in, PASSES[run], **WAYS[way]) == [[], []]


def test_a_function_is_waited_for_when_it_is_tried(ranks: Any) -> None:
    for found in ranks(2).run(late, read_in, tried_in_the_first_step):
        assert {each.partition(":")[0] for each in found} == {"step 0"}


def test_a_step_that_reads_is_found_out(ranks: Any) -> None:
    for found in ranks(2).run(prepared, read_in, one):
        assert {each.partition(":")[0] for each in found} == {f"step {number}" for number in range(5)}


# Errors


def told(loop: Callable[[bool], Any], balance: str = "3,1") -> str:
    with lateness():
        return said(loop, balance=balance)


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (
            test_refused_passes.a_term_of_samples,
            r"backward was called on \S+ on rank 0 and on \S+ on rank 1 in step 0, and goes with the number",
        ),
        (
            test_refused_passes.a_factor_with_the_same_value,
            r"prepared losses count 0\.\S+ times on rank 0 and 0\.\S+ times on rank 1 in step 0: what",
        ),
        (
            test_refused_steps.with_the_plain_loss,
            r"backward was called on 1.\d+ on rank 0 and on 1.\d+ on rank 1 in",
        ),
        (
            test_refused_steps.a_loss_that_is_not_finite,
            "DivergenceError: the loss is nan in step 2 on rank 1, and the",
        ),
        (
            test_refused_steps.a_loss_on_one_rank_alone,
            "different places of the loop: rank 0 in the loss, rank 1 in",
        ),
        (test_refused_steps.shuffling_apart, "the ranks are not working on the same batch"),
    ],
    ids=placeless,
)
def test_what_is_wrong_is_told(ranks: Any, loop: Any, words: str) -> None:
    for message in ranks(2).run(told, loop):
        assert re.search(words, message), message


def told_of_a_loss(loss: Any, step: kinds.Step, balance: str) -> str:
    with lateness():
        return refused_losses.refusal(loss, step, balance)


def by_own_samples(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    """Their number is on the device."""
    count = torch.full((), float(len(batch[0])), dtype=torch.float64)
    found: Tensor = loss(model(batch[0]).flatten(0, 1), batch[1].flatten()) / count
    return found


def with_a_number_of_its_own(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    """In every batch but the first."""
    own = torch.full(
        (), 1.0 + evener.rank() * bool(evener.batch_size() and model.norm.num_batches_tracked >= 1)
    )
    found: Tensor = loss(model(batch[0]), batch[1], own)
    return found


def hardest_times(o: Tensor, y: Tensor, factor: Tensor) -> Tensor:
    return kinds.hardest(o, y) * factor.detach()


def words_times(o: Tensor, y: Tensor, factor: Tensor) -> Tensor:
    return kinds.words(o, y) * factor.detach()


WORDS_OF_A_SUM = "is a sum over the samples of all ranks, and is divided by 3.*, which is how many rank"


@pytest.mark.parametrize(
    ("loss", "step", "balance", "words"),
    [
        *refused_losses.REFUSED,
        (nn.CrossEntropyLoss(reduction="sum"), by_own_samples, "equal", f"{WORDS_OF_A_SUM}"),
        (
            hardest_times,
            with_a_number_of_its_own,
            "2,1",
            "in step 1 with something that is no row of samples",
        ),
    ],
    ids=lambda value: placeless(value) if callable(value) else "",
)
def test_what_is_wrong_with_a_loss_is_told(
    ranks: Any, loss: Any, step: kinds.Step, balance: str, words: str
) -> None:
    for message in ranks(2).run(told_of_a_loss, loss, step, balance):
        assert re.search(words, message), message


def times_own(balance: str) -> list[str]:
    with lateness():
        return refused_losses.epoch_sum(balance)


def test_a_mean_times_the_samples_of_one_rank_is_told(ranks: Any) -> None:
    for texts in ranks(2).run(times_own, "2,1"):
        assert any("multiplied by" in each and "evener.batch_size()" in each for each in texts), texts


def last(_: bool, then: str, directory: str) -> str:
    """What is told of the last step, of which another never comes."""
    loop = Loop(True, sgd, shuffle=False)
    try:
        for step, (x, y) in enumerate(loop.loader):
            is_last = step == 4
            loss = loop.loss(loop.model(x) * (math.nan if is_last and then == "nan" else 1.0), y)
            (loss + x.mean() * (is_last and then != "nan")).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            if is_last and then == "save":
                evener.save(f"{directory}/file", model=loop.model)
    except EvenerError as error:
        return f"step {step}: {error}"
    return "nothing"


@pytest.mark.parametrize("then", ["save", "end", "nan"])
@pytest.mark.parametrize("settings", [{}, ZERO3], ids=["ddp", "zero3"])
def test_the_last_step_is_told_at_the_end_and_before_it_is_saved(
    ranks: Any, tmp_path: Any, then: str, settings: Any
) -> None:
    words = (
        "step 4: the loss is nan in step 4"
        if then == "nan"
        else "step 4: backward was called on .* in step 4"
    )
    for message in ranks(2).run(late, last, then, str(tmp_path), **settings):
        assert re.match(words, message), message
    assert not (tmp_path / "file").exists()


def going_on_after_an_error(_: bool, directory: str) -> Weights:
    """From a file, when a loss was no number: what is left of the bad steps is not told of the good ones."""
    loop = Loop(True, sgd)
    path = f"{directory}/file"
    evener.save(path, model=loop.model, optimizer=loop.optimizer, loader=loop.loader)
    for factor in (math.nan, 1.0):
        try:
            for x, y in loop.loader:
                loop.optimizer.zero_grad()
                loop.loss(loop.model(x) * factor, y).backward()
                loop.optimizer.step()
        except DivergenceError:
            assert math.isnan(factor)
            evener.load(path, model=loop.model, optimizer=loop.optimizer, loader=loop.loader)
    return loop.weights()


def test_a_loop_that_goes_back_goes_on(ranks: Any, tmp_path: Any) -> None:
    expected = test_prepare.plainly(False)
    for found in ranks(2).run(late, going_on_after_an_error, str(tmp_path)):
        test_strategies.check(found, expected)


def alone() -> list[str]:
    """What one device reads in a step, and what it tells of a loss that is no number."""
    found = late(read_in, one)
    with lateness(), with_settings():
        loop = Loop(True)
        try:
            for x, y in itertools.islice(loop.loader, 3):
                loop.backward(x * math.nan, y)
                loop.optimizer.step()
        except DivergenceError as error:
            found.append(str(error))
    return found


def test_one_device_waits_for_nothing_either() -> None:
    (message,) = alone()
    assert "the loss is nan in step 0 on rank 0" in message


def timed(_: bool) -> list[tuple[int, int]]:
    """The steps whose times the balancer is told, and how many were drawn until then."""
    torch.manual_seed(4)
    model, loader, loss = evener.prepare(model_of(), DataLoader(rows(), batch_size=6), F.cross_entropy)
    told, taken = list[tuple[int, int]](), 0
    loader.balancer.observe = lambda step, shares, seconds: told.append((step, taken))
    for _ in range(2):
        for x, y in loader:
            loss(model(x), y).backward()
            taken += 1
    return told


def test_times_of_a_batch_are_told_with_the_next_one(ranks: Any) -> None:
    for told in ranks(2).run(late, timed):
        assert told == [(step, step + 2) for step in range(9)]
    for told in ranks(2).run(prepared, timed):
        assert told == [(step, step + 1) for step in range(10)]


def unsound(_: bool, then: str) -> list[str]:
    """What is told of gradients that are not finite in the second step."""
    loop, said = Loop(True, sgd), list[str]()
    try:
        for step, (x, y) in enumerate(loop.loader):
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            if step == 1:
                dict(loop.model.named_parameters())["2.weight"].grad.mul_(torch.inf)
            said.append(f"step {step}")
            loop.optimizer.step()
            if step == 1 and then == "save":
                evener.save("/dev/null/nothing", model=loop.model)
    except DivergenceError as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize("settings", [{}, TENSOR, ZERO3], ids=["ddp", "tensor", "zero3"])
@pytest.mark.parametrize("then", ["save", "go on"])
def test_unsound_gradients_are_told_before_they_are_saved(ranks: Any, settings: Any, then: str) -> None:
    words = "the gradient of 2.weight is not finite before the update of step 1: the run stops here"
    for texts in ranks(2).run(late, unsound, then, **settings):
        assert texts[:2] == ["step 0", "step 1"]
        assert len(texts) == 3 or (then == "go on" and texts[2:-1] == ["step 2"])
        assert words in texts[-1]
