"""The plain graph: a graph captured by ``torch.compile``, changed so that running it node by node is correct.

Some operators in captured graphs need care. If the model calls ``torch.utils.checkpoint``, the graph has
``tag_activation_checkpoint``: a tag for the compiler, which makes recomputation use the same random numbers. Run node
by node, it would draw different numbers in backward, and gradients would be wrong. The plain graph calls
``torch.utils.checkpoint`` itself instead. A graph with any other operator that contains graphs, such as
``flex_attention`` or ``cond``, is not compared: compilers may use another algorithm for it, whose rounding cannot be
estimated from outside. The operator of ``torch.autograd.Function`` is correct as it is.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import fx
from torch.utils.checkpoint import checkpoint

_RECOMPUTED = ("tag_activation_checkpoint", "wrap_activation_checkpoint")
_THE_SAME = ("autograd_function_apply",)


def recomputed(body: fx.GraphModule, *args: Any, **_: Any) -> Any:
    """Runs ``body`` with activation checkpointing: it is recomputed in backward with the same random numbers."""
    return checkpoint(body, *args, use_reentrant=False)


def plain_graph(captured: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of the graph that computes what the model computes when it is run node by node."""
    made = fx.GraphModule(captured, copy.deepcopy(captured.graph))
    for node in made.graph.nodes:
        if node.op == "call_function" and str(node.target) in _RECOMPUTED:
            body = node.args[0]
            setattr(made, body.target, plain_graph(getattr(captured, body.target)))
            node.target = recomputed
    made.recompile()
    return made


def unlike(plain: fx.GraphModule) -> str | None:
    """Returns an operator because of which the graph cannot be compared. Returns None if there is none."""
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
