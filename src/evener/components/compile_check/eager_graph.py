"""The graph that ``torch.compile`` has captured, so that to run it node by node computes what the model computes.

Two operators of such graphs are no functions of what they are given. Where the model calls
``torch.utils.checkpoint``, the graph has ``tag_activation_checkpoint``: a tag for a compiler, which sees to it that
random numbers are the same when the forward pass is computed again. Run as it is, it draws others in backward, and the
gradients are wrong. In the plain graph ``torch.utils.checkpoint`` itself stands there again. A graph with another
operator that contains graphs, such as ``flex_attention`` or ``cond``, is not compared: what a compiler makes of it may
be another algorithm, and how far rounding moves it cannot be seen from outside. That of ``torch.autograd.Function`` is
the same when it is run.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import fx
from torch.utils.checkpoint import checkpoint

_RECOMPUTED = ("tag_activation_checkpoint", "wrap_activation_checkpoint")
_THE_SAME = ("autograd_function_apply",)


def recomputed(body: fx.GraphModule, *args: Any, **_: Any) -> Any:
    """What ``body`` computes; it is computed again in backward, from the same random numbers."""
    return checkpoint(body, *args, use_reentrant=False)


def plain_graph(captured: fx.GraphModule) -> fx.GraphModule:
    """A copy that computes what the model computes."""
    made = fx.GraphModule(captured, copy.deepcopy(captured.graph))
    for node in made.graph.nodes:
        if node.op == "call_function" and str(node.target) in _RECOMPUTED:
            body = node.args[0]
            setattr(made, body.target, plain_graph(getattr(captured, body.target)))
            node.target = recomputed
    made.recompile()
    return made


def unlike(plain: fx.GraphModule) -> str | None:
    """An operator with which the graph, run node by node, is not to be compared; None if there is none."""
    for node in plain.graph.nodes:
        bodies = [each.target for each in node.all_input_nodes if _is_graph(plain, each)]
        if node.target is recomputed:
            found = [unlike(getattr(plain, name)) for name in bodies]
        else:
            found = [str(node.target)] if bodies and str(node.target) not in _THE_SAME else []
        if any(found):
            return next(filter(None, found))
    return None


def _is_graph(plain: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(getattr(plain, str(node.target), None), fx.GraphModule)
