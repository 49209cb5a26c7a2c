"""A run as its parts: batches, steps, records, evaluation and state."""

from __future__ import annotations

import math
import time
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener.core.config.run_config import RunConfig
from evener.core.losses import Sum
from evener.core.observer import Observer
from evener.core.records import StepRecord
from evener.core.task.task import Task
from evener.distributed.session import Session
from evener.errors import ConfigurationError, TaskError
from evener.hardware import timers as stopwatch
from evener.nn.context import current
from evener.strategies.learner import Learner
from evener.training.engine import Engine
from tests import tasks
from tests.engines import Weights, assert_same, copied, engine_of, stepped
from tests.observers import Remembering


def test_a_skipped_batch_leaves_no_count_behind() -> None:
    """Batches of tokens have different counts; the divisor must be that of the batch stepped on."""
    losses: dict[int, float] = {}
    with engine_of("tokens", steps=None, epochs=1) as engine:
        weights = copied(engine)
        for batch in engine.batches():
            if batch.index != 1:
                engine.model.load_state_dict(weights)
                losses[batch.index] = engine.step(batch).loss
    expected = {}
    with engine_of("tokens", steps=None, epochs=1) as engine:
        for batch in engine.batches():
            (micro,) = batch.micro_batches
            with torch.no_grad():
                outputs = engine.model(micro.inputs)
            expected[batch.index] = F.cross_entropy(outputs, micro.targets).item()
    assert losses == pytest.approx({key: expected[key] for key in losses}, rel=1e-12)


def test_the_loss_of_a_step_is_known_at_once_and_told_once() -> None:
    seen = Remembering()
    with Engine(tasks.penalty(), device="cpu", steps=5, observers=[seen]) as engine:
        steps = [engine.step(batch) for batch in engine.batches()]
    assert seen.steps == [step.record() for step in steps]
    assert [step.number for step in steps] == [0, 1, 2, 3, 4]
    record = steps[2].record()
    assert (record.step, record.samples, record.shares) == (2, 13, (13,))
    assert record.loss == steps[2].loss
    assert steps[2].total == pytest.approx(13 * (record.loss - steps[2].penalty.value()))


