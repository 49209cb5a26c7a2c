"""What a prepared loop does besides: refusals, accumulation, closures, scalers, files, helpers."""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import evener
from evener.distributed import hosts
from evener.errors import (
    ConfigurationError,
    DivergenceError,
    EvenerError,
)
from evener.hardware.async_read import ReadyValue
from evener.nn import context as scope
from evener.training.prepare import prepare as preparing
from tests.ids import placeless
from tests.training.prepare.running import (
    Loop,
    Weights,
    divided,
    model_of,
    prepared,
    rows,
    sgd,
    with_settings,
)


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


# Refusals


def said(loop: Callable[[bool], Any], **settings: Any) -> str:
    try:
        prepared(loop, **settings)
    except EvenerError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def with_the_plain_loss(_: bool) -> None:
    loop = Loop(True)
    for x, y in loop.loader:
        F.cross_entropy(loop.model(x), y).backward()
        loop.optimizer.step()


def without_a_step(_: bool) -> None:
    """Nobody would ask about the gradients before the batch is over."""
    loop = Loop(True)
    for x, y in loop.loader:
        F.cross_entropy(loop.model(x), y).backward()


def with_the_plain_loader(_: bool) -> None:
    loop = Loop(True)
    for x, y in DataLoader(rows(), batch_size=6):
        loop.backward(x, y)


def stepping_before_the_sum(_: bool) -> None:
    loop = Loop(True)
    for x, y in loop.loader:
        with evener.no_sync():
            loop.backward(x, y)
            loop.optimizer.step()


def shuffling_apart(_: bool) -> None:
    drawn = torch.Generator().manual_seed(evener.rank())
    loop = Loop(True, generator=drawn)
    for x, y in loop.loader:
        loop.backward(x, y)


def a_loss_that_is_not_finite(_: bool) -> None:
    loop = Loop(True)
    for step, (x, y) in enumerate(loop.loader):
        loop.backward(x * (math.nan if step == 2 and evener.rank() == 1 else 1.0), y)
        loop.optimizer.step()


def a_gradient_that_is_not_finite(_: bool) -> None:
    loop = Loop(True)
    for x, y in loop.loader:
        loop.backward(x, y)
        if evener.rank() == 0:
            loop.model[0].weight.grad.fill_(0)
        loop.model[2].bias.grad[1] = math.inf
        loop.optimizer.step()


def a_loss_on_one_rank_alone(_: bool) -> None:
    """Its numbers would be taken for those of another call."""
    loop = Loop(True)
    for x, y in loop.loader:
        if evener.is_main():
            loop.loss(loop.model(x), y)


def two_loaders_with_other_shares(_: bool) -> None:
    loop = Loop(True)
    others = evener.prepare(DataLoader(rows(), batch_size=1))
    for (x, y), (other, label) in zip(loop.loader, others, strict=False):
        loop.loss(loop.model(x), y) + loop.loss(loop.model(other), label)


def two_loaders_of_other_sizes(_: bool) -> None:
    loop = Loop(True)
    others = evener.prepare(DataLoader(rows(), batch_size=4))
    for (x, y), (other, label) in zip(loop.loader, others, strict=False):
        found = F.cross_entropy(loop.model(x), y) + F.cross_entropy(loop.model(other), label)
        evener.global_mean(found)


def one_loader_twice_at_once(_: bool) -> None:
    loop = Loop(True)
    for (x, y), _other in zip(loop.loader, loop.loader, strict=True):
        loop.backward(x, y)


def saving_on_one_rank_alone(_: bool) -> None:
    loop = Loop(True)
    for x, y in loop.loader:
        if evener.is_main():
            evener.save(os.devnull, model=loop.model)
        loop.backward(x, y)


def gathering_other_rows(_: bool) -> None:
    loop = Loop(True)
    for x, y in loop.loader:
        evener.gather(loop.loss(loop.model(x), y))


