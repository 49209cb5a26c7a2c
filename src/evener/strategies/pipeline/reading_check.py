"""Compares what was read of a model's code with the code itself, on the first samples.

Proxies are no tensors. Code that asks (``isinstance(x, Tensor)``, ``hasattr``, ``try``) goes another way while it is
read than it does in training, and nothing tells. So the model runs once by its own code, one module's weights in memory
at a time, and what it gives to each module and what it returns are recorded. Then the recorded calls are made in the
order that was read, and must be given the same::

    own code   embed(words) ─▶ a      block(a + place) ─▶ b      returns b[0]      recorded
    as read    embed(words) ─▶ a      block(a + place) ─▶ b      returns b[0]      a and b are those of the record
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from evener.components.tree_spec import taken_apart
from evener.data.batch import map_leaves
from evener.errors import TaskError
from evener.strategies.pipeline.stages import layers_of
from evener.strategies.pipeline.traced_run import Rehearsal
from evener.strategies.pipeline.tracing import gradients_as, in_mode, inputs_of


class _OtherWayError(Exception):
    """Raised where calls differ from the record."""


@dataclass(frozen=True)
class _MadeCall:
    name: str
    given: Any
    result: Any


class _Record:
    """Makes calls, and keeps what each was given and what it returned."""

    def __init__(self) -> None:
        self.calls: list[_MadeCall] = []

    def __call__(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = map_leaves(_copied, (args, kwargs))
        self.calls.append(_MadeCall(name, given, map_leaves(_copied, forward(*args, **kwargs))))
        return map_leaves(_copied, self.calls[-1].result)


class _Repeated:
    """Answers calls from a record. Raises _OtherWayError if they are others, or are given something else."""

    def __init__(self, record: _Record) -> None:
        self._calls = iter(record.calls)

    def __call__(self, name: str, forward: Any, args: Any, kwargs: Any) -> Any:
        call = next(self._calls, None)
        if call is None or call.name != name or not _is_alike(call.given, (args, kwargs)):
            raise _OtherWayError(name)
        return map_leaves(_copied, call.result)

    def is_over(self) -> bool:
        return next(self._calls, None) is None


class _AsRead(fx.Interpreter):
    """Runs a graph whose calls of modules are answered from a record."""

    def __init__(self, model: Any, graph: fx.Graph, repeated: _Repeated) -> None:
        super().__init__(model, graph=graph)
        self._repeated = repeated

    def run_node(self, n: fx.Node) -> Any:
        with gradients_as(n):
            return super().run_node(n)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._repeated(str(target), None, args, kwargs)


def check_reading(graphs: Mapping[bool, fx.Graph], rehearsal: Rehearsal) -> None:
    """Compares the graphs, in training (True) and in evaluation (False), with the model's own code.

    Nothing is said about a model that cannot be run on the first samples, or gives its modules something else each
    time, as code does that draws random numbers.

    Raises:
        TaskError: If a graph gives a module something else than the code does, or returns something else.
    """
    for training, graph in graphs.items():
        with in_mode(rehearsal.model, training):
            if not _goes_the_same_way(graph, rehearsal):
                name = type(rehearsal.model).__name__
                raise TaskError(
                    f"{name}.forward goes another way while its code is read than on the first samples: it may ask "
                    "whether something is a tensor, where it meets a stand-in"
                )


def _goes_the_same_way(graph: fx.Graph, rehearsal: Rehearsal) -> bool:
    model, record = rehearsal.model, _Record()
    at_hand = Rehearsal(
        model, tuple(layers_of(graph)), rehearsal.arguments, rehearsal.device, rehearsal.dtype
    )
    try:
        with at_hand.stage() as run:
            expected = map_leaves(_copied, run(record, at_hand.inputs()))
            if not _is_alike(expected, run(_Repeated(record), at_hand.inputs())):
                return True
    except Exception:
        return True
    repeated = _Repeated(record)
    names = inputs_of(graph, inspect.signature(model.forward)).values()
    try:
        with at_hand.stage():
            given = at_hand.inputs()
            found = _AsRead(model, graph, repeated).run(*(given[name] for name in names))
    except Exception:
        return False
    return _is_alike(expected, found) and repeated.is_over()


def _copied(leaf: Any) -> Any:
    """Returns a tensor with memory of its own and no graph, which code may write into."""
    return leaf.detach().requires_grad_(leaf.requires_grad).clone() if isinstance(leaf, Tensor) else leaf


def _is_alike(one: Any, other: Any) -> bool:
    """Returns True if two trees have the same form, and their tensors the same numbers up to rounding."""
    (form, tensors), (other_form, others) = taken_apart(one), taken_apart(other)
    return bool(form == other_form) and all(map(_is_close, tensors, others))


def _is_close(one: Tensor, other: Tensor) -> bool:
    if one.is_floating_point() or one.is_complex():
        return torch.allclose(one.detach(), other.detach(), rtol=1e-3, atol=1e-5, equal_nan=True)
    return torch.equal(one, other)
