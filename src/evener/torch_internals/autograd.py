"""Names of autograd: its engine, what it knows of a tensor, hooks on gradients, and calls of ``autograd.Function``.

- ``_engine_run_backward`` runs the engine without what Python does before it. Under a mode for functions ``backward``
  is a function like any other: the mode is told of it and then suspended until it returns, so that the mode does not
  see the forward passes that activation checkpointing repeats in it. Within the engine a mode stays.
- ``Tensor._version`` counts writes in place, by which autograd finds tensors that were changed since they were saved.
  Its notes name the attribute, and no public one tells it.
- ``Tensor._base`` is the tensor of which another is a view. FSDP2 hangs a hook on what a module returns, which an
  operation in place on a view drops in silence; and a view of a weight is in a weight's memory. PyTorch's notes on
  views name the attribute, and no public one tells it.
- ``Tensor._backward_hooks`` and ``..._post_accumulate_grad_hooks`` stay with a tensor and have no public name, so that
  whoever puts a piece in the place of a weight would lose what the user registered, in silence. Nor can they be put
  off until ranks have summed what they are for.
- ``_SingleLevelFunction`` has the ``setup_context`` of a function that sets up none. ``torch.fx`` has no node for a
  call of a function: with its stand-ins for tensors ``apply`` runs the function's ``forward`` as any other code, and
  the function's own ``backward`` is lost in silence. ``apply`` is bound to names when a module is loaded
  (``relu = MyReLU.apply``), and from torch 2.15 on goes to C++ without a word of Python. There it asks the class for
  its ``forward``, and for its ``setup_context`` if it is not that of the class which is borrowed here; what
  ``forward`` returns and is no tensor is handed on as it is.
- ``torch.distributed.pipelining._backward`` has backward in two parts, of a stage's inputs and of its weights, which
  zero-bubble schedules need. The public way to them is a whole schedule's runtime, which wants micro-batches of one
  shape. It is imported with the first backward, because the package imports torch's compiler, for a second.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, _SingleLevelFunction
from torch.autograd.graph import GradientEdge, _engine_run_backward

# What autograd knows of a tensor


def version(tensor: Tensor) -> int:
    """Returns a number that rises with every write in place."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Tells whether autograd takes the tensor for a view."""
    return tensor._base is not None


def base_of(tensor: Tensor) -> Tensor | None:
    """Returns the tensor of which this one is a view; None if autograd takes it for none."""
    return tensor._base


Hooks = tuple[Any, Any]
"""Hooks that run before a gradient is accumulated, and after."""


