"""Whole weights in the place of pieces, while the model computes.

Between steps a model holds pieces: the optimizer, clipping and checkpoints know nothing else. While it computes, it
holds the wholes, which owners have brought up to date before::

    outside of forward   module.weight ──▶ piece
    in forward           module.weight ──▶ whole
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from evener.collectives.reduce_scatter import Owners
from evener.collectives.shared_memory.shared_buffer import Common
from evener.errors import ConfigurationError
from evener.hardware.timers import waiting
from evener.nn.unowned import Shared
from evener.strategies.sharded.buckets import Bucket
from evener.strategies.sharded.owned_weight import Weight
from evener.torch_internals.module_tensors import own_parameters
from evener.torch_internals.version import version


class Wholes:
    """Puts wholes in the place of pieces, and back, and keeps them up to date.

    Args:
        buckets: Of all weights, in which rows come from their owners.
        owners: Bring them.
    """

    def __init__(
        self, model: nn.Module, weights: Sequence[Weight], buckets: Sequence[Bucket], owners: Owners
    ) -> None:
        self._model, self._depth = model, 0
        self._weights, self._buckets, self._owners = list(weights), list(buckets), owners
        self._common: Common | None = None
        self._seen: list[int] | None = None
        self._places = list(_places(model, weights))
        shared = Shared(self)
        self._hooks = [
            model.register_forward_pre_hook(Before(shared)),
            model.register_forward_hook(After(shared), always_call=True),
        ]

    def refresh(self, always: bool = False) -> None:
        """Gathers the rows of other owners, if pieces were written to since: by all ranks alike, so that they agree.

        Args:
            always: Also if that was not seen, for there are optimizers that write behind PyTorch's back.
        """
        if not always and not self._is_stale:
            return
        for weight in self._weights:
            weight.join()
        for bucket in self._buckets:
            self._gather(bucket)
        self.meet()
        self._seen = self._versions

    def move(self, common: Common, weights: Sequence[Weight], others: Sequence[Bucket]) -> None:
        """Keeps whole weights in memory that their owners have in common, from now on: what an owner writes is there.

        Args:
            common: Has a tensor for each of ``weights``.
            weights: Those that are divided, on all ranks alike.
            others: Buckets of the weights that are not.
        """
        for weight, place in zip(weights, common.tensors, strict=True):
            weight.move(place)
        self._common, self._buckets = common, list(others)
        self.refresh(always=True)

    def meet(self) -> None:
        """Where whole weights are in common: no rank computes with them until all have come here."""
        if self._common is not None:
            with waiting():
                self._common.meet()

    def _part(self) -> None:
        """Takes whole weights out of memory that others may write to."""
        self._common = None
        for weight in self._weights:
            if weight.cut is not None:
                weight.move(weight.whole.detach().clone())

    def expire(self) -> None:
        """An update follows of which nobody tells."""
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
            # What has no rows all ranks update alike, and have from the first, so that no bit can differ.
            if weight.cut is not None or not owner:
                weight.rows(weight.whole, owner).copy_(updated)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The model holds whole weights, however the passes within end: a stage of a pipeline leaves the model's
        forward by no Exception, at which PyTorch does not call :class:`After`."""
        before = self._depth
        self.enter(self._model)
        try:
            yield
        finally:
            while self._depth > before:
                self.leave(self._model)

    def enter(self, model: nn.Module) -> None:
        """The model computes from here on; within another such stretch nothing changes.

        Raises:
            ConfigurationError: For a copy of the model.
        """
        if model is not self._model:
            raise ConfigurationError(_COPY)
        if not self._depth:
            self.refresh()
            for replace, weight in self._places:
                # Frozen or not is said of the piece, which is what the user sees.
                weight.whole.requires_grad_(weight.piece.requires_grad)
                replace(weight.piece, weight.whole)
        self._depth += 1

    def leave(self, model: nn.Module) -> None:
        """Ends what ``enter`` began, if it did."""
        if model is not self._model or not self._depth:
            return
        self._depth -= 1
        if not self._depth:
            for replace, weight in self._places:
                replace(weight.whole, weight.piece)

    def close(self) -> None:
        """Leaves the model alone, with whole weights if these are up to date."""
        for hook in self._hooks:
            hook.remove()
        is_stale = self._is_stale
        if self._common is not None:
            self._part()
        if not is_stale:
            for replace, weight in self._places:
                replace(weight.piece, weight.whole)


Replace = Callable[[nn.Parameter, nn.Parameter], None]
"""Puts the second in the place of the first, if that is there."""


def _places(model: nn.Module, weights: Sequence[Weight]) -> Iterator[tuple[Replace, Weight]]:
    """Everywhere that a piece stands, under all its names."""
    of_piece = {weight.piece: weight for weight in weights if weight.cut is not None}
    for module in model.modules():
        for name, parameter in own_parameters(module).items():
            if parameter is not None and parameter in of_piece:
                yield _replacing(module, name), of_piece[parameter]


def _replacing(module: nn.Module, name: str) -> Replace:
    held = own_parameters(module)
    # A recurrent layer has a list of its weights besides, which it renews when they are set.
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


class Before:
    """The hook before the model's forward."""

    def __init__(self, wholes: Shared[Wholes]) -> None:
        self._wholes = wholes

    def __call__(self, model: nn.Module, args: object) -> None:
        if self._wholes.value is None:
            raise ConfigurationError(_COPY)
        self._wholes.value.enter(model)


class After:
    """The hook after the model's forward, also where that failed."""

    def __init__(self, wholes: Shared[Wholes]) -> None:
        self._wholes = wholes

    def __call__(self, model: nn.Module, args: object, outputs: object) -> None:
        if self._wholes.value is not None:
            self._wholes.value.leave(model)
