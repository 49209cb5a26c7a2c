"""Backward passes of a prepared loop: replaces ``torch.autograd.backward`` and ``torch.autograd.grad`` while it runs.

A pass through a prepared loss or to a prepared parameter is a pass of all ranks. Only the caller knows its root, the
number from which it starts, which must be the same on all ranks. So both functions are replaced while the preparation
lasts, and pass such calls to it. All other calls are unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from evener.components.delayed_hooks import OF_WEIGHTS
from evener.components.sharded_tensor.local import is_divided
from evener.errors import ConfigurationError
from evener.nn.attention_dispatch import attending
from evener.torch_internals.compiling import kept_out_of_graphs, outside_of_graphs
from evener.training.prepare.global_loss_value import GlobalLossValue
from evener.training.prepare.late_checks import LateChecks, Number
from evener.training.prepare.loop_state import LoopState

_ROUNDINGS = 8
Gradients = tuple[Tensor | None, ...]


def replaced(passes: Passes) -> Callable[[], None]:
    """Replaces both functions. Returns a function that restores them."""
    backward, grad = torch.autograd.backward, torch.autograd.grad

    @outside_of_graphs
    @functools.wraps(backward)
    def backward_of_all(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        roots = several(tensors)
        leaves = passes.concerns(roots, False)
        if leaves is None:
            return backward(tensors, grad_tensors, retain_graph, create_graph, *args, **kwargs)
        older = kwargs.pop("grad_variables", None)  # torch's older name of the argument
        given = grad_tensors if grad_tensors is not None else older
        return passes.backward(
            roots,
            given,
            leaves,
            create_graph,
            lambda factor: backward(
                roots, _begun(roots, given, factor), retain_graph, create_graph, *args, **kwargs
            ),
        )

    @outside_of_graphs
    @functools.wraps(grad)
    def grad_of_all(
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        roots, inputs = several(outputs), inputs if isinstance(inputs, Tensor) else several(inputs)

        def run(factor: float) -> Any:
            given = grad_outputs if factor == 1 else _begun(roots, grad_outputs, factor)
            return grad(outputs, inputs, given, retain_graph, create_graph, *args, **kwargs)

        if passes.concerns(roots, True) is None:
            found = run(1)
            passes.plain(found, several(inputs))
            return found
        return passes.grad(roots, grad_outputs, several(inputs), create_graph, run)

    torch.autograd.backward, torch.autograd.grad = backward_of_all, grad_of_all

    def restore() -> None:
        if torch.autograd.backward is backward_of_all:
            torch.autograd.backward = backward
        if torch.autograd.grad is grad_of_all:
            torch.autograd.grad = grad

    return restore


def several(tensors: Any) -> tuple[Any, ...]:
    return (tensors,) if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable) else tuple(tensors)


def value_of(roots: Sequence[Tensor], given: Any, later: LateChecks) -> tuple[list[Number], float]:
    """Returns the terms of a pass's root, and the relative tolerance for rounding differences between ranks."""
    found = (None,) * len(roots) if given is None else several(given)
    terms = [
        later.kept((root.detach() if weight is None else root.detach() * weight.detach()).sum().real)
        for root, weight in zip(roots, found, strict=True)
    ]
    return terms, max(torch.finfo(root.dtype).eps for root in roots) * _ROUNDINGS


def _begun(roots: Sequence[Any], given: Any, factor: float) -> list[Tensor | None]:
    """Returns the gradients of ``roots`` that a pass starts with, times ``factor``. A single number's default is 1.

    Raises:
        ConfigurationError: For a graph edge instead of a tensor.
    """
    if not all(isinstance(root, Tensor) for root in roots):
        raise ConfigurationError(
            "backward began with an edge of the graph; in a loop with evener.prepare it begins with the tensor itself"
        )
    found = (None,) * len(roots) if given is None else several(given)
    return [
        gradient * factor
        if gradient is not None
        else torch.full_like(root, factor)
        if root.numel() == 1
        else None
        for root, gradient in zip(roots, found, strict=True)
    ]


def ends_of(roots: Sequence[Any], is_loss: Callable[[Any], bool]) -> tuple[bool, list[Tensor]]:
    """Walks the graph behind ``roots``, but not beyond nodes for which ``is_loss`` is true.

    Returns:
        True if it met such a node, and the leaves that it met.
    """
    tensors = [root for root in roots if isinstance(root, Tensor)]
    leaves = [root for root in tensors if root.grad_fn is None and root.requires_grad]
    left = [root.grad_fn for root in tensors if root.grad_fn is not None]
    seen, has_loss = set(left), False
    while left:
        node = left.pop()
        if is_loss(node):
            has_loss = True
            continue
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(getattr(node, "variable"))  # noqa: B009  # unknown to type checkers
        new = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= new
        left += new
    return has_loss, leaves


