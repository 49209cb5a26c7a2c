"""Loops that would part in silence, for what they do with gradients, parameters or batches, are refused in words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import evener
from tests.ids import placeless
from tests.training.prepare.running import Loop, model_of, rows, said


def a_term_of_samples(_: bool) -> None:
    loop = Loop(True)
    for x, y in loop.loader:
        (loop.loss(loop.model(x), y) + 0.1 * loop.model[0](x).pow(2).mean()).backward()


def a_factor_of_samples(_: bool) -> None:
    loop = Loop(True)
    for x, y in loop.loader:
        (loop.loss(loop.model(x), y) * x.mean()).backward()


def a_factor_with_the_same_value(_: bool) -> None:
    """Whose root is the same on all ranks."""
    loop = Loop(True)
    for x, y in loop.loader:
        loss = loop.loss(loop.model(x), y)
        (loss.detach() + x.mean() * (loss - loss.detach())).backward()


def plain_gradients_assigned(_: bool) -> None:
    loop = Loop(True)
    for x, y in loop.loader:
        parameters = list(loop.model.parameters())
        found = torch.autograd.grad(F.cross_entropy(loop.model(x), y), parameters)
        for p, g in zip(parameters, found, strict=True):
            p.grad = g
        loop.optimizer.step()


def plain_gradients_before_others(_: bool) -> None:
    loop = Loop(True)
    for x, y in loop.loader:
        loop.model[2].bias.grad = torch.full((3,), x.mean().item(), dtype=torch.float64)
        loop.backward(x, y)


def an_inner_step(_: bool) -> None:
    loop = Loop(True)
    for x, y in loop.loader:
        weight = loop.model[0].weight
        (g,) = torch.autograd.grad(loop.loss(loop.model(x), y), weight, create_graph=True)
        loop.loss(F.linear(x, weight - 0.1 * g)[:, :3], y).backward()


def a_graph_of_gradients(_: bool) -> None:
    loop = Loop(True)
    for x, y in loop.loader:
        loop.loss(loop.model(x), y).backward(create_graph=True)
        found = [p.grad.clone() for p in loop.model.parameters()]
        loop.optimizer.zero_grad()
        sum(each.pow(2).sum() for each in found).backward()


def a_parameter_of_no_model(_: bool) -> None:
    loop = Loop(True)
    warmth = torch.ones((), dtype=torch.float64, requires_grad=True)
    own = torch.optim.SGD([warmth], lr=0.1)
    for x, y in loop.loader:
        own.zero_grad()
        loop.loss(loop.model(x) * warmth, y).backward()
        own.step()


def an_update_on_one_rank(_: bool) -> None:
    loop = Loop(True)
    for x, y in loop.loader:
        loop.backward(x, y)
        if evener.is_main():
            loop.optimizer.step()


def thawed_on_one_rank(_: bool) -> None:
    loop = Loop(True)
    loop.model[0].requires_grad_(evener.is_main())
    for x, y in loop.loader:
        loop.backward(x, y)


def a_layer_on_one_rank(_: bool) -> None:
    loop = Loop(True)
    if evener.is_main():
        loop.model[1] = nn.ReLU()
    for x, y in loop.loader:
        loop.backward(x, y)


def a_layer_within_a_batch(_: bool) -> None:
    loop = Loop(True)
    for x, y in loop.loader:
        torch.manual_seed(evener.rank())
        loop.model[2] = nn.Linear(6, 3).double()
        loop.backward(x, y)


def by_hand(_: bool) -> None:
    """No optimizer, and what it would be given is of this rank's own samples."""
    loop = Loop(True)
    for x, y in loop.loader:
        with torch.no_grad():
            own = F.cross_entropy(loop.model(x), y)
            for p in loop.model.parameters():
                p -= 0.1 * own


def an_inner_step_of_a_plain_loss(_: bool) -> None:
    loop = Loop(True)
    for x, y in loop.loader:
        weight = loop.model[0].weight
        torch.autograd.grad(F.cross_entropy(loop.model(x), y), weight, create_graph=True)


def batches_fetched_ahead(_: bool) -> None:
    loop = Loop(True)
    batches = iter(loop.loader)
    x, y = next(batches)
    for following in batches:
        loop.optimizer.zero_grad()
        loop.backward(x, y.view(-1))
        loop.optimizer.step()
        x, y = following


def a_batch_that_was_kept(_: bool) -> None:
    loop = Loop(True)
    kept = list(loop.loader)
    loop.backward(*kept[0])


def hooks_and_sums_put_off(_: bool) -> None:
    loop = Loop(True)
    loop.model[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    for x, y in loop.loader:
        with evener.no_sync():
            loop.backward(x, y)


def a_loader_before_its_model(_: bool) -> None:
    evener.prepare(DataLoader(rows(), batch_size=6))


def a_generator(_: bool) -> None:
    evener.prepare(model_of(), (batch for batch in DataLoader(rows(), batch_size=6)))


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (
            a_term_of_samples,
            r"backward was called on \S+ on rank 0 and on \S+ on rank 1, and goes with the number",
        ),
        (
            a_factor_of_samples,
            r"backward was called on \S+ on rank 0 and on \S+ on rank 1.*evener.global_mean",
        ),
        (
            a_factor_with_the_same_value,
            r"prepared losses count 0\.\S+ times on rank 0 and 0\.\S+ times on rank 1",
        ),
        (
            plain_gradients_assigned,
            "gradient of 0.weight by a number that went through no prepared loss",
        ),
        (plain_gradients_before_others, r"the gradient of 2.bias, one of 1, is of rank \d's samples alone"),
        (by_hand, "0.weight, one of 4 that differ, is not on rank 1 what it is on rank 0"),
        (
            an_inner_step_of_a_plain_loss,
            "gradient of 0.weight by a number that went through no prepared loss",
        ),
        (
            batches_fetched_ahead,
            "samples of a batch that is no longer at hand, .* before the next is fetched",
        ),
        (a_batch_that_was_kept, "samples of a batch that is no longer at hand"),
        (an_inner_step, "torch.autograd.grad of a prepared loss was asked for a graph of its gradients"),
        (a_graph_of_gradients, r"backward\(\) was asked for a graph of gradients .* evener.gather"),
        (
            a_parameter_of_no_model,
            "updated tensors of no prepared model with other gradients on rank 1 than on rank 0",
        ),
        (an_update_on_one_rank, "rank 0 has made 1 updates and rank 1 0 before the end of a batch"),
        (thawed_on_one_rank, "the ranks train different parameters: requires_grad"),
        (a_layer_on_one_rank, "rank 0 in layers that were put in or taken out, rank 1 in"),
        (
            a_layer_within_a_batch,
            "a layer was put into the model in the middle of a batch, and has other weights",
        ),
        (hooks_and_sums_put_off, "0.weight has a hook on its gradient, .* evener.no_sync puts that off"),
        (
            a_loader_before_its_model,
            "a DataLoader before its model, goes with evener.prepare, which was not called",
        ),
        (
            a_generator,
            "evener.prepare cannot divide something of type generator, .*: give it the DataLoader itself",
        ),
    ],
    ids=placeless,
)
def test_what_cannot_be_made_right_is_refused(ranks: Any, loop: Any, words: str) -> None:
    for message in ranks(2).run(said, loop, balance="3,1"):
        assert re.search(words, message), message
