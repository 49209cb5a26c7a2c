"""Loops of one's own with strategies that divide more than the batch: the training of one device, or refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import evener
from evener.training.prepare.gradient_part import _made
from tests.tiers import ALWAYS, NIGHTLY, SLOW, crossed
from tests.training.prepare import test_loops, test_prepare, test_silent_errors
from tests.training.prepare.running import Loop, Weights, model_of, prepared, with_settings

ZERO1 = {"strategy": "sharded", "strategy_option": ("zero=1", "shard_sizes=3,1"), "balance": "3,1"}
ZERO2 = {"strategy": "sharded", "strategy_option": ("zero=2",), "balance": "3,1"}
ZERO3 = {"strategy": "sharded", "balance": "3,1"}
TENSOR = {"strategy": "tensor"}
ALL = {"zero1": ZERO1, "zero3": ZERO3, "tensor": TENSOR}
Settings = dict[str, Any]


def model() -> nn.Module:
    torch.manual_seed(7)
    blocks = [nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2)]
    layers = nn.Linear(4, 7, bias=False), nn.BatchNorm1d(7), nn.Tanh(), *blocks, nn.Linear(7, 3)
    return nn.Sequential(*layers).double()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) == each] for each in (True, False))
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
    return torch.optim.AdamW(groups, lr=0.01)


def loop_of(is_prepared: bool) -> Loop:
    return Loop(is_prepared, adamw, model())


def found_of(loop: Loop, *told: float) -> Weights:
    """Weights and the optimizer's state as one device has them."""
    state = loop.optimizer.state_dict()["state"]
    moments = {f"{number} {key}": value for number, each in state.items() for key, value in each.items()}
    return loop.weights() | copy.deepcopy(moments) | {"told": torch.tensor(told)}


def through_no_prepared_loss(is_prepared: bool) -> Weights:
    """Passes on what all ranks have, from the plain loss."""
    loop = Loop(is_prepared, adamw)
    common = torch.arange(20, dtype=torch.float64).square().sin().view(5, 4)
    for _ in loop.loader:
        loop.optimizer.zero_grad()
        loop.model(common).pow(2).mean().backward()
        loop.optimizer.step()
    return found_of(loop)


def freezing_blocks(is_prepared: bool) -> Weights:
    """One block, then the other, in one backward pass and in two; and all again."""
    loop = loop_of(is_prepared)
    for step, (x, y) in enumerate(loop.loader):
        loop.model[3].requires_grad_(step not in (1, 2))
        loop.model[4].requires_grad_(step not in (2, 3))
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        if step == 3:
            loop.backward(x, y)
        loop.optimizer.step()
    return found_of(loop)


def clipping(is_prepared: bool) -> Weights:
    one = nn.PReLU().double()  # of whose number one rank has nothing
    loop, told = Loop(is_prepared, adamw, nn.Sequential(*model(), one)), list[float]()
    for step, (x, y) in enumerate(loop.loader):
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        order = (2.0, 1.0, float("inf"))[step % 3]
        told.append(float(torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3, order)))
        torch.nn.utils.clip_grad_value_(loop.model.parameters(), 0.1)
        loop.optimizer.step()
    return found_of(loop, *told)


def looking_at_gradients(is_prepared: bool) -> Weights:
    loop, told = loop_of(is_prepared), list[float]()
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        for p in loop.model.parameters():
            g = p.grad
            assert g is not None
            told += [
                float(g.norm()),
                g.data.norm(1).item(),
                g.sum().item(),
                float(g.abs().max()),
                g.mean().item(),
            ]
            told.append(float(g.sum() / g.numel()))
            told += [float(g.isnan().any()), float((g > -9).all()), float(g.pow(2).sum()), float(g.min())]
            g.mul_(0.5).add_(0.01)
            p.grad = g * 2 - 0.02
        total = sum(p.grad.norm() ** 2 for p in loop.model.parameters() if p.grad is not None) ** 0.5
        told.append(float(total))
        told.append(float(loop.model[5].weight.grad.norm()))
        loop.model[5].weight.grad = None
        loop.optimizer.step()
    return found_of(loop, *told)


