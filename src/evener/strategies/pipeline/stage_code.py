"""Compiles the calls of a stage into one function.

The code is the code that :mod:`torch.fx` writes for a graph, with the model in the place of ``self``. Modules and
weights are looked up in every call, so that replaced ones are found. A value is freed after its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from evener.strategies.pipeline.stages import Stage
from evener.strategies.pipeline.tracing import WITHOUT_GRADIENTS


def function_of(stage: Stage, inputs: Sequence[fx.Node]) -> Callable[..., Any]:
    """Returns the stage as a function of the model, its ``inputs`` and the received values, as positional arguments.

    The function returns the model's outputs in the last stage, and the values to hand on in other stages.
    """
    graph = fx.Graph()
    own = {node: graph.placeholder(node.name) for node in (*inputs, *stage.received)}
    outer = graph.call_function(torch.is_grad_enabled)
    off = False
    for node in stage.calls:
        without = node.op not in ("get_attr", "output") and bool(node.meta.get(WITHOUT_GRADIENTS, False))
        if without != off:
            off = without
            graph.call_function(torch.set_grad_enabled, (False if off else outer,))
        own[node] = graph.node_copy(node, own.__getitem__)
    if not any(node.op == "output" for node in stage.calls):
        graph.output(tuple(own[node] for node in stage.handed_on))
    code = graph.python_code("self")
    found: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<a stage of a pipeline>", "exec"), found)
    function: Callable[..., Any] = found["forward"]

    def run(*args: Any) -> Any:
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # or an error would leave them off
            return function(*args)

    return run
