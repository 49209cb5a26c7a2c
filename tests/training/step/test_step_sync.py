"""The books of a run on a device that runs behind the host, kept over fakes and over CPU ranks that say they do."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener.core.losses import SumLoss
from evener.core.task.task import Task
from evener.data.batch import Batch, MicroBatch
from evener.distributed.control_channel import Pending, Rows
from evener.distributed.mesh import Layout, Mesh
from evener.errors import DivergenceError, RankError
from evener.hardware.async_read import READERS, DeferredValue, Readout, ReadyValue
from evener.strategies.interfaces import StepOutcome
from evener.training.engine import Engine
from evener.training.step.oom_report import noticed
from evener.training.step.step import RankStats, Step
from evener.training.step.step_sync import StepSync
from tests.observers import Remembering

META = torch.device("meta")
DIVISION = RankStats._fields.index("division")
LOSS = SumLoss(count=len, total=lambda outputs, targets: outputs.sum())


class Exchange:
    def __init__(self) -> None:
        self.happened: list[str] = []
        self.rows: list[list[float]] = []

    def exchange(self, values: Sequence[float]) -> Rows:
        self.happened.append("posted")
        self.rows.append(list(values))
        return Pending(lambda: self.read(list(values)))

    def read(self, row: list[float]) -> list[list[float]]:
        """A row of two ranks, of which the second says ten times what the first says, and divides alike."""
        self.happened.append("read")
        other = [10 * value for value in row]
        if len(other) > 1:
            other[DIVISION] = row[DIVISION]
        return [row, other]

    @property
    def signals(self) -> list[RankStats]:
        return [RankStats(*row[: len(RankStats._fields)]) for row in self.rows if len(row) > 1]


class Totals:
    """A reader of the meta device, which gives the n-th thing that is read the n-th of the given numbers."""

    def __init__(self, *numbers: list[float]) -> None:
        self.numbers = list(numbers)
        self.asked = 0

    def __call__(self, tensor: Tensor) -> Readout:
        return Number(self, tensor, self.numbers.pop(0))


class Number:
    def __init__(self, totals: Totals, tensor: Tensor, numbers: list[float]) -> None:
        self._totals, self.tensor, self._numbers = totals, tensor, numbers

    def value(self) -> float:
        raise AssertionError("the host waits for a number of this rank")

    def values(self) -> list[float]:
        self._totals.asked += 1
        return self._numbers


class Books:
    """A late StepSync of rank 0 of two, and what is to be known of each step."""

    def __init__(self, rows: Sequence[list[float]]) -> None:
        self.exchange, self.observed = Exchange(), list[Step]()
        self.totals = Totals(*rows)
        mesh = Mesh(Layout({"data": 2}), 0, None, 1.0, timedelta(seconds=1))
        self.step_sync = StepSync(self.exchange, mesh, META, lambda: LOSS, self.observed.append)
        self.steps: list[Step] = []
        self.timed: list[int] = []
        """The steps whose time has been read."""

    def step(self, **outcome: Any) -> Step:
        """What an engine does with it in a step."""
        number = len(self.steps)
        step = Step(batch(number), number, self.step_sync.settle)
        upcoming = self.step_sync.count(batch(number + 1))
        self.step_sync.divisor(step)
        known = StepOutcome((self._device_number(),), (), False, DeferredValue(lambda: self._seconds(number)))
        elapsed = DeferredValue(lambda: number + 1.5)
        self.step_sync.post(step, replace(known, **outcome), batch(number + 1), upcoming, elapsed, 0.25)
        step.seconds = 1.0
        self.steps.append(step)
        return step

    def _seconds(self, number: int) -> float:
        self.timed.append(number)
        return number + 1.0

    def _device_number(self) -> Readout:
        return Number(self.totals, torch.empty((), device=META), [])


def batch(number: int) -> Batch:
    """Two samples on this rank's device, of four; counted on the host."""
    micro = MicroBatch(torch.ones(2), torch.arange(2), torch.arange(2))
    return Batch(0, number, 4 * number, 4, (2, 2), [micro], False).to(META)


@pytest.fixture
def registered() -> Iterator[None]:
    with mock.patch.dict(READERS):
        yield


def books(*rows: list[float]) -> Books:
    found = Books(rows or [[1.0, 0.0, 0.0, 3.0, 0.0, 0.0]] * 9)
    READERS["meta"] = found.totals
    return found