def parts_of_one_rank_or_none() -> list[float]:
    """Numbers of a gradient of which rank 0 has nothing, and rank 1 what is no number, or large."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    found: list[float] = []
    for kind, values in (
        (torch.float64, [math.nan, -1.0]),
        (torch.float16, [300.0, 300.0]),
        (torch.float32, [2.0, 0.0]),
    ):
        plain = torch.tensor(values if rank else [], dtype=kind)
        part = _made(plain, group, len(values), lambda _: None)
        found += [float(part.norm(math.inf)), float(part.max()), float(part.min()), float(part.norm())]
        found += [float(part.all()), float(part.any()), float(part.mean())]
    return found


def test_numbers_of_a_gradient_are_those_of_all_ranks(ranks: Any) -> None:
    nan, norm = math.nan, float(torch.tensor(300 * 2**0.5, dtype=torch.float16))
    expected = [nan, nan, nan, nan, 1, 1, nan, 300, 300, 300, norm, 1, 1, 300, 2, 2, 0, 2, 0, 1, 1]
    for found in ranks(2).run(parts_of_one_rank_or_none):
        assert found == pytest.approx(expected, nan_ok=True)


def with_a_scaler(is_prepared: bool) -> Weights:
    loop = loop_of(is_prepared)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step, (x, y) in enumerate(loop.loader):
        loop.optimizer.zero_grad()
        scaler.scale(loop.loss(loop.model(x), y)).backward()
        if step == 1:  # as if it had overflowed, where one rank has it
            bias = loop.model[5].bias.grad
            bias.mul_(torch.inf)
        scaler.unscale_(loop.optimizer)
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3)
        scaler.step(loop.optimizer)
        scaler.update()
    return found_of(loop, scaler.get_scale())


def more_passes_than_one(is_prepared: bool) -> Weights:
    """Accumulation with and without a delay, a graph that is gone through twice, a forward pass for nothing."""
    loop = loop_of(is_prepared)
    for step, (x, y) in enumerate(loop.loader):
        if step % 2 == 0:
            with evener.no_sync(loop.model) if is_prepared else nullcontext():
                loop.backward(x, y)
        else:
            value = loop.loss(loop.model(x), y)
            value.backward(retain_graph=True)
            (0.5 * value).backward()
            loop.model(x)
            loop.optimizer.step()
            loop.model(x)
            loop.model.zero_grad()
    return found_of(loop)


def cleared_between(is_prepared: bool) -> Weights:
    """The model's gradients, between forward and backward; to zeros in every second step."""
    loop = loop_of(is_prepared)
    for step, (x, y) in enumerate(loop.loader):
        value = loop.loss(loop.model(x), y)
        loop.model.zero_grad(set_to_none=step % 2 == 0)
        value.backward()
        loop.optimizer.step()
    return found_of(loop)


class WithGaps(nn.Module):
    """A layer that every third pass goes through, one that no pass does, a number, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.never = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(3, 3)
        self.last, self.factor, self.passes = nn.Linear(6, 3), nn.Parameter(torch.tensor(1.3)), 0
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden, self.passes = self.frozen(self.first(x)), self.passes + 1
        return self.last(torch.tanh(self.sometimes(hidden) if self.passes % 3 == 0 else hidden)) * self.factor


def with_gaps(is_prepared: bool) -> Weights:
    torch.manual_seed(2)
    make = lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)  # noqa: E731
    loop = Loop(is_prepared, make, WithGaps().double())
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
        loop.optimizer.step()
    return found_of(loop)


def made_later(is_prepared: bool) -> Weights:
    """Optimizer and scheduler that are never given to prepare. The optimizer has its state from the beginning, and
    writes to all gradients at once."""
    torch.manual_seed(4)
    loop = Loop(is_prepared, adamw, model())
    loop.optimizer = torch.optim.Adagrad(loop.model.parameters(), lr=0.05, foreach=True)
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 2, 0.5)
    for x, y in loop.loader:
        loop.optimizer.zero_grad(set_to_none=False)
        loop.backward(x, y)
        loop.optimizer.step()
        scheduler.step()
    return found_of(loop)


def going_back(is_prepared: bool) -> Weights:
    """To states that were kept."""
    loop = loop_of(is_prepared)

    def epoch() -> None:
        for x, y in loop.loader:
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            loop.optimizer.step()

    epoch()
    kept = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
    epoch()
    loop.model.load_state_dict(kept[0])
    loop.optimizer.load_state_dict(kept[1])
    epoch()
    return found_of(loop)


class Asking(torch.optim.SGD):
    """Asks parameters for a rate of their own."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.grad *= getattr(parameter, "rate", 1.0)
        return super().step(closure)


