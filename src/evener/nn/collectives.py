"""Differentiable collectives, for custom parallel layers, losses and operators.

Gradients are those of the *sum* over the ranks of what each rank back-propagates; nothing here averages. A collective
is a linear map of the ranks' tensors, and backward is its adjoint: it takes each rank's gradient with respect to its
output, and returns to each rank the gradient of the sum with respect to its input::

    forward                                       backward
    all_reduce      y_r = Σ x_s                   dx_r = Σ dy_s                     all_reduce
    all_gather      y_r = x_0 | x_1 | ...         dx_r = piece r of Σ dy_s          reduce_scatter
    reduce_scatter  y_r = piece r of Σ x_s        dx_r = dy_0 | dy_1 | ...          all_gather
    all_to_all      y_r = pieces r of all x_s     dx_r = pieces r of all dy_s       all_to_all
    broadcast       y_r = x_source                dx_source = Σ dy_s, others 0      reduce
    shift           y_r = x_(r - by)              dx_r = dy_(r + by)                shift

Under tensor parallelism, all ranks compute the same from the same tensors outside of the divided layers, and each has
the whole gradient there. A sum over the ranks would count this gradient once for each rank. So a region of divided
layers begins with a function whose backward makes the gradient whole, and ends with one that takes the gradient as
whole (``f`` and ``g`` of Shoeybi et al., "Megatron-LM", 2019)::

    enter                        y_r = x                dx = Σ dy_s                 all_reduce
    split                        y_r = piece r of x     dx = dy_0 | dy_1 | ...      all_gather
    all_reduce(replicated=True)  y = Σ x_s              dx_r = dy                   no message
    all_gather(replicated=True)  y = x_0 | x_1 | ...    dx_r = piece r of dy        no message
    broadcast(replicated=True)   y = x_source           dx_source = dy, others 0    no message

The adjoint of backward is forward, so gradients can be differentiated again, for a gradient penalty for example.

All ranks of the group must make each call together, in forward and in backward, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from evener.errors import ConfigurationError
from evener.nn import collectives_no_grad as messages
from evener.nn.checks import (
    agreed,
    alike,
    check_own_length,
    described,
    dimension,
    lengths_of,
    pieces_of,
    several,
)
from evener.torch_internals.compiling import outside_of_graphs

Map = Callable[[Tensor], Tensor]


@outside_of_graphs
def all_reduce(x: Tensor, group: ProcessGroup | None, *, replicated: bool = False) -> Tensor:
    """Returns the sum of ``x`` over the ranks, bitwise the same on all.

    Args:
        x: A tensor of the same shape and type on all ranks. This is not checked, as it would take another message.
        group: The ranks; None for this rank alone.
        replicated: True if all ranks compute the same from the result, so that each has the whole gradient. Backward
            then sends nothing.

    Raises:
        ConfigurationError: If this rank is not in the group.
    """
    if (ranks := several(group)) is None:
        return x.clone()
    return mapped(
        x,
        lambda x: messages.summed(x, ranks),
        lambda dy: dy if replicated else messages.summed(dy, ranks),
    )


@outside_of_graphs
def all_gather(
    x: Tensor,
    group: ProcessGroup | None,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    *,
    replicated: bool = False,
) -> Tensor:
    """Concatenates the tensors of all ranks along ``dim``, in order of rank.

    Args:
        x: A tensor of the same type on all ranks, and of the same shape except along ``dim``, where the length may be
            0. A 0-d tensor counts as one of length 1.
        group: The ranks; None for this rank alone.
        dim: The dimension along which tensors are concatenated.
        sizes: The length of every rank's tensor along ``dim``. Without it the ranks exchange their lengths, and the
            host waits for that; they also compare shapes, types and ``requires_grad`` then.
        replicated: True if all ranks compute the same from the result, so that each has the whole gradient. Backward
            then sends nothing.

    Raises:
        ConfigurationError: If the tensors do not fit together, ``x`` has no such dimension or another length than
            ``sizes`` says, or this rank is not in the group.
    """
    x = x.reshape(1) if x.dim() == 0 else x
    dim = dimension("all_gather", x, dim)
    ranks = several(group)
    index = ranks.rank() if ranks else 0
    if sizes is not None:
        check_own_length("all_gather", x, dim, lengths_of("all_gather", sizes, ranks)[index])
    if ranks is None:
        return x.clone()
    lengths = agreed("all_gather", x, dim, ranks) if sizes is None else list(sizes)
    start = sum(lengths[:index])

    def back(dy: Tensor) -> Tensor:
        if replicated:
            return dy.narrow(dim, start, lengths[index])
        return messages.scattered(dy, dim, lengths, ranks)

    return mapped(x, lambda x: messages.gathered(x, dim, lengths, ranks), back)


@outside_of_graphs
def reduce_scatter(
    x: Tensor, group: ProcessGroup | None, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """Returns this rank's piece, along ``dim``, of the sum of ``x`` over the ranks.

    Terms are added in order of rank. Each piece has its gradient on one rank only, so a region of divided layers can
    also end with this function.

    Args:
        x: A tensor of the same shape and type on all ranks. This is not checked, as it would take another message.
        group: The ranks; None for this rank alone.
        dim: The dimension along which the sum is cut.
        sizes: The length of every rank's piece; may be 0. By default lengths differ by at most 1, longer ones first.

    Raises:
        ConfigurationError: If ``x`` has no such dimension, ``sizes`` do not add up to its length, or this rank is not
            in the group.
    """
    dim = dimension("reduce_scatter", x, dim)
    ranks = several(group)
    lengths = pieces_of("reduce_scatter", x, dim, sizes, ranks)
    if ranks is None:
        return x.clone()
    return mapped(
        x,
        lambda x: messages.scattered(x, dim, lengths, ranks),
        lambda dy: messages.gathered(dy, dim, lengths, ranks),
    )


@outside_of_graphs
def all_to_all(
    x: Tensor,
    group: ProcessGroup | None,
    splits: Sequence[int],
    dim: int = 0,
    received: Sequence[int] | None = None,
) -> Tensor:
    """Sends each rank its piece of ``x`` along ``dim``, and concatenates the received pieces in order of rank.

    Args:
        x: A tensor of the same type on all ranks, and of the same shape except along ``dim``.
        group: The ranks; None for this rank alone.
        splits: The length of the piece for each rank; may be 0. They must add up to the length of ``x``.
        dim: The dimension along which ``x`` is cut.
        received: The length of the piece that each rank sends here. Without it the ranks exchange their lengths, and
            the host waits for that; they also compare shapes, types and ``requires_grad`` then.

    Raises:
        ConfigurationError: If the tensors do not fit together, ``x`` has no such dimension, ``splits`` do not add up to
            its length, or this rank is not in the group.
    """
    dim = dimension("all_to_all", x, dim)
    ranks = several(group)
    sent = pieces_of("all_to_all", x, dim, splits, ranks)
    if received is not None:
        came = lengths_of("all_to_all", received, ranks)
    if ranks is None:
        return x.clone()
    if received is None:
        of_ranks = alike("all_to_all", x, dim, ranks, sent)
        came = [each.numbers[ranks.rank()] for each in of_ranks]
    return mapped(
        x,
        lambda x: messages.exchanged(x, dim, sent, came, ranks),
        lambda dy: messages.exchanged(dy, dim, came, sent, ranks),
    )


@outside_of_graphs
def broadcast(x: Tensor, group: ProcessGroup | None, source: int = 0, *, replicated: bool = False) -> Tensor:
    """Returns the ``x`` of rank ``source`` on all ranks.

    Args:
        x: A tensor of the same shape, type and ``requires_grad`` on all ranks. This is not checked. Its values matter
            on the source only.
        group: The ranks; None for this rank alone.
        source: The source's rank in the group.
        replicated: True if all ranks compute the same from the result, so that each has the whole gradient. Backward
            then sends nothing.

    Raises:
        ConfigurationError: If the group has no rank ``source``, or this rank is not in the group.
    """
    ranks = several(group)
    degree = ranks.size() if ranks else 1
    if not 0 <= source < degree:
        raise ConfigurationError(f"broadcast: there is no rank {source} in a group of {degree}")
    if ranks is None:
        return x.clone()

    def back(dy: Tensor) -> Tensor:
        if replicated:
            return dy if ranks.rank() == source else torch.zeros_like(dy)
        return messages.summed_at(dy, source, ranks)

    return mapped(x, lambda x: messages.copied(x, source, ranks), back)


@outside_of_graphs
def split(x: Tensor, group: ProcessGroup | None, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """Returns this rank's piece, along ``dim``, of an ``x`` that is the same on all ranks. Begins a region of divided
    layers.

    Forward sends nothing; backward gathers, so that all ranks have the whole gradient of ``x``. If each rank's ``x``
    is a separate term of the loss instead, use ``x.narrow``.

    Args:
        x: A tensor that is the same on all ranks.
        group: The ranks; None for this rank alone.
        dim: The dimension along which ``x`` is cut.
        sizes: The length of every rank's piece; may be 0. By default lengths differ by at most 1, longer ones first.

    Raises:
        ConfigurationError: If ``x`` has no such dimension, ``sizes`` do not add up to its length, or this rank is not
            in the group.
    """
    dim = dimension("split", x, dim)
    ranks = several(group)
    lengths = pieces_of("split", x, dim, sizes, ranks)
    if ranks is None:
        return x.clone()
    index = ranks.rank()
    start = sum(lengths[:index])
    return mapped(
        x,
        lambda x: x.narrow(dim, start, lengths[index]).clone(),
        lambda dy: messages.gathered(dy, dim, lengths, ranks),
    )


@outside_of_graphs
def shift(x: Tensor, group: ProcessGroup | None, by: int = 1, shape: Sequence[int] | None = None) -> Tensor:
    """Passes ``x`` around the ring of ranks, and returns the ``x`` of the rank ``by`` places before this one.

    Args:
        x: A tensor of the same type on all ranks; shapes may differ.
        group: The ranks; None for this rank alone.
        by: How many ranks forward; negative for backward.
        shape: The shape of the received tensor. Without it the ranks exchange their shapes, and the host waits for
            that; they also compare types and ``requires_grad`` then.

    Raises:
        ConfigurationError: If types or ``requires_grad`` were compared and differ, or this rank is not in the group.
    """
    ranks = several(group)
    if ranks is None or by % ranks.size() == 0:
        return x.clone()
    if shape is None:
        shape = described("shift", x, ranks)[(ranks.rank() - by) % ranks.size()].shape
    own = x.shape
    return mapped(
        x,
        lambda x: messages.shifted(x, by, shape, ranks),
        lambda dy: messages.shifted(dy, -by, own, ranks),
    )


@outside_of_graphs
def enter(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Returns ``x``, which must be the same on all ranks. Begins a region of divided layers.

    Backward sums the gradients over the ranks, since each rank's layers contribute a term: all ranks get the whole
    gradient of ``x``.

    Raises:
        ConfigurationError: If this rank is not in the group.
    """
    ranks = several(group)
    if ranks is None:
        return x.view_as(x)
    return mapped(x, lambda x: x.view_as(x), lambda dy: messages.summed(dy, ranks))


class _Mapped(torch.autograd.Function):
    """Applies ``there`` in forward and ``back`` in backward. Each of the two is the adjoint of the other, so that the
    backward of ``back`` is ``there``: gradients can be differentiated any number of times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map) -> Tensor:
        ctx.maps = back, there
        return there(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        back, there = ctx.maps
        return mapped(dy, back, there) if torch.is_grad_enabled() else back(dy), None, None


def mapped(x: Tensor, there: Map, back: Map) -> Tensor:
    """Returns ``there(x)``, a linear map of the ranks' tensors whose adjoint is ``back``."""
    output: Tensor = _Mapped.apply(x, there, back)  # type: ignore[no-untyped-call]
    return output
