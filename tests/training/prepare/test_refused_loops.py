"""What a loop cannot do with a divided model is refused on all ranks, in words."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import evener
from evener.errors import EvenerError
from tests.training.prepare import test_prepare, test_refused_steps
from tests.training.prepare.running import prepared, rows
from tests.training.prepare.test_strategies import TENSOR, ZERO1, ZERO2, ZERO3, Settings, loop_of, model


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


def twice_and_whole(_: bool) -> None:
    made = model()
    evener.prepare(made, strategy="sharded")
    evener.prepare(made, strategy="ddp")


def a_layer_by_itself(_: bool) -> None:
    loop = loop_of(True)
    for x, _y in loop.loader:
        loop.model[0](x)


def a_penalty_on_gradients(_: bool) -> None:
    loop = loop_of(True)
    for x, _y in loop.loader:
        x.requires_grad_()
        torch.autograd.grad(loop.model(x).sum(), x, create_graph=True)


def a_penalty_on_weights(_: bool) -> None:
    loop = loop_of(True)
    for x, y in loop.loader:
        (loop.loss(loop.model(x), y) + 0.1 * sum(p.pow(2).sum() for p in loop.model.parameters())).backward()


def parameters_from_before(use: Callable[[list[nn.Parameter]], object], _: bool) -> None:
    made = model()
    listed, numbers = list(made.parameters()), sum(p.numel() for p in made.parameters())
    frozen, *others = listed
    frozen.requires_grad_(False)
    evener.prepare(made, torch.optim.SGD(listed, lr=0.1))
    assert (sum(p.numel() for p in listed), others[-1].shape, frozen.sum().dim()) == (numbers, (3,), 0)
    use(others)


def clipped(parameters: list[nn.Parameter]) -> object:
    return nn.utils.clip_grad_norm_(parameters, 1.0)


def frozen_later(parameters: list[nn.Parameter]) -> None:
    parameters[-1].requires_grad = False


def logged(parameters: list[nn.Parameter]) -> float:
    return parameters[-1].norm().item()


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


def an_earlier_model(_: bool) -> None:
    earlier, loop = loop_of(True), loop_of(True)
    for x, _y in loop.loader:
        earlier.model(x)


def an_earlier_state(_: bool) -> None:
    earlier, _loop = loop_of(True), loop_of(True)
    earlier.model.state_dict()


def an_earlier_optimizer(_: bool) -> None:
    earlier, _loop = loop_of(True), loop_of(True)
    earlier.optimizer.state_dict()


def an_earlier_loss(_: bool) -> None:
    earlier, loop = loop_of(True), loop_of(True)
    for x, y in loop.loader:
        earlier.loss(loop.model(x), y)


def averaged(_: bool) -> None:
    torch.optim.swa_utils.AveragedModel(loop_of(True).model)


def plain_gradients(_: bool) -> None:
    loop = loop_of(True)
    for x, y in loop.loader:
        loop.backward(x, y)
        for each in loop.model.parameters():
            each.grad = torch.ones(each.shape, dtype=each.dtype)
        loop.optimizer.step()


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
    (twice_and_whole, {}, "was given a model that is divided already"),
    (a_layer_by_itself, TENSOR, "0 was called by the loop itself, and is divided"),
    (a_layer_by_itself, ZERO3, "0 was called by the loop itself, and is divided"),
    (a_late_layer, ZERO3, "a later layer cannot be divided"),
    *(
        (partial(parameters_from_before, use), settings, "a parameter from before evener.prepare is used")
        for use, settings in ((clipped, ZERO3), (clipped, TENSOR), (frozen_later, ZERO3), (logged, ZERO3))
    ),
    (
        a_penalty_on_gradients,
        ZERO3,
        "a graph of its own .* one unit .* or use zero=1 or strategy",
    ),
    (
        test_refused_steps.with_the_plain_loss,
        ZERO3,
        r"called on 1.2\d+ on rank 0 and on 1.4\d+ on rank 1, .* no prepared loss",
    ),
    (a_penalty_on_weights, ZERO3, "computed from divided weights, .*let the optimizer decay weights"),
    *(
        (loop, settings, "a later call of evener.prepare with another model has ended that")
        for loop in (an_earlier_model, an_earlier_state, an_earlier_optimizer)
        for settings in (ZERO3, TENSOR)
    ),
    (an_earlier_loss, ZERO3, "this loss belongs to an earlier call of evener.prepare"),
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
    (pickled, ZERO3, r"cannot be copied or pickled: take its state_dict\(\)"),
    (averaged, ZERO3, "cannot be copied or pickled.*say zero=1"),
    (plain_gradients, ZERO3, "has put a plain tensor in the place of the gradient"),
    (test_prepare.with_a_closure, ZERO3, "calls a closure has only this rank's parts"),
)


@pytest.mark.parametrize(
    ("loop", "settings", "words"),
    REFUSED,
    ids=[f"{getattr(each[0], 'func', each[0]).__name__}-{number}" for number, each in enumerate(REFUSED)],
)
def test_what_cannot_be_is_refused_on_all_ranks(
    ranks: Any, loop: Callable[[bool], Any], settings: Settings, words: str
) -> None:
    answers = ranks(2).run(said, loop, settings)
    assert re.search(words, answers[0]), answers[0]
    assert all(answer != "nothing" for answer in answers)
