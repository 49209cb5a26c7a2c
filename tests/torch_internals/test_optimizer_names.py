"""Private names of optimizers and of operators on many tensors, exercised."""

from __future__ import annotations

import math
import warnings
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import profile

from tests.torch_internals.borrowing import borrowed


def test_the_largest_of_many_tensors_are_known() -> None:
    with borrowed("optimizers") as norms:
        numbers = [torch.tensor([1.0, -3.0]), torch.tensor([[float("nan"), 1.0]]), torch.tensor(2.0)]
        found = norms.largest(numbers)
        assert found[0] == 3
        assert found[1].isnan()
        assert found[2] == 2


def test_many_tensors_are_changed_in_one_call() -> None:
    with borrowed("foreach") as many:
        found, narrow = [torch.ones(2, dtype=torch.float64), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
        many.add_each(found, [2.0, 3.0])
        many.add_each(found, [each.clone() for each in found])
        many.subtract_each(found, [1.0, 2.0])
        many.copy_each(narrow, found)
        assert [each.tolist() for each in narrow] == [[5.0, 5.0], [4.0, 4.0, 4.0]]
        for function in (many.add_each, many.subtract_each, many.copy_each):
            function([], [])
        turned = torch.arange(6.0).view(2, 3).t()
        check = many.FiniteCheck()
        assert check.all_finite(
            [turned, torch.tensor(7.0), torch.ones(2, dtype=torch.float64), torch.ones(0)]
        )
        assert turned.tolist() == [[0, 3], [1, 4], [2, 5]]
        for bad in (math.nan, math.inf, -math.inf):
            assert not check.all_finite([turned, torch.tensor([1.0, bad])])
            assert many.are_finite([turned, torch.tensor([1.0, bad])]).item() == 0
        assert many.are_finite([turned, torch.tensor(7.0)]).item() == 1
        assert many.are_finite([torch.zeros(2, device="meta")]).is_meta, "as on the stand-in for a GPU"


def test_hooks_on_an_optimizer_are_known() -> None:
    with borrowed("optimizers") as names:
        for register in ("register_step_pre_hook", "register_step_post_hook"):
            optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)])
            assert not names.has_step_hooks(optimizer)
            getattr(optimizer, register)(lambda *_: None)
            assert names.has_step_hooks(optimizer)
            assert not names.has_step_hooks(names.without_hooks(optimizer))


def test_a_step_without_hooks_is_the_same() -> None:
    with borrowed("optimizers") as names:
        weight, calls = torch.ones(2, requires_grad=True), []
        optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        of_all = register_optimizer_step_pre_hook(lambda *_: calls.append("of all"))
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        weight.grad = torch.ones(2)
        names.step_without_hooks(optimizer)
        assert weight.tolist() == [0.5, 0.5]
        assert weight in optimizer.state
        assert not calls
        optimizer.step()
        of_all.remove()
        assert calls == ["of all", "before", "after"]


@pytest.mark.parametrize("has_scheduler", [False, True])
def test_a_step_without_a_range_is_the_same(has_scheduler: bool) -> None:
    with borrowed("optimizers") as names:
        weight = torch.ones(2, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.5)
        if has_scheduler:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        weight.grad = torch.ones(2)
        step = names.own_step(optimizer)
        assert isinstance(step, partial), "the range is left out"
        step()
        assert weight.tolist() == [0.5, 0.5]
        if has_scheduler:
            with warnings.catch_warnings(action="error"):  # PyTorch's scheduler warns if no step came before
                scheduler.step()
        with profile(acc_events=True) as recorded:
            names.own_step(optimizer)()
        assert "Optimizer.step#SGD.step" in {event.key for event in recorded.key_averages()}


def test_no_hook_of_a_step_is_left_out() -> None:
    with borrowed("optimizers") as names:
        weight, calls = torch.ones(2, requires_grad=True), []
        weight.grad = torch.ones(2)
        for register in ("register_step_pre_hook", "register_step_post_hook"):
            optimizer = torch.optim.SGD([weight])
            getattr(optimizer, register)(lambda *_: calls.append("its own"))
            names.own_step(optimizer)()
        for register_of_all in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
            of_all = register_of_all(lambda *_: calls.append("of all"))
            names.own_step(torch.optim.SGD([weight]))()
            of_all.remove()
        assert calls == ["its own"] * 2 + ["of all"] * 2


def test_a_step_that_somebody_has_replaced_is_taken() -> None:
    with borrowed("optimizers") as names:
        weight, calls = torch.ones(2, requires_grad=True), []
        optimizer: Any = torch.optim.SGD([weight])
        before = optimizer.step

        def step(self: Any) -> None:
            calls.append("mine")
            before()

        optimizer.step = MethodType(step, optimizer)
        names.own_step(optimizer)()
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps it
        names.own_step(optimizer)()
        assert calls == ["mine"] * 2


def test_state_in_codes_is_known() -> None:
    with warnings.catch_warnings(action="ignore"):
        optim = pytest.importorskip("torchao.optim")
    with borrowed("quantized_state") as names:
        weight = nn.Parameter(torch.zeros(64, 64))
        optimizer = optim.AdamW8bit([weight], bf16_stochastic_round=True)
        state = names.new_state(optimizer, weight, True)
        assert names.is_quantized(state)
        assert names.makes_quantized(optimizer)
        assert names.rounds_by_chance(optimizer)
        assert not names.makes_quantized(torch.optim.AdamW([weight]))
        assert names.codes_of(state).keys() == {"codes", "scale"}
        assert names.block_size(state) == 256
        assert -1 < names.lowest_code(state) < -0.9
        assert not names.is_quantized(weight)
