"""Loops that used to part in silence: each is that of one device."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import evener
from tests.ids import placeless
from tests.training.prepare.running import Loop, Weights, model_of, prepared, sgd, with_settings


def steps(loop: Loop, count: int = 2) -> None:
    for x, y in itertools.islice(loop.loader, count):
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        loop.optimizer.step()


# Parameters and models that come and go


def thawed(is_prepared: bool) -> Weights:
    """Of the head alone first, and then of all, with another optimizer for what was thawed."""
    torch.manual_seed(4)
    model = model_of()
    model[0].requires_grad_(False)
    loop = Loop(is_prepared, lambda other: torch.optim.SGD(other[2].parameters(), lr=0.3), model=model)
    steps(loop)
    loop.model[0].requires_grad_(True)
    loop.optimizer.add_param_group({"params": list(loop.model[0].parameters())})
    steps(loop)
    loop.model[2].bias.requires_grad_(False)
    steps(loop)
    return loop.weights()


def with_another_head(is_prepared: bool) -> Weights:
    """Put in between two epochs, with an optimizer that was never prepared; and a parameter more."""
    loop = Loop(is_prepared)
    steps(loop)
    with torch.random.fork_rng():
        torch.manual_seed(evener.rank() if is_prepared else 0)
        head = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    loop.model[2] = head
    loop.optimizer = sgd(loop.model)
    steps(loop)
    loop.model[0].register_parameter("more", nn.Parameter(torch.zeros(6, dtype=torch.float64)))
    loop.model[0].register_forward_hook(lambda module, _, output: output + module.more)
    for x, y in loop.loader:
        if not isinstance(
            loop.model[1], nn.Linear
        ):  # in the middle of a batch, with the same weights on all ranks
            loop.model[1] = nn.Linear(6, 6).double()
            nn.init.eye_(loop.model[1].weight)
            nn.init.zeros_(loop.model[1].bias)
            loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        loop.optimizer.step()
    return loop.weights()


def pruned(is_prepared: bool) -> Weights:
    """Masks, which are buffers, come, change, and go when they are made permanent."""
    loop = Loop(is_prepared)
    steps(loop)
    for _ in range(2):
        prune.l1_unstructured(loop.model[0], "weight", amount=0.3)
        loop.optimizer = sgd(loop.model)
        steps(loop)
    prune.remove(loop.model[0], "weight")
    loop.optimizer = sgd(loop.model)
    steps(loop)
    return loop.weights()


def two_calls(is_prepared: bool) -> Weights:
    loop = Loop(is_prepared)
    second = model_of()
    optimizer = sgd(second)
    if is_prepared:
        second, optimizer = evener.prepare(second, optimizer)
    for x, y in itertools.islice(loop.loader, 3):
        loop.optimizer.zero_grad()
        optimizer.zero_grad()
        loop.loss(loop.model(x) + second(x), y).backward()
        loop.optimizer.step()
        optimizer.step()
        for each in (loop.optimizer, optimizer):
            each.load_state_dict(copy.deepcopy(each.state_dict()))
    return loop.weights() | {f"second.{name}": value.detach() for name, value in second.state_dict().items()}


def with_copies(is_prepared: bool) -> Weights:
    """A moving average of a model whose BatchNorm is that of all ranks, and a file of the whole model."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    loop = Loop(is_prepared, model=model, drop_last=True)
    average = AveragedModel(loop.model)
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        loop.optimizer.step()
        average.update_parameters(loop.model)
    file = io.BytesIO()
    torch.save(copy.deepcopy(loop.model), file)
    return {f"average.{name}": value.detach() for name, value in average.state_dict().items()}


def something_else_between_two_calls(is_prepared: bool) -> Weights:
    """A model that each rank trains for itself, after a loop and before another is prepared."""
    loop = Loop(is_prepared)
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        loop.optimizer.step()
    mine = nn.Linear(2, 1)
    optimizer = sgd(mine)
    mine(torch.full((1, 2), 1.0 + evener.rank())).sum().backward()
    optimizer.step()
    torch.manual_seed(5)
    second = model_of()
    if is_prepared:
        second = evener.prepare(second)
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        loop.loss(loop.model(x) + second(x), y).backward()
        loop.optimizer.step()
    return loop.weights()


# Gradients by other ways


