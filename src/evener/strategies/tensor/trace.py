"""Finds regions that can be divided by reading a module's own forward.

``torch.fx`` runs the forward once with proxies for its inputs and records the operations on them. A region is taken
only if the graph proves it. Walking back from the layer that reads, everything up to the layers that make the features
must be elementwise, and nothing on the way may be used for anything else::

    up ─▶ silu ─┐
                ├─ mul ─▶ drop ─▶ down          columns up, gate; between drop; row down
    gate ───────┘

A forward is left alone if it cannot be recorded (it branches on numbers, say), or if it differs in evaluation or
without its optional inputs. It runs on a copy, because it may count its calls or keep its inputs.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from evener.strategies.tensor.regions import (
    ACTIVATIONS,
    CONVOLUTIONS,
    Region,
    fit,
    is_local,
    is_sequence,
    is_told,
    obstacle,
)

_FUNCTIONS = {
    *(*ACTIVATIONS, F.softplus, F.hardswish, F.relu6, F.selu, F.logsigmoid),
    *(torch.exp, torch.square, torch.abs),
}
_OF_TWO = {
    operator.mul,
    operator.add,
    operator.sub,
    operator.truediv,
    torch.mul,
    torch.add,
    torch.sub,
    torch.div,
}
_METHODS = {"relu", "tanh", "sigmoid", "exp", "square", "abs"}
_METHODS_OF_TWO = {"mul", "add", "sub", "div"}
_SHAPES = {"transpose", "permute", "movedim", "view", "reshape", "flatten", "contiguous", "unflatten", "mT"}
"""Methods of tensors and functions of torch that change no number."""


def output_layer(model: nn.Module) -> str | None:
    """Returns the name of the linear layer whose scores are the model's output, perhaps reshaped. Returns None if there
    is no such layer, or nothing proves it."""
    if is_sequence(model):
        name, last = next(reversed([*model.named_children()]), ("", model))
        inner = output_layer(last) if is_sequence(last) and last is not model else None
        return name if isinstance(last, nn.Linear) else None if inner is None else f"{name}.{inner}"
    with torch.random.fork_rng([]):
        graphs = list(_graphs(model))
    found = {_output_of(graph, model) for graph in graphs}
    return found.pop() if len(found) == 1 else None


def _output_of(graph: fx.Graph, model: nn.Module) -> str | None:
    node = next(node for node in graph.nodes if node.op == "output").args[0]
    while isinstance(node, fx.Node) and _reshapes(node):
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    name = str(node.target)
    uses = [other for other in graph.nodes if f"{other.target}.".startswith(f"{name}.")]  # of its weight too
    plain = isinstance(model.get_submodule(name), nn.Linear) and len(uses) == len(node.users) == 1
    return name if plain else None


def _reshapes(node: fx.Node) -> bool:
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return node.op in ("call_method", "call_function") and name in _SHAPES and len(node.users) == 1


def traced(module: nn.Module) -> list[Region]:
    """Returns the regions among the layers that the forward of ``module`` calls itself."""
    children = [child for child in _children(module) if obstacle(child) is None]
    if not any(fit(column, row) for column in children for row in children):
        return []
    with torch.random.fork_rng([]):
        graphs = list(_graphs(module))
    found = [list(_regions(graph, module)) for graph in graphs]
    return found[0] if found and all(regions == found[0] for regions in found) else []


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules that the forward of ``module`` may call itself."""
    for child in module.children():
        yield from _children(child) if type(child) in (nn.ModuleList, nn.ModuleDict) else [child]


def _graphs(module: nn.Module) -> Iterator[fx.Graph]:
    """Yields a graph for every way to call the module; none if one of them cannot be recorded."""
    made = []
    for training in (True, False):
        for given in _optional(module):
            try:
                copied = copy.deepcopy(module).train(training)
                made.append(_Shallow().trace(copied, given))
            except Exception:
                return
    yield from made


def _optional(module: nn.Module) -> list[dict[str, Any]]:
    """Returns the fixed arguments for two ways to call the module: with all inputs, and with required inputs only."""
    parameters = inspect.signature(module.forward).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return [{}, defaults] if defaults else [{}]


class _Shallow(fx.Tracer):
    """Tracer that looks into no module but the given one."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _regions(graph: fx.Graph, module: nn.Module) -> Iterator[Region]:
    calls = [node for node in graph.nodes if node.op == "call_module"]
    modules = {node: module.get_submodule(str(node.target)) for node in calls}
    read = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    once = {
        node
        for node, called in modules.items()
        if str(node.target) not in read and sum(other is called for other in modules.values()) == 1
    }
    for node in calls:
        if node in once and _divides(modules[node]):
            region = _Walk(modules, once).back_from(node)
            if region is not None:
                yield region


def _divides(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, *CONVOLUTIONS)) and obstacle(module) is None


class _Walk:
    """Walks back from the layer that reads the features to the layers that make them."""

    def __init__(self, modules: dict[fx.Node, nn.Module], once: set[fx.Node]) -> None:
        self._modules, self._once = modules, once
        self._columns: list[fx.Node] = []
        self._between: list[fx.Node] = []

    def back_from(self, node: fx.Node) -> Region | None:
        row = self._modules[node]
        if not self._goes(node.args, row) or node.kwargs:
            return None
        inside = {*self._columns, *self._between}
        if any(user is not node and user not in inside for one in inside for user in one.users):
            return None
        told = [self._modules[one] for one in self._between if one in self._modules]
        columns = [self._modules[one] for one in self._columns]
        return Region(tuple(columns), tuple(filter(is_told, told)), row)

    def _goes(self, inputs: tuple[Any, ...], row: nn.Module) -> bool:
        return all(self._back(value, row) for value in inputs if isinstance(value, fx.Node))

    def _back(self, node: fx.Node, row: nn.Module) -> bool:
        if node in self._columns or node in self._between:
            return True
        called = self._modules.get(node)
        if called is not None and fit(called, row):
            self._columns.append(node)
            return node in self._once
        self._between.append(node)
        local = is_local(called, row) if called is not None else _elementwise(node)
        own = called is None or not is_told(called) or node in self._once
        return local and own and self._goes(node.args, row)


def _elementwise(node: fx.Node) -> bool:
    """Returns True for an elementwise operation. Only functions of two may have several node inputs."""
    several = sum(isinstance(value, fx.Node) for value in node.args) > 1
    if any(isinstance(value, fx.Node) for value in node.kwargs.values()):
        return False
    if node.op == "call_function":
        return node.target in _OF_TWO or (node.target in _FUNCTIONS and not several)
    return node.op == "call_method" and (
        node.target in _METHODS_OF_TWO or (node.target in _METHODS and not several)
    )