def gathering_rows_of_other_lengths(_: bool) -> None:
    loop = Loop(True)
    for x, _y in loop.loader:
        evener.gather(x[:, : 1 + evener.rank()])


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (
            with_the_plain_loss,
            r"backward was called on 1.2\d+ on rank 0 and on 1.3\d+ on rank 1, and goes with the number of the whole",
        ),
        (
            without_a_step,
            r"went through no prepared loss. Give the loss function to evener.prepare .* evener.global_mean",
        ),
        (with_the_plain_loader, "the loss was called outside of a prepared loader's batch"),
        (
            stepping_before_the_sum,
            r"optimizer.step\(\) with gradients of rank \d's samples alone, the first that of 0.weight: they were put",
        ),
        (shuffling_apart, "the ranks are not working on the same batch: rank 1 has another one than rank 0"),
        (
            a_loss_that_is_not_finite,
            r"DivergenceError: the loss is nan in step 2 on rank 1, and the gradient of \S+ is not finite before",
        ),
        (
            a_gradient_that_is_not_finite,
            "DivergenceError: the gradient of 2.bias is not finite before the update",
        ),
        (
            a_loss_on_one_rank_alone,
            "different places of the loop: rank 0 in the loss, rank 1 in the end of a batch.* must have none of them",
        ),
        (saving_on_one_rank_alone, "different places of the loop: rank 0 in evener.save, rank 1 in the loss"),
        (two_loaders_with_other_shares, "at once, and rank 1 had other numbers of samples of their batches"),
        (two_loaders_of_other_sizes, "other numbers of samples of their batches"),
        (one_loader_twice_at_once, "was iterated anew before the pass at hand was over"),
        (
            gathering_other_rows,
            r"evener.gather takes tensors with a row for each of this rank's 3 samples, not one",
        ),
        (
            gathering_rows_of_other_lengths,
            r"rows of another shape or type on rank 1 than on rank 0, \S+ \(2,\) and \S+ \(1,\).* Pad to one length",
        ),
    ],
    ids=placeless,
)
def test_what_would_be_wrong_in_silence_is_refused(ranks: Any, loop: Any, words: str) -> None:
    for message in ranks(2).run(said, loop):
        assert re.search(words, message), message


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from rows()


SHARDS = evener.ShardedDataset(["a", "b"], lambda key: rows(), lengths=[26, 26])


def test_what_cannot_be_divided_is_refused_in_words() -> None:
    model = model_of()
    divided = DistributedSampler(rows(), num_replicas=2, rank=0)
    with warnings.catch_warnings(action="ignore"):  # tracing is deprecated
        traced = torch.jit.trace(model, torch.zeros(1, 4).double())
    with with_settings():
        for wrong, words in (
            ((), "evener.prepare got nothing"),
            ((nn.DataParallel(model),), "a model in DataParallel is divided already"),
            ((traced,), "a model that is a ScriptModule: put it into a module"),
            ((model, 3), "does not know what to do with .*int"),
            ((model, nn.CrossEntropyLoss), "does not know what to do with"),
            ((model, DataLoader(Stream(), batch_size=None)), "this DataLoader has batch_size=None"),
            ((model, DataLoader(SHARDS, shuffle=True)), "shuffles shards opens one for each sample"),
            ((model, DataLoader(rows(), batch_size=None)), "this DataLoader has batch_size=None"),
            ((model, DataLoader(rows(), sampler=divided)), "has a DistributedSampler, .* leave it out"),
            ((model, sgd(model_of())), "an optimizer has 4 parameters, .* of no model .*ParameterList"),
        ):
            with pytest.raises(ConfigurationError, match=words):
                evener.prepare(*wrong)
        with pytest.raises(
            ConfigurationError, match=r"takes no exact=bits: a loop of your own .*use evener.fit"
        ):
            evener.prepare(model, exact="bits")
        with pytest.raises(ConfigurationError, match="takes no balence; did you mean balance"):
            evener.prepare(model, balence="auto")
        with pytest.raises(ConfigurationError, match=r"takes no epochs; is a setting of evener.fit"):
            evener.prepare(model, epochs=3)
    with pytest.raises(ConfigurationError, match="was not called yet with a model"):
        evener.prepare(DataLoader(rows(), batch_size=2))
    with with_settings():
        loop = Loop(True)
        with pytest.raises(
            ConfigurationError, match=r"device goes with the call of evener.prepare that has the model"
        ):
            evener.prepare(DataLoader(rows(), batch_size=2), device="cpu")
        evener.prepare(loop.model)
        with pytest.raises(ConfigurationError, match=r"belongs to an earlier call of evener.prepare"):
            next(iter(loop.loader))


def test_parameters_of_no_optimizer_are_told() -> None:
    model = model_of()
    with (
        with_settings(),
        pytest.warns(UserWarning, match=r"0.weight, one of 2 parameters, is in no optimizer"),
    ):
        evener.prepare(model, torch.optim.SGD(model[2].parameters(), lr=0.1))


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
