"""Gradients of gradients, for functions whose backward is written by hand.

A gradient penalty (Gulrajani et al., "Improved Training of Wasserstein GANs", 2017), forces as derivatives of an
energy, and MAML (Finn, Abbeel and Levine, 2017) differentiate what backward has computed. Backward then runs with
``create_graph=True``, in which gradients are enabled, and must consist of operations that autograd knows. A backward
that is written by hand for speed does not. In that mode alone the output is computed again, by plain operations and
differentiable collectives, and autograd derives the gradients::

    backward(dy) ──create_graph=False──▶ the fast one
                 └─create_graph=True───▶ y = function(x) again ──▶ autograd.grad(y, x, dy, create_graph=True)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def differentiable_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], are_needed: Sequence[bool], dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of ``function(*inputs)``, multiplied by ``dy``, as tensors that can be differentiated.

    Args:
        function: Computes what forward has computed, by operations that autograd knows.
        inputs: Its arguments; None for one that is not given.
        are_needed: For each of them, and perhaps for more, whether its gradient is needed.
        dy: The gradient of the output.
    """
    # Gradients of the inputs themselves would call the hooks on them.
    views = [x if x is None else x.view_as(x) for x in inputs]
    needed = [x for x, is_needed in zip(views, are_needed, strict=False) if is_needed and x is not None]
    found = iter(torch.autograd.grad(function(*views), needed, dy, create_graph=True))
    return tuple(
        next(found) if is_needed and x is not None else None
        for x, is_needed in zip(views, are_needed, strict=False)
    )