def by_attributes_of_parameters(is_prepared: bool) -> Weights:
    made = model()
    for parameter in made[-1].parameters():
        parameter.rate = 0.1
    loop = Loop(is_prepared, lambda model: Asking(model.parameters(), lr=0.1, momentum=0.9), made)
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        loop.optimizer.step()
    return found_of(loop)


LOOPS = (
    *(
        by_attributes_of_parameters,
        freezing_blocks,
        clipping,
        looking_at_gradients,
        with_a_scaler,
        more_passes_than_one,
        cleared_between,
        with_gaps,
        through_no_prepared_loss,
    ),
    *(
        made_later,
        going_back,
        test_silent_errors.against_an_adversary,
        test_silent_errors.weighing_by_uncertainty,
    ),
    *(test_silent_errors.seeded_in_the_loop, test_silent_errors.passes_of_common_noise),
    *(test_prepare.evaluating_within, test_prepare.two_loaders_at_once, test_prepare.after_an_error),
)
NAMED = {loop.__name__: loop for loop in LOOPS}


def in_channels_last(is_prepared: bool) -> Weights:
    torch.manual_seed(6)
    layers = nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 7, 3, padding=1), nn.Flatten(), nn.Linear(7, 3)
    made = nn.Sequential(*layers).double().to(memory_format=torch.channels_last)
    loop = Loop(is_prepared, adamw, made)
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        loop.optimizer.step()
    return found_of(loop)


def computed_again(is_prepared: bool) -> Weights:
    """The whole model, in backward."""
    loop = loop_of(is_prepared)
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        loop.loss(checkpoint(loop.model, x, use_reentrant=False), y).backward()
        loop.optimizer.step()
    return found_of(loop)


def check(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("loop", "way"),
    crossed(NAMED, list(ALL), lambda _: (ALWAYS, SLOW, NIGHTLY)),
)
def test_it_is_the_loop_of_one_device(ranks: Any, loop: str, way: str) -> None:
    if (loop, way) == ("with_gaps", "tensor"):
        pytest.skip("the first pass, by which layers are chosen, does not go through all")
    expected = NAMED[loop](False)
    for found in ranks(2).run(prepared, NAMED[loop], **ALL[way]):
        check(found, expected)


@pytest.mark.parametrize(
    "loop", [in_channels_last, computed_again, test_prepare.leaving_out_what_is_not_finite]
)
def test_it_is_so_for_weights_in_parts(ranks: Any, loop: Callable[[bool], Weights]) -> None:
    expected = loop(False)
    for found in ranks(2).run(prepared, loop, **ZERO3):
        check(found, expected)


@pytest.mark.parametrize(
    "loop",
    [
        test_silent_errors.with_another_head,
        test_silent_errors.something_else_between_two_calls,
        test_silent_errors.two_calls,
    ],
    ids=["another head", "something between two calls", "two calls"],
)
def test_divided_updates_follow_new_layers(ranks: Any, loop: Callable[[bool], Weights]) -> None:
    expected = loop(False)
    for found in ranks(2).run(prepared, loop, **ZERO1):
        check(found, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"mesh": "data=2,tensor=2", "balance": "3,1"},
        {"mesh": "data=2,shard=2", "balance": "4,1,0,2"},
        {"mesh": "shard=2,tensor=2", "balance": "1,3"},
        {**ZERO1, "strategy_option": ("zero=1",), "mesh": "data=2,shard=2", "balance": "1,2,3,4"},
    ],
    ids=["data x tensor", "data x shard", "shard x tensor", "data x zero1"],
)
def test_meshes_are_one_device(ranks: Any, settings: Settings) -> None:
    both = settings["mesh"] in ("data=2,tensor=2", "data=2,shard=2")  # of two kinds of division
    for loop in (clipping, looking_at_gradients) if both else (clipping,):
        expected = loop(False)
        for found in ranks(4).run(prepared, loop, **settings):
            check(found, expected)