def assigned(is_prepared: bool) -> Weights:
    loop = Loop(is_prepared)
    for x, y in loop.loader:
        parameters = list(loop.model.parameters())
        for p, g in zip(
            parameters, torch.autograd.grad(loop.loss(loop.model(x), y), iter(parameters)), strict=True
        ):
            p.grad = g
        loop.optimizer.step()
    return loop.weights()


def scaled_by_hand(is_prepared: bool) -> Weights:
    """Other tensors in the place of gradients, the same on all ranks; and a pass of a penalty alone."""
    loop = Loop(is_prepared)
    for x, y in loop.loader:
        loop.optimizer.zero_grad(set_to_none=False)
        loop.backward(x, y)
        sum(p.pow(2).sum() for p in loop.model.parameters()).mul(0.01).backward()
        for p in loop.model.parameters():
            p.grad = p.grad * 0.5
        loop.optimizer.step()
    return loop.weights()


def with_clamping_hooks(is_prepared: bool) -> Weights:
    loop = Loop(is_prepared)
    for p in loop.model.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    for index, (x, y) in enumerate(loop.loader):
        loop.backward(x, y)
        if index % 2:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    return loop.weights()


def with_clamped_activations(is_prepared: bool) -> Weights:
    loop = Loop(is_prepared)
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        hidden = loop.model[0](x)
        hidden.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        loop.loss(loop.model[2](hidden.tanh()), y).backward()
        loop.optimizer.step()
    return loop.weights()


