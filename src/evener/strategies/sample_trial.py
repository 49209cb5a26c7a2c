"""Tries whether a model computes a sample's outputs from that sample alone, as every division of a batch needs it.

A model that normalizes over the batch by code of its own, or compares samples with each other, trains on several ranks
as if each rank's samples were the batch, without an error. So before the first step the first rank runs the model on a
few samples twice, and the second time other samples stand behind the first ones::

    a b c d ─▶ model ─▶ outputs of a and b
    a b a b ─▶ model ─▶ the same outputs?

Both runs have the same shapes, so that rounding is no difference, and draw the same random numbers. Dropout does
nothing, and ``torch.nn``'s BatchNorm, which ranks compute together, uses its running statistics. Only a difference in
most numbers of an output counts: a choice that rounding turned, such as that of an expert, changes a few. Then the
model also runs on fewer samples: an output whose number of rows stays the same has something else in its rows.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evener.components.loss_trial import WithoutMessages, ask_for_others
from evener.components.microbatches import by_samples
from evener.components.model_trial import state_kept, training_without_dropout, undisturbed
from evener.core.types import Tree
from evener.data.batch import Batch, MicroBatch, map_leaves, named_leaves
from evener.distributed import signals as interrupt
from evener.hardware import accelerators
from evener.hardware.generators import seeded
from evener.nn.context import Scope, resumed
from evener.nn.recompute_guard import apart
from evener.strategies.learner import Learner
from evener.torch_internals.modules import AnyBatchNorm, compiled_from

_MOST = 4
"""Number of samples that are tried."""
_SEED = 0x5EED
_FAR, _FAR_IN_HALF = 0.01, 0.1
"""Means of the differences of an output that count, as parts of the mean of its numbers. Medians count from a tenth."""

Outputs = list[tuple[str, Any]]
"""Outputs of a model with their names; None in place of what is no tensor."""


class SampleTrial:
    """Tries a model once, on the first micro-batch that has two samples."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._is_done = learner.session.world_size == 1 or learner.session.rank > 0 or not _can_try(learner)

    def run(self, batch: Batch) -> None:
        """Tries the model, if it has not been.

        Warns:
            UserWarning: If the outputs of samples depend on other samples of the batch.
        """
        if self._is_done:
            return
        micro = next((m for m in batch.micro_batches if m.weight and len(m.samples) > 1), None)
        if micro is None:
            return
        self._is_done = True
        if self._learner.replays is None and (found := self._difference(micro)) is not None:
            name, part = found
            warnings.warn(
                f"the model's {name} for a sample changed by {part:.0%} when other samples were beside it in the "
                "batch: it normalizes over the batch, or compares samples. On several ranks the model sees those of "
                "its own rank alone, which is another training than that of one device. torch.nn's BatchNorm is "
                "brought together by itself; elsewhere evener.nn.all_gather(rows, evener.nn.data_group()) brings the "
                "samples of all ranks together, and a comparison of samples may be made in the loss",
                stacklevel=2,
            )

    def _difference(self, micro: MicroBatch) -> tuple[str, float] | None:
        """Returns the name of an output that depends on other samples, and how far it moved. Returns None if there is
        none, or if samples cannot be told apart."""
        samples = len(micro.samples)
        if not _is_by_samples(micro.inputs, samples, self._learner.task.collate is not None):
            return None
        tried = min(samples, _MOST)
        half = tried // 2
        first = [*range(tried)]
        try:
            whole, drawn = self._outputs(micro, first)
            other, drawn_then = self._outputs(micro, [index % half for index in first])
            moved = self._moved(whole, other, half)
            if not moved or not all(map(torch.equal, drawn, drawn_then)):
                return None  # if how much is drawn depends on the samples, so do the numbers
            again, _ = self._outputs(micro, first)
            fewer, _ = self._outputs(micro, first[:-1])
        except Exception:  # of the user's code, which will say so itself where it cannot compute a batch
            interrupt.check()
            return None
        if self._moved(whole, again, half):
            return None
        rows = [name for name, leaf in fewer if isinstance(leaf, Tensor) and leaf.shape[:1] == (tried - 1,)]
        return next(((name, part) for name, part in moved.items() if name in rows), None)

    def _moved(self, outputs: Outputs, others: Outputs, rows: int) -> dict[str, float]:
        """Returns which outputs differ in their first rows, and how far."""
        far = _FAR if self._learner.settings.precision.coarsest.itemsize > 2 else _FAR_IN_HALF
        found = {}
        for (name, one), (_, other) in zip(outputs, others, strict=False):
            if _are_alike(one, other):
                move = _move(one[:rows], other[:rows])
                if move.mean > far and move.median > far / 10:
                    found[name] = move.mean
        return found

    def _outputs(self, micro: MicroBatch, rows: list[int]) -> tuple[Outputs, list[Tensor]]:
        """Returns the outputs for some rows of a micro-batch, and the states of the generators afterwards."""
        learner, model = self._learner, self._learner.model
        device = learner.session.device
        trains = [m for m in model.modules() if m.training and not isinstance(m, AnyBatchNorm)]

        def chosen(leaf: Any) -> Any:
            return leaf[torch.tensor(rows, device=leaf.device)] if isinstance(leaf, Tensor) else leaf

        own = Scope(micro.samples[: len(rows)], 0, learner.settings.seed, 1, ask_for_others)
        with apart(), undisturbed(model), training_without_dropout(model, trains), state_kept(model):
            # With gradients, blocks that are recomputed would take these for their first calls.
            has_gradients = learner.settings.recompute is None
            with (
                seeded(_SEED, device),
                resumed(own),
                WithoutMessages(),
                torch.set_grad_enabled(has_gradients),
            ):
                found = learner.task.forward(model, map_leaves(chosen, micro.inputs))
                drawn = accelerators.generator_states(device)
            return [(name, _plain(leaf)) for name, leaf in named_leaves(found, "outputs")], drawn


