"""Checks of the arguments of a collective, before it sends anything.

An error that a rank sees by itself is raised on this rank only; the launcher then ends the other ranks. Other errors
appear when the ranks exchange descriptions of their tensors; all ranks raise these alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from evener.errors import ConfigurationError
from evener.nn.collectives_no_grad import Description, descriptions


def several(group: ProcessGroup | None) -> ProcessGroup | None:
    """Returns the group if it has several ranks, or None if this rank is alone.

    Raises:
        ConfigurationError: If this rank is not in the group. ``torch.distributed`` then returns an object that is not a
            ``ProcessGroup``.
    """
    if group is None:
        return None
    if not isinstance(group, ProcessGroup) or group.rank() < 0:
        raise ConfigurationError(
            f"this rank is not in the group ({group!r}); call collectives on its members only, or give None for "
            "this rank alone"
        )
    return group if group.size() > 1 else None


def dimension(who: str, x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ConfigurationError(f"{who}: a tensor of shape {tuple(x.shape)} has no dimension {dim}")
    return dim % x.dim()


def lengths_of(who: str, sizes: Sequence[int], group: ProcessGroup | None) -> list[int]:
    degree = group.size() if group else 1
    lengths = [int(size) for size in sizes]
    if len(lengths) != degree or min(lengths) < 0:
        raise ConfigurationError(
            f"{who}: {lengths} are not the lengths of {degree} pieces; give one for each rank, 0 or more"
        )
    return lengths


def pieces_of(
    who: str, x: Tensor, dim: int, sizes: Sequence[int] | None, group: ProcessGroup | None
) -> list[int]:
    """Returns the lengths of the pieces into which ``x`` is cut along ``dim``: ``sizes``, or as equal as possible.

    Raises:
        ConfigurationError: If ``sizes`` are not one for each rank, or do not add up to the length of ``x``.
    """
    length, degree = x.shape[dim], group.size() if group else 1
    if sizes is None:
        return [length // degree + (index < length % degree) for index in range(degree)]
    lengths = lengths_of(who, sizes, group)
    if sum(lengths) != length:
        raise ConfigurationError(
            f"{who}: pieces of {lengths} come to {sum(lengths)}, but dimension {dim} of the tensor, of shape "
            f"{tuple(x.shape)}, has {length}"
        )
    return lengths


def check_own_length(who: str, x: Tensor, dim: int, length: int) -> None:
    if x.shape[dim] != length:
        raise ConfigurationError(
            f"{who}: this rank's length is said to be {length}, but dimension {dim} of its tensor, of shape "
            f"{tuple(x.shape)}, has {x.shape[dim]}"
        )


def agreed(who: str, x: Tensor, dim: int, group: ProcessGroup) -> list[int]:
    """Exchanges and returns the lengths of all ranks' tensors along ``dim``; raises as :func:`alike`."""
    return [each.shape[dim] for each in alike(who, x, dim, group)]


def alike(
    who: str, x: Tensor, dim: int, group: ProcessGroup, numbers: Sequence[int] = ()
) -> list[Description]:
    """Exchanges descriptions of all ranks' tensors, and checks that they differ at most in length along ``dim``.

    Raises:
        ConfigurationError: On all ranks, if the tensors differ in anything else.
    """
    of_ranks = described(who, x, group, numbers)
    if len({(*each.shape[:dim], -1, *each.shape[dim + 1 :]) for each in of_ranks}) > 1:
        raise ConfigurationError(
            f"{who}: the tensors may differ along dimension {dim} only, and are {_listed(of_ranks)}"
        )
    return of_ranks


def described(who: str, x: Tensor, group: ProcessGroup, numbers: Sequence[int] = ()) -> list[Description]:
    """Exchanges descriptions of all ranks' tensors, and checks that types and ``requires_grad`` are the same.

    Raises:
        ConfigurationError: On all ranks, if types differ, or some tensors require a gradient and others do not.
    """
    of_ranks = descriptions(x, group, numbers)
    if len({each.dtype for each in of_ranks}) > 1:
        raise ConfigurationError(f"{who}: the tensors are of different types: {_listed(of_ranks)}")
    if len({each.trained for each in of_ranks}) > 1:
        raise ConfigurationError(
            f"{who}: backward needs all ranks, so all of their tensors must require a gradient or none: "
            f"{_listed(of_ranks)}. Call requires_grad_() on the others, or detach() on these"
        )
    return of_ranks


def _listed(of_ranks: Sequence[Description]) -> str:
    return "; ".join(f"{each} on rank {rank}" for rank, each in enumerate(of_ranks))
