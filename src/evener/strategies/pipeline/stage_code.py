"""Compiles the calls of a stage into one function.

The code is the code that :mod:`torch.fx` writes for a graph, with the model in the place of ``self``. Modules and
weights are looked up in every call, so that replaced ones are found. A value is freed after its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from evener.strategies.pipeline.stages import Stage


def function_of(stage: Stage, inputs: Sequence[fx.Node]) -> Callable[..., Any]:
    """Returns the stage as a function of the model, its ``inputs`` and the received values, as positional arguments.

    The function returns the model's outputs in the last stage, and the values to hand on in other stages.
    """
    graph = fx.Graph()
    own = {node: graph.placeholder(node.name) for node in (*inputs, *stage.received)}
    for node in stage.calls:
        own[node] = graph.node_copy(node, own.__getitem__)
    if not any(node.op == "output" for node in stage.calls):
        graph.output(tuple(own[node] for node in stage.handed_on))
    code = graph.python_code("self")
    found: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<a stage of a pipeline>", "exec"), found)
    function: Callable[..., Any] = found["forward"]
    return function