@pytest.mark.usefixtures("registered")
def test_times_travel_with_the_row_of_the_next_step() -> None:
    one = books()
    for _ in range(4):
        one.step()
    assert [s.compute_seconds for s in one.exchange.signals] == pytest.approx(
        [math.nan, 1, 2, 3], nan_ok=True
    )
    assert [s.wait_seconds for s in one.exchange.signals] == pytest.approx(
        [math.nan, 0.5, 0.5, 0.5], nan_ok=True
    )
    assert one.timed == [0, 1, 2], "the time of the step that was queued last is not read"
    assert [step.number for step in one.observed] == [0, 1]
    assert one.observed[1].compute_seconds == (2, 20)
    assert one.step_sync.steps_late == 2


@pytest.mark.usefixtures("registered")
def test_a_row_is_read_after_the_next_forward_pass_and_the_first_at_once() -> None:
    one = books()
    for _ in range(3):
        one.step()
    first = ["posted", "read", "posted", "read"]  # the count of the first batch, the first row
    assert one.exchange.happened == [*first, "posted", "read", "posted"]
    assert [signal.next_count for signal in one.exchange.signals] == [2, 2, 2]
    assert [step.count for step in one.steps] == [22, 22, 22]


@pytest.mark.usefixtures("registered")
def test_totals_are_read_when_they_are_asked_for_and_by_one_rank_alone() -> None:
    one = books([6.0, 0.0, 0.0, 5.0, 0.0, 0.0], [8.0, 0.0, 0.0, 3.0, 0.0, 0.0])
    first, second = one.step(), one.step()
    happened = list(one.exchange.happened)
    assert one.totals.asked == 0
    assert second.loss == pytest.approx(11 / 22)
    assert first.total == 11
    assert one.totals.asked == 2
    assert one.exchange.happened == happened, "nobody else has to take part"


@pytest.mark.usefixtures("registered")
def test_the_end_tells_the_last_step_too() -> None:
    one = books()
    for _ in range(3):
        one.step()
    assert [step.number for step in one.step_sync.told()] == [0]
    one.step_sync.finish()
    told = list(one.step_sync.told())
    assert [step.number for step in told] == [1, 2]
    assert told[-1].compute_seconds == (3, 30)
    assert told[-1].input_seconds == (0.25, 2.5)
    posted = len(one.exchange.rows)
    one.step_sync.finish()
    assert len(one.exchange.rows) == posted
    assert list(one.step_sync.told()) == []


@pytest.mark.usefixtures("registered")
def test_steps_may_follow_what_looked_like_the_end() -> None:
    one = books()
    one.step()
    one.step_sync.finish()
    one.step()
    one.step()
    one.step_sync.finish()
    assert [step.number for step in one.observed] == [0, 1, 2]
    assert [step.compute_seconds[0] for step in one.observed] == [1, 2, 3]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_first_step_that_went_wrong_is_named_whatever_came_of_it(steps: int) -> None:
    """A gradient of rank 1 in the step, and after its update the losses of all."""
    later = [[math.nan] * 6] * 2
    one = books([1.0, 0.0, 0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0, math.inf, 0.0], *later)
    for _ in range(1 + steps):
        one.step()
    with pytest.raises(DivergenceError, match="a gradient is not finite in step 1 on rank 1"):
        one.step_sync.check()


@pytest.mark.usefixtures("registered")
def test_a_step_that_went_wrong_is_not_told() -> None:
    one = books([math.nan, 0.0, 0.0, 1.0, 0.0, 0.0], *[[1.0, 0.0, 0.0, 1.0, 0.0, 0.0]] * 2)
    for _ in range(3):
        one.step()
    with pytest.raises(DivergenceError, match="the loss is nan in step 0 on rank 0"):
        list(one.step_sync.told())


@pytest.mark.usefixtures("registered")
def test_what_is_missing_on_all_ranks_is_known_before_the_update() -> None:
    one = books()
    one.step()
    step = Step(batch(1), 1, one.step_sync.settle)
    one.step_sync.divisor(step)
    missing = StepOutcome((), ("head.weight",), False, ReadyValue(0.5))
    with mock.patch.object(Exchange, "read", lambda self, row: [row, row]):
        assert list(one.step_sync.post(step, missing, None, [], ReadyValue(1.0), 0.0)) == ["head.weight"]


