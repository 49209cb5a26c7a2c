"""One recorded forward and backward: two graphs, because the divisor of the loss arrives between them.

::

    batch ─copy▶ static inputs ─ forward graph ─▶ total ─copy▶ loss
    gradient of the total ─copy▶ static ─ backward graph ─▶ static gradients of the parameters

:class:`ReplayedPass` makes both one node of autograd, from the parameters to the loss. So all around it is as in an
eager pass: hooks on gradients, buckets of DistributedDataParallel, accumulation, clipping and the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from evener.components.cuda_graphs.recorder import Recorder
from evener.components.cuda_graphs.unfit import UnfitError
from evener.data.batch import MicroBatch, tensors_in
from evener.torch_internals.autograd import version
from evener.torch_internals.optimizers import largest
from evener.torch_internals.storages import address, use_count

Pass = Callable[[MicroBatch], Tensor]
"""Maps a micro-batch to its summed loss."""


def gradients_of(
    total: Tensor, parameters: Sequence[nn.Parameter], start: Tensor
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of ``parameters``, on this thread, without accumulating them."""
    if not total.requires_grad:
        raise UnfitError("the loss depends on no parameter")
    with torch.autograd.set_multithreading_enabled(False):
        return torch.autograd.grad(total, parameters, start, allow_unused=True)


class RecordedPass:
    """The graphs of one shape.

    Args:
        micro: The micro-batch whose shape they have.
        run: The eager forward pass.
        parameters: Those that are trained.
        leaves: What stands in their place while the pass is recorded.
        written: Buffers whose version rises in the eager pass. Replays raise it too, since a graph does not.
        norms: True if the largest element of each gradient is computed as well.
    """

    replays = 0
    """How often it has run."""
    unchecked = 0
    """How often it has run since it was last compared with an eager pass."""
    sound_at = -1
    """The step in which it was last found equal to an eager pass. -1 before the first."""

    def __init__(
        self,
        micro: MicroBatch,
        run: Pass,
        parameters: Sequence[nn.Parameter],
        leaves: Sequence[nn.Parameter],
        recorder: Recorder,
        written: Sequence[Tensor] = (),
        norms: bool = False,
    ) -> None:
        self._written = written
        static = micro.map(lambda leaf: _copy_of(leaf) if isinstance(leaf, Tensor) else leaf)
        self._inputs = list(tensors_in((static.inputs, static.targets)))
        total, self._forward = recorder.record(lambda: run(static))
        self._start = torch.ones_like(total)
        (found, self._norms), self._backward = recorder.record(
            lambda: _with_norms(self._own_gradients(total, leaves), norms)
        )
        self._total = total.detach()
        pairs = [(p, each) for p, each in zip(parameters, found, strict=True) if each is not None]
        self.parameters = [p for p, _ in pairs]
        """The parameters that get a gradient."""
        self.gradients = [gradient for _, gradient in pairs]
        """Their gradients after :meth:`backward`, each in memory of its own that the next replay overwrites."""

        self._addresses, self._versions = list(map(Tensor.data_ptr, self.gradients)), list[int]()
        self._given: tuple[Tensor, int] | None = None
        """The gradient of the loss that the last backward started with, and its version."""
        self._storages = [address(gradient.untyped_storage()) for gradient in self.gradients]
        self._holders = list(map(use_count, self._storages))

    @property
    def is_kept(self) -> bool:
        """True if somebody holds a gradient of the last replay, which the next one would overwrite."""
        return list(map(use_count, self._storages)) != self._holders

    def _own_gradients(self, total: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """Returns the gradients, each in memory that nothing else uses and laid out as its parameter. Autograd may
        return one tensor for several parameters, or a part of the model: such are copied."""
        # Without the tensors of which they may be views, as that of a linear layer is.
        found = [
            each if each is None else each.detach() for each in gradients_of(total, parameters, self._start)
        ]
        if any(each is not None and each.layout is not torch.strided for each in found):
            raise UnfitError("a gradient is sparse")
        pairs = zip(parameters, found, strict=True)
        return [
            each if each is None or _is_own(each, p) else torch.empty_like(p).copy_(each) for p, each in pairs
        ]

    def forward(self, micro: MicroBatch) -> Tensor:
        """Returns the summed loss of a micro-batch."""
        increment_version(self._written)
        for static, given in zip(self._inputs, tensors_in((micro.inputs, micro.targets)), strict=True):
            static.copy_(given)
        self._forward.replay()
        return self._total.clone()

    def backward(self, start: Tensor) -> list[Tensor]:
        """Computes the gradients of ``start`` times the last loss. Returns :attr:`gradients`."""
        if self._given is None or self._given[0] is not start or self._given[1] != version(start):
            self._start.copy_(start)
            self._given = start, version(start)
        self._backward.replay()
        self._versions = list(map(version, self.gradients))
        return self.gradients

    def norms_of(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """Returns the largest absolute value of each gradient, if these are :attr:`gradients` as the last backward left
        them. None otherwise, or if they were not recorded. The next replay overwrites them."""
        is_same = self._norms is not None and list(map(Tensor.data_ptr, gradients)) == self._addresses
        return self._norms if is_same and list(map(version, gradients)) == self._versions else None


class ReplayedPass(torch.autograd.Function):
    """Replays a pass as one node of autograd."""

    @staticmethod
    def forward(ctx: Any, recorded: RecordedPass, micro: MicroBatch, *parameters: nn.Parameter) -> Tensor:
        ctx.recorded = recorded
        return recorded.forward(micro)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, start: Tensor) -> tuple[Tensor | None, ...]:
        # Aliases, which autograd may make the gradients of the parameters without a copy.
        return None, None, *(gradient.detach() for gradient in ctx.recorded.backward(start))


def _with_norms(gradients: list[Tensor | None], norms: bool) -> tuple[list[Tensor | None], Tensor | None]:
    """Returns the gradients, and the largest absolute value of each, if all are of one type and real, and have
    elements."""
    found = [each for each in gradients if each is not None]
    are_alike = len({(each.dtype, each.device) for each in found}) == 1
    has_norms = norms and are_alike and all(each.numel() and not each.is_complex() for each in found)
    return gradients, torch.stack(largest(found)) if has_norms else None


_ALONE = 2
"""Uses of a storage by its only tensor, and by the Python object through which they are counted."""


def _is_own(gradient: Tensor, parameter: nn.Parameter) -> bool:
    """Returns True if nobody else holds the gradient's memory, and it is laid out as the parameter."""
    storage = gradient.untyped_storage()
    is_alone = use_count(address(storage)) == _ALONE and gradient.nbytes == storage.nbytes()
    return is_alone and gradient.stride() == parameter.stride()


def _copy_of(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor).copy_(tensor)