def stepping_in_backward(is_prepared: bool) -> Weights:
    loop = Loop(is_prepared)
    each = {p: torch.optim.SGD([p], lr=0.3, momentum=0.9) for p in loop.model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    for p in each:
        p.register_post_accumulate_grad_hook(step)
    for x, y in loop.loader:
        loop.backward(x, y)
    return loop.weights()


def against_an_adversary(is_prepared: bool) -> Weights:
    """Whose steps follow gradients of inputs by their size, found in both ways."""
    loop = Loop(is_prepared)
    for index, (x, y) in enumerate(loop.loader):
        x.requires_grad_(True)
        loss = loop.loss(loop.model(x), y)
        if index % 2:
            (gradient,) = torch.autograd.grad(loss, x)
        else:
            loss.backward()
            gradient = x.grad
        loop.optimizer.zero_grad()
        loop.backward((x + 3 * gradient).detach(), y)
        loop.optimizer.step()
    return loop.weights()


def weighing_by_uncertainty(is_prepared: bool) -> Weights:
    """A parameter of no model and an optimizer that was not prepared, behind the loss."""
    loop = Loop(is_prepared)
    deviation = torch.zeros((), dtype=torch.float64, requires_grad=True)
    own = torch.optim.SGD([deviation], lr=0.1)
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        own.zero_grad()
        (loop.loss(loop.model(x), y) * torch.exp(-deviation) + deviation).backward()
        loop.optimizer.step()
        own.step()
    return loop.weights() | {"deviation": deviation.detach()}


def scaling_of_no_model(is_prepared: bool) -> Weights:
    """A parameter before the model, whose gradient is of each rank's samples: prepared in a list."""
    loop = Loop(is_prepared)
    scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
    own = torch.optim.SGD([scale], lr=0.1)
    if is_prepared:
        evener.prepare(nn.ParameterList([scale]), own)
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        own.zero_grad()
        loop.backward(x * scale, y)
        loop.optimizer.step()
        own.step()
    return loop.weights() | {"scale": scale.detach()}


# Data


def seeded_in_the_loop(is_prepared: bool) -> Weights:
    """And a layer drawn from that seed."""
    loop = Loop(is_prepared)
    for epoch in range(2):
        torch.manual_seed(epoch)
        noise = torch.randn(4, dtype=torch.float64)
        for x, y in loop.loader:
            loop.optimizer.zero_grad()
            loop.backward(x + noise, y)
            loop.optimizer.step()
    return loop.weights()


def seeded_twice(is_prepared: bool) -> Weights:
    """The seed that was set already, of which rank 0 has drawn nothing since."""
    torch.manual_seed(7)
    loop = Loop(is_prepared)
    for _ in range(2):
        torch.manual_seed(7)
        for x, y in loop.loader:
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            loop.optimizer.step()
    return loop.weights()


def one_batch_at_a_time(is_prepared: bool) -> Weights:
    loop = Loop(is_prepared)
    for _ in range(3):
        x, y = next(iter(loop.loader))
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        loop.optimizer.step()
    return loop.weights()


def passes_of_common_noise(is_prepared: bool) -> Weights:
    """In training mode, before the batches, within them and between them, each counted once in running figures."""
    torch.manual_seed(4)
    head = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    loop = Loop(is_prepared, model=head)
    noise = torch.rand(5, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    loop.model(noise)
    for _ in range(2):
        for x, y in itertools.islice(loop.loader, 4):
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            loop.optimizer.step()
            with torch.no_grad():
                loop.model(2 * noise)
        loop.model(3 * noise)
    return loop.weights()


def penalized_on_common_noise(is_prepared: bool) -> Weights:
    """By its outputs, and by their gradients, also in a batch of which a rank has no samples."""
    torch.manual_seed(4)
    head = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    loop = Loop(is_prepared, model=head)
    noise = torch.rand(5, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        loop.backward(x, y)
        loop.model(noise).pow(2).mean().backward()
        outputs = loop.model(noise.requires_grad_())
        (found,) = torch.autograd.grad(outputs.pow(2).sum(), noise, create_graph=True)
        (0.001 * found.pow(2).mean()).backward()
        loop.optimizer.step()
    return loop.weights()


def penalized_by_gradients(is_prepared: bool) -> Weights:
    """Of the samples, taken after a loss, also in a batch of which a rank has none."""
    torch.manual_seed(4)
    head = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    loop = Loop(is_prepared, model=head)
    for x, y in loop.loader:
        outputs = loop.model(x.requires_grad_())
        value = loop.loss(outputs, y)
        (found,) = torch.autograd.grad(outputs.pow(2).sum(), x, create_graph=True)
        squares = 0.001 * found.pow(2).sum(1)
        loop.optimizer.zero_grad()
        (value + (evener.global_mean(squares) if is_prepared else squares.mean())).backward()
        loop.optimizer.step()
    return loop.weights()


def evaluated_with_another_layer(is_prepared: bool) -> Weights:
    """Put in while the model is in evaluation mode, beside a teacher that is never in another."""
    torch.manual_seed(4)
    parts = [nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double() for _ in range(2)]
    teacher = parts[1].eval()
    teacher = evener.prepare(teacher) if is_prepared else teacher
    loop = Loop(is_prepared, model=parts[0])
    for _ in range(2):
        for x, y in loop.loader:
            loop.optimizer.zero_grad()
            loop.backward(x + teacher(x).mean(1, keepdim=True), y)
            loop.optimizer.step()
        loop.model.eval()
        with torch.random.fork_rng():
            torch.manual_seed(9)
            loop.model[2] = nn.Linear(5, 3).double()
        loop.optimizer = sgd(loop.model)
        with torch.no_grad():
            for x, y in loop.loader:
                loop.loss(loop.model(x), y)
        loop.model.train()
    return loop.weights() | {f"teacher's {name}": value for name, value in teacher.state_dict().items()}


@pytest.mark.parametrize("settings", [{}, {"strategy": "sharded"}], ids=["ddp", "sharded"])
def test_models_keep_the_mode_that_they_have(settings: dict[str, Any]) -> None:
    with with_settings(**settings):
        model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(), nn.Linear(5, 3))
        model[1].eval()
        assert [each.training for each in evener.prepare(model).modules()] == [True, True, False, True]
        evaluated = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)).eval()
        assert not any(each.training for each in evener.prepare(evaluated).modules())


LOOPS = (
    *(thawed, with_another_head, pruned, two_calls, something_else_between_two_calls, with_copies),
    *(assigned, scaled_by_hand, with_clamping_hooks),
    *(with_clamped_activations, stepping_in_backward, against_an_adversary),
    *(weighing_by_uncertainty, scaling_of_no_model),
    *(seeded_in_the_loop, seeded_twice, one_batch_at_a_time, passes_of_common_noise),
    *(penalized_on_common_noise, penalized_by_gradients, evaluated_with_another_layer),
)


@pytest.mark.parametrize("loop", LOOPS, ids=placeless)
def test_it_is_the_loop_of_one_device(ranks: Any, loop: Callable[[bool], Weights]) -> None:
    expected = loop(False)
    for found in ranks(2).run(prepared, loop, balance="3,1"):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)
