"""The calls of a stage as one function.

Its code is what :mod:`torch.fx` writes for a graph, with the model in the place of ``self``: a module or a weight is
looked up with each call, so that one which has been put in the place of another is found, and a value is let go of
where it was used last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from evener.strategies.pipeline.stages import Stage


def function_of(stage: Stage, inputs: Sequence[fx.Node]) -> Callable[..., Any]:
    """The stage as a function of the model, its ``inputs`` and what the stage receives, one argument after the other.

    It returns the model's outputs in the last stage, in others what is handed on.
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
