"""Loops of one's own with strategies that divide more than the batch: the training of one device, or refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import evener
from evener.errors import EvenerError
from tests.tiers import ALWAYS, NIGHTLY, crossed
from tests.training.prepare import test_loops, test_prepare, test_silent_errors
from tests.training.prepare.running import Loop, Weights, model_of, prepared, rows, with_settings

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


def clipping(is_prepared: bool) -> Weights:
    loop, told = loop_of(is_prepared), list[float]()
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
    """Optimizer and scheduler that are never given to prepare."""
    torch.manual_seed(4)
    loop = Loop(is_prepared, adamw, model())
    loop.optimizer = torch.optim.Adam(loop.model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 2, 0.5)
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
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


LOOPS = (
    *(clipping, looking_at_gradients, with_a_scaler, more_passes_than_one, cleared_between, with_gaps),
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


def check(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("loop", "way"),
    crossed(NAMED, list(ALL), lambda _: (ALWAYS, ALWAYS, NIGHTLY)),
)
def test_it_is_the_loop_of_one_device(ranks: Any, loop: str, way: str) -> None:
    if (loop, way) == ("with_gaps", "tensor"):
        pytest.skip("the first pass, by which layers are chosen, does not go through all")
    expected = NAMED[loop](False)
    for found in ranks(2).run(prepared, NAMED[loop], **ALL[way]):
        check(found, expected)


@pytest.mark.parametrize(
    "loop",
    [test_silent_errors.with_another_head, test_silent_errors.something_else_between_two_calls],
    ids=["another head", "two calls"],
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


def in_halves(is_prepared: bool, path: str, half: int) -> Weights:
    """Saves after three batches, or goes on from there."""
    loop = loop_of(is_prepared)
    parts = {"model": loop.model, "optimizer": loop.optimizer, "loader": loop.loader}
    if half:
        assert evener.load(path, **parts) == {"told": 3}
    for step, (x, y) in enumerate(loop.loader):
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        loop.optimizer.step()
        if step == 2 and half == 0 and is_prepared:
            evener.save(path, **parts, told=3)
            break
    return found_of(loop)


def test_a_file_goes_from_strategy_to_strategy(ranks: Any, tmp_path: Path) -> None:
    expected = in_halves(False, "", 0)
    ways = [ZERO3, TENSOR, ZERO1, {}, ZERO2]
    for number, (before, after) in enumerate(zip(ways, [*ways[1:], ZERO3], strict=True)):
        path = str(tmp_path / str(number))
        ranks(2).run(prepared, partial(in_halves, path=path, half=0), **before)
        for found in ranks(2).run(prepared, partial(in_halves, path=path, half=1), **after):
            check(found, expected)
    with with_settings():
        check(in_halves(True, path, 1), expected)


def test_the_file_is_that_of_one_device(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(prepared, partial(in_halves, path=str(tmp_path / "file"), half=0), **ZERO3)
    held = torch.load(tmp_path / "file", weights_only=True)["states"]
    plain = model()
    plain.load_state_dict(held["model"])
    adamw(plain).load_state_dict(held["optimizer"])


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


def said(loop: Callable[[bool], Any], settings: Settings) -> str:
    try:
        prepared(loop, **settings)
    except EvenerError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def begun(_: bool) -> None:
    loop_of(True)


def two_models(_: bool) -> None:
    models = model(), model()
    evener.prepare(*models)


def twice(_: bool) -> None:
    made = model()
    evener.prepare(made)
    evener.prepare(made)


def a_layer_by_itself(_: bool) -> None:
    loop = loop_of(True)
    for x, _y in loop.loader:
        loop.model[0](x)


def a_late_layer(_: bool) -> None:
    loop = loop_of(True)
    loop.model.add_module("more", nn.Linear(3, 3).double())
    for x, y in loop.loader:
        loop.backward(x, y)


def a_penalty(_: bool) -> None:
    loop = loop_of(True)
    for x, y in loop.loader:
        penalty: Any = sum(p.pow(2).sum() for p in loop.model.parameters())
        (loop.loss(loop.model(x), y) + 0.01 * penalty.full_tensor()).backward()


def a_penalty_alone(_: bool) -> None:
    loop = loop_of(True)
    for _x, _y in loop.loader:
        penalty: Any = sum(p.pow(2).sum() for p in loop.model.parameters())
        penalty.backward()


def gradients_by_themselves(_: bool) -> None:
    loop = loop_of(True)
    for x, y in loop.loader:
        torch.autograd.grad(loop.loss(loop.model(x), y), list(loop.model.parameters()))


def with_a_hook(_: bool) -> None:
    loop = loop_of(True)
    loop.model[5].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    for x, y in loop.loader:
        loop.backward(x, y)


def an_old_optimizer(_: bool) -> None:
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    made, loader, loss = evener.prepare(made, DataLoader(rows(), batch_size=6), F.cross_entropy)
    for x, y in loader:
        loss(made(x), y).backward()
        optimizer.step()


def lbfgs_made_later(_: bool) -> None:
    loop = loop_of(True)
    optimizer = torch.optim.LBFGS(loop.model.parameters())
    for x, y in loop.loader:
        optimizer.step(lambda x=x, y=y: loop.backward(x, y))


def a_saved_gradient(_: bool) -> None:
    loop = loop_of(True)
    for x, y in loop.loader:
        loop.backward(x, y)
        torch.save([p.grad for p in loop.model.parameters()], "/dev/null")


def a_closure(_: bool) -> None:
    loop = loop_of(True)
    for x, y in loop.loader:
        loop.optimizer.step(lambda x=x, y=y: loop.backward(x, y))


def sorted_gradients(_: bool) -> None:
    loop = loop_of(True)
    for x, y in loop.loader:
        loop.backward(x, y)
        for p in loop.model.parameters():
            torch.sort(p.grad.flatten())  # type: ignore[union-attr]


def saved_by_one(_: bool) -> None:
    loop = loop_of(True)
    for x, y in loop.loader:
        loop.backward(x, y)
        if evener.is_main():
            loop.model.state_dict()


def pickled(_: bool) -> None:
    torch.save(loop_of(True).model, "/dev/null")


REFUSED = (
    (begun, {"strategy": "pipeline"}, "strategy 'pipeline' runs forward and backward in an order of its own"),
    (begun, {"strategy": "local_sgd"}, "take the batches and steps of evener.Engine"),
    (begun, {"strategy": "asynchronous"}, "runs forward and backward in an order of its own"),
    (begun, {"strategy": "nothing"}, "no strategy"),
    (begun, {"mesh": "data=3"}, "there are 2 ranks"),
    (
        begun,
        {"strategy": "sharded", "strategy_option": ("reshard=false",)},
        "reshard goes with evener.Engine",
    ),
    (
        begun,
        {**ZERO2, "strategy_option": ("zero=2", "shard_sizes=1,2")},
        "shard_sizes goes with evener.Engine",
    ),
    (begun, {"precision": "fp16"}, "scales no loss, which precision fp16 needs"),
    (begun, {"micro_batch": 2}, "takes no micro_batch"),
    (two_models, ZERO3, "divides one model, and evener.prepare got 2"),
    (twice, ZERO3, "was given a model that is divided already"),
    (twice, TENSOR, "was given a model that is divided already"),
    (a_layer_by_itself, TENSOR, "0 was called by the loop itself, and is divided"),
    (a_layer_by_itself, ZERO3, "0 was called by the loop itself, and is divided"),
    (a_late_layer, ZERO3, "a later layer or model cannot be divided"),
    (a_penalty, ZERO3, "computed from divided weights"),
    (a_penalty_alone, ZERO3, "computed from divided weights"),
    (gradients_by_themselves, ZERO3, "which only backward.. sums"),
    (with_a_hook, ZERO3, "5.weight has a hook on its gradient, of which each rank has a part"),
    (an_old_optimizer, ZERO3, "an optimizer has parameters from before evener.prepare"),
    (an_old_optimizer, TENSOR, "an optimizer has parameters from before evener.prepare"),
    (a_closure, ZERO1, "calls a closure has only this rank's parts"),
    (a_closure, TENSOR, "calls a closure has only this rank's parts"),
    *(
        (lbfgs_made_later, each, "calls a closure has only this rank's parts")
        for each in (ZERO1, ZERO3, TENSOR)
    ),
    (a_saved_gradient, TENSOR, "would see this rank's part of it alone"),
    (sorted_gradients, TENSOR, "was given to flatten, which would see this rank's part of it alone"),
    (saved_by_one, TENSOR, r"rank 0 in state_dict\(\), rank 1 in the end of a batch"),
    (pickled, TENSOR, "cannot be pickled"),
    (test_prepare.with_a_closure, ZERO3, "calls a closure has only this rank's parts"),
)


@pytest.mark.parametrize(
    ("loop", "settings", "words"),
    REFUSED,
    ids=[f"{each[0].__name__}-{number}" for number, each in enumerate(REFUSED)],
)
def test_what_cannot_be_is_refused_on_all_ranks(
    ranks: Any, loop: Callable[[bool], Any], settings: Settings, words: str
) -> None:
    answers = ranks(2).run(said, loop, settings)
    assert re.search(words, answers[0]), answers[0]
    assert all(answer != "nothing" for answer in answers)


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
