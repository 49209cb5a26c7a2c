"""Collectives that autograd differentiates, for parallel layers, losses and operators of one's own.

What is trained is the *sum* over the ranks of what each rank back-propagates; nothing here averages. A collective is a
linear map of the ranks' tensors, and backward is its adjoint: it takes each rank's gradient of its own output, and
gives each the gradient of that sum by its own input::

    forward                                       backward
    all_reduce      y_r = Σ x_s                   dx_r = Σ dy_s                     all_reduce
    all_gather      y_r = x_0 | x_1 | ...         dx_r = piece r of Σ dy_s          reduce_scatter
    reduce_scatter  y_r = piece r of Σ x_s        dx_r = dy_0 | dy_1 | ...          all_gather
    all_to_all      y_r = pieces r of all x_s     dx_r = pieces r of all dy_s       all_to_all
    broadcast       y_r = x_source                dx_source = Σ dy_s, others 0      reduce
    shift           y_r = x_(r - by)              dx_r = dy_(r + by)                shift

Between layers that are divided (tensor parallelism), all ranks compute the same from the same tensors, and each holds
the whole gradient of these: a sum over the ranks would count it once a rank. There a region begins by a function that
makes the gradient whole, and ends by one that takes it as whole (``f`` and ``g`` of Shoeybi et al., "Megatron-LM",
2019)::

    enter                        y_r = x                dx = Σ dy_s                 all_reduce
    split                        y_r = piece r of x     dx = dy_0 | dy_1 | ...      all_gather
    all_reduce(replicated=True)  y = Σ x_s              dx_r = dy                   no message
    all_gather(replicated=True)  y = x_0 | x_1 | ...    dx_r = piece r of dy        no message
    broadcast(replicated=True)   y = x_source           dx_source = dy, others 0    no message

Every call is one of all ranks of the group, in forward and in backward, in the same order on all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
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
    """The sum of ``x`` over the ranks, the same bits on all.

    Args:
        x: Of one shape and type on all ranks, which is not checked: that would take another message.
        group: The ranks; None for this rank alone.
        replicated: What follows is the same on all ranks, so that the gradient is whole: backward sends nothing.

    Raises:
        ConfigurationError: If this rank is not in the group.
    """
    if (ranks := several(group)) is None:
        return x.clone()
    return _mapped(
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
    """The tensors of all ranks side by side along ``dim``, in order of rank.

    Args:
        x: Of one type on all ranks, and of one shape but for ``dim``, where it may also be 0. Numbers (0-d) come as
            one dimension.
        group: The ranks; None for this rank alone.
        sizes: The length along ``dim`` of every rank's tensor. Without them the ranks tell each other, for which the
            host waits; shapes, types and need of a gradient are compared then.
        replicated: What follows is the same on all ranks, so that the gradient is whole: backward sends nothing.

    Raises:
        ConfigurationError: If the tensors do not fit together, the dimension or the sizes are not those of ``x``, or
            this rank is not in the group.
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

    return _mapped(x, lambda x: messages.gathered(x, dim, lengths, ranks), back)


