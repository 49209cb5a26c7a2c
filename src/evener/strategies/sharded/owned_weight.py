"""A weight of which this rank owns some rows: the whole weight for computing, and the piece that the optimizer updates.

The piece is a view of its own rows of the whole, so that an update of the piece also updates the whole::

    whole    rows 0-8   what forward and backward see; its ``grad`` is this rank's own, and soon gone
    piece    rows 3-5   what the optimizer, clipping and checkpoints see; its ``grad`` is the sum over the ranks
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evener.components.sharded_tensor.shard_spec import ShardSpec, take_attributes
from evener.errors import ConfigurationError
from evener.strategies.reducer import zeros_of
from evener.torch_internals.autograd import version

AXIS = "shard"
"""Mesh axis over which rows are divided."""


class Weight:
    """A trained weight: the whole tensor in this rank's memory, and this rank's piece as a view of it.

    Args:
        name: Used in error messages.
        piece: This rank's rows. They move into the memory of the whole.
        cut: Shard spec of the rows. None for a scalar, whose piece and whole are the same parameter.
        sparse: Whether the weight has sparse gradients.
    """

    def __init__(self, name: str, piece: nn.Parameter, cut: ShardSpec | None, sparse: bool) -> None:
        self.name, self.piece, self.cut, self.sparse = name, piece, cut, sparse
        self.whole = piece if cut is None else take_attributes(nn.Parameter(_room(piece, cut)), vars(piece))
        self.join()
        self._shown: Tensor | None = None
        self._version = 0
        self._hooks: list[RemovableHandle] = []

    def rows(self, whole: Tensor, rank: int) -> Tensor:
        """Returns the rows of ``rank`` in a tensor of the whole's shape; all rows if the weight is not divided."""
        if self.cut is None:
            return whole
        rows = self.cut.pieces[rank]
        return whole.narrow(self.cut.dim, rows.start, len(rows))

    def join(self) -> None:
        """Makes the piece a view of the whole if it is not: at first, and after ``piece.data`` was set."""
        if self.cut is None:
            return
        place = self.rows(self.whole.detach(), self.cut.index)
        if not self.piece.detach().is_set_to(place):
            place.copy_(self.piece.detach())
            self.piece.data = place

    def move(self, place: Tensor) -> None:
        """Makes ``place``, of the whole's shape, the memory of whole and piece, and copies this rank's rows into it."""
        assert self.cut is not None
        self.rows(place, self.cut.index).copy_(self.piece.detach())
        self.whole.data = place
        self.piece.data = self.rows(place, self.cut.index)

    def watch(self, arrived: Callable[[Weight], None]) -> None:
        """Registers hooks that call ``arrived`` when backward has accumulated the whole's gradient."""
        self._hooks = [
            self.whole.register_hook(lambda _: self.check()),  # type: ignore[no-untyped-call]
            self.whole.register_post_accumulate_grad_hook(lambda _: arrived(self)),  # type: ignore[no-untyped-call]
        ]

    def close(self) -> None:
        """Removes the hooks of :meth:`watch`: Python's garbage collector cannot reach autograd's own hooks."""
        for hook in self._hooks:
            hook.remove()

    def taken(self) -> Tensor:
        """Takes the sparse gradient away from the whole. Returns an empty one if there is no gradient."""
        gradient, self.whole.grad = self.whole.grad, None
        return zeros_of(self.whole, True) if gradient is None else gradient.to_sparse(1)

    def own_of_sparse(self, gradient: Tensor) -> Tensor:
        """Returns this rank's rows of a sparse gradient of the whole."""
        assert self.cut is not None
        found, own = gradient.coalesce(), self.cut.local_bounds
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
        """Sets ``piece.grad`` to this rank's rows of its own gradient, so that the user's loop sees a gradient."""
        if self.cut is None or self.whole.grad is None:
            return
        # A view of ``data`` has a version counter of its own, which counts writes to it.
        rows = zeros_of(self.piece, True) if self.sparse else self.rows(self.whole.grad.data, self.cut.index)
        self.piece.grad = self._shown = rows
        self._version = version(rows)

    def check(self) -> None:
        """Drops the whole's gradient if the user has cleared ``piece.grad``.

        Raises:
            ConfigurationError: If the gradient was changed, or came to the piece and not to the whole.
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
        """Removes the gradient that :meth:`show` has set."""
        if self._shown is not None:
            self.piece.grad = self._shown = None


def _room(piece: nn.Parameter, cut: ShardSpec) -> Tensor:
    shape = list(piece.shape)
    shape[cut.dim] = cut.pieces[-1].stop
    return piece.new_empty(shape)
