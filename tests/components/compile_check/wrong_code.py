"""Backends of torch.compile that make something else of a graph, and the tasks in which they are to be found."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.registry import list_backends, register_backend

Run = Callable[..., Any]


class Passes(torch.autograd.Function):
    """A tensor, with ``factor`` times its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


def passing(run: Run, which: Callable[[Tensor], bool], factor: float) -> Run:
    """``run``, with other gradients of those inputs."""

    def wrong(*args: Any) -> Any:
        given = [
            Passes.apply(each, factor)
            if isinstance(each, Tensor) and each.requires_grad and which(each)
            else each
            for each in args
        ]
        return run(*given)

    return wrong


def right(run: Run) -> Run:
    return run


def scaled(run: Run) -> Run:
    """Outputs of numbers are 1 % too large."""
    return lambda *args: [each * 1.01 if _is_floating(each) else each for each in run(*args)]


def scaled_from_5(run: Run) -> Run:
    """Likewise, where a size of an input of the model is 5 or more: code that is wrong for some sizes."""

    def wrong(*args: Any) -> Any:
        sizes = [each for each in args if isinstance(each, int)]
        return scaled(run)(*args) if max(sizes, default=0) >= 5 else run(*args)

    return wrong


def without_weights(run: Run) -> Run:
    """Gradients of matrices that are leaves are zero."""
    return passing(run, lambda each: each.is_leaf and each.ndim == 2, 0.0)


def without_inputs(run: Run) -> Run:
    """The gradient of what a block gets is half of it."""
    return passing(run, lambda each: not isinstance(each, torch.nn.Parameter), 0.5)


def one_number(run: Run) -> Run:
    """The first number of each output is another."""

    def wrong(*args: Any) -> Any:
        found = [each.clone() if _is_floating(each) else each for each in run(*args)]
        for each in found:
            if _is_floating(each) and each.numel():
                each.view(-1)[0] += each.detach().abs().max()
        return found

    return wrong


def not_a_number(run: Run) -> Run:
    return lambda *args: [each * float("nan") if _is_floating(each) else each for each in run(*args)]


def forgetful(run: Run) -> Run:
    """Writes nothing to buffers."""
    return lambda *args: run(
        *(each.clone() if isinstance(each, Tensor) and not each.requires_grad else each for each in args)
    )


def scaled_without_gradients(run: Run) -> Run:
    """Wrong in evaluation alone."""
    return lambda *args: run(*args) if torch.is_grad_enabled() else scaled(run)(*args)


def other_dice(run: Run) -> Run:
    """Draws random numbers of its own."""

    def other(*args: Any) -> Any:
        with torch.random.fork_rng():
            torch.rand(3)
            return run(*args)

    return other


def only_once(run: Run) -> Run:
    """Raises where it is tried."""

    def once(*args: Any) -> Any:
        if inspect.stack()[1].function == "trial":
            raise RuntimeError("no second time")
        return run(*args)

    return once


WRONG = (scaled, scaled_from_5, without_weights, without_inputs, one_number, not_a_number, forgetful)


def register() -> None:
    """In this process: each by the name of its function."""
    for make in (right, other_dice, only_once, scaled_without_gradients, *WRONG):
        if make.__name__ not in list_backends():

            def backend(graph: fx.GraphModule, examples: Sequence[Any], make: Any = make) -> Run:
                return make(graph.forward)

            register_backend(backend, name=make.__name__)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