def famous(name: str, settings: Settings) -> Any:
    with with_settings(**settings):
        return test_loops.outcome(f"{name}_prepared")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, ZERO1) for name in test_loops.LOOPS),
        *((name, ZERO3) for name in ("images", "words", "sentences", "tokens")),
        *((name, TENSOR) for name in ("words", "sentences", "tokens")),
    ],
)
def test_loops_that_everybody_knows(ranks: Any, name: str, settings: Settings) -> None:
    weights, told = test_loops.outcome(name)
    for found, found_told in ranks(2).run(famous, name, settings):
        check(found, weights)
        assert found_told == pytest.approx(told, rel=1e-11, abs=1e-12)


# Files


# Settings beside the strategy


def settings_beside(is_prepared: bool) -> Weights:
    loop = loop_of(is_prepared)
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        loop.optimizer.step()
    return found_of(loop)


@pytest.mark.parametrize("settings", [{}, ZERO3], ids=["ddp", "zero3"])
def test_blocks_are_recomputed(ranks: Any, settings: Settings) -> None:
    expected = settings_beside(False)
    for found in ranks(2).run(prepared, settings_beside, **settings, recompute="blocks"):
        check(found, expected)


def types_of(_: bool) -> list[str]:
    loop, seen = Loop(True, model=model_of().float()), list[str]()
    loop.model[1].register_forward_hook(lambda module, args, output: seen.append(str(output.dtype)))
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        seen.append(str(loop.model(x.float()).dtype))
        loop.loss(loop.model(x.float()), y).backward()
        loop.optimizer.step()
        break
    return seen


@pytest.mark.parametrize("settings", [{}, ZERO3], ids=["ddp", "zero3"])
def test_the_model_computes_in_half_precision(ranks: Any, settings: Settings) -> None:
    for seen in ranks(2).run(prepared, types_of, **settings, precision="bf16"):
        assert seen == ["torch.bfloat16", "torch.float32", "torch.bfloat16"]


def gradients_of_a_second_pass(is_prepared: bool) -> dict[str, float]:
    """In one region of autocast, after a pass without gradients and one whose backward is over."""
    loop = Loop(is_prepared, model=model().float())
    x, y = next(iter(loop.loader))
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            loop.model(x.float())
        loop.backward(x.float(), y)
        loop.backward(x.float(), y)
    return {name: float(p.grad.norm()) for name, p in loop.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("settings", [{}, ZERO3], ids=["ddp", "zero3"])
def test_no_gradient_is_lost_to_casts_of_an_earlier_pass(ranks: Any, settings: Settings) -> None:
    expected = gradients_of_a_second_pass(False)
    for found in ranks(2).run(prepared, gradients_of_a_second_pass, **settings):
        assert found == pytest.approx(expected, rel=0.1, abs=0.02)


def inferring_first(is_prepared: bool) -> Weights:
    loop, told = loop_of(is_prepared), []
    with torch.inference_mode():
        told += [float(loop.loss(loop.model(x), y)) for x, y in loop.loader]
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        with torch.inference_mode():
            told.append(float(loop.loss(loop.model(x), y)))
        loop.backward(x, y)
        loop.optimizer.step()
    return found_of(loop, *told)


def test_passes_in_inference_mode_leave_weights_that_train(ranks: Any) -> None:
    expected = inferring_first(False)
    for found in ranks(2).run(prepared, inferring_first, **ZERO3):
        check(found, expected)


# Experts


class WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts, self.last = (
            nn.Linear(4, 6),
            evener.nn.Experts(6, 8, experts=4),
            nn.Linear(6, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.experts(torch.tanh(self.first(x))).output)


def with_experts(is_prepared: bool) -> Weights:
    torch.manual_seed(3)
    loop = Loop(is_prepared, adamw, WithExperts().double())
    told = []
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        told.append(float(torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3)))
        loop.optimizer.step()
    return found_of(loop, *told)


def test_experts_are_those_of_one_device(ranks: Any) -> None:
    expected = with_experts(False)
    for found in ranks(2).run(prepared, with_experts, strategy="experts", balance="3,1"):
        check(found, expected)


# Refusals


def averaged(is_prepared: bool) -> Weights:
    loop = loop_of(is_prepared)
    average = AveragedModel(loop.model)
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        loop.optimizer.step()
        average.update_parameters(loop.model)
    return copy.deepcopy(dict(average.state_dict()))


def test_a_copy_of_a_divided_model_is_whole_where_it_is_saved(ranks: Any) -> None:
    expected = averaged(False)
    for found in ranks(2).run(prepared, averaged, **TENSOR):
        check(found, expected)