def has_accumulation_hooks(tensor: Tensor) -> bool:
    """Tells whether ``register_post_accumulate_grad_hook`` was called for the tensor."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def hooks_of(tensor: Tensor) -> Hooks | None:
    """Returns those of ``register_hook`` and of ``register_post_accumulate_grad_hook``; None where there are none."""
    found = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return found if found[0] or found[1] else None


def give_hooks(tensor: Tensor, hooks: Hooks) -> None:
    """Puts ``hooks`` in the place of those that ``tensor`` has; who holds one can still remove it."""
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks


# The engine


def run_backward(
    around: AbstractContextManager[Any],
    tensors: Tensor | Sequence[Tensor],
    gradients: Tensor | Sequence[Tensor | None] | None,
    retain_graph: bool | None,
    create_graph: bool,
    inputs: Tensor | Sequence[Tensor] | None,
) -> None:
    """Does what ``torch.autograd.backward`` does, with ``around`` entered while the engine runs."""
    into = () if inputs is None else _several(inputs)
    _run(around, tensors, gradients, retain_graph, create_graph, into, True, accumulate_grad=True)


def run_grad(
    around: AbstractContextManager[Any],
    outputs: Tensor | Sequence[Any],
    inputs: Tensor | Sequence[Any],
    gradients: Tensor | Sequence[Tensor | None] | None,
    retain_graph: bool | None,
    create_graph: bool,
    allow_unused: bool,
) -> tuple[Tensor | None, ...]:
    """Does what ``torch.autograd.grad`` of tensors or edges does, likewise."""
    into = _several(inputs)
    found: tuple[Tensor | None, ...] = _run(
        around, outputs, gradients, retain_graph, create_graph, into, allow_unused, accumulate_grad=False
    )
    return found


def _run(
    around: AbstractContextManager[Any],
    tensors: Tensor | Sequence[Any],
    gradients: Tensor | Sequence[Tensor | None] | None,
    retain_graph: bool | None,
    create_graph: bool,
    *rest: Any,
    accumulate_grad: bool,
) -> Any:
    """Starts at ``tensors``, with a gradient of 1 for each number that is given none."""
    roots = _several(tensors)
    given = (None,) * len(roots) if gradients is None else _several(gradients)
    started = (
        torch.ones_like(root)
        if gradient is None and isinstance(root, Tensor) and root.numel() == 1
        else gradient
        for root, gradient in zip(roots, given, strict=True)
    )
    retain = create_graph if retain_graph is None else retain_graph
    with around:
        return _engine_run_backward(
            roots, tuple(started), retain, create_graph, *rest, accumulate_grad=accumulate_grad
        )


def _several(tensors: Any) -> tuple[Any, ...]:
    return (tensors,) if isinstance(tensors, Tensor | GradientEdge) else tuple(tensors)


# Calls of ``autograd.Function``

Record = Callable[[type[Function], tuple[Any, ...]], Any]


@contextmanager
def applied(record: Record) -> Iterator[None]:
    """Asks ``record(function, args)`` at each call in the block of a function that there is when it begins.

    What ``record`` returns is the result of the call, unless None.
    """
    replacements = {kind: _recorded(kind, record) for kind in _all_below(Function)}
    with ExitStack() as replaced:
        for kind, functions in replacements.items():
            for name, replacement in functions.items():
                replaced.enter_context(mock.patch.object(kind, name, staticmethod(replacement)))
        yield


def _all_below(kind: type[Function]) -> list[type[Function]]:
    """Returns the classes derived from ``kind``, without itself."""
    return [each for below in kind.__subclasses__() for each in (below, *_all_below(below))]


def _recorded(kind: type[Function], record: Record) -> dict[str, Callable[..., Any]]:
    """Returns what takes the places of the functions of a class."""
    forward, setup_context = kind.forward, kind.setup_context
    sets_up = setup_context is not _SingleLevelFunction.setup_context
    given: list[Any] = []  # to calls whose context is not set up yet

    def forward_recorded(*args: Any, **kwargs: Any) -> Any:
        found = record(kind, args if sets_up else args[1:])  # else the first is the context
        result = forward(*args, **kwargs) if found is None else found
        if sets_up:
            given.append(found)
        return result

    def set_up(context: Any, inputs: Any, output: Any) -> None:
        if given.pop() is None:
            setup_context(context, inputs, output)

    return {"forward": forward_recorded} | ({"setup_context": set_up} if sets_up else {})


# Backward in two parts


@cache
def _theirs() -> Any:
    return importlib.import_module("torch.distributed.pipelining._backward")


class _TangledError(Exception):
    """The gradients of a weight meet those of inputs in several places."""


def _apart(groups: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps their grouping of weights by where their gradients meet those of inputs, if each group has one place."""

    def checked(*args: Any) -> Any:
        found = groups(*args)
        if any(len(group["intermediates"]) > 1 for group in found):
            raise _TangledError
        return found

    return checked


def backward_of_inputs(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    weights: Sequence[nn.Parameter],
) -> list[dict[str, Any]]:
    """Adds to the gradients of ``inputs``; returns what :func:`backward_of_weights` needs.

    Without inputs that could have one there is nothing to hurry for, and the whole of backward is left to that. Where a
    weight is used in several places, such as a bias of positions that several blocks add, PyTorch's second part takes
    a way twice, and either fails or gives wrong gradients: then it is the whole of backward again.
    """
    whole = {"outputs": list(outputs), "gradients": None if gradients is None else list(gradients)}
    if not inputs or not outputs:
        return [whole]
    theirs = _theirs()
    try:
        with mock.patch.object(theirs, "get_param_groups", _apart(theirs.get_param_groups)):
            _, groups = theirs.stage_backward_input(
                list(outputs), whole["gradients"], list(inputs), iter(weights)
            )
        return list(groups)
    except _TangledError:
        torch.autograd.backward(outputs, gradients, retain_graph=True, inputs=list(inputs))
        return [whole]


def backward_of_weights(groups: list[dict[str, Any]], weights: Sequence[nn.Parameter]) -> None:
    """Adds to the gradients of ``weights``.

    A first gradient is copied: where weights are only added, that of one is that of another, and of the stage's input,
    in the same memory, to which the next micro-batch's would be added.
    """
    if groups and "outputs" in groups[0]:
        if groups[0]["outputs"]:
            torch.autograd.backward(groups[0]["outputs"], groups[0]["gradients"], inputs=list(weights))
        return
    without = [weight for weight in weights if weight.grad is None]
    _theirs().stage_backward_weight(iter(weights), groups)
    for weight in without:
        if weight.grad is not None:
            weight.grad = weight.grad.clone()
