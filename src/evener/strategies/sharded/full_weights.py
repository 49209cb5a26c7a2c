"""Puts whole weights in the place of pieces while the model computes.

Between steps the model holds pieces, so that the optimizer, clipping and checkpoints see only these. While it computes,
it holds the whole weights, which have been brought up to date from the owners::

    outside of forward   module.weight ──▶ piece
    in forward           module.weight ──▶ whole
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from evener.collectives.reduce_scatter import RangeOwners
from evener.collectives.shared_memory.shared_buffer import Common
from evener.errors import ConfigurationError
from evener.hardware.timers import waiting
from evener.nn.unowned import Shared
from evener.strategies.sharded.buckets import Bucket
from evener.strategies.sharded.owned_weight import Weight
from evener.torch_internals.autograd import version
from evener.torch_internals.modules import own_parameters


class FullWeights:
    """Exchanges pieces for whole weights and back, and keeps the whole weights up to date.

    Args:
        buckets: Cover all weights; rows are gathered in them.
        owners: Gathers the rows from their owners.
    """

    def __init__(
        self, model: nn.Module, weights: Sequence[Weight], buckets: Sequence[Bucket], owners: RangeOwners
    ) -> None:
        self._model, self._depth = model, 0
        self._weights, self._buckets, self._owners = list(weights), list(buckets), owners
        self._common: Common | None = None
        self._seen: list[int] | None = None
        self._places = list(_places(model, weights))
        shared = Shared(self)
        self._hooks = [
            model.register_forward_pre_hook(partial(_enter, shared)),
            model.register_forward_hook(partial(_leave, shared), always_call=True),
        ]

    def refresh(self, always: bool = False) -> None:
        """Gathers the rows of other owners, if pieces were written to since the last time. All ranks must write to
        pieces alike, so that they agree on this.

        Args:
            always: Gathers even if no write was detected, because some optimizers bypass PyTorch's version counter.
        """
        if not always and not self._is_stale:
            return
        for weight in self._weights:
            weight.join()
        for bucket in self._buckets:
            self._gather(bucket)
        self.barrier()
        self._seen = self._versions

    def move(self, common: Common, weights: Sequence[Weight], others: Sequence[Bucket]) -> None:
        """Moves whole weights into memory that the ranks of a host share: a row that its owner writes is there at once.

        Args:
            common: Shared memory with a tensor for each of ``weights``.
            weights: The divided weights, the same on all ranks.
            others: Buckets of the weights that are not divided.
        """
        for weight, place in zip(weights, common.tensors, strict=True):
            weight.move(place)
        self._common, self._buckets = common, list(others)
        self.refresh(always=True)

    def barrier(self) -> None:
        """Waits until all ranks of the host have come here, if they share whole weights; otherwise does nothing."""
        if self._common is not None:
            with waiting():
                self._common.barrier()

    def _part(self) -> None:
        """Copies whole weights out of the memory that other ranks may write to."""
        self._common = None
        for weight in self._weights:
            if weight.cut is not None:
                weight.move(weight.whole.detach().clone())

    def expire(self) -> None:
        """Marks the whole weights as out of date, before an update that is not announced."""
        self._seen = None

    @property
    def _versions(self) -> list[int]:
        return [version(weight.piece) for weight in self._weights]

    @property
    def _is_stale(self) -> bool:
        return self._seen != self._versions

    @torch.no_grad()
    def _gather(self, bucket: Bucket) -> None:
        flat = bucket.room()
        views = bucket.views(flat)
        for weight, rows in zip(bucket.weights, views[bucket.rank][:-1], strict=True):
            rows.copy_(weight.piece)
        with waiting():
            self._owners.gather(flat, bucket.sizes)
        for owner, of_owner in enumerate(views):
            if owner != bucket.rank:
                self._take(bucket, owner, of_owner[:-1])

    def _take(self, bucket: Bucket, owner: int, rows: Sequence[Tensor]) -> None:
        for weight, updated in zip(bucket.weights, rows, strict=True):
            # All ranks update an undivided weight alike. They take the first rank's, so that no bit differs.
            if weight.cut is not None or not owner:
                weight.rows(weight.whole, owner).copy_(updated)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Puts whole weights in the model for the block, and pieces back after it, however the block ends. A pipeline
        stage leaves the model's forward by a BaseException, for which PyTorch does not call :class:`AfterForward`."""
        before = self._depth
        self.enter(self._model)
        try:
            yield
        finally:
            while self._depth > before:
                self.leave(self._model)

    def enter(self, model: nn.Module) -> None:
        """Puts whole weights in the model. Does nothing more than count if they are already there.

        Raises:
            ConfigurationError: If ``model`` is a copy of the model.
        """
        if model is not self._model:
            raise ConfigurationError(_COPY)
        if not self._depth:
            self.refresh()
            for replace, weight in self._places:
                # The user sees the piece, and freezes or thaws it.
                weight.whole.requires_grad_(weight.piece.requires_grad)
                replace(weight.piece, weight.whole)
        self._depth += 1

    def leave(self, model: nn.Module) -> None:
        """Puts the pieces back at the end of the outermost :meth:`enter`."""
        if model is not self._model or not self._depth:
            return
        self._depth -= 1
        if not self._depth:
            for replace, weight in self._places:
                replace(weight.whole, weight.piece)

    def close(self) -> None:
        """Removes the hooks. Leaves whole weights in the model if they are up to date, otherwise pieces."""
        for hook in self._hooks:
            hook.remove()
        is_stale = self._is_stale
        if self._common is not None:
            self._part()
        if not is_stale:
            for replace, weight in self._places:
                replace(weight.piece, weight.whole)


Replace = Callable[[nn.Parameter, nn.Parameter], None]
"""Puts the second parameter in the place of the first, if the first is there."""


def _places(model: nn.Module, weights: Sequence[Weight]) -> Iterator[tuple[Replace, Weight]]:
    """Yields every place in the model where a piece stands, with the weight it belongs to."""
    of_piece = {weight.piece: weight for weight in weights if weight.cut is not None}
    for module in model.modules():
        for name, parameter in own_parameters(module).items():
            if parameter is not None and parameter in of_piece:
                yield _replacing(module, name), of_piece[parameter]


def _replacing(module: nn.Module, name: str) -> Replace:
    held = own_parameters(module)
    # A recurrent layer also keeps a list of its weights, which it updates when they are set as attributes.
    put = (lambda new: setattr(module, name, new)) if isinstance(module, nn.RNNBase) else None

    def replace(old: nn.Parameter, new: nn.Parameter) -> None:
        if held[name] is not old:
            return
        if put is None:
            held[name] = new
        else:
            put(new)

    return replace


_COPY = (
    "this copy of the model holds only the pieces that one rank owns; engine.state_dict()['model'] has the whole "
    "weights, for a model of your own"
)


def _enter(wholes: Shared[FullWeights], model: nn.Module, *_: object) -> None:
    """Puts whole weights in before the model's forward."""
    if wholes.value is None:
        raise ConfigurationError(_COPY)
    wholes.value.enter(model)


def _leave(wholes: Shared[FullWeights], model: nn.Module, *_: object) -> None:
    """Puts pieces back after the model's forward, also if that failed."""
    if wholes.value is not None:
        wholes.value.leave(model)
