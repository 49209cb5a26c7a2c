"""Private names of autograd, each as Evener uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tests.torch_internals.borrowing import borrowed


def test_hooks_on_accumulated_gradients_are_known() -> None:
    with borrowed("autograd") as names:
        weight = torch.ones(2, requires_grad=True)
        assert not names.has_accumulation_hooks(weight)
        weight.register_post_accumulate_grad_hook(lambda _: None)
        assert names.has_accumulation_hooks(weight)


def test_code_that_backward_calls_is_known() -> None:
    with borrowed("autograd") as names:
        seen, weight = [], torch.ones(2, requires_grad=True)
        weight.register_hook(lambda _: seen.append(names.is_within_backward()))
        weight.sum().backward()
        assert (seen, names.is_within_backward()) == ([True], False)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap, torch.func.jacrev])
def test_transforms_of_functions_are_known(transform: Any) -> None:
    with borrowed("autograd") as names:
        seen = []

        def function(x: torch.Tensor) -> torch.Tensor:
            seen.append(names.is_within_transform())
            return x.sum()

        transform(function)(torch.ones(2))
        assert (seen, names.is_within_transform()) == ([True], False)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_tensors_with_hooks_are_looked_for_only_after_a_hook_was_registered(register: str) -> None:
    from evener.torch_internals import autograd as names

    weights = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    looks = []

    def look() -> list[nn.Parameter]:
        looks.append(len(looks))
        return weights

    tensors = names.HookedTensors(look)
    assert tensors.now() == tensors.now() == []
    assert len(looks) == 1
    handle = getattr(weights[1], register)(lambda _: None)
    assert tensors.now()[0] is weights[1]
    hooks = names.hooks_of(weights[1])
    assert hooks is not None
    names.give_hooks(weights[1], (None, None))  # while they are put off, another is registered
    getattr(weights[2], register)(lambda _: None)
    assert [id(each) for each in tensors.now()] == [id(weights[2])]
    names.give_hooks(weights[1], hooks)
    assert [id(each) for each in tensors.now()] == [id(each) for each in weights[1:]]
    assert len(looks) == 3
    handle.remove()
    assert [id(each) for each in tensors.now()] == [id(weights[2])]
    assert len(looks) == 3


def test_hooks_on_gradients_are_taken_off_and_given_back() -> None:
    with borrowed("autograd") as names:
        weight, told = torch.ones(2, requires_grad=True), []
        assert names.hooks_of(weight) is None
        first = weight.register_hook(lambda gradient: gradient.clamp(max=0.5))
        weight.register_post_accumulate_grad_hook(lambda each: told.append(each.grad.tolist()))
        hooks = names.hooks_of(weight)
        names.give_hooks(weight, (None, {}))
        (3 * weight).sum().backward()
        assert (weight.grad.tolist(), told) == ([3.0, 3.0], [])
        names.give_hooks(weight, hooks)
        weight.grad = None
        (3 * weight).sum().backward()
        assert told == [[0.5, 0.5]]
        first.remove()
        (3 * weight).sum().backward()
        assert told[1:] == [[3.5, 3.5]]


def test_a_view_is_known() -> None:
    with borrowed("autograd") as names:
        weight = torch.ones(2, 3, requires_grad=True)
        assert names.is_view((weight * 2).T)
        assert not names.is_view(weight * 2)
        assert not names.is_view((weight * 2).T.clone())
        assert names.base_of(weight.T[0]) is weight
        assert names.base_of(weight) is None


def test_backward_comes_in_two_parts() -> None:
    with borrowed("autograd") as names:
        layer, given = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
        layer(given).sin().sum().backward()
        expected, weights = given.grad, [p.grad for p in layer.parameters()]
        given.grad = layer.weight.grad = layer.bias.grad = None
        outputs = layer(given).sin()
        groups = names.backward_of_inputs(
            [outputs], [torch.ones_like(outputs)], [given], list(layer.parameters())
        )
        torch.testing.assert_close(given.grad, expected)
        assert layer.weight.grad is None
        names.backward_of_weights(groups, list(layer.parameters()))
        torch.testing.assert_close([p.grad for p in layer.parameters()], weights)


def two_parts(names: Any, whole: bool) -> list[Any]:
    """Gradients of weights that are added, and of those used in two places, over two micro-batches of one sample."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(1, 3)) for _ in range(4)]
    first, second, twice, scale = weights
    for _ in range(2):
        given, bias = torch.randn(1, 3, requires_grad=True), 2 * twice
        alone = torch.tanh(scale * scale.exp() + bias)  # meets the input later
        output = ((given.clone() + first + second).square() * torch.tanh(alone + given + bias)).sum()
        if whole:
            output.backward()
        else:
            names.backward_of_weights(names.backward_of_inputs([output], None, [given], weights), weights)
    return [weight.grad for weight in weights]


