"""What a strategy's gradient synchronizer does: three small interfaces, each of which does nothing by default.

::

    GradientSum    the sum of gradients over the ranks, during or after backward
    EqualBuffers   buffers that a forward pass has changed
    Lifecycle      what happens between two steps and at the end

A synchronizer of its own inherits :class:`Synchronizer`, which is all three, and overrides what it does differently.
One that adds to another inherits :class:`SynchronizerAround`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from evener.hardware.async_read import Readout


class GradientSum:
    """The sum of gradients over the ranks. By default nothing is summed, as for a single rank."""

    words = "none: one rank"
    """A description of the gradient synchronization, for the record of the run."""

    exchanges_in_passes: bool = True
    """True if ranks may wait for each other before all passes of a step are over."""

    gathers_in_passes: bool = False
    """True if all ranks must run the same number of passes, because each gathers weights from all ranks."""

    bucket_nbytes: int = 0
    """Maximum size in bytes of the communication buffers, without parameters and gradients."""

    follows: bool = False
    """True if parameters may be frozen and unfrozen between steps (`TrainableParameters`)."""

    def collectives(self) -> list[dict[str, Any]]:
        """Returns the all-reduces of this rank so far: ``name``, ``algorithm``, ``nbytes`` of a call, ``calls``, and
        seconds if some were timed: `RunSummary.collectives`."""
        return []

    def wrap(self, replica: nn.Module) -> nn.Module:
        """Wraps the model-with-loss module (as DDP does). The wrapped module maps a micro-batch to its summed loss."""
        return replica

    def hooked_in(self, passes: int) -> Sequence[nn.Parameter]:
        """Returns the parameters whose hooks wait for the end of a step of so many passes, because each pass, or each
        rank, has a part of the gradient."""
        return ()

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Context for forward and backward of one micro-batch. Gradients are synchronized in the ``last`` one."""
        return nullcontext()

    def until_complete(self) -> AbstractContextManager[Any]:
        """Context for all forward and backward passes of a step, in any order. Used in place of :meth:`micro_batch`:
        :meth:`complete` then synchronizes the gradients after the last pass."""
        return nullcontext()

    def end_block(self) -> None:
        """Called after the backward pass of a micro-batch that ends a block and is not the last of the step, in a run
        that is exact in bits."""

    def complete(self) -> tuple[str, ...]:
        """Ends the rank's own work and completes gradient synchronization. Returns the names of the parameters that got
        no gradient from this rank."""
        return ()

    def completes_in_backward(self, parameter: nn.Parameter) -> bool:
        """Returns True if the gradient of ``parameter`` is complete when backward calls the parameter's hooks: summed
        over the ranks, and not part of a bucket."""
        return False

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Returns True if this rank contributed to the gradient of ``parameter``. Called in backward, when that
        gradient is complete."""
        return True

    def soundness(self) -> tuple[Readout, ...]:
        """Returns numbers that are finite if this rank's gradients are; see :class:`StepOutcome`."""
        return ()

    def sums_in_backward(self, parameter: nn.Parameter) -> bool:
        """Returns True if backward itself sums the gradient of ``parameter`` over the ranks that divide a batch, also
        in a training loop of the user's own."""
        return False

    def unused(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        """Returns the names of those ``parameters``, all summed in backward, to which this rank gave no gradient since
        the last call."""
        return []

    def make_alike(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gives ranks that compute the same samples equal gradients, which are summed over all others already. All
        ranks must call this together."""

    def sum_thawed(self, without: Collection[str]) -> None:
        """Sums the gradients of unfrozen parameters before an update.

        Args:
            without: Names of the parameters that got no gradient on any rank; they are skipped.
        """

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sums the gradients of ``parameters`` over the ranks after a training loop of the user's own has run
        backward."""


class EqualBuffers:
    """Buffers, which are equal on all ranks unless the ranks differ in their forward passes."""

    keeps_equal: bool = True
    """True if ranks that hold the same weights and buffers have bitwise equal values after every step."""

    def share_buffers(self, buffers: Sequence[Tensor], part: int) -> None:
        """Copies the buffers of the ranks that compute part number ``part`` of the batch to all ranks."""


class Lifecycle:
    """What happens outside of the passes of a step."""

    holds_all: bool = False
    """True if each rank holds the complete training state, so that any surviving rank can give it to a replacement
    rank. The synchronizer then calls `Learner.has_drawn` before it sends its last gradients."""

    def alone(self) -> None:
        """Tells the synchronizer that from now on only optimizer updates write to the weights, as in a whole run. All
        ranks must call this together."""

    def forward(self) -> AbstractContextManager[Any]:
        """Context for a forward pass that no backward pass follows."""
        return nullcontext()

    def gathered(self, tensor: Tensor) -> bool:
        """Returns True for a whole weight that a pass has gathered from the ranks' parts of a parameter."""
        return False

    def free_gathered(self) -> None:
        """Frees whole weights that a forward pass without a backward pass has left, before they are out of date."""

    def passed(self, totals: Sequence[Readout]) -> None:
        """Called after the passes of a step, with the summed losses of this rank's micro-batches."""

    def updated(self, step: int) -> None:
        """Called after the optimizer step. Exchanges what is exchanged every few steps rather than in each step."""

    def let_go(self) -> None:
        """Drops the reference to the wrapped model. The caller keeps the wrapped model, which may refer to this
        synchronizer."""

    def close(self) -> None:
        """Frees the resources of the synchronizer."""


class Synchronizer(GradientSum, EqualBuffers, Lifecycle):
    """The base class of gradient synchronizers. It sums nothing, as for a single rank."""


class SynchronizerAround(Synchronizer):
    """Passes everything on to ``inner``, which sums gradients over other axes. Subclasses add what their axis needs.

    Gradients are complete, and a rank's state is whole, only with what the subclass adds: `completes_in_backward` and
    `holds_all` stay False.
    """

    def __init__(self, inner: Synchronizer) -> None:
        self._inner = inner

    @property
    def words(self) -> str:  # type: ignore[override]
        return self._inner.words

    @property
    def keeps_equal(self) -> bool:  # type: ignore[override]
        return self._inner.keeps_equal

    @property
    def follows(self) -> bool:  # type: ignore[override]
        return self._inner.follows

    @property
    def bucket_nbytes(self) -> int:  # type: ignore[override]
        return self._inner.bucket_nbytes

    def collectives(self) -> list[dict[str, Any]]:
        return self._inner.collectives()

    def wrap(self, replica: nn.Module) -> nn.Module:
        return self._inner.wrap(replica)

    def forward(self) -> AbstractContextManager[Any]:
        return self._inner.forward()

    def hooked_in(self, passes: int) -> Sequence[nn.Parameter]:
        return self._inner.hooked_in(passes)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return self._inner.micro_batch(last)

    def until_complete(self) -> AbstractContextManager[Any]:
        return self._inner.until_complete()

    def end_block(self) -> None:
        self._inner.end_block()

    def complete(self) -> tuple[str, ...]:
        return self._inner.complete()

    def soundness(self) -> tuple[Readout, ...]:
        return self._inner.soundness()

    def sums_in_backward(self, parameter: nn.Parameter) -> bool:
        return self._inner.sums_in_backward(parameter)

    def unused(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        return self._inner.unused(parameters)

    def make_alike(self, parameters: Iterable[nn.Parameter]) -> None:
        self._inner.make_alike(parameters)

    def gathered(self, tensor: Tensor) -> bool:
        return self._inner.gathered(tensor)

    def free_gathered(self) -> None:
        self._inner.free_gathered()

    def sum_thawed(self, without: Collection[str]) -> None:
        self._inner.sum_thawed(without)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        self._inner.sum_gradients(parameters)

    def share_buffers(self, buffers: Sequence[Tensor], part: int) -> None:
        self._inner.share_buffers(buffers, part)

    def passed(self, totals: Sequence[Readout]) -> None:
        self._inner.passed(totals)

    def updated(self, step: int) -> None:
        self._inner.updated(step)

    def let_go(self) -> None:
        self._inner.let_go()

    def close(self) -> None:
        self._inner.close()