@outside_of_graphs
def reduce_scatter(
    x: Tensor, group: ProcessGroup | None, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """This rank's piece along ``dim`` of the sum of ``x`` over the ranks.

    Terms are added in order of rank. The gradient of a piece is its owner's, so that a region of divided layers can
    end here too.

    Args:
        x: Of one shape and type on all ranks, which is not checked: that would take another message.
        group: The ranks; None for this rank alone.
        sizes: The length of every rank's piece, also 0; else as equal as they can be, the first ones longer.

    Raises:
        ConfigurationError: If the dimension or the sizes are not those of ``x``, or this rank is not in the group.
    """
    dim = dimension("reduce_scatter", x, dim)
    ranks = several(group)
    lengths = pieces_of("reduce_scatter", x, dim, sizes, ranks)
    if ranks is None:
        return x.clone()
    return _mapped(
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
    """Sends each rank its piece of ``x`` along ``dim``; the pieces that come are side by side, in order of rank.

    Args:
        x: Of one type on all ranks, and of one shape but for ``dim``.
        group: The ranks; None for this rank alone.
        splits: The length of the piece for each rank, also 0; together they are ``x``.
        received: The length of the piece that each rank sends here. Without them the ranks tell each other, for which
            the host waits; shapes, types and need of a gradient are compared then.

    Raises:
        ConfigurationError: If the tensors do not fit together, the dimension or the splits are not those of ``x``, or
            this rank is not in the group.
    """
    dim = dimension("all_to_all", x, dim)
    ranks = several(group)
    sent = pieces_of("all_to_all", x, dim, splits, ranks)
    if received is not None:
        came = lengths_of("all_to_all", received, ranks)
    if ranks is None:
        return x.clone()
    if received is None:
        told = alike("all_to_all", x, dim, ranks, sent)
        came = [each.numbers[ranks.rank()] for each in told]
    return _mapped(
        x,
        lambda x: messages.exchanged(x, dim, sent, came, ranks),
        lambda dy: messages.exchanged(dy, dim, came, sent, ranks),
    )


@outside_of_graphs
def broadcast(x: Tensor, group: ProcessGroup | None, source: int = 0, *, replicated: bool = False) -> Tensor:
    """The ``x`` of rank ``source`` of the group, on all ranks.

    Args:
        x: Of one shape and type on all ranks, which is not checked, and with ``requires_grad`` on all or on none; what
            other ranks than the source have in it does not matter.
        group: The ranks; None for this rank alone.
        replicated: What follows is the same on all ranks, so that the gradient is whole: backward sends nothing.

    Raises:
        ConfigurationError: If there is no such source, or this rank is not in the group.
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

    return _mapped(x, lambda x: messages.copied(x, source, ranks), back)


@outside_of_graphs
def split(x: Tensor, group: ProcessGroup | None, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's piece along ``dim`` of an ``x`` that all ranks hold alike; begins a region of divided layers.

    Forward sends nothing; backward gathers, so that all hold the whole gradient of ``x``. Where each rank's ``x``
    counts in a sum by itself, ``x.narrow`` has the right gradient.

    Args:
        x: The same on all ranks.
        group: The ranks; None for this rank alone.
        sizes: The length of every rank's piece, also 0; else as equal as they can be, the first ones longer.

    Raises:
        ConfigurationError: If the dimension or the sizes are not those of ``x``, or this rank is not in the group.
    """
    dim = dimension("split", x, dim)
    ranks = several(group)
    lengths = pieces_of("split", x, dim, sizes, ranks)
    if ranks is None:
        return x.clone()
    index = ranks.rank()
    start = sum(lengths[:index])
    return _mapped(
        x,
        lambda x: x.narrow(dim, start, lengths[index]).clone(),
        lambda dy: messages.gathered(dy, dim, lengths, ranks),
    )


@outside_of_graphs
def shift(x: Tensor, group: ProcessGroup | None, by: int = 1, shape: Sequence[int] | None = None) -> Tensor:
    """Passes ``x`` on around the ring of ranks: what comes is the ``x`` of the rank ``by`` places before this one.

    Args:
        x: Of one type on all ranks, of any shape on each.
        group: The ranks; None for this rank alone.
        by: How many ranks on; negative is back.
        shape: Of what comes. Without it the ranks tell each other, for which the host waits; types and need of a
            gradient are compared then.

    Raises:
        ConfigurationError: If types or need of a gradient differ, or this rank is not in the group.
    """
    ranks = several(group)
    if ranks is None or by % ranks.size() == 0:
        return x.clone()
    if shape is None:
        shape = described("shift", x, ranks)[(ranks.rank() - by) % ranks.size()].shape
    return _mapped(
        x,
        lambda x: messages.shifted(x, by, shape, ranks),
        lambda dy: messages.shifted(dy, -by, x.shape, ranks),
    )


@outside_of_graphs
def enter(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """``x`` itself, which all ranks hold alike; begins a region of divided layers.

    Backward sums, so that all hold the whole gradient of ``x``, to which each rank's layers give a term.

    Raises:
        ConfigurationError: If this rank is not in the group.
    """
    ranks = several(group)
    if ranks is None:
        return x.view_as(x)
    return _mapped(x, lambda x: x.view_as(x), lambda dy: messages.summed(dy, ranks))


class _Mapped(torch.autograd.Function):
    """A linear map of the ranks' tensors; backward is another, which cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(dy), None, None


def _mapped(x: Tensor, there: Map, back: Map) -> Tensor:
    output: Tensor = _Mapped.apply(x, there, back)  # type: ignore[no-untyped-call]
    return output
