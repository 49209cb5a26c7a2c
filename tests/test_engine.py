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

from evener.config import RunConfig
from evener.engine import Engine
from evener.errors import ConfigurationError, DivergenceError, TaskError
from evener.losses import Sum, loss
from evener.nn.scope import current
from evener.observer import Observer
from evener.records import StepRecord
from evener.runtime.session import Session
from evener.strategies.learner import Learner
from evener.task import Task
from tests import tasks
from tests.observers import Remembering

Weights = dict[str, Tensor]


def engine_of(name: str, **settings: Any) -> Engine:
    return Engine(getattr(tasks, name)(), RunConfig(**({"dtype": "float64", "device": "cpu"} | settings)))


def copied(engine: Engine) -> Weights:
    return {name: value.detach().clone() for name, value in engine.model.state_dict().items()}


def assert_same(a: Weights, b: Weights, tolerance: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        scale = max(1e-30, value.abs().max().item())
        assert (value - b[name]).abs().max().item() <= tolerance * scale, name


# Loops


def stepped(name: str, **settings: Any) -> tuple[Weights, list[float]]:
    with engine_of(name, **settings) as engine:
        losses = [engine.step(batch).loss for batch in engine.batches()]
        return copied(engine), losses


def by_hand(name: str, **settings: Any) -> tuple[Weights, list[float]]:
    """The same as ``stepped``, written out."""
    losses = []
    with engine_of(name, **settings) as engine:
        for batch in engine.batches():
            (micro,) = batch.micro_batches
            outputs = engine.model(micro.inputs)
            total = engine.loss.total(outputs, micro.targets)
            losses.append(engine.backward(total, engine.loss.count(micro.targets)))
            engine.update()
        return copied(engine), losses


def test_a_loop_by_hand_is_the_step(ranks: Any) -> None:
    for name, settings in (
        ("batch_norm", {"steps": 8, "clip_norm": 0.2}),
        ("branches", {"steps": 8}),  # ranks without a gradient for some parameters
        ("sparse", {"steps": 6}),
        ("dropout", {"steps": 6}),
    ):
        weights, losses = stepped(name, **settings)
        for balance in ("equal", "0,1"):
            for other, found in ranks(2).run(by_hand, name, balance=balance, **settings):
                assert_same(weights, other)
                assert found == pytest.approx(losses, rel=1e-12, nan_ok=True)


def test_a_loop_by_hand_takes_whole_batches() -> None:
    with engine_of("plain", batch_size=8, micro_batch=4) as engine:
        micro = next(batches := engine.batches()).micro_batches[0]
        with pytest.raises(ConfigurationError, match="2 micro-batches"):
            engine.backward(engine.model(micro.inputs).sum(), 4)
        batches.close()  # type: ignore[attr-defined]


def adversarial(**settings: Any) -> Weights:
    """Two optimizers in turn, and an exchange for each."""
    with engine_of("adversaries", steps=6, **settings) as engine:
        generator, critic = engine.model.generator, engine.model.critic
        makes: Any = torch.optim.Adam(generator.parameters(), lr=1e-2)
        judges = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
        for batch in engine.batches():
            (micro,) = batch.micro_batches
            noise = torch.stack([micro.samples.double().sin(), micro.samples.double().cos()], 1)
            made, n = generator(noise), len(micro.samples)
            real, fake = critic(micro.inputs), critic(made.detach())
            wrong = F.softplus(-real).sum() + F.softplus(fake).sum()
            engine.backward(wrong, n)
            engine.update(judges)
            engine.backward(F.softplus(-critic(made)).sum(), n)
            judges.zero_grad()
            engine.update(makes)
        assert engine.steps_done == 6
        return copied(engine)


def test_two_optimizers_in_turn(ranks: Any) -> None:
    reference = adversarial()
    for settings in ({}, {"balance": "5,1"}, {"balance": "0,1"}):
        for weights in ranks(2).run(adversarial, **settings):
            assert_same(reference, weights)


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


# Losses, limits, schedulers


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


# Divergence


def diverge(name: str, form: Any, **settings: Any) -> tuple[str, int]:
    with engine_of(name, **settings) as engine:
        try:
            for batch in engine.batches():
                form(engine, batch)
        except DivergenceError as error:
            return str(error), engine.steps_done
    return "nothing was said", -1


def taking_steps(engine: Engine, batch: Any) -> None:
    engine.step(batch)


def taking_them_by_hand(engine: Engine, batch: Any) -> None:
    (micro,) = batch.micro_batches
    total = engine.loss.total(engine.model(micro.inputs), micro.targets)
    engine.backward(total, len(micro.samples))
    engine.update()


def place_of_bad_sample(world_size: int) -> tuple[int, int]:
    """Step and rank that meet the sample whose target is NaN."""
    order = [i for batch in _batches("one_bad_target") for i in batch]
    step, place = divmod(order.index(20), 13)
    size = min(13, tasks.SAMPLES - 13 * step)
    return step, 0 if place < -(-size // world_size) else 1


def _batches(name: str) -> list[list[int]]:
    with engine_of(name, epochs=1) as engine:
        return [batch.micro_batches[0].samples.tolist() for batch in engine.batches()]


@pytest.mark.parametrize("form", [taking_steps, taking_them_by_hand])
def test_a_loss_that_is_nan_names_step_and_rank_on_every_rank(ranks: Any, form: Any) -> None:
    step, rank = place_of_bad_sample(2)
    for message, _ in ranks(2).run(diverge, "one_bad_target", form):
        assert f"the loss is nan in step {step} on rank {rank};" in message


def test_a_nan_loss_in_the_very_last_step_is_found(ranks: Any) -> None:
    step, _ = place_of_bad_sample(2)
    for message, _ in ranks(2).run(diverge, "one_bad_target", taking_steps, steps=step + 1):
        assert f"in step {step} " in message


def test_a_process_alone_keeps_the_weights_before_the_nan() -> None:
    with engine_of("one_bad_target") as engine:
        last = place_of_bad_sample(1)[0]
        for batch in engine.batches():
            before = copied(engine)
            if engine.steps_done == last:
                with pytest.raises(DivergenceError, match="Try a lower learning rate"):
                    engine.step(batch)
                break
            engine.step(batch)
        assert_same(before, copied(engine), 0.0)


# Going on


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


# Other


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


def a_gradient_that_is_not_finite(by_hand: bool) -> str:
    """On rank 1 alone; the loss is finite."""

    class Spoiled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scores = super().forward(x)
            if torch.distributed.get_rank() == 1 and self.training:
                scores = scores + (scores * 0).sqrt() * 0
            return scores

    with Engine(tasks._task(model=lambda: Spoiled(6, 3)), device="cpu", steps=1) as engine:
        try:
            for batch in engine.batches():
                if by_hand:
                    taking_them_by_hand(engine, batch)
                else:
                    engine.step(batch)
        except DivergenceError as error:
            return str(error)
    return "nothing was said"


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_gradient_that_is_not_finite_names_step_and_rank(ranks: Any, by_hand: bool) -> None:
    for message in ranks(2).run(a_gradient_that_is_not_finite, by_hand):
        assert "a gradient is not finite" in message
        assert "on rank 1" in message
        assert by_hand or "in step 0" in message


def test_a_task_may_be_given_as_its_function_or_its_name() -> None:
    for task in (tasks.plain(), tasks.plain, "tests.tasks:plain", "digits"):
        with Engine(task, device="cpu", steps=1) as engine:
            assert isinstance(engine.task, Task)
    for wrong, words in (("digit", "known are digits"), (lambda: 3, "must return an evener.Task")):
        with pytest.raises(TaskError, match=words):
            Engine(wrong, device="cpu")


def test_a_penalty_that_is_nan_names_its_own_step() -> None:
    calls = iter(range(9))

    def penalty(model: nn.Module) -> Tensor:
        weights = torch.cat([p.reshape(-1) for p in model.parameters()])
        return weights.sum() * (math.nan if next(calls) == 2 else 0.0)

    with (
        Engine(tasks._task(penalty=penalty), device="cpu", steps=5) as engine,
        pytest.raises(DivergenceError, match="the penalty is nan in step 2 on all ranks"),
    ):
        list(map(engine.step, engine.batches()))


def large_gradients(dtype: str) -> list[float]:
    """Each of them is finite in half precision, their sum is not."""
    task = Task(
        model=lambda: nn.Linear(2000, 1, bias=False),
        loss=loss(total=lambda outputs, _: (outputs * 100).sum(), count=len),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-6),
        train=TensorDataset(torch.ones(12, 2000), torch.zeros(12, 1)),
        batch_size=4,
        epochs=1,
    )
    with Engine(task, device="cpu", dtype=dtype) as engine:
        steps = [engine.step(batch) for batch in engine.batches()]
    return [step.loss for step in steps]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gradients_whose_sum_overflows_are_sound(ranks: Any, dtype: str) -> None:
    assert all(map(math.isfinite, large_gradients(dtype)))
    for losses in ranks(2).run(large_gradients, dtype):
        assert len(losses) == 3
        assert all(map(math.isfinite, losses))


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
