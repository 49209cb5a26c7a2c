"""Backward passes of a prepared loop: ``torch.autograd.backward`` and ``torch.autograd.grad`` while it runs.

What is called on a tensor that a prepared loss or a prepared parameter is part of is a pass of all ranks. Only the
caller knows what it begins with, its root, which must be the same number on all ranks. So the two functions are
replaced as long as the preparation lasts, and hand such passes to it; all others go on as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from evener.errors import ConfigurationError
from evener.training.prepare.loop_state import Place

_ROUNDINGS = 8
Gradients = tuple[Tensor | None, ...]


class Taker(Protocol):
    """Who takes over the passes that concern it."""

    def concerns(self, roots: Sequence[Tensor], only_losses: bool) -> list[Tensor] | None:
        """The leaves that ``roots`` are made of without a prepared loss between; None if neither a prepared loss nor,
        unless ``only_losses`` are looked for, a prepared parameter is part of them."""

    def backward(
        self, roots: Sequence[Tensor], given: Any, leaves: Sequence[Tensor], run: Callable[[float], None]
    ) -> None:
        """Has ``run`` go backward with a factor on the roots' gradients, which are ``given``."""

    def grad(
        self,
        roots: Sequence[Tensor],
        given: Any,
        inputs: Sequence[Tensor],
        create_graph: bool,
        run: Callable[[float], Gradients],
    ) -> Gradients:
        """The same where gradients are returned."""

    def plain(self, found: Gradients, inputs: Sequence[Tensor]) -> None:
        """Is shown gradients of a pass that did not concern it."""


def replaced(taker: Taker) -> Callable[[], None]:
    """Replaces both functions until what is returned is called."""
    backward, grad = torch.autograd.backward, torch.autograd.grad

    @functools.wraps(backward)
    def backward_of_all(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        roots = several(tensors)
        leaves = taker.concerns(roots, False)
        if leaves is None:
            return backward(tensors, grad_tensors, *args, **kwargs)
        older = kwargs.pop("grad_variables", None)  # as torch still calls it, too
        given = grad_tensors if grad_tensors is not None else older
        return taker.backward(
            roots,
            given,
            leaves,
            lambda factor: backward(roots, _begun(roots, given, factor), *args, **kwargs),
        )

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
        roots = several(outputs)

        def run(factor: float) -> Any:
            given = grad_outputs if factor == 1 else _begun(roots, grad_outputs, factor)
            return grad(outputs, inputs, given, retain_graph, create_graph, *args, **kwargs)

        if taker.concerns(roots, True) is None:
            found = run(1)
            taker.plain(found, several(inputs))
            return found
        return taker.grad(roots, grad_outputs, several(inputs), create_graph, run)

    torch.autograd.backward, torch.autograd.grad = backward_of_all, grad_of_all

    def restore() -> None:
        if torch.autograd.backward is backward_of_all:
            torch.autograd.backward = backward
        if torch.autograd.grad is grad_of_all:
            torch.autograd.grad = grad

    return restore


def several(tensors: Any) -> tuple[Any, ...]:
    return (tensors,) if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable) else tuple(tensors)


def value_of(roots: Sequence[Tensor], given: Any) -> tuple[float, float]:
    """The number that a pass is the gradient of, and how far rounding may part it on ranks, relatively."""
    found = (None,) * len(roots) if given is None else several(given)
    terms = [
        float((root.detach() if weight is None else root.detach() * weight.detach()).sum().real)
        for root, weight in zip(roots, found, strict=True)
    ]
    return sum(terms), max(torch.finfo(root.dtype).eps for root in roots) * _ROUNDINGS


def _begun(roots: Sequence[Any], given: Any, factor: float) -> list[Tensor | None]:
    """The gradients of ``roots`` that a pass begins with, times ``factor``; of a number without any it is 1.

    Raises:
        ConfigurationError: For an edge of the graph in the place of a tensor.
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
    """Whether a way back through the graph of ``roots`` meets a node that ``is_loss``, beyond which nothing is looked
    at, and the leaves that it meets otherwise."""
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
            leaves.append(getattr(node, "variable"))  # noqa: B009  # which types do not know
        new = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= new
        left += new
    return has_loss, leaves


class Passes:
    """Those of a preparation, until it is closed."""

    def __init__(self, place: Place) -> None:
        self._place, self._mean = place, place.mean
        self.close = replaced(self)

    def concerns(self, roots: Sequence[Any], only_losses: bool) -> list[Tensor] | None:
        """See :class:`Taker`."""
        if self._place.is_over or self._place.is_in_pass or self._mean.ranks == 1:
            return None
        has_loss, leaves = ends_of(roots, lambda node: getattr(node, "place", None) is self._place)
        if has_loss or (not only_losses and any(map(self._mean.owns, leaves))):
            return leaves
        return None

    def backward(
        self, roots: Sequence[Tensor], given: Any, leaves: Sequence[Tensor], run: Callable[[float], None]
    ) -> None:
        """A backward pass, after which gradients are those of all ranks, unless that is put off."""
        self._place.look_for_changes()
        others = {leaf: leaf.grad for leaf in leaves if not self._mean.owns(leaf)}
        for leaf in others:
            leaf.grad = None
        value, tolerance = value_of(roots, given)
        with self._in_pass():
            self._mean.going(run, value, tolerance)
        for leaf, before in others.items():  # of a root's N-th part
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
        """Gradients of parameters are those of all ranks, and those of samples are what one device has of them.

        Raises:
            ConfigurationError: For those of other tensors, which nobody here could sum, or a graph of them.
        """
        strange = next((each for each in inputs if not self._is_known(each)), None)
        if create_graph or strange is not None:
            what = (
                "a graph of its gradients" if strange is None else f"a tensor of shape {tuple(strange.shape)}"
            )
            raise ConfigurationError(
                f"torch.autograd.grad of a prepared loss was asked for {what}, and gives gradients of the models' "
                "parameters and of this rank's own samples alone: for an inner step take the plain loss function, of "
                "samples that all ranks have, and the prepared one for the step of all ranks"
            )
        value, tolerance = value_of(roots, given)
        with self._in_pass():
            found = run(1 / self._mean.ranks)
        with self._place.summing():
            self._mean.returned(found, inputs, value, tolerance)
        return found

    def plain(self, found: Gradients, inputs: Sequence[Tensor]) -> None:
        """Gradients of no prepared loss; a collective call where some are of parameters, and a batch is at hand.

        Raises:
            ConfigurationError: If those are not the same on all ranks.
        """
        place = self._place
        if place.is_over or place.is_in_pass or self._mean.ranks == 1 or not place.rows:
            return
        self._mean.check_alike(
            [
                (tensor, each)
                for tensor, each in zip(inputs, found, strict=False)
                if each is not None and self._mean.owns(tensor)
            ]
        )

    def _is_known(self, tensor: Any) -> bool:
        """A parameter, or a leaf with a row for each of this rank's samples."""
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
