"""What a prepared loop does besides: accumulation, closures, scalers, files, helpers."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import evener
from evener.distributed import hosts
from evener.errors import ConfigurationError, DivergenceError, EvenerError
from evener.hardware.async_read import ReadyValue
from evener.nn import context as scope
from evener.training.prepare import prepare as preparing
from tests.training.prepare.running import Loop, Weights, divided, model_of, prepared, rows, with_settings


def plainly(is_prepared: bool) -> Weights:
    loop = Loop(is_prepared)
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        loop.optimizer.step()
    return loop.weights()


def accumulating(is_prepared: bool) -> Weights:
    """Sums left to the third batch, then two that are not put off."""
    loop = Loop(is_prepared)
    for step, (x, y) in enumerate(loop.loader):
        if is_prepared and step < 2:
            with evener.no_sync(loop.model):
                loop.backward(x, y)
        else:
            loop.backward(x, y)
        if step in (2, 4):
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    return loop.weights()


def freezing_before_the_sum(is_prepared: bool) -> Weights:
    loop = Loop(is_prepared)
    for step, (x, y) in enumerate(loop.loader):
        with evener.no_sync() if is_prepared and step % 2 == 0 else nullcontext():
            loop.backward(x, y)
        loop.model[0].weight.requires_grad_(step % 2 == 1)
        if step % 2:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    return loop.weights()


def with_a_closure(is_prepared: bool) -> Weights:
    loop = Loop(is_prepared, lambda model: torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3))
    for x, y in loop.loader:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            loop.optimizer.zero_grad()
            return loop.backward(x, y)

        loop.optimizer.step(closure)
    return loop.weights()


def with_a_scaler(is_prepared: bool) -> Weights:
    loop = Loop(is_prepared)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        scaler.scale(loop.loss(loop.model(x), y)).backward()
        scaler.step(loop.optimizer)
        scaler.update()
    return loop.weights()


def two_losses_of_a_batch(is_prepared: bool) -> Weights:
    """Their sum, and a penalty that every rank computes; half of the passes through a part of the model alone."""
    loop = Loop(is_prepared)
    for step, (x, y) in enumerate(loop.loader):
        loop.optimizer.zero_grad()
        hidden = loop.model[0](x)
        total = loop.loss(loop.model(x), y) + 0.5 * loop.loss(hidden[:, :3], y)
        (total + 1e-2 * sum(p.pow(2).sum() for p in loop.model.parameters()) * (step % 2)).backward()
        loop.optimizer.step()
    return loop.weights()


def evaluating_within(is_prepared: bool) -> Weights:
    """A validation inside of training, whose result decides the rate."""
    loop = Loop(is_prepared)
    others: Any = DataLoader(rows(11, 2), batch_size=4)
    others = evener.prepare(others) if is_prepared else others
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        with torch.no_grad():
            seen = [loop.loss(loop.model(inputs), targets).item() for inputs, targets in others]
        loop.optimizer.param_groups[0]["lr"] = 0.1 * sum(seen)
        loop.backward(x, y)
        loop.optimizer.step()
    return loop.weights()


def two_loaders_at_once(is_prepared: bool) -> Weights:
    """Of other lengths, with a loss of both batches."""
    loop = Loop(is_prepared, drop_last=True)
    others: Any = DataLoader(rows(40, 2), batch_size=loop.loader.batch_size)
    others = evener.prepare(others) if is_prepared else others
    for (x, y), (other, label) in zip(loop.loader, others, strict=False):
        loop.optimizer.zero_grad()
        (loop.loss(loop.model(x), y) + 0.5 * loop.loss(loop.model(other), label)).backward()
        loop.optimizer.step()
    return loop.weights()


def after_an_error(is_prepared: bool) -> Weights:
    """A cell of a notebook that failed, whose traceback is kept, and is run again."""
    loop = Loop(is_prepared)
    kept = None
    for wrong in (True, False):
        try:
            for x, y in loop.loader:
                now = scope.current()
                assert (now is not None) == is_prepared
                loop.optimizer.zero_grad()
                loop.backward(x[:, :1] if wrong else x, y)
                loop.optimizer.step()
                if kept is not None and is_prepared:
                    kept = None
                    assert scope.current() is now
        except RuntimeError as error:
            kept = error
    assert scope.current() is None
    return loop.weights()


def with_workers(is_prepared: bool) -> Weights:
    loop = Loop(is_prepared, num_workers=2, persistent_workers=True)
    for _ in range(2):
        for x, y in loop.loader:
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            loop.optimizer.step()
    return loop.weights()


def frozen_and_unused(is_prepared: bool) -> Weights:
    """A layer that only some samples go through, so that a rank may have no gradient for it; and a frozen one."""
    loop = Loop(is_prepared)
    loop.model[0].weight.requires_grad_(False)
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        few = x[:, 0] < 0.2
        outputs = loop.model[0](x)
        if few.any():
            outputs = torch.where(few[:, None], loop.model[2](outputs).repeat(1, 2), outputs)
        loop.loss(outputs[:, :3], y).backward()
        loop.optimizer.step()
    return loop.weights()


def with_a_compiled_step(is_prepared: bool) -> Weights:
    """Of a compiled model, with its loss and backward pass: none of it can be in a graph but the model."""
    loop = Loop(is_prepared)
    loop.model = torch.compile(loop.model, backend="eager")  # type: ignore[assignment]

    def step(x: Tensor, y: Tensor) -> None:
        loop.loss(loop.model(x), y).backward()

    compiled = torch.compile(step, backend="eager")
    with warnings.catch_warnings(action="ignore"):  # what the compiler says of torch's own code
        for x, y in loop.loader:
            loop.optimizer.zero_grad()
            compiled(x, y)
            loop.optimizer.step()
    return {name.removeprefix("_orig_mod."): value for name, value in loop.weights().items()}


def leaving_out_what_is_not_finite(is_prepared: bool) -> Weights:
    """By the loss, by the norm of the gradients, and by the gradients themselves."""
    loop = Loop(is_prepared)
    for step, (x, y) in enumerate(loop.loader):
        loop.optimizer.zero_grad()
        loss = loop.loss(loop.model(x / (x[:, :1] > (0.1 if step < 3 else 0.0))), y)
        if step == 0 and not loss.isfinite():
            continue
        loss.backward()
        if step == 1 and not nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0).isfinite():
            continue
        for parameter in loop.model.parameters():
            assert parameter.grad is not None
            parameter.grad.nan_to_num_(0.0)
        loop.optimizer.step()
    return loop.weights()


LOOPS = (
    *(plainly, accumulating, with_a_closure, with_a_scaler, two_losses_of_a_batch, evaluating_within),
    *(frozen_and_unused, freezing_before_the_sum, two_loaders_at_once, after_an_error),
    *(with_a_compiled_step, leaving_out_what_is_not_finite),
)


@pytest.mark.parametrize(
    ("loop", "balance"), divided(((each.__name__, (each,)) for each in LOOPS), ("3,1", "0,1"))
)
def test_it_is_the_loop_of_one_device(ranks: Any, loop: Callable[[bool], Weights], balance: str) -> None:
    expected = loop(False)
    for found in ranks(2).run(prepared, loop, balance=balance):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)


def test_workers_read_what_the_plain_loader_reads() -> None:
    expected = with_workers(False)
    for name, value in prepared(with_workers).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-13, atol=0)


class WithoutLength:
    def __getitem__(self, number: int) -> Tensor:
        return INPUTS[number]


INPUTS = rows(20).tensors[0]


def read_from(dataset: Any) -> Tensor:
    """What all ranks read of a loader whose data set is no ``Dataset``."""
    loader = DataLoader(dataset, batch_size=6, sampler=range(20))
    with with_settings(balance="3,1"):
        _, loader = evener.prepare(model_of(), loader)
        return torch.cat([evener.gather(torch.as_tensor(each)) for each in loader])


@pytest.mark.parametrize(
    "dataset",
    [INPUTS, INPUTS.numpy(), dict(enumerate(INPUTS)), list(INPUTS), WithoutLength()],
    ids=["tensor", "array", "mapping", "list", "without-length"],
)
def test_a_loader_may_read_whatever_has_items(ranks: Any, dataset: Any) -> None:
    for found in ranks(2).run(read_from, dataset):
        assert torch.equal(found, INPUTS)


def learning_shares(is_prepared: bool) -> tuple[Weights, list[tuple[int, ...]]]:
    """A sample takes 1 ms on rank 0 and 4 ms on rank 1, as far as anybody is told."""
    loop, shares, last = Loop(is_prepared), [], [0]
    if is_prepared:
        each = (0.001, 0.004)[evener.rank()]
        preparing.current("").work_timer.taken = lambda: ReadyValue(each * last[0])  # type: ignore[method-assign]
    for _ in range(12):
        for x, y in loop.loader:
            last[0] = len(y)
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            loop.optimizer.step()
            if is_prepared:
                shares.append(preparing.current("").current_batch("").batch.shares)
    return loop.weights(), shares


def test_shares_follow_the_speed_and_weights_do_not(ranks: Any) -> None:
    expected, _ = learning_shares(False)
    answers = ranks(2).run(prepared, learning_shares, balance="auto")
    for found, shares in answers:
        assert shares == answers[0][1]
        assert shares[0] == (3, 3)
        assert shares[-2] == (5, 1)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def leaving(is_prepared: bool) -> Weights:
    """Looks at first batches alone, and leaves passes early."""
    loop = Loop(is_prepared)
    for _ in range(6):
        next(iter(loop.loader))
    for step in range(6):
        for at, (x, y) in enumerate(loop.loader):
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            loop.optimizer.step()
            if at == step % 2:
                break
    return loop.weights()


def test_passes_may_be_left_where_shares_follow_the_speed(ranks: Any) -> None:
    expected = leaving(False)
    for found in ranks(2).run(prepared, leaving, balance="auto"):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def alike(_: bool) -> int:
    """A loop whose batches all give the same gradient. Returns how many of 200 weights it has moved."""
    inputs = torch.linspace(1, 2, 100, dtype=torch.float64).repeat(200, 1)
    model = nn.Linear(100, 2, bias=False).double()
    before = model.weight.detach().clone()
    loader = DataLoader(TensorDataset(inputs, torch.zeros(200, dtype=torch.int64)), batch_size=2)
    parts = evener.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6), loader, F.cross_entropy)
    model, optimizer, loader, loss = parts
    for x, y in loader:
        loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return int((model.weight != before).sum())


def test_what_compression_leaves_out_is_sent_later(ranks: Any) -> None:
    """top-k sends one weight in a hundred: without the rest of earlier steps the same two of 200, in each of 100."""
    for moved in ranks(2).run(prepared, alike, compress="top-k"):
        assert moved > 60


# Helpers


def helped() -> tuple[Any, ...]:
    before = evener.rank(), evener.world_size(), evener.is_main()
    with with_settings(balance="2,1"):
        loop = Loop(True, shuffle=False)
        evener.barrier()
        found = [evener.gather({"x": x, "y": [y, "as it is"]}) for x, y in loop.loader]
        return before, (evener.rank(), evener.world_size()), found, str(evener.device()), len(loop.loader)


def test_helpers_know_the_ranks_and_gather_rows_in_order(ranks: Any) -> None:
    inputs, targets = rows().tensors
    for rank, (before, after, found, device, length) in enumerate(ranks(2).run(helped)):
        assert before == (rank, 2, rank == 0)
        assert (after, device, length) == ((rank, 2), "cpu", 5)
        assert torch.equal(torch.cat([each["x"] for each in found]), inputs)
        assert torch.equal(torch.cat([each["y"][0] for each in found]), targets)
        assert all(each["y"][1] == "as it is" for each in found)


def drawn_and_printed() -> tuple[Tensor, list[str]]:
    import builtins

    lines: list[str] = []
    with with_settings(balance="2,1"), pytest.MonkeyPatch.context() as patched:
        patched.setattr(builtins, "print", lambda *values, **_: lines.append(" ".join(map(str, values))))
        loop = Loop(True)
        made = [evener.gather(evener.draw(torch.randn, 2)) for _ in loop.loader]
        evener.print("seen", 5)
        return torch.cat(made), lines


def test_numbers_are_drawn_as_one_device_draws_them_and_one_rank_prints(ranks: Any) -> None:
    plain = Loop(False)
    expected = torch.cat([torch.randn(len(x), 2) for x, _ in plain.loader])
    (first, said_first), (second, said_second) = ranks(2).run(drawn_and_printed)
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    assert (said_first, said_second) == (["seen 5"], [])


def test_helpers_alone() -> None:
    assert (evener.rank(), evener.world_size(), evener.is_main()) == (0, 1, True)
    evener.barrier()
    with pytest.raises(
        ConfigurationError, match=r"evener.gather goes with evener.prepare, which was not called yet"
    ):
        evener.gather(torch.ones(2))


def test_what_is_closed_at_the_end_knows_that_the_script_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    error, seen, opened = ValueError("of the script"), list[BaseException | None](), ExitStack()
    opened.callback(lambda: seen.append(sys.exception()))
    monkeypatch.setattr(preparing._CurrentPreparation, "opened", opened)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    preparing._end_at_exit()
    assert seen == [error]


def test_a_loop_that_is_replaced_where_an_error_is_handled_does_not_end_by_it() -> None:
    seen = list[bool]()
    with with_settings():
        evener.prepare(model_of())
        assert preparing._CurrentPreparation.opened is not None
        preparing._CurrentPreparation.opened.callback(
            lambda: seen.append(id(sys.exception()) == hosts._handled)
        )
        try:
            raise MemoryError
        except MemoryError:
            evener.prepare(model_of(), seed=3)
    assert seen == [True]


def test_a_divergence_is_an_error_of_eveners() -> None:
    assert issubclass(DivergenceError, EvenerError)