_WITHIN_A_LOSS = (
    "{name} takes gradients of what it was called with (torch.autograd.grad), as a penalty on gradients does, and a "
    "loss over the samples of all ranks has no way from one argument back to another. Take them in the loop, of this "
    "rank's samples, and the mean over all samples: (found,) = torch.autograd.grad(outputs.sum(), inputs, "
    "create_graph=True), then evener.global_mean((found.flatten(1).norm(dim=1) - 1) ** 2)"
)
_GRAPH_OF_A_PART = (
    "backward() was asked for a graph of gradients (create_graph=True), which would be of this rank's samples alone, "
    "while the gradients are of all. For second derivatives (AdaHessian, a penalty on gradients of weights) every rank "
    "takes them of all samples: x, y = evener.gather((x, y)), and of those torch.autograd.grad(loss, weights, "
    "create_graph=True) of the plain loss function, in place of the prepared one"
)


class Passes:
    """Handles the backward passes of a preparation, until it is closed."""

    def __init__(self, place: LoopState) -> None:
        self._place, self._mean = place, place.mean
        kept_out_of_graphs(GlobalLossValue)
        self.close = replaced(self)

    def concerns(self, roots: Sequence[Any], only_losses: bool) -> list[Tensor] | None:
        """Returns the leaves behind ``roots``, or None if the pass does not belong to the preparation. Stops at
        prepared losses.

        It belongs to it if it meets a prepared loss or, unless ``only_losses``, a prepared parameter.
        """
        if self._place.is_over or self._place.is_in_pass or self._place.world_size == 1:
            return None
        has_loss, leaves = ends_of(roots, lambda node: getattr(node, "place", None) is self._place)
        if has_loss or (not only_losses and any(map(self._mean.owns, leaves))):
            return leaves
        return None

    def backward(
        self,
        roots: Sequence[Tensor],
        given: Any,
        leaves: Sequence[Tensor],
        create_graph: bool,
        run: Callable[[float], None],
    ) -> None:
        """Runs a backward pass, and sums the gradients over the ranks unless that is delayed.

        Raises:
            ConfigurationError: For a graph of gradients: it would be of this rank's part of the sum.
        """
        self._place.look_for_changes()
        if any(map(is_divided, roots)):
            raise ConfigurationError(OF_WEIGHTS)
        if create_graph and self._mean.ranks > 1:
            raise ConfigurationError(_GRAPH_OF_A_PART)
        others = {leaf: leaf.grad for leaf in leaves if not self._mean.owns(leaf)}
        for leaf in others:
            leaf.grad = None
        value, tolerance = value_of(roots, given, self._place.later)
        with self._in_pass(), attending(self._place.sequence):
            self._mean.going(run, value, tolerance)
        for leaf, before in others.items():  # computed from root / N
            if leaf.grad is not None:
                leaf.grad *= self._mean.ranks
            if before is not None:
                leaf.grad = before if leaf.grad is None else before.add_(leaf.grad)
        self._place.passed()

    def grad(
        self,
        roots: Sequence[Tensor],
        given: Any,
        inputs: Sequence[Tensor],
        create_graph: bool,
        run: Callable[[float], Gradients],
    ) -> Gradients:
        """Returns gradients of parameters summed over all ranks, and gradients of samples as on one device.

        Raises:
            ConfigurationError: For other tensors, whose gradients cannot be summed, or a graph of gradients.
        """
        self._place.look_for_changes()
        if any(map(self._mean.is_summed_in_backward, inputs)):
            raise ConfigurationError(
                "torch.autograd.grad was asked for the gradient of a weight that is divided over the ranks, which only "
                "backward() sums: call that and read .grad, or use strategy 'ddp'"
            )
        strange = next((each for each in inputs if not self._is_known(each)), None)
        if (create_graph or strange is not None) and self._place.function:
            raise ConfigurationError(_WITHIN_A_LOSS.format(name=self._place.function))
        if create_graph or strange is not None:
            what = (
                "a graph of its gradients" if strange is None else f"a tensor of shape {tuple(strange.shape)}"
            )
            raise ConfigurationError(
                f"torch.autograd.grad of a prepared loss was asked for {what}, and gives gradients of the models' "
                "parameters and of this rank's own samples alone: for an inner step take the plain loss function, of "
                "samples that all ranks have, and the prepared one for the step of all ranks"
            )
        value, tolerance = value_of(roots, given, self._place.later)
        with self._in_pass():
            found = run(1 / self._mean.ranks)
        with self._place.summing():
            self._mean.returned(found, inputs, value, tolerance)
        return found

    def plain(self, found: Gradients, inputs: Sequence[Tensor]) -> None:
        """Checks gradients of no prepared loss. A collective call if some are of parameters, within a batch.

        Raises:
            ConfigurationError: If those are not the same on all ranks.
        """
        place = self._place
        if place.is_over or place.is_in_pass or place.world_size == 1 or not place.rows:
            return
        self._mean.check_alike(
            [
                (tensor, each)
                for tensor, each in zip(inputs, found, strict=False)
                if each is not None and self._mean.owns(tensor)
            ]
        )

    def _is_known(self, tensor: Any) -> bool:
        """Returns True for a parameter, or a leaf with one row for each of this rank's samples."""
        if not isinstance(tensor, Tensor) or self._mean.owns(tensor):
            return isinstance(tensor, Tensor)
        return tensor.is_leaf and tensor.dim() > 0 and len(tensor) in self._place.rows

    @contextmanager
    def _in_pass(self) -> Iterator[None]:
        self._place.is_in_pass = True
        try:
            yield
        finally:
            self._place.is_in_pass = False