def test_numbers_of_any_shape_and_of_the_host_travel_too() -> None:
    """A total may have one element and any number of dimensions; a stage without a loss gives a number."""
    with mock.patch("evener.training.step.step_sync.is_late", return_value=True):
        mesh = Mesh(Layout({"data": 1}), 0, None, 1.0, timedelta(seconds=1))
        step_sync = StepSync(Exchange(), mesh, torch.device("cpu"), lambda: LOSS, lambda step: None)
    step = Step(batch(0), 0, step_sync.settle)
    outcome = StepOutcome(
        (
            ReadyValue(torch.tensor([[1.5]])),
            ReadyValue(torch.tensor(2.0, dtype=torch.bfloat16)),
            ReadyValue(1 / 3),
        ),
        (),
        False,
        ReadyValue(0.5),
        soundness=(ReadyValue(torch.tensor([math.inf])),),
    )
    step_sync.post(step, outcome, None, [], ReadyValue(1.0), 0.0)
    assert step.total == 1.5 + 2.0 + 1 / 3
    assert step.results is not None
    assert step.results().gradient == (0, 0.0)


# An engine on CPU ranks that say they were a GPU's


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, marks: Tensor) -> Tensor:
        ctx.save_for_backward(marks)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (marks,) = ctx.saved_tensors
        return gradient.masked_fill(marks[:, None] > 99, math.inf), None