def test_a_batch_without_any_term_changes_nothing() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(4, 7, dtype=torch.int64), torch.full((4, 7), -100))
    task = tasks._task(model=tasks.Tokens, train=data, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    with Engine(task, device="cpu", epochs=1) as engine:
        before = copied(engine)
        with pytest.warns(UserWarning, match="no target of the batch of step 0 counts"):
            losses = [engine.step(batch).loss for batch in engine.batches()]
        assert all(map(math.isnan, losses))
        assert_same(before, copied(engine), 0.0)


@pytest.mark.parametrize(
    ("settings", "steps", "epochs_begun"),
    [
        ({}, 8, 2),
        ({"epochs": 3}, 12, 3),
        ({"steps": 5}, 5, 2),
        ({"steps": 9}, 9, 3),
        ({"steps": 30, "epochs": 1}, 4, 1),
        ({"batch_size": 100}, 2, 2),
    ],
    ids=str,
)
def test_how_long_a_run_is(settings: dict[str, Any], steps: int, epochs_begun: int) -> None:
    with engine_of("plain", **settings) as engine:
        assert engine.total_steps == steps
        batches = [(batch, engine.step(batch))[0] for batch in engine.batches()]
        assert len(batches) == engine.steps_done == steps
        assert len({batch.epoch for batch in batches}) == epochs_begun
        assert engine.samples_done == sum(batch.size for batch in batches)


def test_an_engine_makes_one_pass() -> None:
    with engine_of("plain", steps=1) as engine:
        list(engine.batches())
        with pytest.raises(ConfigurationError, match="one pass"):
            next(engine.batches())


@pytest.mark.parametrize(
    ("interval", "rates"),
    [("epoch", [1, 1, 1, 1, 0.5, 0.5]), ("step", [1, 0.5, 0.25, 0.125, 0.0625, 0.03125])],
)
def test_schedulers_count_epochs_or_steps(interval: Any, rates: list[float]) -> None:
    task = tasks._task(
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        scheduler_interval=interval,
    )
    with Engine(task, device="cpu", steps=6) as engine:
        assert [engine.step(batch).lr for batch in engine.batches()] == rates


def test_a_penalty_counts_once_a_step_and_not_once_a_rank(ranks: Any) -> None:
    """That of the trajectories is in test_exactness; here the number that is reported."""
    (_, reference), found = stepped("penalty", steps=3), ranks(2).run(stepped, "penalty", steps=3)
    for _, losses in found:
        assert losses == pytest.approx(reference, rel=1e-12)


def part_of_run(
    name: str, until: int, state: Any = None, **settings: Any
) -> tuple[dict[str, Any], list[list[int]], Weights]:
    """Takes steps up to ``until`` of 12: the state then, the ids of this rank's samples, the weights."""
    ids: list[list[int]] = []
    with engine_of(name, steps=12, **settings) as engine:
        if state is not None:
            engine.load_state_dict(state)
        for batch in engine.batches():
            engine.step(batch)
            ids.append([i for m in batch.micro_batches if m.weight for i in m.samples.tolist()])
            if engine.steps_done == until:
                break
        return engine.state_dict(), ids, copied(engine)


def over_ranks(ids: list[list[list[int]]]) -> list[list[int]]:
    """The ids of each step, those of all ranks together."""
    return [sorted(chain.from_iterable(parts)) for parts in zip(*ids, strict=True)]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("name", ["penalty", "dropout"])
def test_a_run_goes_on_in_mid_epoch_on_other_ranks(ranks: Any, name: str, before: int, after: int) -> None:
    def run(world_size: int, *args: Any, **settings: Any) -> list[Any]:
        if world_size == 1:
            return [part_of_run(name, *args, **settings)]
        return ranks(world_size).run(part_of_run, name, *args, **settings)

    _, whole, weights = part_of_run(name, 12)
    first = run(before, 6)
    second = run(after, 12, first[0][0], balance="equal" if after == 1 else "1,3")
    for _, _, found in second:
        assert_same(weights, found)
    seen = [*over_ranks([ids for _, ids, _ in first]), *over_ranks([ids for _, ids, _ in second])]
    assert seen == [sorted(ids) for ids in whole]
    for epoch in (seen[:4], seen[4:8], seen[8:]):
        assert sorted(chain.from_iterable(epoch)) == list(range(tasks.SAMPLES))


def test_a_state_is_taken_up_only_in_the_same_order_of_samples() -> None:
    state, *_ = part_of_run("plain", 3)
    for settings, words in (({"seed": 3}, "seed to 0"), ({"batch_size": 14}, "batch_size to 13")):
        with engine_of("plain", **settings) as engine, pytest.raises(ConfigurationError, match=words):
            engine.load_state_dict(state)
    with (
        engine_of("batch_norm", batch_size=13) as engine,
        pytest.raises(ConfigurationError, match="another model"),
    ):
        engine.load_state_dict(state)


def test_plain_weights_are_no_state_of_an_engine() -> None:
    with engine_of("plain") as engine:
        weights = engine.model.state_dict()
        with pytest.raises(
            ConfigurationError, match="no state of an engine, which has progress, model, optimizer"
        ):
            engine.load_state_dict(weights)


def one_step_more(state: Any) -> Weights:
    with engine_of("buffers", steps=4) as engine:
        engine.load_state_dict(state)
        for batch in engine.batches():
            engine.step(batch)
        return copied(engine)


def test_buffers_agree_after_a_single_further_step(ranks: Any) -> None:
    state, *_ = part_of_run("buffers", 3)
    first, second = ranks(2).run(one_step_more, state)
    assert_same(first, second, 0.0)


def evaluate_in_the_loop() -> tuple[list[dict[str, float]], bool]:
    values = []
    with engine_of("mixed", epochs=1) as engine:
        for batch in engine.batches():
            engine.step(batch)
            values.append(engine.evaluate())
        return values, engine.model.training


def test_evaluation_in_the_middle_of_a_loop(ranks: Any) -> None:
    for values, training in ranks(2).run(evaluate_in_the_loop):
        assert len(values) == 4
        assert {tuple(value) for value in values} == {("loss", "accuracy")}
        assert training


def test_a_metric_is_a_sum_of_the_users_own() -> None:
    largest = lambda outputs, targets: Sum((outputs.argmax(1) == 2).sum(), len(targets))  # noqa: E731
    with Engine(tasks._task(metrics={"twos": largest}), device="cpu") as engine:
        assert 0 <= engine.evaluate()["twos"] <= 1
        with pytest.raises(ConfigurationError, match="no setting is called batchsize"):
            Engine(engine.task, batchsize=3)


def test_nothing_to_evaluate_on() -> None:
    with (
        Engine(tasks._task(evaluate=None), device="cpu") as engine,
        pytest.raises(ConfigurationError, match="nothing to evaluate on"),
    ):
        engine.evaluate()


def test_the_model_is_the_users_own() -> None:
    with engine_of("plain") as engine:
        assert isinstance(engine.model, nn.Sequential)
        assert next(engine.model.parameters()).dtype == torch.float64


class Slow(Observer):
    """What rank 0 does with a record is no work of the step."""

    def step(self, record: StepRecord) -> None:
        time.sleep(0.05)


def seconds_with_slow_observers() -> list[tuple[tuple[float, ...], float]]:
    seen = Remembering()
    with Engine(tasks.plain(), device="cpu", steps=6, observers=[Slow(), seen]) as engine:
        for batch in engine.batches():
            engine.step(batch)
    return [(record.compute_seconds, record.seconds) for record in seen.steps]


def test_observers_are_told_outside_of_what_is_measured(ranks: Any) -> None:
    (times, _) = ranks(2).run(seconds_with_slow_observers)
    assert len(times) == 6
    for of_rank in zip(*(compute for compute, _ in times), strict=True):
        assert min(of_rank) < 0.05, "in every step the record counted as work"
    assert all(seconds > 0 for _, seconds in times)


def told_in_a_run_with_unused_parameters() -> list[tuple[int, float, float]]:
    seen = Remembering()
    with Engine(tasks.branches(), device="cpu", steps=4, observers=[seen]) as engine:
        for batch in engine.batches():
            engine.step(batch)
    return [(record.step, record.seconds, record.lr) for record in seen.steps]


def test_no_record_is_made_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("evener.training.step.step.StepRecord", lambda **fields: made.append(fields))
    for listening in ([], [Remembering()]):
        with Engine(tasks.branches(), device="cpu", steps=3, observers=listening) as engine:
            for batch in engine.batches():
                engine.step(batch)
        assert len(made) == 3 * len(listening)


def test_every_record_is_of_a_step_that_is_over(ranks: Any) -> None:
    """Also of the first, and of those with parameters that no rank used, which are known before they end."""
    for told in ranks(2).run(told_in_a_run_with_unused_parameters):
        assert [number for number, *_ in told] == [0, 1, 2, 3]
        assert all(seconds > 0 and lr == 0.1 for _, seconds, lr in told)


def test_an_engine_that_cannot_be_made_gives_back_what_it_has() -> None:
    """The strategy is set up when the scheduler is refused."""
    closed = []
    task = tasks._task(scheduler=lambda optimizer: 3)
    close = Learner.close
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "close", lambda learner: (closed.append(True), close(learner)))
        with pytest.raises(TaskError, match="must return a learning rate scheduler"):
            Engine(task, device="cpu")
    assert closed


