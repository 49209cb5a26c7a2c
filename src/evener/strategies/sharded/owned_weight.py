"""A weight of which this rank owns some rows: the whole that it computes with, and the piece that it updates.

The piece is a view of its own rows of the whole, so that an update of the one is an update of the other::

    whole    rows 0-8   what forward and backward see; its ``grad`` is this rank's own, and soon gone
    piece    rows 3-5   what the optimizer, clipping and checkpoints see; its ``grad`` is the sum over the ranks
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evener.components.sharded_tensor.shard_spec import Slice
from evener.errors import ConfigurationError
from evener.strategies.after_backward import zeros_of
from evener.torch_internals.version import version

AXIS = "shard"
"""The axis of the mesh over which rows are divided."""


class Weight:
    """A trained weight, in the memory that this rank has for all of it.

    Args:
        name: For errors.
        piece: This rank's rows, which get the whole's memory.
        cut: Which rows these are; None for a number alone, which is the same as its whole.
    """

    def __init__(self, name: str, piece: nn.Parameter, cut: Slice | None, sparse: bool) -> None:
        self.name, self.piece, self.cut, self.sparse = name, piece, cut, sparse
        self.whole = piece if cut is None else nn.Parameter(_room(piece, cut))
        self.join()
        self._shown: Tensor | None = None
        self._version = 0
        self._hooks: list[RemovableHandle] = []

    def rows(self, whole: Tensor, rank: int) -> Tensor:
        """Those of ``rank``, of a tensor of the whole's shape; all, where there are none."""
        if self.cut is None:
            return whole
        rows = self.cut.pieces[rank]
        return whole.narrow(self.cut.dim, rows.start, len(rows))

    def join(self) -> None:
        """Makes the piece a view of the whole, if it is not: at first, and where ``piece.data`` was set."""
        if self.cut is None:
            return
        place = self.rows(self.whole.detach(), self.cut.index)
        if not self.piece.detach().is_set_to(place):
            place.copy_(self.piece.detach())
            self.piece.data = place

    def move(self, place: Tensor) -> None:
        """Makes ``place``, of the whole's shape, the memory of both; it gets this rank's rows."""
        assert self.cut is not None
        self.rows(place, self.cut.index).copy_(self.piece.detach())
        self.whole.data = place
        self.piece.data = self.rows(place, self.cut.index)

    def watch(self, arrived: Callable[[Weight], None]) -> None:
        """Has ``arrived`` called when backward has given the whole a gradient."""
        self._hooks = [
            self.whole.register_hook(lambda _: self.check()),  # type: ignore[no-untyped-call]
            self.whole.register_post_accumulate_grad_hook(lambda _: arrived(self)),  # type: ignore[no-untyped-call]
        ]

    def close(self) -> None:
        """Ends :meth:`watch`: backward's own hooks are out of the reach of Python's collector of garbage."""
        for hook in self._hooks:
            hook.remove()

    def taken(self) -> Tensor:
        """The sparse gradient of the whole, without rows where there is none; the whole has none then."""
        gradient, self.whole.grad = self.whole.grad, None
        return zeros_of(self.whole, True) if gradient is None else gradient.to_sparse(1)

    def own_of_sparse(self, gradient: Tensor) -> Tensor:
        """This rank's rows of a sparse gradient of the whole."""
        assert self.cut is not None
        found, own = gradient.coalesce(), self.cut.own
        rows = found.indices()[0]
        held = (rows >= own.start) & (rows < own.stop)
        return torch.sparse_coo_tensor(
            rows[held].unsqueeze(0) - own.start,
            found.values()[held],
            self.piece.shape,
            is_coalesced=True,
            check_invariants=False,
        )

    def show(self) -> None:
        """Lets a loop of the user's own see that there is a gradient: its own rows of what this rank has."""
        if self.cut is None or self.whole.grad is None:
            return
        # With ``data`` the view counts by itself how often it is written to.
        rows = zeros_of(self.piece, True) if self.sparse else self.rows(self.whole.grad.data, self.cut.index)
        self.piece.grad = self._shown = rows
        self._version = version(rows)

    def check(self) -> None:
        """Forgets the gradient if the user has cleared it.

        Raises:
            ConfigurationError: If it was changed, or came to the piece and not to the whole.
        """
        given, shown = self.piece.grad, self._shown
        if self.cut is None or (given is None and shown is None):
            return
        if given is None:
            self.whole.grad = self._shown = None
        elif given is not shown or version(given) != self._version:
            raise ConfigurationError(
                f"the gradient of {self.name} was changed before engine.update() summed it, or came from the use of "
                "the model outside of its forward(): a rank sees some rows of it only. Scale the total that "
                "engine.backward() is given, clip by `clip_norm`, and call the model itself"
            )

    def hide(self) -> None:
        """Nothing is shown any more."""
        if self._shown is not None:
            self.piece.grad = self._shown = None


def _room(piece: nn.Parameter, cut: Slice) -> Tensor:
    shape = list(piece.shape)
    shape[cut.dim] = cut.pieces[-1].stop
    return piece.new_empty(shape)