class Brittle(nn.Module):
    """A sample that begins with 100 has a gradient that is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = Breaks.apply(self.inner(x.clamp(max=1)), x[:, 0])
        scores: Tensor = self.outer(hidden)
        return scores


def brittle(bad: int | None) -> Task:
    data = torch.randn(40, 3, generator=torch.Generator().manual_seed(3))
    if bad is not None:
        data[bad, 0] = 100.0
    return Task(
        model=Brittle,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        train=TensorDataset(data, torch.arange(40) % 2),
        batch_size=8,
        epochs=2,
    )


@contextmanager
def told_late(late: bool) -> Iterator[None]:
    """If ``late``, the numbers of a CPU are told as those of a device that runs behind the host."""
    rooms = "training.step.step_sync", "strategies.ddp", "components.gradients"
    with ExitStack() as stack:
        for room in rooms:
            stack.enter_context(mock.patch(f"evener.{room}.is_late", return_value=late))
        yield


def train(late: bool) -> tuple[list[float], list[tuple[int, float]], float]:
    """Losses as rank 0 asks for them, what observers are told, and the sum of the weights."""
    told, losses = Remembering(), []
    with told_late(late):
        engine = Engine(brittle(None), strategy="ddp", device="cpu", dtype="float64", observers=[told])
        with engine:
            for at in engine.batches():
                step = engine.step(at)
                if engine.session.rank == 0:
                    losses.append(step.loss)
            weights = sum(float(p.sum()) for p in engine.model.parameters())
    return losses, [(record.step, record.loss) for record in told.steps], weights


def test_a_late_device_trains_and_tells_the_same(ranks: Any) -> None:
    prompt, late = ranks(2).run(train, late=False), ranks(2).run(train, late=True)
    assert late[0] == prompt[0]
    assert [told for _, told, _ in late] == [told for _, told, _ in prompt]
    assert len(late[1][1]) == 10


def told_in_order(late: bool) -> list[str]:
    """What observers hear of a run with an evaluation at the end of each epoch, in short."""
    told, task = Remembering(), brittle(None)
    with told_late(late):
        engine = Engine(replace(task, evaluate=task.train), strategy="ddp", device="cpu", observers=[told])
        with engine:
            for at in engine.batches():
                engine.step(at)
                if at.last:
                    engine.evaluate()
    return [f"{kind} {record.step}" for kind, record in told.told if kind in ("step", "evaluation")]


def test_an_evaluation_is_told_after_the_steps_before_it(ranks: Any) -> None:
    prompt, late = ranks(2).run(told_in_order, False)[0], ranks(2).run(told_in_order, True)[0]
    assert late == prompt
    assert late[:6] == [*(f"step {number}" for number in range(5)), "evaluation 5"]


def stopped(
    late: bool, saves: bool, directory: str, strategy: str = "ddp"
) -> tuple[str, tuple[int, int] | None, int]:
    """What the rank says of a step that went wrong, the step and rank if the bad sample was here, and saves before."""
    where, done = None, 0
    with told_late(late):
        engine = Engine(brittle(23), strategy=strategy, device="cpu")
        try:
            with engine:
                for at in engine.batches():
                    if any(micro.weight and (micro.inputs > 99).any() for micro in at.micro_batches):
                        where = engine.steps_done, engine.session.rank
                    engine.step(at)
                    if saves:
                        engine.save(Path(directory))
                        done += 1
        except DivergenceError as error:
            return str(error), where, done
    return "", where, done


@pytest.mark.parametrize("saves", [True, False])
def test_a_bad_gradient_of_a_late_device_is_found_before_anything_is_saved(
    ranks: Any, saves: bool, tmp_path: Path
) -> None:
    said = ranks(2).run(stopped, True, saves, str(tmp_path))
    ((step, rank),) = [where for _, where, _ in said if where]
    for message, _, done in said:
        assert f"a gradient is not finite in step {step} on rank {rank}: that of inner.bias" in message
        assert done == (step if saves else 0)


@pytest.mark.parametrize("late", [False, True])
def test_one_rank_alone_finds_its_bad_gradient(late: bool, tmp_path: Path) -> None:
    message, place, done = stopped(late, True, str(tmp_path), "single")
    assert place is not None
    assert f"a gradient is not finite in step {place[0]} on rank 0: that of inner.bias" in message
    assert done == place[0]


def test_a_step_whose_row_died_with_a_rank_is_known_without_its_loss() -> None:
    mesh = Mesh(Layout({"data": 2}), 0, None, 1.0, timedelta(seconds=1))
    exchange = Exchange()
    step_sync = StepSync(exchange, mesh, torch.device("cpu"), lambda: LOSS, lambda step: None)
    outcome = StepOutcome((ReadyValue(3.0),), (), False, ReadyValue(1.0), (ReadyValue(0.0),))
    for number in range(2):
        step = Step(batch(number), number, step_sync.settle)
        step_sync.divisor(step)
        if number == 1:
            dead = Pending(mock.Mock(side_effect=RankError("rank 1 died")))
            exchange.exchange = mock.Mock(return_value=dead)  # type: ignore[method-assign]
        step_sync.post(step, outcome, None, [], ReadyValue(1.5), 0.25)
        assert step_sync.lost_before(number + 1) is None
    with pytest.raises(RankError):
        step_sync.settle_before(2)
    assert step_sync.lost_before(1) is None
    lost = step_sync.lost_before(2)
    assert lost is not None
    record = lost.record()
    assert (record.step, record.samples, record.shares) == (1, 4, (2, 2))
    assert math.isnan(record.loss)
    assert math.isnan(record.seconds)


class Crowd:
    """A row under way to ``size`` ranks that all say the same."""

    def __init__(self, row: Sequence[float], size: int) -> None:
        self._rows = [list(row)] * size

    def wait(self) -> list[list[float]]:
        return self._rows


def lines_run(ranks: int, mode: str) -> int:
    """Lines of Python that a rank runs for a step of so many: told, read, checked, recorded, and looked at."""
    layout = Layout({"data": ranks} if mode == "data" else {"data": ranks // 2, "tensor": 2})
    mesh = Mesh(layout, 0, None, 1.0, timedelta(seconds=1))
    told: list[Step] = []
    exchange = mock.Mock(exchange=lambda row: Crowd(row, ranks))
    step_sync = StepSync(exchange, mesh, torch.device("cpu"), lambda: LOSS, told.append)
    lines = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    outcome = StepOutcome((ReadyValue(2.0),), (), False, ReadyValue(1.0))
    for number in range(3):
        micro = MicroBatch(torch.ones(2), torch.arange(2), torch.arange(2))
        one = Batch(0, number, 4 * number, 2 * layout.data_axis(0).degree, (2,), [micro], False)
        step = Step(one, number, step_sync.settle)
        gc.collect()  # what other tests have left ends now, and not in the midst of what is counted
        gc.disable()
        sys.settrace(trace if number == 2 else None)
        try:
            step_sync.post(step, outcome, one, [ReadyValue(2.0)], ReadyValue(1.5), 0.25)
            step_sync.settle()
            step.seconds = 1.0
            for each in step_sync.told():
                each.record()
                noticed(each, "cpu")
        finally:
            sys.settrace(None)
            gc.enable()
    assert told[-1].total == pytest.approx(2.0 * layout.data_axis(0).degree)
    return lines


@pytest.mark.parametrize("mode", ["data", "tensor"])
def test_a_step_costs_as_much_python_on_thousands_of_ranks(mode: str) -> None:
    assert lines_run(64, mode) == lines_run(2048, mode) > 0