def two_engines_at_once() -> list[float]:
    """Each with a BatchNorm, and so with a process group of its own."""
    with Session(device="cpu") as session:
        config = RunConfig(device="cpu", steps=3)
        first, second = (Engine(tasks.batch_norm(), config, session=session) for _ in range(2))
        losses = []
        for one, other in zip(first.batches(), second.batches(), strict=True):
            losses += [first.step(one).loss, second.step(other).loss]
        first.close()
        second.close()
        return losses


def test_two_engines_may_share_a_session(ranks: Any) -> None:
    for losses in ranks(2).run(two_engines_at_once):
        assert losses[::2] == losses[1::2]


def test_a_task_may_be_given_as_its_function_or_its_name() -> None:
    for task in (tasks.plain(), tasks.plain, "tests.tasks:plain", "digits"):
        with Engine(task, device="cpu", steps=1) as engine:
            assert isinstance(engine.task, Task)
    for wrong, words in (("digit", "known are digits"), (lambda: 3, "must return an evener.Task")):
        with pytest.raises(TaskError, match=words):
            Engine(wrong, device="cpu")


def spectral() -> list[Tensor]:
    """Complex weights, as those of spectral layers."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((5,), 0.5, dtype=torch.complex128))

        def forward(self, inputs: Tensor) -> Tensor:
            return torch.fft.irfft(torch.fft.rfft(inputs) * self.weight, n=8)

    data = torch.randn(24, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    task = Task(
        model=Spectral,
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        train=TensorDataset(data, data.roll(1, 1)),
        batch_size=7,
        epochs=2,
    )
    with Engine(task, device="cpu", clip_norm=0.5) as engine:
        for batch in engine.batches():
            engine.step(batch)
        return [p.detach().clone() for p in engine.model.parameters()]


def test_complex_weights(ranks: Any) -> None:
    reference = spectral()
    for found in ranks(2).run(spectral):
        torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-12)


def test_a_loop_left_by_an_error_leaves_no_scope_behind() -> None:
    """The error, if somebody keeps it, keeps the frame of the loop and with it the generator of the batches."""
    kept = None
    with engine_of("plain", steps=2) as engine:
        batches = engine.batches()
        try:
            for _ in batches:
                assert current() is not None
                raise ZeroDivisionError
        except ZeroDivisionError as error:
            kept = error
    assert kept is not None
    assert current() is None
    batches.close()  # type: ignore[attr-defined]
    assert current() is None


def test_no_stopwatch_runs_after_a_step_of_the_users_own() -> None:
    with engine_of("plain", steps=2) as engine:
        for _ in engine.batches():
            measured = stopwatch.running()
            assert measured is not None
        assert stopwatch.running() is not measured


def test_the_watchdog_is_told_where_the_run_stands() -> None:
    with Engine(tasks.plain(), device="cpu", epochs=2, steps=7) as engine:
        for batch in engine.batches():
            engine.step(batch)
        assert engine.session.watchdog.progress_text == "step 7 of 7, epoch 2"


def norms(measures: bool, **settings: Any) -> list[float | None]:
    """Of the gradients of each update."""
    found: list[float | None] = []
    with Engine(tasks.plain(), device="cpu", dtype="float64", steps=3, **settings) as engine:
        engine.learner.clipping.measures |= measures
        for batch in engine.batches():
            engine.step(batch)
            norm = engine.learner.clipping.norm
            found.append(None if norm is None else float(norm))
    return found


def test_the_norm_of_the_gradients_is_known_of_each_update(ranks: Any) -> None:
    assert norms(False) == [None] * 3
    alone = norms(True)
    assert alone[0] != alone[1]
    assert norms(False, clip_norm=1e9) == pytest.approx(alone)  # before clipping, which there was none of
    assert norms(False, clip_norm=1e-3)[0] == pytest.approx(alone[0])
    for strategy in ("ddp", "sharded"):
        for each in ranks(2).run(norms, True, balance="3,1", strategy=strategy):
            assert each == pytest.approx(alone, rel=1e-12)