def _can_try(learner: Learner) -> bool:
    """Returns False if a forward pass of one rank alone would be waited for by others or have effects that last, or if
    the model has no numbers."""
    settings, model = learner.settings, learner.model
    own = (*model.parameters(), *model.buffers())
    return (
        learner.mesh.degree("data") == learner.session.world_size
        and settings.compiling.how is None
        and settings.bits is None
        and not settings.offload.kinds
        and all(type(tensor.detach()) is Tensor and not tensor.is_meta for tensor in own)
        and all(m.running_mean is not None for m in model.modules() if isinstance(m, AnyBatchNorm))
        and all(compiled_from(m) is None for m in model.modules())
    )


def _is_by_samples(inputs: Tree, samples: int, is_collated: bool) -> bool:
    """Returns True if the rows of all tensors are surely the samples. In a task with its own collate function, samples
    may be columns, so no other dimension may be as long."""
    if not by_samples(inputs, samples):
        return False
    tensors: list[Tensor] = []
    map_leaves(lambda leaf: tensors.append(leaf) if isinstance(leaf, Tensor) else None, inputs)
    return bool(tensors) and all(
        type(t) is Tensor and t.layout is torch.strided and not (is_collated and samples in t.shape[1:])
        for t in tensors
    )


def _plain(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else None


def _are_alike(one: Any, other: Any) -> bool:
    both = all(type(leaf) is Tensor and leaf.layout is torch.strided for leaf in (one, other))
    return both and one.is_floating_point() and one.ndim > 0 and one.numel() > 0 and one.shape == other.shape


class _Move(NamedTuple):
    """How far an output moved, as parts of the size of its numbers."""

    mean: float
    median: float


def _move(one: Tensor, other: Tensor) -> _Move:
    told = (one != 0) | (other != 0)
    if not told.any():
        return _Move(0.0, 0.0)
    sizes, moves = one[told].abs().double(), (one - other)[told].abs().double()
    size = float(sizes.mean())
    return _Move(float(moves.mean()) / size, float(moves.median()) / size) if size else _Move(0.0, 0.0)