def test_both_parts_of_backward_give_weights_their_own_gradients() -> None:
    with borrowed("autograd") as names:
        torch.testing.assert_close(two_parts(names, whole=False), two_parts(names, whole=True))


def without_inputs(names: Any, whole: bool) -> list[Any]:
    """Gradients of the input, of a weight whose result depends on it, and of two whose result does not."""
    torch.manual_seed(0)
    given = torch.randn(1, 3, requires_grad=True)
    weights = [nn.Parameter(torch.randn(1, 3)) for _ in range(3)]
    scale, apart, alone = weights
    outputs = [given * scale, (given.detach() * apart).sin(), 2 * alone]
    gradients = [torch.randn(1, 3) for _ in outputs]
    if whole:
        torch.autograd.backward(outputs, gradients)
    else:
        names.backward_of_weights(names.backward_of_inputs(outputs, gradients, [given], weights), weights)
    return [given.grad, *(weight.grad for weight in weights)]


def test_both_parts_of_backward_give_weights_their_gradients_without_inputs() -> None:
    with borrowed("autograd") as names:
        torch.testing.assert_close(without_inputs(names, whole=False), without_inputs(names, whole=True))


def test_what_is_to_run_after_backward_runs_then() -> None:
    with borrowed("autograd") as names:
        leaf, told = torch.ones(1, requires_grad=True), []
        total = leaf.sum()
        total.register_hook(lambda _: names.after_backward(lambda: told.append(leaf.grad is not None)))
        total.backward()
        assert told == [True]

        def fail() -> None:
            raise ValueError("told")

        total = leaf.sum()
        total.register_hook(lambda _: names.after_backward(fail))
        with pytest.raises(ValueError, match="told"):
            total.backward()


def test_a_write_in_place_is_counted() -> None:
    with borrowed("autograd") as names:
        tensor = torch.zeros(2)
        before = names.version(tensor)
        tensor.add_(1)
        assert names.version(tensor) > before


def test_backward_runs_within_a_context() -> None:
    with borrowed("autograd") as names:
        leaf, entered = torch.ones(2, requires_grad=True), []

        @contextmanager
        def around() -> Iterator[None]:
            entered.append("in")
            yield
            entered.append("out")

        leaf.register_hook(lambda gradient: entered.append("engine"))
        names.run_backward(around(), (3 * leaf).sum(), None, None, False, None)
        names.run_backward(around(), [2 * leaf], [torch.ones(2)], None, False, [leaf])
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [5, 5]
        (found,) = names.run_grad(around(), (3 * leaf).sum(), leaf, None, None, False, False)
        assert found.tolist() == [3, 3]
        ends = [torch.autograd.graph.get_gradient_edge(x) for x in (2 * leaf, leaf)]
        assert names.run_grad(around(), ends[:1], ends[1:], [torch.ones(2)], None, False, False)[0].sum() == 4
        assert entered == ["in", "engine", "out"] * 4


class Triples(torch.autograd.Function):
    """Whose backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


bound_before: Any = Triples.apply


class TriplesToo(Triples):
    pass


class TriplesApart(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.factor = output.shape[0] + 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.factor


@pytest.mark.parametrize(
    ("call", "function"),
    [
        pytest.param(lambda x: Triples.apply(x), Triples, id="by its class"),
        pytest.param(bound_before, Triples, id="bound before"),
        pytest.param(lambda x: TriplesToo.apply(x), TriplesToo, id="inherited"),
        pytest.param(lambda x: TriplesApart.apply(x), TriplesApart, id="with a context set up apart"),
    ],
)
def test_calls_of_an_autograd_function_are_seen(call: Any, function: Any) -> None:
    x, seen = torch.ones(2, requires_grad=True), []
    with borrowed("autograd") as names:
        with names.applied(lambda function, args: seen.append((function, len(args)))):
            call(x).sum().backward()
        with names.applied(lambda function, args: 7):
            assert call(x) == 7
    assert seen == [(function, 1)]
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]
    call(x).sum().backward()
    assert x.grad.tolist() == [6.0, 6.0]


def test_gradients_of_the_caller_are_known_in_a_function() -> None:
    seen: list[bool] = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            assert not torch.is_grad_enabled()
            seen.append(mode.is_on())
            with torch.no_grad():
                return x * 1

    x = torch.ones(2, requires_grad=True)
    with borrowed("autograd") as names, names.GradientMode() as mode:
        Asks.apply(x)
        with torch.no_grad():
            Asks.apply(x)
        with torch.inference_mode():
            Asks.apply(x)
        _ = x * 1  # what the last function turned off is known to be on again
        Asks.apply(x)
    assert seen == [True, False, False, True]
